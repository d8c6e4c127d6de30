"""torch's caches and the manifests in one file, for the next machine, and back.

    multigraph cache
    {"format": 2, "torch": "2.13.0", "multigraph": "0.1.1", "python": "3.11", "machine": "x86_64", "digest": "...",
     "artifacts": 1293871, "manifests": [812, 5120], "processor": "...", "libraries": [16384],
     "native": [["rj/crjw...main.so", 0], ["7x/c7xz...main.so", 0]]}
    <what torch.compiler.save_cache_artifacts() makes> <manifest> <manifest> <library>

In a process that compiled, what torch has noted goes into it.  For processes that are over, what the manifests name is
collected from torch's folders: `aotautograd/KEY/*` and `fxgraph/XX/KEY/*` are artifacts as they lie there, with
Triton's binaries in them, and measured choices of kernels are small files of JSON.  Kernels for CPUs are libraries that
the C++ compiler made for the very processor; they go along, each once under all of its names, and are taken where
processor and C library are the same.

A file is taken back as a whole or not at all: it is this user's (or root's) and nobody else can write to it, it has
this format and is of this torch, package, Python and kind of machine, its digest is right, and each key in it names a
place inside of torch's caches.  What is taken back is what torch would find in its folders, and no more: keys
are computed by each compile, and what does not fit is compiled again.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import hashlib
import json
import logging
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multigraph_backend import _compat, events
from multigraph_backend.cache import cpp_kernels, manifest, manifests, trusted
from multigraph_backend.cache.manifest import Manifest
from multigraph_backend.cache.trusted import Refused
from multigraph_backend.spelling import did_you_mean

log = logging.getLogger(__name__)

MAGIC = b"multigraph cache\n"
FORMAT = 2
MOST_BYTES = 8 << 30  # of a file
MOST_HEADER = 1 << 20
MOST_ENTRY = 1 << 30  # of one entry of torch's caches

Artifact = tuple[str, str, bytes]  # kind, key, content


class CacheRefused(ValueError):
    """A file of caches is not taken, or cannot be made; the message says why."""


@dataclass(frozen=True)
class Carried:
    """What went into a file, or came out of it: artifacts of torch's caches, manifests of graphs, bytes of the file.

    `native`: libraries of kernels for CPUs.  `lacking`: keys that manifests name and torch's caches no longer have, or
    have in files that others may write to; or libraries that were made for another processor.
    """

    artifacts: int
    manifests: int
    nbytes: int
    native: int = 0
    lacking: int = 0

    def __str__(self) -> str:
        lacking = f"; {self.lacking} entries were not there, or not for this processor" if self.lacking else ""
        return (
            f"{self.artifacts} entries of torch's caches, {self.native} libraries of kernels and {self.manifests} "
            f"manifests, {self.nbytes / 1e6:.1f} MB{lacking}"
        )


# ---------------------------------------------------------------- into a file


def save(path: str | Path, chosen: Iterable[Manifest]) -> Carried:
    """Write what this process compiled, and what `chosen` manifests name, into `path`.

    Raises `CacheRefused` where there is nothing to write, or this torch differs, and OSError.
    """
    if lacking := _compat.missing("warm start"):
        raise CacheRefused(f"this torch differs: {lacking[0]}")
    chosen = list(chosen)
    with _compat.compile_lock:  # torch notes artifacts under it
        found = _of_this_process()
        have = {(kind, key) for kind, key, _ in found}
        wanted = set().union(*(entry.cached for entry in chosen)) - have
        lacking_keys = 0
        for kind, key in sorted(wanted):
            collected = list(_collected(kind, key))
            lacking_keys += not collected
            found += collected
        if not found:
            raise CacheRefused("nothing is there to save: no manifest names code that torch's caches have")
        libraries = [entry for entry in found if entry[0] == "native"]
        artifacts = _serialized([entry for entry in found if entry[0] != "native"])
    bodies = [manifest.to_bytes(entry, manifests.versions()) for entry in chosen]
    different = {
        content: number for number, content in enumerate(dict.fromkeys(content for _, _, content in libraries))
    }
    payload = b"".join((artifacts, *bodies, *different))
    header = {
        "format": FORMAT,
        **_machine(),
        "digest": hashlib.sha256(payload).hexdigest(),
        "artifacts": len(artifacts),
        "manifests": [len(body) for body in bodies],
        "processor": _processor(),
        "libraries": [len(content) for content in different],
        "native": [[key, different[content]] for _, key, content in libraries],
    }
    content = b"".join((MAGIC, json.dumps(header).encode(), b"\n", payload))
    if len(content) > MOST_BYTES:
        raise CacheRefused(f"it would have {len(content)} bytes, and at most {MOST_BYTES} are read: choose a model")
    trusted.write(Path(path).absolute(), content)
    return Carried(len(found) - len(libraries), len(chosen), len(content), len(libraries), lacking_keys)


def of_model(found: Iterable[Manifest], model: str | None) -> list[Manifest]:
    """Those of one model: the name of a module's class or of a function, or a glob.  Raises `CacheRefused` where there
    are others, and none of it."""
    everything = list(found)
    if model is None:
        return everything
    chosen = [entry for entry in everything if model in entry.names or fnmatch.filter(entry.names, model)]
    if everything and not chosen:
        known = sorted({name for entry in everything for name in entry.names})
        raise CacheRefused(f"no manifest is of {model!r}{did_you_mean(model, known)}; there are: {', '.join(known)}")
    return chosen


def _of_this_process() -> list[Artifact]:
    """What torch has noted of compiles in this process, by stock or by us."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return []
    noted = _compat.CacheArtifactManager.deserialize(saved[0]) or {}
    return [
        (kind, artifact.key, artifact.content)
        for kind, entries in noted.items()
        for artifact in entries
        if manifest.safe_key(kind, artifact.key)
    ]


def _collected(kind: str, key: str) -> Iterable[Artifact]:
    """What torch's folders have under a key, as artifacts."""
    if not manifest.safe_key(kind, key):
        return
    place = _compat.cache_entry(kind, key)
    try:
        files = sorted(place.iterdir()) if kind in manifest.GRAPH_CACHES else [place]
    except OSError:
        return
    for file in files:
        if file.name.startswith("."):  # it is being written
            continue
        try:
            content = trusted.read(file, MOST_ENTRY, shared_group=True)
            if kind == "autotune":
                json.loads(content)
            yield kind, key, content
        except (OSError, ValueError) as problem:  # `Refused` among them
            log.info("%s is left out: %s", file, problem)


def _serialized(found: Sequence[Artifact]) -> bytes:
    manager = _compat.CacheArtifactManager
    with manager.with_fresh_cache():
        for kind, key, content in found:
            manager.record_artifact(kind, key, json.loads(content) if kind == "autotune" else content)
        saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise CacheRefused("torch could not serialize what its caches have")
    return saved[0]


# ---------------------------------------------------------------- out of a file


def load(path: str | Path) -> Carried:
    """Put what `save` wrote into torch's caches and among the manifests.

    Raises `CacheRefused` for a file that is not to be trusted, is of another torch or machine, or is not whole: then
    nothing was taken; and OSError.
    """
    if lacking := _compat.missing("warm start"):
        raise CacheRefused(f"this torch differs: {lacking[0]}")
    try:
        content = trusted.read(Path(path), MOST_BYTES)
        artifacts, bodies, libraries = _parts(content)
        read = [manifest.from_bytes(body, manifests.versions()) for body in bodies]
        count = _checked(artifacts)
    except Refused as problem:
        events.count("refused_manifests")
        raise CacheRefused(f"{path} is not taken: {problem}") from None
    with _compat.compile_lock:
        if torch.compiler.load_cache_artifacts(artifacts) is None:
            raise CacheRefused(f"{path} is not taken: torch cannot read it")
    names: dict[bytes, Path] = {}
    taken = sum(_put(key, library, names) for key, library in libraries.items())
    noted = sum(manifests.note(entry) for entry in read)
    return Carried(count, noted, len(content), taken, len(libraries) - taken)


def _put(key: str, library: bytes | None, names: dict[bytes, Path]) -> bool:
    """Put a library where Inductor looks for it; whether it is there and can be used.  None: for another processor.
    `names`: under which name each has been put."""
    place = _compat.cache_entry("native", key)
    if place.exists():
        return True
    if library is None:
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    if library in names:
        cpp_kernels.put_under(place, names[library])
        return True
    trusted.write(place, library, durable=False)
    try:
        ctypes.CDLL(str(place))
    except OSError as problem:  # of another C++ library, perhaps: the compiler makes it again
        log.info("%s is not taken: %s", place, problem)
        place.unlink(missing_ok=True)
        return False
    names[library] = place
    return True


def _parts(content: bytes) -> tuple[bytes, list[bytes], dict[str, bytes | None]]:
    """torch's artifacts, the manifests, and libraries (None: for another processor).  Raises `Refused`."""
    if not content.startswith(MAGIC):
        raise Refused("it is no file of multigraph's caches")
    end = content.find(b"\n", len(MAGIC), len(MAGIC) + MOST_HEADER)
    try:
        header: Any = json.loads(content[len(MAGIC) : max(end, 0)])
        said, own = {name: header[name] for name in _machine()}, _machine()
        form, digest = header["format"], header["digest"]
        names = [key for key, _ in header["native"]]
        which = [number for _, number in header["native"]]
        lengths = [header["artifacts"], *header["manifests"], *header["libraries"]]
        count = len(header["libraries"])
        same_processor = header["processor"] == _processor()
        if not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise TypeError
        if not all(isinstance(number, int) and 0 <= number < count for number in which):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Refused("its header is not whole") from None
    if form != FORMAT:
        raise Refused(f"it has format {form!r}, and {FORMAT} is read")
    for name, value in own.items():
        if said[name] != value:
            raise Refused(f"it was saved with {name} {said[name]!r}, and this is {value}")
    payload = content[end + 1 :]
    if sum(lengths) != len(payload):
        what = "it was cut off" if len(payload) < sum(lengths) else "something was added to it"
        raise Refused(f"it has {len(payload)} bytes where its header says {sum(lengths)}: {what}")
    if digest != hashlib.sha256(payload).hexdigest():
        raise Refused("its digest is another one: it was changed")
    parts, at = [], 0
    for length in lengths:
        parts.append(payload[at : at + length])
        at += length
    if not all(isinstance(name, str) and manifest.safe_key("native", name) for name in names):
        raise Refused("a library in it has no place in torch's caches")
    first = len(parts) - count
    libraries = {
        name: parts[first + number] if same_processor else None for name, number in zip(names, which, strict=True)
    }
    return parts[0], parts[1:first], libraries


def _checked(artifacts: bytes) -> int:
    """How many artifacts there are.  Raises `Refused` where one does not belong into torch's caches."""
    found: dict[str, list[Any]] | None = _compat.CacheArtifactManager.deserialize(artifacts)
    if found is None:
        raise Refused("torch cannot read it")
    for kind, entries in found.items():
        for artifact in entries:
            if not manifest.safe_key(kind, artifact.key):
                raise Refused(f"{kind} {artifact.key!r} is no key of torch's caches")
    return sum(map(len, found.values()))


@functools.cache
def _processor() -> str:
    """What libraries of kernels were made for: the processor with all that it can do, and the C library."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        said = platform.processor()
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    lines = sorted(line for line in said.splitlines() if line.startswith(kept))
    return hashlib.sha256(repr((lines, platform.libc_ver())).encode()).hexdigest()[:32]


def _machine() -> dict[str, str]:
    """What must be the same where a file is taken back."""
    torch_version, multigraph = manifests.versions()
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "torch": torch_version,
        "multigraph": multigraph,
        "python": f"{platform.python_implementation()} {python}",
        "machine": f"{platform.system()} {platform.machine()}",
    }


__all__ = ["CacheRefused", "Carried", "load", "of_model", "save"]
