"""Builds the C++ scan kernel where there is a compiler; without one PyTorch does the scan."""

from __future__ import annotations

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMMON = ["-O3", "-std=c++11", "-fno-math-errno", "-pthread"]
WITHOUT_KERNEL = "MAMBACL_NO_KERNEL"  # set it to leave the kernel out


class OptionalKernel(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if os.environ.get(WITHOUT_KERNEL):
            print(f"mambacl: {WITHOUT_KERNEL} is set, so the C++ scan kernel is left out.")
            return
        if self.compiler.compiler_type == "msvc":
            attempts = [(["/O2", "/openmp"], []), (["/O2"], [])]
        else:
            attempts = [(["-fopenmp", *COMMON], ["-fopenmp", "-pthread"]), (COMMON, ["-pthread"])]
        for compile_args, link_args in attempts:
            ext.extra_compile_args, ext.extra_link_args = compile_args, link_args
            try:
                super().build_extension(ext)
                return
            except Exception as error:
                reason = error
        print(f"mambacl: the C++ scan kernel was not built ({reason}); the PyTorch scan is used instead.")


kernel = Extension(
    "mambacl.scan._kernel",
    sources=["src/mambacl/scan/kernel.cpp"],
    depends=["src/mambacl/scan/kernel_body.h", "src/mambacl/scan/kernel_types.h"],
    language="c++",
    optional=True,  # an editable installation copies it only if it is there
)

setup(ext_modules=[kernel], cmdclass={"build_ext": OptionalKernel})
