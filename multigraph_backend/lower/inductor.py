"""What every compile by Inductor is given, whoever asks for it: the two guards around changed inputs.

Imported when something is to be compiled by Inductor, not before: it loads Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from multigraph_backend import _compat
from multigraph_backend.lower.gradients_of_changes import SafePartitioner
from multigraph_backend.lower.order_of_changes import InnerCompile, compile_in_order


def compile_fx_settings(
    chosen: Mapping[str, object],
    inner: InnerCompile | None = None,
    around: Callable[[Any], Any] | None = None,
) -> dict[str, object]:
    """Keyword arguments for Inductor's `compile_fx`: the knobs `chosen`, and the two guards.

    `inner` compiles one graph in place of Inductor's own function; `around` makes the partitioner that is used out of
    `SafePartitioner`.  Without what these need of torch only graphs that change no input may be compiled.
    """
    if _compat.missing("changed inputs"):
        return {"config_patches": dict(chosen) or None, **({} if inner is None else {"inner_compile": inner})}
    theirs = chosen.get("custom_partitioner_fn", _compat.partitioner_config.custom_partitioner_fn)
    safe = SafePartitioner(theirs)
    patches = {**chosen, "custom_partitioner_fn": safe if around is None else around(safe)}
    return {"config_patches": patches, "inner_compile": functools.partial(compile_in_order, inner)}
