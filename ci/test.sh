#!/usr/bin/env bash
# Every check of the project: ci/test.sh
# One of them:                ci/test.sh lint|types|layers|unit|suite|mpi [ranks]
# Makes .venv first, if it is absent. pytest also reads PYTEST_ADDOPTS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: $0 [lint|types|layers|unit|suite|mpi [ranks]]"
only=${1:-all}
case $#,$only in
    0,*) ;;
    1,lint | 1,types | 1,layers | 1,unit | 1,suite | 1,mpi) ;;
    2,mpi) [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; } ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
ranks=${2:-1 2 3 4}

source ci/setup.sh

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
child=
trap 'kill $child 2>/dev/null; exit 130' INT TERM
passed=0 failed=0 skipped=0
# mpirun gives the ranks a terminal, so pytest can't tell.
color=--color=$([[ -t 1 ]] && echo yes || echo no)
broken=() # the stages that failed

# stage NAME SECONDS COMMAND...: run a command with a bound on its time, and say how it ended.
stage() {
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    printf '\n=== %s\n' "$name"
    # In the background, because bash would handle Ctrl-C only after a command in the foreground.
    timeout --kill-after=10 "$limit" "$@" </dev/null &
    child=$!
    wait "$child" || status=$?
    if [[ $status -eq 124 || $status -eq 137 ]]; then
        echo "stopped after $limit s"
    fi
    if [[ $status -ne 0 ]]; then
        broken+=("$name")
    fi
    printf '=== %s: %s, %d s\n' "$name" "$([[ $status -eq 0 ]] && echo ok || echo "FAILED (exit $status)")" \
        $((SECONDS - begin))
    [[ $status -eq 0 ]]
}

# check NAME SECONDS COMMAND...: a stage without tests; counts as one failure, so that the last line can't look green.
check() { stage "$@" || failed=$((failed + 1)); }

# tests NAME SECONDS COMMAND...: a stage that is a pytest run; adds its tests to the sums.
tests() {
    local name=$1 ok=0 p f s
    local report=$results/$name.xml
    stage "$@" --junit-xml="$report" || ok=$?
    read -r p f s < <(python ci/count.py "$report")
    if [[ $ok -eq 0 && $((p + f)) -eq 0 ]]; then
        echo "=== $name: FAILED, no test ran"
        broken+=("$name")
        ok=1
    fi
    if [[ $ok -ne 0 && $f -eq 0 ]]; then
        f=1 # cut short, or broken before the first test
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# wanted STAGE: is it to run?
wanted() { [[ $only == all || $only == "$1" ]]; }

if wanted lint; then
    check lint 60 ruff check .
    check format 60 ruff format --check .
fi
if wanted types; then
    check types 300 mypy
fi
if wanted layers; then
    # import-linter finds the contract of ci/layers.py from here.
    check layers 60 env PYTHONPATH=. lint-imports
fi
if wanted unit; then
    tests unit 2400 python -m pytest -m "not mpi" -q "$color" --durations=5
fi
if wanted suite; then
    tests suite 400 python ci/torch_suite.py
fi
if wanted mpi; then
    for np in $ranks; do
        # Ranks share no cache directory: they would write to it at once.
        tests "mpi-$np" 900 mpirun -np "$np" python -m pytest --with-mpi -m mpi -q "$color" -p no:cacheprovider
    done
fi

printf '\n%s\n' "total: $SECONDS s"
if [[ ${#broken[@]} -gt 0 ]]; then
    echo "FAILED: ${broken[*]}"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[[ ${#broken[@]} -eq 0 ]]
