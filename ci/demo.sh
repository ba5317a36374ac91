#!/usr/bin/env bash
# The main job: data-parallel training on handwritten digits with 4 ranks. Makes .venv first, if it is absent.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/setup.sh

exec timeout --kill-after=10 300 mpirun -np 4 .venv/bin/python examples/digits.py
