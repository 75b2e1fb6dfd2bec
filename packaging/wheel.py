#!/usr/bin/env python3
"""Writes a wheel from a folder, with nothing but Python itself.

    wheel.py --source DIR --version VERSION --tag TAG --out DIR

DIR has the package `oxygin` as it is to be installed. Every file gets the same date (SOURCE_DATE_EPOCH, else 1980), so the
same files give the same wheel. Prints the wheel's path.
"""
import argparse
import base64
import hashlib
import os
import pathlib
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

METADATA = """Metadata-Version: 2.1
Name: oxygin
Version: {version}
Summary: A NCCL network plugin for GPU-Initiated Networking on every cluster, with or without RDMA
License: Apache-2.0
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: Rust
Requires-Python: >=3.8
Description-Content-Type: text/markdown

{description}"""

WHEEL = """Wheel-Version: 1.0
Generator: oxygin
Root-Is-Purelib: false
Tag: {tag}
"""

ENTRY_POINTS = """[console_scripts]
oxygin = oxygin.__main__:program
"""


def date():
    """The date of all files; a zip archive knows none before 1980."""
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", 0))
    return max(time.gmtime(seconds)[:6], (1980, 1, 1, 0, 0, 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "version", "tag", "out"):
        parser.add_argument("--" + name, required=True)
    asked = parser.parse_args()
    info = "oxygin-%s.dist-info" % asked.version
    source = pathlib.Path(asked.source)
    files = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("*") if p.is_file()}
    runs = {name for name in files if os.access(source / name, os.X_OK)}
    description = (ROOT / "python/README.md").read_text()
    files[info + "/METADATA"] = METADATA.format(version=asked.version, description=description).encode()
    files[info + "/WHEEL"] = WHEEL.format(tag=asked.tag).encode()
    files[info + "/entry_points.txt"] = ENTRY_POINTS.encode()
    files[info + "/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        record.append("%s,sha256=%s,%d\n" % (name, digest, len(files[name])))
    files[info + "/RECORD"] = "".join(record + ["%s/RECORD,,\n" % info]).encode()
    out = pathlib.Path(asked.out) / ("oxygin-%s-%s.whl" % (asked.version, asked.tag))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        # RECORD comes last, as the format recommends.
        for name in sorted(files, key=lambda name: (name.startswith(info), name.endswith("/RECORD"), name)):
            entry = zipfile.ZipInfo(name, date())
            entry.external_attr = (0o100755 if name in runs else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, files[name])
    print(out)


if __name__ == "__main__":
    main()
