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
unsteady=() # tests that failed, and passed when run once more
most_retried=10 # tests of a stage: more failures are no chance
cut_short=() # the stages without a report of pytest that have failed
most_repeated=8 # last lines of their output, which `sum_up` repeats

# stage NAME SECONDS COMMAND...: run a command with a bound on its time, and say how it ended. If `beside` has started
# the command, wait for its end, and show the output.
stage() {
    local name=$1 limit=$2 log=$results/${1//\//_}.log begin=$SECONDS status=0 output shown=
    shift 2
    printf '\n=== %s\n' "$name"
    if [[ -n ${started[$name]:-} ]]; then
        child=${started[$name]}
    else
        # In the background, because bash would handle Ctrl-C only after a command in the foreground. `sum_up` may need
        # the log.
        exec {output}> >(exec tee "$log")
        shown=$!
        timeout --kill-after=10 "$limit" "$@" </dev/null >&"$output" 2>&1 &
        child=$!
        exec {output}>&-
    fi
    wait "$child" || status=$?
    if [[ $shown ]]; then
        # For at most 5 s: a process that is left behind may hold the pipe.
        for ((i = 0; i < 50; i++)); do
            kill -0 "$shown" 2>/dev/null || break
            sleep 0.1
        done
        kill "$shown" 2>/dev/null || true
    fi
    if [[ -n ${started[$name]:-} ]]; then
        cat "$log"
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

# tests NAME SECONDS COMMAND... [-- SELECTION...]: a stage that is a pytest run, by COMMAND SELECTION; adds its tests to the
# sums. If there is a --, tests that fail are run once more, alone: by COMMAND and their names.
tests() {
    local name=$1 limit=$2 ok=0 p f s command=() selection=() again=
    shift 2
    while [[ $# -gt 0 ]]; do
        if [[ $1 == -- ]]; then
            again=yes selection=("${@:2}")
            break
        fi
        command+=("$1")
        shift
    done
    local report=$results/$name.xml
    stage "$name" "$limit" "${command[@]}" ${selection[@]+"${selection[@]}"} --junit-xml="$report" || ok=$?
    read -r p f s < <(python ci/count.py "$report")
    if [[ $ok -eq 0 && $((p + f)) -eq 0 ]]; then
        echo "=== $name: FAILED, no test ran"
        broken+=("$name")
        ok=1
    fi
    # pytest has the status 1 if it came to its end, and tests failed. What crashed or was stopped is not tried again.
    if [[ $again && $ok -eq 1 && $f -gt 0 ]]; then
        retry "$name" "${command[@]}"
    fi
    if [[ $ok -ne 0 && $f -eq 0 ]]; then
        f=1 # cut short, or broken before the first test
        cut_short+=("$name")
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# retry NAME COMMAND...: for `tests`, run the tests of the stage that have failed once more. Those that pass then are
# unsteady: shown with their first failure, and counted apart. Sets f and ok of `tests` by what has failed twice.
retry() {
    local name=$1 ids steady id well=
    shift
    mapfile -t ids < <(python ci/count.py failed "$report")
    if [[ ${#ids[@]} -eq 0 || ${#ids[@]} -gt $most_retried ]]; then
        return
    fi
    if stage "$name-retry" 1200 "$@" "${ids[@]}" --junit-xml="$results/$name-retry.xml"; then
        well=yes
    else
        unset 'broken[-1]' # the stage itself is there already
    fi
    mapfile -t steady < <(python ci/count.py unsteady "$report" "$results/$name-retry.xml")
    for id in ${steady[@]+"${steady[@]}"}; do
        printf '\n=== %s: UNSTEADY: passed when run alone: %s\nIts first failure:\n' "$name" "$id"
        python ci/count.py text "$report" "$id"
        unsteady+=("$id")
    done
    f=$((${#ids[@]} - ${#steady[@]}))
    if [[ $well && $f -eq 0 ]]; then
        ok=0
        unset 'broken[-1]'
    fi
}

# sum_up: the last lines; fails if a stage has failed.
sum_up() {
    local name log
    for name in ${cut_short[@]+"${cut_short[@]}"}; do
        log=$results/${name//\//_}.log
        printf '\n%s\n' "=== $name: cut short, with these at the end, after the tests that were running"
        {
            # Python's report of a crash lists the modules that are loaded, in a line of many kilobytes.
            grep -aE 'Fatal Python error|/test_[a-z0-9_]*\.py", line' "$log" | head -n 6
            grep -a '[^[:space:]]' "$log" | tail -n "$most_repeated"
        } | cut -c 1-200 || true
    done
    printf '\n%s\n' "total: $SECONDS s"
    if [[ ${#unsteady[@]} -gt 0 ]]; then
        printf 'UNSTEADY: passed when run alone: %s\n' "${unsteady[@]}"
    fi
    if [[ ${#broken[@]} -gt 0 ]]; then
        echo "FAILED: ${broken[*]}"
    fi
    echo "$passed passed, $failed failed, $skipped skipped$([[ ${#unsteady[@]} -eq 0 ]] || echo ", ${#unsteady[@]} unsteady")"
    [[ ${#broken[@]} -eq 0 ]]
}
