# shellcheck shell=bash
# What the scripts share. Source it; it sets `root`, the repository's top directory.

set -euo pipefail
# With it `cd` prints where it went, and goes elsewhere.
unset CDPATH

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

# limited GRACE SECONDS COMMAND...: `timeout`, which Ctrl-C and SIGTERM end as well. It has a process group of its own, so
# the terminal's signal reaches this shell alone, which would go on. The command gets no input.
limited() {
    local rc=0 stopped='' child
    # Job control, for a shell has its other background commands ignore SIGINT, and all that they start.
    set -m
    timeout --kill-after="$1" "$2" "${@:3}" </dev/null &
    child=$!
    set +m
    # timeout hands the signal on to its group. The shell waits, so that nothing is left when it is gone.
    trap "stopped=130; kill -TERM $child || true" INT
    trap "stopped=143; kill -TERM $child || true" TERM
    wait "$child" || rc=$?
    if [ -n "$stopped" ]; then
        wait "$child" || true
        exit "$stopped"
    fi
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
