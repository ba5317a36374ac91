#!/usr/bin/env bash
# Read the C sources with the static analysis of gcc: ci/analyse.sh [FILES]. Without gcc or Python's headers it only
# checks that no line of them is over 120 columns.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source ci/setup.sh
sources=("$@")
[[ $# -gt 0 ]] || sources=(mpicoll/csrc/*.[ch])
status=0
awk 'length > 120 { print FILENAME ":" FNR ": over 120 columns"; long = 1 } END { exit long }' "${sources[@]}" || status=1

headers=$(find_headers)
if ! command -v gcc >/dev/null || [[ -z $headers ]]; then
    echo "mpicoll: no analysis of the C sources without gcc and Python's headers"
    exit "$status"
fi
[[ $# -gt 0 ]] || set -- mpicoll/csrc/*.c

for file in "$@"; do
    analysis=(-fanalyzer -S -o /dev/null)
    # Of arithmetic on vectors gcc 12 has false positives, after minutes.
    [[ $file != */kernels.c ]] || analysis=(-fsyntax-only)
    gcc "${analysis[@]}" -Wall -Wextra -Wno-missing-field-initializers -Werror -std=c11 -O1 -pthread \
        -DPy_LIMITED_API=0x030B0000 -I"$headers" "$file" || status=1
done
exit "$status"
