#!/usr/bin/env bash
# Run jobs in the image mpicoll:NAME and the sample of the tests in mpicoll:NAME-tests, which ci/containers/build.sh has
# built, in containers as they are by default, and in more restricted ones: ci/containers/prove.sh [NAME...]
# All run as an ordinary user, with 64 MB of /dev/shm and a PID namespace of their own. ENGINE is docker or podman.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source ci/stages.sh
source ci/containers/shows.sh

for engine in ${ENGINE:-docker podman}; do
    if command -v "$engine" >/dev/null; then break; fi
done

# Where reading the memory of other processes is refused, as by the profiles of older engines and of some sites.
no_reading=$results/no_reading.json
cat >"$no_reading" <<'END'
{
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        { "names": ["process_vm_readv", "process_vm_writev", "ptrace"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1 }
    ]
}
END
restricted=(--security-opt "seccomp=$no_reading" --security-opt no-new-privileges --cap-drop ALL)

# run IMAGE [OPTIONS...] -- COMMAND...
run() {
    local image=$1 options=()
    shift
    while [[ $1 != -- ]]; do options+=("$1"); shift; done
    shift
    "$engine" run --rm ${options[@]+"${options[@]}"} --volume "$PWD/ci:/ci:ro" "mpicoll:$image" "$@"
}

export -f run shows
export engine

# Functions, in a process that can have a bound on its time.
bounded() { check "$1" 200 bash -c 'set -euo pipefail; "$@"' bash "${@:2}"; }

[[ $# -gt 0 ]] || set -- openmpi5 openmpi4 mpich5 mpich4
for name in "$@"; do
    bounded "$name-root" shows '^uid=1000' run "$name" -- id
    bounded "$name-run" shows 'rank 3: one of 4, number 3 of 4 on node 0' \
        run "$name" -- mpicoll run -np 4 examples/hello.py
    bounded "$name-no-reading" shows "reading .*can't read the memory of its peers: Operation not permitted" \
        run "$name" "${restricted[@]}" -- mpicoll doctor
    # 32 MiB a rank: more than /dev/shm has, and more than what is copied by way of slots.
    for size in 8 8388608 33554432; do
        bounded "$name-large-$size" shows 'right' run "$name" "${restricted[@]}" -- \
            mpicoll run -np 4 /ci/containers/large.py "$size"
    done
    bounded "$name-no-shm" shows 'right' run "$name" --shm-size=64k -- mpicoll run -np 2 /ci/containers/large.py 8388608
    bounded "$name-read-only" shows 'right' run "$name" "${restricted[@]}" --read-only --tmpfs /tmp -- \
        mpicoll run -np 2 /ci/containers/large.py 8388608
    if "$engine" image inspect "mpicoll:$name-tests" >/dev/null 2>&1; then
        check "$name-tests" 900 "$engine" run --rm "mpicoll:$name-tests"
        check "$name-tests-restricted" 900 "$engine" run --rm "${restricted[@]}" "mpicoll:$name-tests"
    fi
done

printf '\n%s\n' "total: $SECONDS s"
[[ ${#broken[@]} -eq 0 ]] || { echo "FAILED: ${broken[*]}"; exit 1; }
