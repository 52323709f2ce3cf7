# What the stages share. Each begins with: . .ci/lib.sh
# shellcheck shell=bash
set -euo pipefail
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
work=$(mktemp -d "$CI_WORK/XXXXXX")
python=$PWD/.venv/bin/python

say() { printf '\n== %s\n' "$*"; }

# Note that $1 does not run, because of $2.
skip() {
    echo "$1: $2" >> "$CI_WORK/skipped"
    echo "SKIPPED: $1: $2"
}

# Run a command, show its output, and add the tests it passed to the sum.
counted() {
    "$@" 2>&1 | tee "$work/log" || return 1  # said here: among && set -e does not look
    local n
    n=$(grep -Eo '[0-9]+ passed' "$work/log" | tail -n 1 | cut -d' ' -f1)
    [ -n "$n" ] || { echo "no test ran"; exit 1; }
    echo "$n" >> "$CI_WORK/passed"
}

# Install this package with extra $1 into .venv, which is made if there is none.
needs() {
    [ -x "$python" ] || python3 -m venv .venv
    "$python" -m pip install -e ".[$1]"
}

# The path of CPython $1, or nothing when it is not installed.
interpreter() {
    if "python$1" -c '' 2>/dev/null; then command -v "python$1"; return; fi
    find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -maxdepth 3 -path "*/$1.*/bin/python" 2>/dev/null | sort -V | tail -n 1
}

# Run the rest of the line in the background as job $1.
jobs=()
started() {
    local job=$1
    shift
    jobs+=("$job")
    { "$@" > "$work/$job.log" 2>&1 && touch "$work/$job.passed"; } &
}

# Wait for all jobs, and show $1 lines of what each said, or all of it if it failed.
joined() {
    wait
    local job failed=0
    for job in "${jobs[@]}"; do
        echo "-- $job"
        if [ -e "$work/$job.passed" ]; then counted tail -n "$1" "$work/$job.log"; else cat "$work/$job.log"; failed=1; fi
    done
    jobs=()
    [ $failed = 0 ] || exit 1
}
