"""multigraph: a backend for stock torch.compile.

    torch.compile(model, backend="multigraph", options={...})

Dynamo traces once; multigraph compiles that graph as one generic graph and, lazily, as any number of variants for
sizes that were declared.  Importing this package is light: torch loads the backend by its entry point when it is named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigraph_backend.backend import multigraph
    from multigraph_backend.cudagraphs.runtime import limit_recordings
    from multigraph_backend.declare.marks import mark
    from multigraph_backend.declare.predicates import And, Eq, In, MultipleOf, Predicate, Range
    from multigraph_backend.events import reset_stats, stats
    from multigraph_backend.options import Options, OptionsError
    from multigraph_backend.region.gains import measure_gains
    from multigraph_backend.report import Explanation, explain
    from multigraph_backend.saved_tensors.hooks import SavedHook, saved_hook
    from multigraph_backend.saved_tensors.rules import Bits, Cast, Keep, Match, Offload, Recompute, Rule, Scaled

__version__ = "0.1.1"

_HOME = {
    "And": "declare.predicates",
    "Bits": "saved_tensors.rules",
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
    "explain": "report",
    "limit_recordings": "cudagraphs.runtime",
    "mark": "declare.marks",
    "measure_gains": "region.gains",
    "multigraph": "backend",
    "reset_stats": "events",
    "saved_hook": "saved_tensors.hooks",
    "stats": "events",
}

__all__ = [
    "And",
    "Bits",
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
    "explain",
    "limit_recordings",
    "mark",
    "measure_gains",
    "multigraph",
    "reset_stats",
    "saved_hook",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
