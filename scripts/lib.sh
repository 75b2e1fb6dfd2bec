# shellcheck shell=bash
# What the scripts share. Source it; it sets `root`, the repository's top directory.

set -euo pipefail

# Physical path: a child process that changes directory still finds it.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cache=$root/.cache

# A sentence on stderr, in the name of the script that runs.
say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

die() {
    say "$@"
    exit 1
}

# Runs a command as root, through sudo where we are somebody else.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "needs root for '$*', and there is no sudo: run this script as root"
    fi
}

# Runs a command for at most so many seconds, without input. An interrupt of the script ends it and all that it started,
# and then the script: it is a group of processes of its own, which the terminal tells nothing.
limited() {
    local seconds=$1 group rc=0
    shift
    # With job control, or the command would ignore interrupts.
    set -m
    timeout --kill-after=10 "$seconds" "$@" </dev/null &
    group=$!
    set +m
    trap 'kill -TERM -- "-$group" 2>/dev/null; exit 130' INT TERM
    wait "$group" || rc=$?
    trap - INT TERM
    return "$rc"
}

# The release library and the tool, where cargo leaves them.
target=${CARGO_TARGET_DIR:-$root/target}
library=$target/release/liboxygin.so
tool=$target/release/oxygin

# The names under which NCCL and RCCL look for a plugin called "oxygin".
# shellcheck disable=SC2034
plugin_names=(libnccl-gin-oxygin.so libnccl-rma-oxygin.so librccl-rma-oxygin.so)

# Tools out of PyPI, which scripts/deps puts there.
# shellcheck disable=SC2034
python_tools=$cache/python-tools
