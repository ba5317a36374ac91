#!/usr/bin/env bash
# The tests of the extension in C while every access to memory is checked, by the sanitizers of gcc:
#   ci/sanitize.sh                   both rows of tests
#   ci/sanitize.sh address [FILES]   accesses outside of memory, leaks, and undefined behaviour
#   ci/sanitize.sh thread [FILES]    data races of ranks that are threads
# FILES are for pytest; without them it takes those that run the extension with ranks that are threads. The extension is
# compiled beside a copy of the package, so that other programs can use the one in the checkout meanwhile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    '') for one in address thread; do "${BASH_SOURCE[0]}" "$one"; done; exit ;;
    address | thread) kind=$1; shift ;;
    *) echo "usage: $0 [address|thread] [FILES]" >&2; exit 2 ;;
esac
[[ $# -gt 0 ]] || set -- tests/engine/core tests/engine/executors/test_{shared_memory,connections}.py tests/buffers \
    tests/collectives/test_{call,functions,repeated_calls}.py

source ci/setup.sh
if ! command -v gcc >/dev/null || [[ -z $(find_headers) ]]; then
    die "mpicoll: the sanitizers need gcc and Python's headers: apt-get install gcc python3-dev"
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
reports=$folder/report

# What Python's own flags define, the overflow of integers, other builds may not.
flags="-g -UNDEBUG -fno-wrapv -fno-omit-frame-pointer"
if [[ $kind == address ]]; then
    sanitizer="-fsanitize=address,undefined -fno-sanitize-recover=undefined" runtime=$(gcc -print-file-name=libasan.so)
else
    sanitizer=-fsanitize=thread runtime=$(gcc -print-file-name=libtsan.so)
fi
cp -r mpicoll "$folder"
rm -f "$folder"/mpicoll/_shm.*.so
CC=gcc CFLAGS="$sanitizer $flags" LDFLAGS=$sanitizer REQUIRE_EXTENSION=1 \
    python setup.py --quiet build_ext --build-lib "$folder" --build-temp "$folder/objects"

# Beside the copy of the package, which Python imports then. The jobs that tests start use the checkout.
cat >"$folder/run.py" <<'END'
import os
import sys

import pytest

del os.environ["LD_PRELOAD"], os.environ["PYTHONMALLOC"]
sys.exit(pytest.main(sys.argv[1:]))
END

# Python keeps memory until it ends, which counts as leaks. So leaks don't change the status, but reports that name a C
# file of the project do. The frames of gcc 12 that are checked after a return are not aligned for AVX-512.
export ASAN_OPTIONS="detect_leaks=1:abort_on_error=1:detect_stack_use_after_return=0:log_path=$reports"
export LSAN_OPTIONS="exitcode=0"
export UBSAN_OPTIONS="print_stacktrace=1"
export TSAN_OPTIONS="ignore_noninstrumented_modules=1:exitcode=0:log_path=$reports"

# Python's own allocator would hide objects from the sanitizer, and it looks for the C++ runtime that torch loads later.
# Without randomisation, the kernel puts nothing where the thread sanitizer has its memory. The undefined behaviour
# sanitizer writes to standard error, which pytest would capture.
status=0
PYTHONMALLOC=malloc LD_PRELOAD="$runtime $(gcc -print-file-name=libstdc++.so)" \
    setarch --addr-no-randomize timeout --kill-after=10 3600 python "$folder/run.py" -q --tier default \
    --capture=sys -p no:cacheprovider -p no:faulthandler -m "not mpi" "$@" || status=$?

# The end by SIGTERM while a thread holds the interpreter lock, where no test runs in this process. The thread sanitizer
# delivers no signal to such a thread.
run_locked() {
    local ended=0
    { # bash says that the program was terminated
        PYTHONPATH=$folder PYTHONMALLOC=malloc LD_PRELOAD="$runtime $(gcc -print-file-name=libstdc++.so)" \
            timeout --kill-after=1 60 python tests/support/locked_interpreter.py "$1" 2>"$folder/stderr" || ended=$?
    } 2>/dev/null
    if [[ $ended -ne $2 ]]; then
        cat "$folder/stderr"
        echo "mpicoll: locked_interpreter.py $1 ended with the status $ended instead of $2" >&2
        status=1
    fi
}
if [[ $kind == address ]]; then
    run_locked locked 143
    run_locked cancelled 0
fi

for report in "$reports".*; do
    if [[ -e $report ]] && { [[ $status -ne 0 ]] || grep -q "mpicoll/csrc/" "$report"; }; then
        cat "$report"
        status=1
    fi
done
[[ $status -eq 0 ]] || echo "mpicoll: the sanitizer ($kind) has found a defect, or a test failed (see above)" >&2
exit "$status"
