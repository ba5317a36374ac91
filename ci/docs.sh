#!/usr/bin/env bash
# The documentation site, from docs/ and the docstrings: ci/docs.sh builds it in build/docs/html, and fails on warnings.
# Makes .venv first, if it is absent, and installs Sphinx into it.
# Sphinx, rather than MkDocs, since the API reference comes from Python's docstrings, links between them included; MyST
# reads the pages of docs/ as GitHub shows them. The theme is Furo: no script or font from elsewhere, light and dark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source ci/setup.sh

if [[ $(cat .venv/documentation 2>/dev/null) != "$(hash_of <ci/requirements-docs.txt)" ]]; then
    install_verified --requirement ci/requirements-docs.txt || die "mpicoll: pip could not install Sphinx (see above)."
    hash_of <ci/requirements-docs.txt >.venv/documentation
fi
python ci/docs/assemble.py build/docs/source
timeout 900 python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 --builder html build/docs/source build/docs/html
echo "mpicoll: build/docs/html/index.html"
