"""The libraries by which released NCCL and real GPUs work with RDMA devices that there are none of: tests/fake-verbs plays
them, tests/fake-gpudirect lets them reach memory of GPUs."""
import functools
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NAMES = {"verbs": "libfake_verbs.so", "mlx5": "libfake_mlx5.so", "cuda": "libfake_gpudirect.so"}
# A folder that has them; None: they are built.
folder = None


@functools.cache
def libraries():
    """Where each is."""
    if folder:
        found = {name: pathlib.Path(folder).resolve() / file for name, file in NAMES.items()}
    else:
        said = subprocess.run(["cargo", "build", "--package", "fake-verbs", "--package", "fake-gpudirect", "--message-format", "json"],
                              cwd=ROOT, check=True, capture_output=True, text=True).stdout
        messages = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        # One is linked by a build script; it looks for the first one in the folder `deps` of the same target.
        scripts = [pathlib.Path(m["out_dir"]) for m in messages if m["reason"] == "build-script-executed"]
        made = [script / NAMES["mlx5"] for script in scripts if (script / NAMES["mlx5"]).exists()]
        deps = made[0].parents[3] / "deps"
        found = {"verbs": deps / NAMES["verbs"], "mlx5": made[0], "cuda": deps / NAMES["cuda"]}
    missing = [str(path) for path in found.values() if not path.exists()]
    if missing:
        raise FileNotFoundError(f"the fake RDMA devices lack {', '.join(missing)}")
    return found


def environment(found):
    """The variables that have oxygin load them."""
    return {"OXYGIN_LIBIBVERBS": str(found["verbs"]), "OXYGIN_LIBRDMACM": str(found["verbs"]), "OXYGIN_LIBMLX5": str(found["mlx5"]),
            "OXYGIN_LIBCUDA": str(found["cuda"])}
