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

# Install this package with what its tests need into .venv, which is made if there is none.
needs_tests() {
    [ -x "$python" ] || python3 -m venv .venv
    "$python" -m pip install -e '.[test]'
}

# Install dependency group $1, too. The pip that comes with a Python before 3.14 knows no groups.
needs_group() {
    needs_tests
    "$python" -m pip install 'pip>=25.1'
    "$python" -m pip install --group "$1"
}

# The path of CPython $1, or nothing when it is not installed.
interpreter() {
    if "python$1" -c '' 2>/dev/null; then command -v "python$1"; return; fi
    find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -maxdepth 3 -path "*/$1.*/bin/python" 2>/dev/null | sort -V | tail -n 1
}

# One of $1 parts of the tests, for --part: which one is up to the commit, so that each has its turn; all with .ci/run --all.
part() {
    if [ -n "$CI_ALL" ]; then echo 0/1; else echo "$(turn)/$1"; fi
}

# A number that belongs to this commit.
turn() { echo $((16#$(git rev-parse --short=7 HEAD | cut -c1-7))); }

# The oldest version of dependency $1 that pyproject.toml admits.
oldest_version() { sed -n "s/^dependencies = .*\"$1>=\([0-9.]*\)\".*/\1/p" pyproject.toml; }

# Make the environment that has the oldest dependencies we admit, on CPython 3.12 if it is installed. Its Python is $oldest.
needs_oldest() {
    local redis hiredis anyio other
    redis=$(oldest_version 'redis\[hiredis\]')
    hiredis=$(oldest_version hiredis)
    anyio=$(oldest_version anyio)
    oldest=$CI_WORK/oldest/bin/python
    [ ! -x "$oldest" ] || return 0
    other=$(interpreter 3.12)
    [ -n "$other" ] || { needs_tests; other=$python; }
    echo "redis-py $redis, hiredis $hiredis and anyio $anyio, the oldest we admit, on $("$other" --version)"
    "$other" -m venv "$CI_WORK/oldest"
    "$oldest" -m pip install -e '.[test]' "redis[hiredis]==$redis.*" "hiredis==$hiredis.*" "anyio==$anyio.*"
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
