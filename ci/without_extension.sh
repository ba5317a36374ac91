#!/usr/bin/env bash
# Run a command in a copy of the checkout without the extension in C: ci/without_extension.sh COMMAND...
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: $0 COMMAND [ARGUMENTS]" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# pytest would name the checkout's files for modules that were compiled there.
tar --create --exclude=./.git --exclude=./.venv --exclude='./.*_cache' --exclude='_shm.*.so' --exclude='test_*.pyc' . |
    tar --extract --directory "$folder"
cd "$folder"
PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} "$@"
