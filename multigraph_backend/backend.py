"""The backend: what `torch.compile(model, backend="multigraph")` calls with each graph that Dynamo traced.

In: a graph module and example inputs, inside Dynamo's trace.  Out: a callable over the same inputs.  Nothing is
compiled here: the graph is captured, and compiled when a call needs it.  In torch's `aot_compile` the callable is one
that can be saved, and what a call with the example inputs needs is compiled ahead.

Stock dispatch is taken over: Dynamo reads the marks (`shape_env.specializations`) right after the backend returned, so
they are removed last thing, and no dispatcher of its own is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from multigraph_backend import _compat, events, sealing
from multigraph_backend.capture import effects, from_dynamo, redirected, user_code
from multigraph_backend.declare import marks
from multigraph_backend.lower import at_once
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.options import VARIABLE, Options, disabled_pieces
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.region import region, registry
from multigraph_backend.saved_tensors import account
from multigraph_backend.saved_tensors.hooks import stock_hooks

log = logging.getLogger(__name__)


class Multigraph:
    """A torch.compile backend: `backend="multigraph"`, or this object itself.

    Idea: one trace, several backend specializations, dispatched per call (PyTorch pull requests 152596, 153433 and
    153449).
    """

    compiler_name = "multigraph"
    __name__ = "multigraph"

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> Callable[..., Any]:
        """Take one Dynamo graph.

        `mode`, `options` and `name` as in torch.compile (see `Options.build`).  Raises `OptionsError` for what is not
        accepted.
        """
        knobs: Mapping[str, object] = {}
        if (mode, options, name) == (None, None, None) and (asked := redirected.asked(self)) is not None:
            if asked.other is not None:
                other: Callable[..., Any] = asked.other(gm, example_inputs)
                return other
            mode, options, name = (asked.arguments.get(key) for key in ("mode", "options", "name"))
            knobs = asked.knobs
        marks.meet(example_inputs)
        traced = user_code.current()
        accepted = _accepted(options, mode, name, traced, knobs)
        traced = dataclasses.replace(traced, name=accepted.name)
        by_inductor = accepted.compiler == "inductor"
        for feature, line in _compat.switched_off(by_inductor):
            events.warn_once("recordings" if feature.startswith("cudagraphs") else f"off: {feature}", "%s", line)
        disabled = disabled_pieces(os.environ)
        accepted = accepted.without(disabled)
        try:
            # Dynamo has done so; what is refused is its compile, when it comes
            sealing.refused(f"{traced} is traced (TORCH_LOGS=recompiles says why)")
            if "all" in disabled:
                return _compile_at_once(gm, example_inputs, accepted, traced, "MULTIGRAPH_DISABLE=all")
            if "variants" in disabled:
                _take_over_marks(example_inputs)
            lacking = list(_compat.missing("variants", by_inductor))
            lacking += filter(None, [_compat.missing_in_trace(gm, example_inputs)])
            if lacking:
                return _compile_at_once(gm, example_inputs, accepted, traced, f"this torch differs: {lacking[0]}")
            ahead = _ahead_of_time()
            if ahead is None and effects.only_exchanges(gm):
                log.debug("%s: runs as it is, for it computes nothing", traced)
                as_it_is: Callable[..., Any] = gm.forward
                return as_it_is
            try:
                graph = from_dynamo.capture(gm, example_inputs, traced)
                with _compat.ordinary_caching() if ahead else contextlib.nullcontext():
                    state = CompileState.take()
            except from_dynamo.CannotCapture as reason:
                return _compile_at_once(gm, example_inputs, accepted, traced, str(reason))
            except Exception as error:  # what this torch does otherwise, and no row of `_compat` knows of
                if accepted.on_failure == "raise" or from_outside(error):
                    raise
                log.debug("%s: cannot be captured", traced, exc_info=True)
                return _compile_at_once(gm, example_inputs, accepted, traced, f"cannot be captured: {describe(error)}")
            if "saved_tensors" in disabled:
                state = dataclasses.replace(state, hooks=None)  # they run in eager
            if state.hooks is not None:  # ours to place; torch would look at their copies when it asks its cache
                from_dynamo.forget_hooks(graph)
            made = region.Region(graph, accepted, state)
            return made.dispatcher() if ahead is None else ahead.of_region(made, example_inputs)
        finally:
            _take_over_marks(example_inputs)

    def reset(self) -> None:
        """Called by `torch._dynamo.reset()`: Dynamo drops the code that holds the regions, reports start anew."""
        registry.clear()
        marks.forget()
        if (runtime := sys.modules.get("multigraph_backend.cudagraphs.runtime")) is not None:
            runtime.forget()

    def __repr__(self) -> str:
        return "<torch.compile backend multigraph>"


def _accepted(
    options: Mapping[str, object] | None,
    mode: str | None,
    name: str | None,
    traced: user_code.UserCode,
    knobs: Mapping[str, object],
) -> Options:
    """What the user asked for; where the module's own name has a part in it, modules of other names get other code.

    `knobs`: of Inductor, from a program that names Inductor as its backend.
    """
    owner = traced.owner
    attribute = None if owner is None else owner.attribute
    accepted = Options.build(options, mode, traced.models, name=name, attribute=attribute, redirected=knobs)
    in_code = name is not None or (options is not None and options.get("name") is not None)
    if owner is not None and not in_code and (owner.attribute is not None or os.environ.get(VARIABLE, "").strip()):
        owner.keep_apart()
    return accepted


def _compile_at_once(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, traced: user_code.UserCode, reason: str
) -> Callable[..., Any]:
    """As any other backend does: one generic compile, in Dynamo's trace and under its guards."""
    started, ahead = time.perf_counter(), _ahead_of_time()
    try:
        if (late := sealing.refused(f"{traced} is compiled")) is not None:
            raise CannotLower(late)
        if stock_hooks() is not None:  # torch puts them into the graphs itself: once is enough
            options = options.without_packs()
            if options.compiler == "inductor" and effects.saves_indices(gm):
                raise CannotLower("saved_tensors_hooks would be given indices of max pooling as numbers, by Inductor")
        caching = contextlib.nullcontext() if ahead is None else _compat.ordinary_caching()
        with account.collecting() as saved, caching:
            run = at_once.compile_at_once(gm, list(example_inputs), options, f"{traced}")
    except CannotLower as error:
        run, saved = gm.forward, []
        reason = f"{reason}; it runs eagerly" + ("" if str(error) == reason else f": {error}")
    made = region.compiled_at_once(run, traced, options, time.perf_counter() - started, reason, tuple(saved))
    return made if ahead is None else ahead.SerializableRegion(reason, made)


def _ahead_of_time() -> ModuleType | None:
    """What makes a region one that torch can save, where torch's `aot_compile` asks for that."""
    if not _compat.ahead_of_time() or _compat.without("SerializableCallable", "GraphPickler") is not None:
        return None
    from multigraph_backend.region import ahead_of_time

    return ahead_of_time


def _take_over_marks(example_inputs: Sequence[Any]) -> None:
    shape_env = _compat.trace_shape_env(example_inputs)
    if shape_env is not None and hasattr(shape_env, "specializations"):
        shape_env.specializations.clear()


multigraph = Multigraph()
