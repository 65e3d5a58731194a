#!/bin/sh
# The numerical tests as other CPUs run them:  test_cpus.sh PYTHON [pytest's options]
# Three runs cover the instruction sets of PyTorch, MKL, oneDNN and the C++ scan, one and two threads, and no C++ scan.
# The fastest of each is what `make test` runs. Where there is Clang, the tests of the C++ scan also run with its build.
set -eu
python=$1
shift

# Files whose tests compute nothing that a CPU could round in its own way.
others="cli/test_cli test_config test_options test_project data/test_checking data/test_images data/test_preparing
data/test_sets test_docs backbones/test_downloads backbones/test_loading
backbones/test_loading_untrusted paper reports test_presets nullspace/test_settings test_files"
for name in $others; do
    set -- "$@" "--ignore-glob=tests/$name*"
done

run() { # NAME VARIABLE=VALUE... -- pytest's options
    echo "== $1"
    shift
    env "$@" || failed=1
}
failed=0

without=$(mktemp -d) # the package as it is where there was no compiler
clang=$(mktemp -d)   # and as Clang builds it, which macOS uses
trap 'rm -rf "$without" "$clang"' EXIT
cp -r src/mambacl "$without/"
rm -f "$without"/mambacl/ops/cpu/_scan*.so
sets=$(PYTHONPATH=src "$python" -c 'from mambacl.ops import cpu; print(*cpu.instruction_sets())')
if_there() { # the instruction set, or nothing where the C++ scan lacks it
    case " $sets " in *" $1 "*) echo "$1" ;; esac
}

run "x86-64 without vector extensions, one thread, no C++ scan" \
    ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
    MAMBACL_TEST_THREADS=1 PYTHONPATH="$without" "$python" -m pytest -n 2 "$@"
run "AVX2, two threads, C++ scan for AVX2" \
    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 MAMBACL_CPU="$(if_there avx2)" \
    MAMBACL_TEST_THREADS=2 PYTHONPATH=src "$python" -m pytest -n 2 "$@"
run "this CPU, one thread, C++ scan for any x86-64 or ARM" \
    MAMBACL_CPU="$(if_there baseline)" MAMBACL_TEST_THREADS=1 PYTHONPATH=src "$python" -m pytest -n 2 "$@"
if command -v clang++ >/dev/null; then
    cp -r "$without/mambacl" "$clang/"
    CC=clang CXX=clang++ "$python" setup.py --quiet build_ext --build-lib "$clang" --build-temp "$clang/build"
    [ -e "$clang/mambacl/ops/cpu/_scan.so" ] || failed=1 # without it, every test would be skipped
    run "this CPU, C++ scan built by Clang" PYTHONPATH="$clang" "$python" -m pytest -n 2 tests/ops/test_scan_native.py
fi
exit $failed
