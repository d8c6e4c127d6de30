"""The folder of manifests, which several processes share.

It lies among torch's caches (`multigraph-manifests-UID`), or where MULTIGRAPH_MANIFESTS says; where that is empty,
nothing is noted and nothing loaded ahead.  A file is named after its graph, torch and package, so that processes
with others do not write over it.

In: what calls used.  Out: manifests, merged with what others have noted.  A reader needs no lock, for files are
replaced whole; a writer has the folder's lock while it reads, merges and writes one small file.  What is not to be
trusted is taken for absent, and written anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from multigraph_backend import _compat, events
from multigraph_backend.cache import manifest, trusted
from multigraph_backend.cache.manifest import Manifest
from multigraph_backend.cache.trusted import Refused
from multigraph_backend.process import sources

log = logging.getLogger(__name__)

VARIABLE = "MULTIGRAPH_MANIFESTS"
MOST_MANIFESTS = 2000  # in one folder; beyond, those that were not written for longest go
PATIENCE = 2.0  # seconds to wait for other writers; then it is not noted this time
_PERIOD = 0.005
_SUFFIX = ".json"


def versions() -> tuple[str, str]:
    """Of torch and of this package, whose files are part of the keys of caches: what others wrote is not taken."""
    package = importlib.import_module(__name__.partition(".")[0])
    return str(torch.version.__version__), f"{package.__version__} ({sources.key()})"


def kept() -> bool:
    """Whether anything is noted in this process."""
    return os.environ.get(VARIABLE, "unset").strip() != ""


def name() -> str:
    """Of the folder among torch's caches: each user has one."""
    return f"multigraph-manifests-{os.geteuid()}"


def folder() -> Path:
    """Where they lie; it may not be there.  Raises OSError where torch cannot say where its caches are."""
    named = os.environ.get(VARIABLE, "").strip()
    return Path(os.path.expanduser(named)) if named else Path(_compat.cache_dir()) / name()


def load(graph: str) -> Manifest | None:
    """The manifest of a graph, None where there is none that is to be trusted."""
    path = _path(graph)
    try:
        trusted.own_folder(path.parent)
        return _read(path)
    except FileNotFoundError:
        return None
    except (OSError, Refused) as problem:
        _say(path, problem)
        return None


def note(noted: Manifest, begins: bool = False) -> bool:
    """Merge `noted` into the manifest of its graph; whether it is written.

    `begins`: it is the first time that this process notes something of that graph.
    """
    path = _path(noted.graph)
    try:
        trusted.own_folder(path.parent)
        with _locked(path.parent):
            try:
                before: Manifest | None = _read(path)
            except FileNotFoundError:
                before = None
                _make_room(path.parent)
            except Refused as problem:
                _say(path, problem)
                before = None
            if before is not None and begins:
                before = manifest.older(before)
            both = manifest.merged(before or Manifest(noted.graph), noted)
            content = manifest.to_bytes(both, versions())
            while len(content) > manifest.MOST_BYTES and both.used:
                both = manifest.merged(Manifest(both.graph), _less(both))
                content = manifest.to_bytes(both, versions())
            trusted.write(path, content, durable=False)
        return True
    except (OSError, Refused) as problem:  # a TimeoutError is one, too
        log.info("not noted in %s: %s", path, problem)
        return False


def _less(large: Manifest) -> Manifest:
    """Without the half that is used least."""
    kept_entries = large.most_used_first()[: len(large.used) // 2]
    return Manifest(large.graph, large.model, large.names, tuple(e for e in large.used if e in kept_entries))


@dataclass(frozen=True)
class Found:
    """All manifests of a folder for this torch and package, what was refused and why, and those of other versions."""

    manifests: tuple[Manifest, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    others: int = 0
    nbytes: int = 0


def find(place: Path | None = None) -> Found:
    """What is in the folder, or in that one.  Raises OSError, and `Refused` for the folder as a whole."""
    place = folder() if place is None else place
    if not place.is_dir():
        return Found()
    trusted.own_folder(place)
    good, refused, others, nbytes = [], [], 0, 0
    for path in sorted(place.glob(f"*{_SUFFIX}")):
        try:
            nbytes += path.stat().st_size
            if not path.name.endswith(f"-{_tag()}{_SUFFIX}"):
                others += 1
                continue
            good.append(_read(path))
        except FileNotFoundError:  # gone meanwhile
            continue
        except (OSError, Refused) as problem:
            refused.append((path.name, str(problem)))
    return Found(tuple(good), tuple(refused), others, nbytes)


def _read(path: Path) -> Manifest:
    read = manifest.from_bytes(trusted.read(path, manifest.MOST_BYTES), versions())
    if _path(read.graph).name != path.name:
        raise Refused("it is the manifest of another graph")
    return read


def _path(graph: str) -> Path:
    return folder() / f"{hashlib.sha256(graph.encode()).hexdigest()[:32]}-{_tag()}{_SUFFIX}"


@functools.cache
def _tag() -> str:
    return hashlib.sha256(repr((manifest.FORMAT, versions())).encode()).hexdigest()[:8]


def _say(path: Path, problem: Exception) -> None:
    events.count("refused_manifests")
    events.warn_once(
        f"manifest {problem}",
        "the manifest %s is not used, and written anew where that is possible: %s",
        path,
        problem,
    )


def _make_room(place: Path) -> None:
    """Before another manifest: those go that were not written for longest."""
    names = [path for path in place.iterdir() if path.suffix == _SUFFIX]
    if len(names) < MOST_MANIFESTS:
        return
    by_age = sorted(names, key=lambda path: path.stat().st_mtime)
    for path in by_age[: len(names) - MOST_MANIFESTS + 1]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """The lock of the folder, which goes with the process that holds it.  Raises OSError."""
    file = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"other processes have had its lock for {PATIENCE:g} s") from None
                time.sleep(_PERIOD)
        yield
    finally:
        os.close(file)  # and the lock goes with it
