"""oxygin, NCCL's GPU-Initiated Networking on every cluster, as a Python package.

It brings the library that NCCL loads and the ``oxygin`` program; the functions here say where they are and which
variables an NCCL needs to take the library. They import no other package: torch need not be there.
"""
import importlib.util
import json
import os
import subprocess

__all__ = ["Error", "environment", "library_path", "program_path"]

_HERE = os.path.dirname(os.path.abspath(__file__))


class Error(RuntimeError):
    """What the ``oxygin`` program says when it cannot answer."""


def library_path():
    """Path of ``liboxygin.so``. Its folder also has the names under which NCCL looks for a plugin called ``oxygin``."""
    return os.path.join(_HERE, "lib", "liboxygin.so")


def program_path():
    """Path of the ``oxygin`` program."""
    return os.path.join(_HERE, "bin", "oxygin")


def environment(nccl="auto"):
    """The variables that have an NCCL take oxygin: a dict for ``os.environ.update``, before NCCL is initialised.

    nccl: a version such as ``"2.30.7"``, the path of a libnccl.so.2, or ``"auto"``: the one that torch would load from
    Python packages, else the first on the library path or the system. Raises `Error` if there is none, or if nothing
    has that version take oxygin.
    """
    if nccl == "auto":
        nccl = _of_packages()
    command = [program_path(), "env", "--json", "--plugin", library_path()]
    if nccl is not None:
        command += ["--nccl", os.fspath(nccl)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if answer.returncode != 0:
        said = answer.stderr.strip()
        said = said[len("oxygin: "):] if said.startswith("oxygin: ") else said
        raise Error(said or "oxygin env ended with status %d" % answer.returncode)
    return {variable["name"]: variable["value"] for variable in json.loads(answer.stdout)["variables"]}


def _of_packages():
    """The NCCL of a CUDA wheel, which torch's wheels name in their RPATH, or one inside torch itself; neither is imported."""
    for package, folder in (("nvidia.nccl", "lib"), ("torch", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (spec and spec.submodule_search_locations) or ():
            library = os.path.join(place, folder, "libnccl.so.2")
            if os.path.exists(library):
                return library
    return None
