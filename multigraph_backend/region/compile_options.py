"""Under which options a variant is compiled, in a call and in a worker alike.

In:  the region's options, the variant, and arguments of a call.  Out: options for `lowering.lower`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from multigraph_backend.options import Options
from multigraph_backend.region.variant import Variant

_TUNING = ("max_autotune", "coordinate_descent_tuning")  # knobs that measure on the GPU
_WHERE_COMPILED = "triton.autotune_at_compile_time"  # Inductor's knob: measure there, with tensors made for it


def options_for(options: Options, variant: Variant, args: Sequence[Any], grad: bool, whole: bool = False) -> Options:
    """Under which `variant` is compiled, wherever that is: keys of torch's caches depend on them.

    `whole`: without bodies for blocks that come again (see `tiers`).

    What a memory goal leaves is reckoned once for a variant, at its first compile, for `args`; without `grad` nothing
    is saved.

    Where a worker may use the GPU, it also tunes.  Else a variant's first call measures each kernel's configurations,
    and the requests behind it wait for that.
    """
    if whole:
        options = dataclasses.replace(options, repeat=False)
    if options.memory_goal is not None:
        if not grad:
            options = options.without_packs()
        else:
            variant.reckoned = variant.reckoned or options.reckoned_for(args)
            options = variant.reckoned
    if variant.generic or options.compile != "background" or options.compiler != "inductor" or not may_use_gpu(options):
        return options
    if any(name == _WHERE_COMPILED for name, _ in options.inductor):
        return options
    knobs = {**dict(options.inductor), _WHERE_COMPILED: True}
    return dataclasses.replace(options, inductor=tuple(sorted(knobs.items(), key=operator.itemgetter(0))))


def may_use_gpu(options: Options) -> bool:
    """Whether a worker may take memory of a GPU."""
    allowed = dict(options.workers).get("gpu")
    tunes = any(value and name.startswith(_TUNING) for name, value in options.inductor)
    return tunes if allowed is None else bool(allowed)
