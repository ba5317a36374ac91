# shellcheck shell=bash
# To be sourced by the scripts that run commands in images.

# shows PATTERN COMMAND...: the output of the command has a line that matches.
shows() {
    local pattern=$1 output
    shift
    output=$("$@" 2>&1) || { printf '%s\n' "$output"; return 1; }
    printf '%s\n' "$output"
    grep -qE "$pattern" <<<"$output" || { echo "no line matches $pattern"; return 1; }
}
