#!/bin/sh
# The numerical tests as other CPUs run them:  test_cpus.sh PYTHON [pytest's options]
# Three runs cover the instruction sets of PyTorch, MKL, oneDNN and the C++ scan, one and two threads, and no C++ scan.
# The fastest of each is what `make test` runs.
set -eu
python=$1
shift

# Files whose tests compute nothing that a CPU could round in its own way.
others="cli config data_archives data_bad_input data_check data_prepare data_sets docs downloads import loading
loading_untrusted paper_command presets reports settings tables tables_paper tensorfile"
for name in $others; do
    set -- "$@" "--ignore=tests/test_$name.py"
done

run() { # NAME VARIABLE=VALUE... -- pytest's options
    echo "== $1"
    shift
    env "$@" || failed=1
}
failed=0

without=$(mktemp -d) # the package as it is where there was no compiler
trap 'rm -rf "$without"' EXIT
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
exit $failed
