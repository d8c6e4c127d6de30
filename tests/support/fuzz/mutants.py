"""Ways to break multigraph, as context managers: the fuzzer is worth its time only if it notices each.

Each puts back one mistake that the design rules out. The name of a mutant says what is wrong while it is active.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from multigraph_backend.capture import declared, effects, from_dynamo, structure
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.lower import donation, fresh_inputs, guards, lowering


@contextlib.contextmanager
def dropped_guard() -> Iterator[None]:
    """What a compile came to rely on is not checked."""
    guards_of = guards.guards_of

    def nothing_added(*args: Any, **kwargs: Any) -> guards.Guards:
        guards_of(*args, **kwargs)
        return guards.NONE

    with mock.patch.object(guards, "guards_of", nothing_added):
        yield


@contextlib.contextmanager
def shared_shape_env() -> Iterator[None]:
    """All compiles of a graph use one ShapeEnv, and equal sizes merge: what one compile learnt, the next believes."""
    envs: dict[int, Any] = {}
    symbols: dict[tuple[int, int], Any] = {}
    build, shape_env, bounded = fresh_inputs.build, fresh_inputs._compat.ShapeEnv, fresh_inputs._bounded_symbol
    current: list[int] = []

    def build_in_shared(graph: Any, *args: Any, **kwargs: Any) -> Any:
        current.append(id(graph))
        try:
            return build(graph, *args, **kwargs)
        finally:
            current.pop()

    def shared(**settings: Any) -> Any:
        if current[-1] not in envs:
            envs[current[-1]] = shape_env(**settings)
        return envs[current[-1]]

    def merged(env: Any, value: int, *args: Any, **kwargs: Any) -> Any:
        if (id(env), value) not in symbols:
            symbols[id(env), value] = bounded(env, value, *args, **kwargs)
        return symbols[id(env), value]

    with (
        mock.patch.object(fresh_inputs, "build", build_in_shared),
        mock.patch.object(fresh_inputs._compat, "ShapeEnv", shared),
        mock.patch.object(fresh_inputs, "_bounded_symbol", merged),
    ):
        yield


@contextlib.contextmanager
def constant_zero_and_one() -> Iterator[None]:
    """A Python float that is 0.0 or 1.0 when its graph is compiled is a constant of it, and nothing checks that."""
    shape_env = fresh_inputs._compat.ShapeEnv

    class Specializing(shape_env):  # type: ignore[misc, valid-type]
        def create_symbol(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, float):
                kwargs["do_not_specialize_zero_one"] = False
            return super().create_symbol(value, *args, **kwargs)

    def specializing(**settings: Any) -> Any:
        return Specializing(**{**settings, "specialize_zero_one": True})

    with (
        mock.patch.object(fresh_inputs._compat, "ShapeEnv", specializing),
        mock.patch.object(fresh_inputs, "_refuse_unchecked_numbers"),
    ):
        yield


@contextlib.contextmanager
def cloned_weights() -> Iterator[None]:
    """A variant's copy of the graph has its own copies of the tensors that the graph holds."""
    with mock.patch.object(structure, "_shared_objects", return_value={}):
        yield


@contextlib.contextmanager
def swapped_order() -> Iterator[None]:
    """The last declared match wins."""
    resolve = declared.resolve

    def backwards(*args: Any, **kwargs: Any) -> tuple[list[declared.Condition], list[str]]:
        found, notes = resolve(*args, **kwargs)
        for condition in found:  # unreachable ones become reachable
            if condition.never is not None and condition.never.startswith("unreachable"):
                condition.never = None
        return found[::-1], notes

    with mock.patch.object(declared, "resolve", backwards):
        yield


@contextlib.contextmanager
def stale_backward() -> Iterator[None]:
    """The backward of compiled code goes on with what came to it first, where the sizes allow it."""
    lower = lowering.lower

    def lower_stale(*args: Any, **kwargs: Any) -> lowering.Lowered:
        lowered = lower(*args, **kwargs)
        return replace(lowered, run=_with_stale_gradients(lowered.run))

    with mock.patch.object(lowering, "lower", lower_stale):
        yield


def _with_stale_gradients(run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    first: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def stale(index: int, gradient: torch.Tensor) -> torch.Tensor:
        return first.setdefault((index, gradient.shape), gradient)

    def run_with_hooks(*args: Any) -> Sequence[Any]:
        outputs = run(*args)
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda gradient, index=index: stale(index, gradient))
        return outputs

    return run_with_hooks


@contextlib.contextmanager
def any_overload_writes() -> Iterator[None]:
    """An operator counts as writing to its operands where any overload of its name does."""

    def by_name(node: torch.fx.Node) -> list[torch.fx.Node]:
        packet = getattr(node.target, "overloadpacket", node.target)
        names = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
        return node.all_input_nodes if any(getattr(packet, name)._schema.is_mutable for name in names) else []

    with mock.patch.object(effects, "_written_by_schema", by_name):
        yield


@contextlib.contextmanager
def weights_share_with_nobody() -> Iterator[None]:
    """Parameters and buffers are left out where it is asked which tensors share memory."""

    def users(graph: CapturedGraph) -> tuple[int, ...]:
        return tuple(i for i, entry in enumerate(graph.inputs) if entry.layout and not (entry.static or entry.number))

    with (
        mock.patch.object(CapturedGraph, "tensor_inputs", property(users)),
        mock.patch.object(CapturedGraph, "held", ()),
    ):
        yield


@contextlib.contextmanager
def infinity_has_no_name() -> Iterator[None]:
    """The text of a condition on an infinite float uses a name that is not there, so no such compile succeeds."""
    is_number = guards._is_number

    def nameless(code: str, number: float) -> str:
        return is_number(code, number).replace("inf", "infinity")

    with mock.patch.object(guards, "_is_number", nameless):
        yield


@contextlib.contextmanager
def zeros_are_one() -> Iterator[None]:
    """Code that was made for 0.0 runs for -0.0."""

    def equal(value: float, number: float) -> bool:
        return math.isnan(value) if math.isnan(number) else value == number

    with mock.patch.object(guards, "_same_float", equal):
        yield


@contextlib.contextmanager
def everything_is_pure() -> Iterator[None]:
    """Code that raises at its first call is run again, whatever it has called."""
    with mock.patch.object(from_dynamo, "impure", return_value=None):
        yield


@contextlib.contextmanager
def refused_again() -> Iterator[None]:
    """What torch donates to a backward keeps it from running a second time."""
    with mock.patch.object(donation, "nothing_donated"):
        yield


@contextlib.contextmanager
def fakes_count_as_written() -> Iterator[None]:
    """What torch itself counts up on fakes that share memory is taken for a change by the graph."""
    with mock.patch.object(effects, "_written_among_set", return_value={}):
        yield


@contextlib.contextmanager
def gradients_as_torch_makes_them() -> Iterator[None]:
    """Fakes of inputs are made in their order, and gradients with the tensors that have them."""
    with mock.patch.object(fresh_inputs, "_gradient", return_value=None):
        yield


# with the profile that draws what each concerns
MUTANTS: dict[Callable[[], contextlib.AbstractContextManager[None]], str] = {
    dropped_guard: "twins",
    shared_shape_env: "two_axes",
    constant_zero_and_one: "python_values",
    cloned_weights: "attributes",
    swapped_order: "default",
    stale_backward: "training",
    any_overload_writes: "overloads",
    weights_share_with_nobody: "windows",
    infinity_has_no_name: "python_values",
    zeros_are_one: "zeros",
    everything_is_pure: "raising",
    refused_again: "training",
    fakes_count_as_written: "overloads",
    gradients_as_torch_makes_them: "gradients",
}
