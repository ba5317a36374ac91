#!/usr/bin/env bash
# Part of ci/containers/Dockerfile: install packages with the versions and hashes of the files beside this script.
#     install.sh PACKAGE...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# select PACKAGE...: print the requirements of these packages.
select_requirements() {
    cat requirements*.txt | awk -v packages=" $* " '
        /^[^ ]/ { split($1, part, "=="); wanted = index(packages, " " part[1] " ") } wanted'
}

pip_install() { pip install --quiet --only-binary :all: --no-deps --require-hashes "$@"; }

select_requirements "$@" >/tmp/requirements.txt
if [[ " $* " == *" torch "* ]]; then
    # A build for CPUs only, from the folder PIP_FIND_LINKS, spares gigabytes.
    select_requirements torch >/tmp/torch.txt
    pip_install --no-index --requirement /tmp/torch.txt 2>/dev/null || true
fi
pip_install --requirement /tmp/requirements.txt
if [[ " $* " == *" torch "* ]] && ! python -c 'import sys, importlib.metadata as m; sys.exit("+cpu" not in m.version("torch"))'; then
    pip_install --requirement requirements-cuda.txt
fi
rm -f /tmp/requirements.txt /tmp/torch.txt
