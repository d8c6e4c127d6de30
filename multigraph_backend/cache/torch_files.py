"""Which torch runs here, by its files, without reading them.

torch tells its compiled code apart by a hash of all its Python files, which each process reads for that.  An installer
has written such hashes down: a wheel's RECORD.  It speaks for the files as long as none was changed since, and that
their times tell.

Out: `identity`, the same for the same torch and the same Triton on whatever machine; "" where nothing speaks for them:
a torch that was built in place, files that were changed after they were installed, or copied without their times.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from multigraph_backend import _compat

_PACKAGES = ("torch", "triton")
_WITHOUT_CODE = frozenset({"lib", "include", "bin", "share", "test", "testing", "__pycache__", "_C"})
_SLACK = 2.0  # seconds: file systems round


@functools.cache
def identity() -> str:
    """A digest over what was installed, looked up once in a process."""
    version, built_from, place = _compat.torch_build()
    digest = hashlib.sha256(f"{version} {built_from}".encode())
    for name in _PACKAGES:
        package = place.with_name(name)
        if not package.is_dir():
            if name in sys.modules:  # from another place
                return ""
            continue
        records = list(place.parent.glob(f"{name}-*.dist-info/RECORD"))
        try:
            (record,) = records
            digest.update(b"\n".join(_of_python_files(name.encode(), record.read_bytes())))
            if changed_since(package, record.stat().st_mtime + _SLACK):
                return ""
        except (ValueError, OSError):
            return ""
    return digest.hexdigest()[:32]


def _of_python_files(name: bytes, record: bytes) -> list[bytes]:
    """The lines that speak for Python files of the package: others name scripts, which say where they lie."""
    return sorted(line for line in record.splitlines() if line.startswith(name + b"/") and b".py," in line)


def changed_since(folder: Path, moment: float) -> bool:
    """Whether a Python file below `folder` was written after `moment`, in seconds."""
    return any(entry.stat().st_mtime > moment for entry in _python_files(folder))


def _python_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    yield entry
                elif entry.is_dir(follow_symlinks=False) and entry.name not in _WITHOUT_CODE:
                    folders.append(entry.path)
