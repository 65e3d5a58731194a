"""Builds the C++ scan where there is a compiler; without one PyTorch does the scan.

The library uses neither Python's nor PyTorch's ABI: one wheel per operating system and processor serves every version.
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = "src/mambacl/ops/cpu"
WITHOUT_KERNEL = "MAMBACL_NO_KERNEL"  # set it to leave the C++ scan out
# A multiplication and the addition after it are fused wherever the processor can; GCC does so anyway, Clang when told.
FLAGS = ["-O3", "-g0", "-std=c++11", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden"]
SCALAR = ["-DMAMBACL_SCALAR"]  # for a compiler that lacks the vector types
LINK = ["-Wl,--as-needed"] if sys.platform == "linux" else []  # or the C++ library would be linked, which is not used


class OptionalKernel(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + (".pyd" if os.name == "nt" else ".so")

    def build_extension(self, ext: Extension) -> None:
        if os.environ.get(WITHOUT_KERNEL):
            print(f"mambacl: {WITHOUT_KERNEL} is set, so the C++ scan is left out.")
            return
        msvc = self.compiler.compiler_type == "msvc"
        for name in (
            "linker_so",
            "linker_so_cxx",
        ):  # without the folders of the builder's Python
            words = getattr(self.compiler, name, None)
            if not msvc and isinstance(words, list):
                setattr(self.compiler, name, [word for word in words if not word.startswith(("-Wl,-rpath", "-L"))])
        for compile_args in [["/O2"]] if msvc else [FLAGS, FLAGS + SCALAR]:
            ext.extra_compile_args, ext.extra_link_args = compile_args, [] if msvc else LINK
            try:
                super().build_extension(ext)
                return
            except Exception as error:
                reason = error
        print(f"mambacl: the C++ scan was not built ({reason}); the PyTorch scan is used instead.")


class EveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernel = Extension(
    "mambacl.ops.cpu._scan",
    sources=[f"{SOURCES}/scan.cpp"],
    depends=[f"{SOURCES}/{name}" for name in sorted(os.listdir(SOURCES)) if name.endswith(".h")],
    language="c++",
    optional=True,  # an editable installation copies it only if it is there
)

setup(ext_modules=[kernel], cmdclass={"build_ext": OptionalKernel, "bdist_wheel": EveryPython})
