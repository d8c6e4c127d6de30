"""A graph compiled at once, as any other backend does it: in Dynamo's own trace and under its guards.

For graphs that cannot be captured, and where this torch lacks what late compiles need.  In: the graph module and the
example inputs of a backend call.  Out: the compiler's code, recorded and packed as the options ask.  A call in which
something that is written to shares memory with a part of a tensor subclass runs eagerly.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigraph_backend import _compat, events
from multigraph_backend.capture import effects
from multigraph_backend.capture.aliasing import parts_apart
from multigraph_backend.capture.structure import copy_structure, held_tensors, uses_gpu
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.lower.compilers import (
    CHANGES_INPUTS,
    KEPT_RIGHT,
    CompiledFunction,
    compile_module,
    records,
    retrying_unpacked,
)
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.options import Options
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.saved_tensors import account as saved_account
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.reckoning import GoalMissed

log = logging.getLogger(__name__)

PARTS_SHARED = "what it writes to shares memory with what a tensor subclass is made of, which AOTAutograd does not see"


def compile_at_once(module: torch.fx.GraphModule, inputs: list[Any], options: Options, name: str) -> CompiledFunction:
    """The chosen compiler's code for `module`; `name` is for messages.

    Raises what the compiler raises, and `CannotLower` where this torch lacks what the compile needs.
    """
    if options.compiler == "inductor" and (negated := effects.reads_negated(module, inputs)) is not None:
        raise CannotLower(negated)
    apart = parts_apart(inputs, list(held_tensors(module)), effects.written(module))
    if apart is None:
        return _compiled(module, inputs, options, name)
    eager = _copied(module) if apart(inputs) else None
    if eager is None:
        raise CannotLower(PARTS_SHARED)
    return _unless_parts_are_shared(_compiled(module, inputs, options, name), eager, apart, name)


def _unless_parts_are_shared(
    run: CompiledFunction, eager: torch.fx.GraphModule, apart: Callable[[Sequence[Any]], bool], name: str
) -> CompiledFunction:
    def checked(*args: Any) -> Any:
        if apart(args):
            return run(*args)
        events.count("eager_calls")
        events.warn_once(f"{name}: {PARTS_SHARED}", "%s: runs eagerly: %s", name, PARTS_SHARED)
        return eager(*args)

    return checked


def _compiled(module: torch.fx.GraphModule, inputs: list[Any], options: Options, name: str) -> CompiledFunction:
    options = options.reckoned_for(inputs) if torch.is_grad_enabled() else options
    options = dataclasses.replace(options, repeat=False)  # nothing is compiled once more where bodies fail
    recorded_as = name if records(uses_gpu(module), inputs, options) else None
    plain = recorded_as is None and not options.packing
    _refuse_where_torch_lacks(module, options, plain)
    if plain:
        return compile_module(module, inputs, options)
    # its backward is compiled at the first call of it, when no setting of now is in force any more
    with _compat.functorch_config.patch(enable_autograd_cache=False):
        if not options.packing:
            return compile_module(module, inputs, options, recorded_as)
        return _packed_or_not(module, inputs, options, name, recorded_as)


def _refuse_where_torch_lacks(module: torch.fx.GraphModule, options: Options, plain: bool) -> None:
    if options.compiler in KEPT_RIGHT and effects.may_change_inputs(module):
        lacking = next(iter(_compat.missing("changed inputs")), None) or _compat.without("TracingContext")
        if lacking:
            raise CannotLower(f"{CHANGES_INPUTS}: {lacking}")
    needed = ("lookup_backend",) if options.compiler != "inductor" else ("compile_fx", "inductor_config")
    if lacking := _compat.without(*needed, *(() if plain else ("functorch_config",))):
        raise CannotLower(f"this torch differs: {lacking}")


def _packed_or_not(
    module: torch.fx.GraphModule, inputs: list[Any], options: Options, name: str, recorded_as: str | None
) -> CompiledFunction:
    """With what is saved for backward packed; where that compile fails, once more without."""
    untouched = _copied(module)
    try:
        with (
            saved_account.collecting() as saved,
            _compat.functorch_config.patch(force_non_lazy_backward_lowering=True),  # so that a failure shows now
        ):
            run = compile_module(module, inputs, options, recorded_as)
        for account in saved:
            saved_account.pass_on(account)
        if options.on_failure == "raise" and options.memory_goal is not None:
            saved_account.refuse_missed(saved)
        return run
    except GoalMissed:
        raise
    except _compat.TensorifyScalarRestartAnalysis:  # Dynamo traces anew
        raise
    except Exception as error:
        if untouched is None or from_outside(error):
            raise
        reason = retrying_unpacked(name, error)
    run = compile_module(untouched, inputs, options.without_packs(), recorded_as)
    saved_account.pass_on(SavedTensors((), failed=reason))
    return run


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """For another compile: a compiler changes the graph.  None where parts of it cannot be copied."""
    try:
        return copy_structure(module)
    except Exception as error:
        log.debug("a graph cannot be copied: %s", describe(error))
        return None
