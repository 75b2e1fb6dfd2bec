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
