"""``python -m oxygin run [--nccl PATH|VERSION] -- COMMAND …`` starts a command whose NCCL takes oxygin.

Everything else is for the ``oxygin`` program: ``python -m oxygin doctor``.
"""
import os
import sys

from . import Error, environment, program_path

USAGE = "usage: python -m oxygin run [--nccl PATH|VERSION] -- COMMAND [ARGUMENT]..."


def run(arguments):
    """Becomes the command; returns only if that fails."""
    nccl = "auto"
    if arguments[:1] == ["--nccl"] and len(arguments) > 1:
        nccl, arguments = arguments[1], arguments[2:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    elif arguments[:1] and arguments[0].startswith("-"):
        arguments = []
    if not arguments:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        variables = environment(nccl)
    except (Error, OSError) as error:
        print("oxygin run: %s" % error, file=sys.stderr)
        return 2
    try:
        os.execvpe(arguments[0], arguments, dict(os.environ, **variables))
    except OSError as error:
        print("oxygin run: %s: %s" % (arguments[0], error.strerror), file=sys.stderr)
        # As shells have it.
        return 127


def program():
    """Becomes the ``oxygin`` program, whose own help does not know of ``run``."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print("%s\n  Starts a command whose NCCL takes oxygin. All else is for the oxygin program:\n" % USAGE, flush=True)
    os.execv(program_path(), ["oxygin"] + sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:]) if sys.argv[1:2] == ["run"] else program())
