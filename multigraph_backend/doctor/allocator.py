"""The allocator extension: whether it is there, whether it serves this process, and why not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from multigraph_backend.doctor.findings import Finding

VARIABLE = "MULTIGRAPH_ALLOCATOR"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_INSTALL = "pip install multigraph-allocator, of the same release as multigraph"


@dataclass(frozen=True)
class AllocatorFacts:
    """What there is to know of the extension.

    version: of the package `multigraph-allocator`, None where it is not installed
    abi: of its library, None where that cannot be loaded
    usable: a pool could draw on it here
    installed: it is this process's allocator
    reason: why it is not
    features: what is on where it is installed
    asked: what MULTIGRAPH_ALLOCATOR says
    autoloads: torch calls the package when it is imported
    """

    version: str | None = None
    abi: int | None = None
    usable: bool = False
    installed: bool = False
    reason: str | None = None
    features: tuple[str, ...] = ()
    asked: str = ""
    autoloads: bool = False


def allocator_facts(environ: Mapping[str, str]) -> AllocatorFacts:
    """Look at this process; torch must be importable."""
    from multigraph_backend import _compat
    from multigraph_backend.allocator import installing

    status = installing.status()
    try:
        version: str | None = importlib.metadata.version("multigraph-allocator")
    except importlib.metadata.PackageNotFoundError:
        version = None
    entries = importlib.metadata.entry_points(group="torch.backends", name="multigraph_allocator")
    segments = "expandable" if status.expandable else "plain"
    lives = "not made, this torch differs" if _compat.missing("recordings in the extension on CUDA") else "in its pools"
    reuse, error = f"reuse in captures: {status.reuse}", f"out of memory: {status.out_of_memory}"
    features = (reuse, f"segments: {segments}", error, f"recordings: {lives}") if status else ()
    return AllocatorFacts(
        version=version,
        abi=status.abi,
        usable=status.usable,
        installed=status.installed,
        reason=status.reason,
        features=features,
        asked=environ.get(VARIABLE, "").strip(),
        autoloads=bool(entries) and environ.get(AUTOLOAD_VARIABLE, "1") == "1",
    )


def allocator(found: AllocatorFacts) -> Iterator[Finding]:
    """Whether the extension serves this process; that nobody asked for it is no fault."""
    check, facts = "allocator", asdict(found)
    named = f"the extension {found.version or 'of a path of its own'}"
    if found.installed:
        said = f"{named} is the allocator of this process ({'; '.join(found.features)})"
        yield Finding(check, "ok", said, facts=facts)
        return
    if found.asked not in ("", "0"):
        said = f"{VARIABLE}={found.asked}, but torch's own allocator is in use: {found.reason}"
        if found.asked != "1":
            yield Finding(check, "warning", said, f"set {VARIABLE} to 1 or 0", facts)
        elif found.abi is None or not found.usable:
            yield Finding(check, "warning", said, f"{_INSTALL}; or unset {VARIABLE}", facts)
        elif not found.autoloads:
            remedy = f"{_INSTALL}; leave {AUTOLOAD_VARIABLE} alone; or call multigraph_backend.allocator.install()"
            yield Finding(check, "warning", f"{said}; torch does not load it by itself", remedy, facts)
        else:
            yield Finding(check, "warning", said, "install it before CUDA starts", facts)
        return
    if found.version is not None and not found.usable:
        yield Finding(check, "ok", f"torch's own; {named} cannot be used here: {found.reason}", facts=facts)
    elif found.usable:
        said = f"torch's own; {named} can serve pools, and the process if it is asked to"
        yield Finding(check, "ok", said, facts=facts)
    else:
        yield Finding(check, "ok", f"torch's own; {found.reason}", facts=facts)
