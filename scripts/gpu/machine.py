"""The GPUs of this machine, and what keeps its processors busy."""
import contextlib
import os
import subprocess
import sys


def gpus(variables=os.environ):
    """(name, driver) of each GPU that programs see, in their order: those that CUDA_VISIBLE_DEVICES has, where it is set.
    nvidia-smi does not look at it."""
    try:
        listing = subprocess.run(["nvidia-smi", "--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader"],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    except FileNotFoundError:
        sys.exit("gpu-test: there is no nvidia-smi; in a container NVIDIA_DRIVER_CAPABILITIES has to have 'utility' in it")
    if listing.returncode != 0 or not listing.stdout.strip():
        sys.exit("gpu-test: nvidia-smi finds no GPU")
    present = [[part.strip() for part in line.split(",")] for line in listing.stdout.splitlines()]
    if "CUDA_VISIBLE_DEVICES" not in variables:
        return [(name, driver) for _, _, name, driver in present]
    visible = []
    for entry in filter(None, (e.strip() for e in variables["CUDA_VISIBLE_DEVICES"].split(","))):
        found = [g for g in present if g[0] == entry or (entry.startswith("GPU-") and g[1].startswith(entry))]
        if entry.startswith("MIG-"):
            found = present
        if not found:
            break  # CUDA stops there, too
        visible.append(tuple(found[0][2:]))
    if not visible:
        sys.exit(f"gpu-test: CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} leaves none of the {len(present)} GPUs")
    return visible


# Ends with the one that started it, however that ends.
COMPUTES = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"


@contextlib.contextmanager
def busy(count):
    """So many processes that compute all the time, beside what is done meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", COMPUTES]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
