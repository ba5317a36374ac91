#!/usr/bin/env bash
# Programs that use mpicoll by way of another library: ci/integrations.sh [NAME...]
# ci/integrations/versions.txt has the names and the pinned versions. Without arguments: all.
# Each gets an environment .venv-integration-NAME, which has the library and what it requires, verified by hashes, and
# takes everything else from .venv. ci/integrations/test_NAME.py starts the programs beside it under mpirun and other
# launchers, and docs/integrations.md has the results. Needs Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t names < <(sed -n 's/^\([a-z]\w*\) .*/\1/p' ci/integrations/versions.txt)
[[ $# -gt 0 ]] || set -- "${names[@]}"
for name in "$@"; do
    [[ " ${names[*]} " == *" $name "* ]] || { echo "usage: $0 [NAME...], of ${names[*]}" >&2; exit 2; }
done

source ci/setup.sh
source ci/stages.sh

# The environments take mpicoll from here.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Nothing is downloaded but what pip installs.
export HF_HUB_OFFLINE=1
# Without the cache of compiled modules each rank would compile the library again.
unset PYTHONDONTWRITEBYTECODE

# install NAME FOLDER
install() {
    local site pip=(.venv/bin/python -m pip --disable-pip-version-check --python "$2/bin/python" install --quiet)
    .venv/bin/python -m venv --without-pip "$2" || return
    site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/venv.pth"
    # DeepSpeed has no wheels, and is built by the setuptools of .venv, without its extensions.
    pip+=(--no-deps --only-binary :all: --no-binary deepspeed --no-build-isolation --require-hashes)
    # mpi4py is in .venv, and needs nothing else.
    ! grep -q == "ci/integrations/$1.txt" || DS_BUILD_OPS=0 "${pip[@]}" --requirement "ci/integrations/$1.txt"
}

for name in "$@"; do
    env=.venv-integration-$name
    if [[ ! $env/installed -nt ci/integrations/$name.txt ]]; then
        stage "install-$name" 1200 bash -c "$(declare -f install); install $name $env" ||
            { failed=$((failed + 1)) && continue; }
        touch "$env/installed"
    fi
    # What a version warns of is no failure.
    tests "$name" 900 "$env/bin/python" -m pytest -q "$color" -p no:cacheprovider -W default \
        "ci/integrations/test_$name.py"
done

sum_up
