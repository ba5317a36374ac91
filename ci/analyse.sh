#!/usr/bin/env bash
# Read the C sources with a static analysis:
#   ci/analyse.sh [FILES]        that of gcc; without gcc or Python's headers only that no line is over 120 columns
#   ci/analyse.sh tidy [FILES]   the checks of clang-tidy that .clang-tidy names, in about a minute
# Of a header it reads the C files that include it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=gcc
if [[ ${1:-} == tidy ]]; then
    kind=tidy
    shift
fi
source ci/setup.sh
for file in "$@"; do
    [[ -f $file ]] || { echo "usage: $0 [tidy] [FILES]" >&2; exit 2; }
done
sources=("$@")
[[ $# -gt 0 ]] || sources=(mpicoll/csrc/*.[ch])
status=0
awk 'length > 120 { print FILENAME ":" FNR ": over 120 columns"; long = 1 } END { exit long }' "${sources[@]}" || status=1

headers=$(find_headers)
if [[ -z $headers ]] || { [[ $kind == gcc ]] && ! command -v gcc >/dev/null; }; then
    echo "mpicoll: no analysis of the C sources without gcc and Python's headers"
    exit "$status"
fi
mapfile -t files < <(
    for file in "${sources[@]}"; do
        if [[ $file == *.h ]]; then
            grep -l "^ *# *include \"${file##*/}\"" mpicoll/csrc/*.c || true # also of headers that other headers include
        else
            echo "$file"
        fi
    done | sort -u
)
options=(-std=c11 -pthread -DPy_LIMITED_API=0x030B0000 -isystem "$headers")

if [[ $kind == tidy ]]; then
    # Without gcc's own headers clang finds those of the machine.
    command -v clang-tidy >/dev/null || install_verified --requirement ci/requirements-tidy.txt
    clang-tidy --quiet "${files[@]}" -- "${options[@]}" || status=1
    exit "$status"
fi
for file in "${files[@]}"; do
    analysis=(-fanalyzer -S -o /dev/null)
    # Of arithmetic on vectors gcc 12 has false positives, after minutes.
    [[ $file != */kernels.c ]] || analysis=(-fsyntax-only)
    gcc "${analysis[@]}" -Wall -Wextra -Wno-missing-field-initializers -Werror -O1 "${options[@]}" "$file" || status=1
done
exit "$status"
