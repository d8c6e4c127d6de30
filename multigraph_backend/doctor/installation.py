"""What is installed: versions, the backend's name, and what multigraph uses of torch's inside."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from multigraph_backend import __version__
from multigraph_backend.doctor.findings import Finding, Level, one_line

if TYPE_CHECKING:
    from multigraph_backend._compat import PrivateSymbol

# torch releases that multigraph supports: from the first, before the second
SUPPORTED_TORCH = ((2, 11), (2, 16))
_SUPPORTED = ">={}.{},<{}.{}".format(*SUPPORTED_TORCH[0], *SUPPORTED_TORCH[1])
INSTALL_TORCH = f"pip install 'torch{_SUPPORTED}'"


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version, zeros for what is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


# ---------------------------------------------------------------- versions


def installed_versions() -> dict[str, str | None]:
    """Versions by name, None for what is not installed; torch is not imported for it."""
    return {
        "multigraph": __version__,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "triton": _version_of("triton", "pytorch-triton"),
        "sympy": _version_of("sympy"),
        "platform": platform.platform(),
    }


def _version_of(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions(found: Mapping[str, str | None]) -> Iterator[Finding]:
    """What is installed, and whether torch is one that multigraph supports."""
    shown = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    yield Finding("versions", "ok", shown, facts=dict(found))
    if found["torch"] is None:
        yield Finding("torch", "error", "torch is not installed", INSTALL_TORCH)
    elif release(found["torch"]) < SUPPORTED_TORCH[0]:
        said = f"torch {found['torch']} is older than multigraph supports ({_SUPPORTED})"
        yield Finding("torch", "error", said, INSTALL_TORCH)
    elif release(found["torch"]) >= SUPPORTED_TORCH[1]:
        said = f"torch {found['torch']} is newer than what multigraph was tested with ({_SUPPORTED})"
        yield Finding("torch", "warning", said, f"heed the check of private symbols below, or {INSTALL_TORCH}")


# ---------------------------------------------------------------- the backend's name


def registered() -> list[importlib.metadata.EntryPoint]:
    """Entry points that torch finds under the name "multigraph"."""
    return list(importlib.metadata.entry_points(group="torch_dynamo_backends", name="multigraph"))


def entry_point(entries: Sequence[importlib.metadata.EntryPoint], expected: object) -> Iterator[Finding]:
    """Whether `backend="multigraph"` finds this package's backend, `expected`."""
    check, install = "entry point", "pip install multigraph (in a checkout: pip install -e .)"
    if not entries:
        said = 'not registered: torch.compile(..., backend="multigraph") is an error'
        yield Finding(check, "error", said, f"{install}; or pass backend=multigraph_backend.multigraph")
        return
    for entry in entries:
        try:
            found = entry.load()
        except Exception as error:
            yield Finding(check, "error", f"{entry.value} cannot be loaded: {one_line(error)}", install)
            continue
        version = entry.dist.version if entry.dist is not None else None
        if found is not expected:
            said = (
                f'backend="multigraph" is {entry.value}, which is not the backend of the package that runs this check'
            )
            yield Finding(check, "error", said, "uninstall the other package of that name")
        elif version is not None and version != __version__:
            said = f"registered by version {version}, but the code is of {__version__}"
            yield Finding(check, "warning", said, install)
        else:
            yield Finding(check, "ok", f'backend="multigraph" is {entry.value}')


# ---------------------------------------------------------------- what multigraph uses of torch's inside

# feature of a private symbol -> how bad it is without, and what is lost
LOST: dict[str, tuple[Level, str]] = {
    "variants": ("error", "no graph gets variants: each is compiled at once, as any backend would"),
    "changed inputs": (
        "warning",
        "graphs that change their inputs run eagerly, tensors that are saved for backward are not packed, and torch"
        " refuses calls with retain_graph where it donates buffers",
    ),
    "retained graphs": ("warning", "torch refuses calls with retain_graph where it donates buffers"),
    "saved tensors": ("warning", "tensors that are saved for backward are not packed, whatever rules say"),
    "watchdog": ("warning", "a rank that waits for others says so by a timeout of its own, not its group's"),
    "one compile": ("warning", "each rank of a host compiles on its own"),
    "warm start": ("warning", "nothing is loaded ahead of calls, and `cache save` and `load` do not work"),
    "workers": ("warning", '`"compile": "background"` compiles in calls'),
    "rows of packs": ("warning", "packs with a scale for each row take longer where rows are long"),
    "kernels together": ("warning", "each C++ kernel is compiled by itself, which takes longer"),
    "rests": ("warning", "workers tune a GPU's kernels without rests, which slows calls down"),
    "stored code": ("warning", "saved functions load all of Inductor before they take their code from torch's caches"),
    "saved graphs": ("warning", "what torch's aot_compile makes of multigraph cannot be saved"),
    "padding": ("warning", "the option 'pad' pads nothing"),
    "endings": ("warning", "recordings with collectives are not destroyed when a process group is aborted"),
    "distributed": ("warning", "no collective is recorded in CUDA graphs"),
    "names": ("warning", "sizes have no names, so options that name them do not apply"),
    "instances": ("warning", "instances of one class share options and reports, whatever their multigraph_name"),
    "cudagraphs": (
        "warning",
        "nothing is recorded in CUDA graphs, tensors that are saved for backward are not packed, and torch refuses"
        " calls with retain_graph where it donates buffers",
    ),
    "cudagraphs on CUDA": ("warning", "nothing is recorded in CUDA graphs"),
    "allocator": ("warning", "the allocator extension does not switch on torch's own reuse in captures"),
    "stacks of allocations": ("warning", "allocator.record_memory_history keeps no stacks"),
    "allocator on CUDA": ("warning", "pools draw no memory from the allocator extension"),
    "recordings in the extension on CUDA": (
        "warning",
        "nothing is recorded while the allocator extension is installed",
    ),
    "size assertions": ("warning", "graphs that assert something of sizes that they compute have no variants"),
    "stances": ("warning", "late compiles do not heed torch.compiler.set_stance"),
    "modes": ("warning", "the option 'mode' is ignored"),
    "redirect": (
        "warning",
        "what redirected programs ask of Inductor is ignored, and those that name other backends get multigraph",
    ),
    "marks": ("warning", "multigraph_backend.mark marks nothing"),
    "instruments": ("warning", "torch's counters, structured trace and profiler do not show variants"),
    "messages": ("warning", "some errors are told in torch's words"),
    "simulation": ("warning", "recordings cannot be simulated on the CPU"),
    "boundaries": ("warning", "inputs of blocks that FSDP2 shards are not packed"),
    "repeated blocks": ("warning", "the option 'repeat' does nothing"),
    "eager's numbers": ("warning", "max pooling over windows of minus infinity has Inductor's indices"),
    "moved parameters": ("warning", "compiled models with tensor subclasses as parameters may refuse to be moved"),
}


def private_symbols(table: Mapping[str, PrivateSymbol], torch_version: str) -> Iterator[Finding]:
    """Which of the private symbols in `table` this torch has, and which features are off without the others."""
    problems: dict[str, list[str]] = {}
    for row in table.values():
        problem = row.problem()
        if problem is not None:
            problems.setdefault(row.feature, []).append(problem)
    missing = sum(map(len, problems.values()))
    counts = {"expected": len(table), "missing": missing}
    if not missing:
        said = f"all {len(table)} that multigraph uses are in torch {torch_version}"
        yield Finding("private symbols", "ok", said, facts=counts)
    for feature, lines in problems.items():
        level, lost = LOST.get(feature, ("warning", "what needs it does not work"))
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        said = f"{feature!r} is off: {lost}. torch {torch_version}: {lines[0]}{more}"
        remedy = f"{INSTALL_TORCH}; if this torch is in that range, it is a bug of multigraph: report this line"
        yield Finding("private symbols", level, said, remedy, {**counts, "feature": feature, "problems": lines})
