#!/usr/bin/env bash
# Build the images of ci/containers/Dockerfile: ci/containers/build.sh [OPTIONS] [MPI[-TARGET]]...
#     openmpi5 openmpi4 mpich5 mpich4    the image mpicoll:NAME, with mpicoll and this MPI library
#     openmpi4-tests                     also with a sample of the tests, which the image runs
#     openmpi5-operator                  also with sshd, for the MPI Operator
#     openmpi5-cuda                      with cupy, on NVIDIA's image of CUDA
# Without names: the first four. Options (such as --build-arg BASE=IMAGE, --network=host) are those of `docker build`.
# The program is docker, podman or buildah, what there is, or what ENGINE names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage="usage: $0 [OPTIONS] [(openmpi5|openmpi4|mpich5|mpich4)[-tests|-operator|-cuda]]..."
cuda_base=nvidia/cuda:12.8.1-runtime-ubuntu22.04

for engine in ${ENGINE:-docker podman buildah}; do
    if command -v "$engine" >/dev/null; then break; fi
done
command -v "$engine" >/dev/null || { echo "ci/containers/build.sh: neither docker, podman nor buildah is here" >&2; exit 1; }

options=()
while [[ $# -gt 0 && $1 == -* ]]; do
    if [[ $1 == --build-arg || $1 == --volume ]]; then
        options+=("$1" "$2")
        shift
    else
        options+=("$1")
    fi
    shift
done
# docker finds the list of what to leave out by its name.
[[ $engine == docker ]] || options+=(--ignorefile ci/containers/Dockerfile.dockerignore)
[[ $engine != buildah ]] || options+=(--layers)
for variable in PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
    [[ -z ${!variable:-} ]] || options+=(--build-arg "$variable=${!variable}")
done

[[ $# -gt 0 ]] || set -- openmpi5 openmpi4 mpich5 mpich4
for name in "$@"; do
    [[ $name =~ ^(openmpi5|openmpi4|mpich5|mpich4)(-(tests|operator|cuda))?$ ]] ||
        { echo "$usage" >&2; exit 2; }
    mpi=${BASH_REMATCH[1]} target=${BASH_REMATCH[3]:-job} base=()
    if [[ $target == cuda && " ${options[*]} " != *" BASE="* ]]; then
        base=(--build-arg "BASE=$cuda_base")
    fi
    "$engine" build --tag "mpicoll:$name" --file ci/containers/Dockerfile --target "$target" --build-arg "MPI=$mpi" \
        ${base[@]+"${base[@]}"} ${options[@]+"${options[@]}"} .
done
