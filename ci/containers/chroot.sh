#!/usr/bin/env bash
# Build the images of ci/containers/Dockerfile where no container can be started and no registry is reached, and run
# jobs in them:
#     ci/containers/chroot.sh [openmpi5|openmpi4|mpich5|mpich4]...
# buildah builds them from a base that debootstrap makes, and runs commands in them by chroot: the files, the user and
# the variables are those of the image, while processes, memory and devices are those of the machine. For each MPI: jobs
# on one host, a job on two hosts of ci/hosts.py by the agent and one by the MPI Operator's ssh (neither with MPICH 4),
# and a sample of the tests. Needs root, and Debian's packages buildah, debootstrap, iproute2 and openssh-client. Where
# PIP_FIND_LINKS is a folder, the builds see it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source ci/containers/shows.sh

base=localhost/bookworm
export ENGINE=buildah BUILDAH_ISOLATION=chroot

# run IMAGE [OPTIONS...] -- COMMAND...: run a command in a container of its own.
run() {
    local image=localhost/mpicoll:$1 options=() container status=0
    shift
    while [[ $1 != -- ]]; do options+=("$1"); shift; done
    container=$(buildah from "$image")
    buildah run --network=host --hostname "$(hostname)" --volume "$PWD/ci:/ci:ro" ${options[@]+"${options[@]}"} \
        "$container" "$@" || status=$?
    buildah rm "$container" >/dev/null
    return $status
}

make_base() {
    local container folder=$results/root
    if buildah inspect --type image "$base" >/dev/null 2>&1; then
        return
    fi
    debootstrap --variant=minbase --include=ca-certificates bookworm "$folder" >/dev/null
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$folder" /
    buildah commit --quiet "$container" "$base"
    buildah rm "$container" >/dev/null
    rm -rf "$folder"
}

build() {
    local options=(--network=host --build-arg "BASE=$base" --volume /etc/ssl/certs:/etc/ssl/certs:ro)
    [[ ! -d ${PIP_FIND_LINKS:-} ]] || options+=(--volume "$PIP_FIND_LINKS:$PIP_FIND_LINKS:ro")
    ci/containers/build.sh "${options[@]}" "$1"
}

# On the first of two hosts: a job in a container on each, as ci/containers/compose.yaml has it.
by_agent() {
    local folder
    folder=$(mktemp -d)
    chmod 755 "$TMPDIR"
    chown 1000 "$folder"
    "$ON_HOST" h1 bash "$self" run "$1" --volume "$folder:/run/mpicoll" -- mpicoll-agent serve &
    shows 'rank 3: one of 4, number 1 of 2 on node 1' run "$1" --volume "$folder:/run/mpicoll" -- \
        mpicoll run -np 4 --host h0:2,h1:2 examples/hello.py
}

# On the first of three hosts: a launcher here, workers on the others, as the MPI Operator makes them. It mounts the
# same key everywhere, in files of root that others may read.
by_ssh() {
    local folder host tenth
    folder=$(mktemp -d)
    chmod 755 "$TMPDIR" "$folder"
    ssh-keygen -q -t rsa -N '' -f "$folder/id_rsa"
    cp "$folder/id_rsa.pub" "$folder/authorized_keys"
    chmod 644 "$folder"/*
    if [[ $1 == mpich* ]]; then printf '%s:2\n' h1 h2; else printf '%s slots=2\n' h1 h2; fi >"$folder/hostfile"
    for host in h1 h2; do
        "$ON_HOST" "$host" bash "$self" run "$1-operator" --volume "$folder:/home/mpi/.ssh:ro" -- \
            /usr/sbin/sshd -De -f /home/mpi/.sshd_config &
        for ((tenth = 0; tenth < 300; tenth++)); do
            ! (: <"/dev/tcp/$host/2222") 2>/dev/null || break
            sleep 0.1
        done
    done
    shows 'rank 3: one of 4, number 1 of 2 on node 1' run "$1-operator" --volume "$folder:/home/mpi/.ssh:ro" -- \
        mpicoll run -np 4 --hostfile /home/mpi/.ssh/hostfile examples/hello.py
}

self=ci/containers/chroot.sh
# A stage runs a function of this script in a process of its own.
case ${1:-} in
    run | shows | make_base | build | by_agent | by_ssh)
        results=${results:-}
        "$@"
        exit
        ;;
esac
source ci/stages.sh
export results

for program in buildah debootstrap ip ssh-keygen; do
    [[ -n $(PATH=$PATH:/usr/sbin:/sbin type -P "$program") ]] || {
        echo "$self: $program is absent. On Debian: apt-get install buildah debootstrap iproute2 openssh-client" >&2
        exit 1
    }
done
[[ $(id -u) -eq 0 ]] || { echo "$self: debootstrap and chroot need root" >&2; exit 1; }

[[ $# -gt 0 ]] || set -- openmpi5 openmpi4 mpich5 mpich4
check base 600 bash "$self" make_base
for name in "$@"; do
    for image in "$name" "$name-operator" "$name-tests"; do
        check "$image-build" 900 bash "$self" build "$image"
    done
    check "$name-user" 60 bash "$self" shows '^uid=1000' run "$name" -- id
    check "$name-run" 60 bash "$self" shows 'rank 3: one of 4, number 3 of 4 on node 0' \
        run "$name" -- mpicoll run -np 4 examples/hello.py
    for size in 8 8388608 33554432; do
        check "$name-large-$size" 100 bash "$self" shows right \
            run "$name" -- mpicoll run -np 4 /ci/containers/large.py "$size"
    done
    # MPICH 4.0 often does not return from MPI_Finalize between hosts: see mpicoll/transport/quirks.py.
    if [[ $name != mpich4 ]]; then
        check "$name-agent" 100 python3 ci/hosts.py --alone 2 0 bash "$self" by_agent "$name"
        check "$name-ssh" 100 python3 ci/hosts.py --alone 3 0 bash "$self" by_ssh "$name"
    fi
    check "$name-tests" 900 bash "$self" run "$name-tests" -- bash run_tests.sh
done

printf '\n%s\n' "total: $SECONDS s"
[[ ${#broken[@]} -eq 0 ]] || { echo "FAILED: ${broken[*]}"; exit 1; }
