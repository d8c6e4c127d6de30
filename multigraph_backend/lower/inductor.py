"""What Inductor is given with each graph, and what it gets wrong kept out.

Imported when a graph is to be compiled by Inductor, not before: it loads Inductor.

In: a graph module and its inputs, options.  Out: Inductor's code, with what the options ask for around it: recordings
(`cudagraphs`), packed tensors (`saved_tensors`), backward code that may run again (`retained`), bodies for blocks that
come again (`one_body`), and always the two guards around changed inputs (`gradients_of_changes`, `order_of_changes`)
eager's numbers where Inductor has others (`as_eager`), and products that it has a slow kernel for
(`quantized_products`).  The kernels of its C++ code are compiled together (`translation_units`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from multigraph_backend import _compat
from multigraph_backend.lower import (
    block_operator,
    one_body,
    quantized_products,
    retained,
    traced_once,
    translation_units,
)
from multigraph_backend.lower import only_cached as from_caches
from multigraph_backend.lower.gradients_of_changes import SafePartitioner
from multigraph_backend.lower.order_of_changes import InnerCompile
from multigraph_backend.lower.sums_with_zero import keep_sums
from multigraph_backend.options import Options
from multigraph_backend.process import libraries
from multigraph_backend.saved_tensors.rules import Offload

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.output_code import How

log = logging.getLogger(__name__)


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    options: Options,
    label: str | None,
    how: How,
    ignore_shape_env: bool,
    when_needed: retained.CompileWhenNeeded | None,
    only_cached: bool = False,
) -> Callable[..., Sequence[Any]]:
    """Inductor's code for `module`; with a `label` for messages, `how` says what becomes of it.

    `when_needed`: see `retained.inner_compile`.  `only_cached`: from torch's caches alone.
    Raises what Inductor raises, `CannotLower` for what it gets wrong, and `NotCached`.
    """
    knobs = dict(options.inductor)
    inner, traced, cut_at = None, None, None
    if label is not None:
        from multigraph_backend.cudagraphs import output_code

        inner = output_code.inner_compile(options, label, how)
        knobs.update(output_code.KNOBS if how == "recorded" else {})
        if any(isinstance(rule.pack, Offload) for rule in options.saved_tensors):
            knobs.setdefault(*output_code.PLACED)
    keep_sums(module)  # first: blocks that are traced once are taken out of it, and compiled by themselves
    if options.repeat and how != "traced":
        traced, why_not = _traced_once(module, inputs, options, only_cached)
        cut_at = output_code.cut_at(options) if label is not None and how == "recorded" else None
        inner = one_body.inner_compile(inner, options.repeat == "auto", cut_at, traced, why_not)
    around = None
    if options.packing and (lacking := _lacks_for_packing()):
        log.debug("saved tensors stay as they are; this torch differs: %s", lacking)  # said at the first graph
    elif options.packing:
        from multigraph_backend.lower.bodies_in_partitions import PuttingPartitioner
        from multigraph_backend.saved_tensors import output_code as packing_code
        from multigraph_backend.saved_tensors.partitioner import PackingPartitioner

        wanted = options.reckoned or options.saved_tensors_budget
        packing = functools.partial(PackingPartitioner, rules=options.saved_tensors, wanted=wanted)
        around = packing if traced is None else lambda inside: packing(PuttingPartitioner(inside, traced, cut_at))
        inner = packing_code.inner_compile(inner, runs=how != "traced")
    elif traced is not None and traced.inlined:
        from multigraph_backend.lower.bodies_in_partitions import InliningPartitioner

        around = functools.partial(InliningPartitioner, bodies=traced)
    if how != "traced" and (lacking := _lacks_for_retained_graphs()):
        log.debug("donated buffers stay as they are; this torch differs: %s", lacking)  # said at the first graph
    elif how != "traced":
        inner = retained.inner_compile(inner, when_needed)
    together = translation_units.knob(knobs)
    given = compile_fx_settings({**knobs, **together}, from_caches.refuse if only_cached else inner, around)
    if only_cached:
        given["decompositions"] = from_caches.RefusingTable()
    known = block_operator.known(traced) if traced is not None else contextlib.nullcontext()
    with known, _zeros_apart(module), translation_units.kernels_together(), libraries.for_nobody_else():
        run: Callable[..., Sequence[Any]]
        run = _compat.compile_fx(module, inputs, ignore_shape_env=ignore_shape_env, **given)
    return run


def _zeros_apart(module: torch.fx.GraphModule) -> contextlib.AbstractContextManager[object]:
    """torch's partitioner takes two steps for one where they differ in the sign of a zero alone, for 0.0 == -0.0.  So
    where a graph has a -0.0, it is told not to look for equal steps.  Torch 2.15 tells them apart."""
    if _compat.without("functorch_config"):
        return contextlib.nullcontext()
    config = _compat.functorch_config
    if not getattr(config, "cse", False) or not any(
        _is_negative_zero(value)
        for graph in module.modules()
        if isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes
        for value in _constants(node)
    ):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = config.patch(cse=False)
    return patched


def _constants(node: torch.fx.Node) -> list[object]:
    found: list[object] = []
    torch.fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found


def _is_negative_zero(value: object) -> bool:
    return isinstance(value, float) and value == 0 and math.copysign(1, value) < 0


def _traced_once(
    module: torch.fx.GraphModule, inputs: list[Any], options: Options, only_cached: bool
) -> tuple[block_operator.Bodies | None, str | None]:
    """Calls of bodies in `module` that AOTAutograd traces once, and why there are none though blocks come again."""
    whole = options.repeat == "auto"  # what is lost by a cut is only known of what AOTAutograd has traced
    if whole and options.packing:
        return None, "packs are placed in the graph as a whole"
    if options.saved_tensors_budget is not None or options.reckoned is not None:
        return None, "what is saved has a budget or a memory goal"  # and a body is parted without a look at it
    config = _compat.inductor_config
    if config.freezing or config.cpp_wrapper or {"freezing", "cpp_wrapper"} & {name for name, _ in options.inductor}:
        return None, "constants are frozen, or wrappers are in C++"
    beside = functools.partial(compile_fx_settings, dict(options.inductor))
    try:
        with _zeros_apart(module):
            may_draw = _keeps_what_was_drawn(options)
            return traced_once.lift(module, inputs, beside, not only_cached, may_draw, inline=whole), None
    except block_operator.Refused as refused:
        return None, str(refused)


def _keeps_what_was_drawn(options: Options) -> bool:
    """Whether what a body has drawn is saved for backward, as torch's partitioner does by itself: another one, or one
    that is told to compute again what it can, may call the body once more, and the call would draw other numbers."""
    chosen = dict(options.inductor).get("custom_partitioner_fn", _compat.partitioner_config.custom_partitioner_fn)
    config = _compat.functorch_config
    kept = config.ban_recompute_not_in_allowlist and not config.aggressive_recomputation
    return chosen is None and kept and config.activation_memory_budget == 1


def compile_fx_settings(
    chosen: Mapping[str, object],
    inner: InnerCompile | None = None,
    around: Callable[[Any], Any] | None = None,
) -> dict[str, object]:
    """Keyword arguments for Inductor's `compile_fx`: the knobs `chosen`, and what is always around (above).

    `inner` compiles one graph in place of Inductor's own function; `around` makes the partitioner that is used out of
    `SafePartitioner`.  Without what these need of torch only graphs that change no input may be compiled.
    """
    if _compat.missing("changed inputs"):
        return {"config_patches": dict(chosen) or None, **({} if inner is None else {"inner_compile": inner})}
    theirs = chosen.get("custom_partitioner_fn", _compat.partitioner_config.custom_partitioner_fn)
    safe = SafePartitioner(theirs)
    patches = {**chosen, "custom_partitioner_fn": safe if around is None else around(safe)}
    return {
        "config_patches": patches,
        "inner_compile": functools.partial(quantized_products.compile_with_products, inner),
    }


def _lacks_for_packing() -> str | None:
    """What of torch packing needs and does not find."""
    return _lacks_of("saved tensors", "changed inputs", "cudagraphs")


def _lacks_for_retained_graphs() -> str | None:
    """What of torch a backward that may run again needs and does not find; a compile without variants has one, too."""
    return _lacks_of("retained graphs", "changed inputs", "cudagraphs") or _compat.without(*retained.NEEDED)


def _lacks_of(*features: str) -> str | None:
    return next((problem for feature in features for problem in _compat.missing(feature)), None)
