"""multigraph: a backend for stock torch.compile.

    torch.compile(model, backend="multigraph", options={...})

Dynamo traces once; multigraph compiles that graph as one generic graph and, lazily, as any number of variants for
sizes that were declared.  Importing this package is light: torch loads the backend by its entry point when it is named.

The parts, each of which imports only from those below it:

    __main__.py     python -m multigraph_backend: the doctor, and explain() for a script, as text or as a page
    doctor/         whether multigraph can work on this machine, and what to do where it cannot
    redirect.py     a program run as it is, with multigraph in place of Inductor
    integrations/   for libraries that take an object of their own in place of a backend's name
    metrics.py      what Prometheus asks for, read when it asks
    __init__.py     the public names, each loaded when it is asked for
    serving/        before the first request: all that was declared called ahead
    report.py       explain(): what became of each graph, of its variants and its recordings, and why
    page/           the same as a page for a browser, which loads nothing from anywhere
    backend.py      what torch calls with each graph; takes over torch's own dispatch of marks; compiles nothing
    region/         one Dynamo graph and its variants: which code runs a call, and what where there is none
    padding/        calls padded up to declared sizes, where rows behind the real ones are shown to change nothing
    lower/          one compile from end to end: a captured graph with facts in, code and its guards out
    options.py      what the user says, in code and in MULTIGRAPH_OPTIONS, as one frozen Options
    option_values.py  how the value of each option is read, and refused
    remedies.py     what to write for an option or a value that is not accepted
    saved_tensors/  what is saved for backward, packed in the forward graph and unpacked in the backward graph
    cudagraphs/     compiled code in CUDA graphs: its parts, what runs them, and the devices they run on
    capture/        a backend call as a captured graph: what is compiled again and again
    declare/        what may be declared: predicates over named integers, facts, torch's marks
    distributed/    under torch.distributed: collectives in order, compiles, endings, who waits for whom
    native/         what every recorded call does most often, as C++ that is compiled for the torch that is there
    cache/          what a second process starts from: manifests of what was used, one file for the next machine
    allocator/      the allocator extension (allocator_ext/): found, checked, given to torch
    sealing.py      whether anything may still be compiled or recorded
    events.py       counters that threads cannot lose, messages that are said once
    process/        what a process has once: rank, garbage collector, its threads' turns and rests, frames
    environment.py  MULTIGRAPH_OPTIONS: options by the names of models, in the variable or in a file
    spelling.py     what errors say of a word that is not right
    _compat.py      every private symbol of torch, with the versions it was seen in; nothing else touches one
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigraph_backend import allocator as allocator
    from multigraph_backend.backend import multigraph
    from multigraph_backend.cache.shipping import CacheRefused
    from multigraph_backend.cudagraphs.runtime import limit_recordings, release
    from multigraph_backend.cudagraphs.snapshot import memory_snapshot
    from multigraph_backend.declare.marks import mark
    from multigraph_backend.declare.predicates import And, Eq, In, MultipleOf, Predicate, Range
    from multigraph_backend.events import reset_stats, stats
    from multigraph_backend.options import Options, OptionsError
    from multigraph_backend.region.gains import measure_gains
    from multigraph_backend.region.warm_start import load_cache, save_cache, wait_until_warm
    from multigraph_backend.report import Explanation, explain
    from multigraph_backend.saved_tensors.hooks import SavedHook, saved_hook
    from multigraph_backend.saved_tensors.rules import Bits, Cast, Keep, Match, Offload, Recompute, Rule, Scaled
    from multigraph_backend.sealing import Sealed, seal, unseal
    from multigraph_backend.serving.rehearsal import WarmUp, warmup

__version__ = "0.1.1"

_HOME = {
    "And": "declare.predicates",
    "Bits": "saved_tensors.rules",
    "CacheRefused": "cache.shipping",
    "Cast": "saved_tensors.rules",
    "Eq": "declare.predicates",
    "Explanation": "report",
    "In": "declare.predicates",
    "Keep": "saved_tensors.rules",
    "Match": "saved_tensors.rules",
    "MultipleOf": "declare.predicates",
    "Offload": "saved_tensors.rules",
    "Options": "options",
    "OptionsError": "options",
    "Predicate": "declare.predicates",
    "Range": "declare.predicates",
    "Recompute": "saved_tensors.rules",
    "Rule": "saved_tensors.rules",
    "SavedHook": "saved_tensors.hooks",
    "Scaled": "saved_tensors.rules",
    "Sealed": "sealing",
    "WarmUp": "serving.rehearsal",
    "explain": "report",
    "limit_recordings": "cudagraphs.runtime",
    "load_cache": "region.warm_start",
    "mark": "declare.marks",
    "measure_gains": "region.gains",
    "memory_snapshot": "cudagraphs.snapshot",
    "multigraph": "backend",
    "release": "cudagraphs.runtime",
    "reset_stats": "events",
    "save_cache": "region.warm_start",
    "saved_hook": "saved_tensors.hooks",
    "seal": "sealing",
    "stats": "events",
    "unseal": "sealing",
    "wait_until_warm": "region.warm_start",
    "warmup": "serving.rehearsal",
}

__all__ = [
    "And",
    "Bits",
    "CacheRefused",
    "Cast",
    "Eq",
    "Explanation",
    "In",
    "Keep",
    "Match",
    "MultipleOf",
    "Offload",
    "Options",
    "OptionsError",
    "Predicate",
    "Range",
    "Recompute",
    "Rule",
    "SavedHook",
    "Scaled",
    "Sealed",
    "WarmUp",
    "explain",
    "limit_recordings",
    "load_cache",
    "mark",
    "measure_gains",
    "memory_snapshot",
    "multigraph",
    "release",
    "reset_stats",
    "save_cache",
    "saved_hook",
    "seal",
    "stats",
    "unseal",
    "wait_until_warm",
    "warmup",
]


#: modules that users import themselves; an attribute too, loaded when it is asked for
_MODULES = ("allocator", "doctor", "metrics")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What is public, loaded or not, and what every module has; not what happens to be loaded beneath."""
    of_modules = {name for name in globals() if name.startswith("__") and name.endswith("__")}
    return sorted({*__all__, *_MODULES, *of_modules})
