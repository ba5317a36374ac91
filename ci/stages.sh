# shellcheck shell=bash
# To be sourced by scripts whose work is a row of stages: runs each with a bound on its time, says how it ended, and sums
# up at the end.

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
child=
declare -A started # the process of each stage that runs beside others
trap 'kill $child "${started[@]}" 2>/dev/null; exit 130' INT TERM
passed=0 failed=0 skipped=0
# mpirun gives the ranks a terminal, so pytest can't tell.
color=--color=$([[ -t 1 ]] && echo yes || echo no)
broken=() # the stages that failed

# stage NAME SECONDS COMMAND...: run a command with a bound on its time, and say how it ended. If `beside` has started
# the command, wait for its end, and show the output.
stage() {
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    printf '\n=== %s\n' "$name"
    if [[ -n ${started[$name]:-} ]]; then
        child=${started[$name]}
    else
        # In the background, because bash would handle Ctrl-C only after a command in the foreground.
        timeout --kill-after=10 "$limit" "$@" </dev/null &
        child=$!
    fi
    wait "$child" || status=$?
    if [[ -n ${started[$name]:-} ]]; then
        cat "$results/$name.log"
        unset "started[$name]"
    fi
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

# beside NAME SECONDS COMMAND...: start a stage now, beside the stages up to the call of `check` or `tests` with the same
# arguments.
beside() {
    local name=$1 limit=$2
    shift 2
    timeout --kill-after=10 "$limit" "$@" --junit-xml="$results/$name.xml" </dev/null >"$results/$name.log" 2>&1 &
    started[$name]=$!
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

# sum_up: the last lines; fails if a stage has failed.
sum_up() {
    printf '\n%s\n' "total: $SECONDS s"
    if [[ ${#broken[@]} -gt 0 ]]; then
        echo "FAILED: ${broken[*]}"
    fi
    echo "$passed passed, $failed failed, $skipped skipped"
    [[ ${#broken[@]} -eq 0 ]]
}
