"""`warmup()`: every declared variant and size to pad to, generic, sizes 0 and 1 where declared, called before traffic.

The example is called first: Dynamo's trace says which sizes depend on which.  From then on calls of other sizes are
made from it, one for each declared condition that no earlier one answers, and one for generic, after all is loaded that
earlier processes used (`region/warm_start`); those with the largest inputs first, so that what is recorded for smaller
ones lies in memory that is there already.  They go through the compiled function as the user's calls do, past Dynamo's
guards and graph breaks, each as often as it takes to compile, to record and to replay.

Guarantees: random number generators (torch's, Python's, numpy's), the buffers of the modules that are called, and
gradients are afterwards what they were before.  An error ends the
row that it came in, and is told; nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import logging
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from multigraph_backend import _compat, events, native
from multigraph_backend.capture import declared
from multigraph_backend.capture.declared import Condition
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.declare.facts import Facts
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.region import background, registry, warm_start
from multigraph_backend.region.region import Region
from multigraph_backend.serving.example_calls import Call, ExampleCall

log = logging.getLogger(__name__)

CALLS = 3  # one compiles, one records, one replays; a parameter that was seen to move is copied from the second on
_TRIED = 64  # sizes that are tried for a condition, until one meets it and no earlier one


_Asked = tuple[int, int]  # a region's serial number and that of a condition; behind the last: generic, sizes to pad to


@dataclass(frozen=True)
class Rehearsed:
    """One size that was called: its `sizes` by name, the conditions that ran ("generic" for that graph), seconds of all
    its calls, and bytes by which the pools of recordings grew.  `failed`: the error that ended it."""

    sizes: dict[str, int]
    ran: tuple[str, ...]
    seconds: float
    pool_bytes: int = 0
    failed: str | None = None

    def __str__(self) -> str:
        grown = f", {self.pool_bytes / 2**20:.1f} MiB of recordings" if self.pool_bytes else ""
        return f"{self.said}  ({self.seconds:.2f} s{grown})"

    @property
    def said(self) -> str:
        """What ran at which sizes."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items()) or "the example"
        what = f"failed: {self.failed}" if self.failed else "; ".join(self.ran) or "nothing of multigraph"
        return f"{sizes}: {what}"


@dataclass(frozen=True)
class WarmUp:
    """What `warmup()` did: its `calls` in their order, `seconds` in all, in `missing` each declared condition that is
    not ready, with the reason, and how much compiled code was `loaded` from caches before a call asked for it."""

    calls: tuple[Rehearsed, ...]
    seconds: float
    missing: dict[str, str] = field(default_factory=dict)
    loaded: int = 0

    @property
    def ready(self) -> bool:
        """Whether nothing is missing, and each call ran code of multigraph: for a health check."""
        return not self.missing and all(call.ran and not call.failed for call in self.calls)

    def __str__(self) -> str:
        loaded = f", {self.loaded} loaded from caches" if self.loaded else ""
        first = f"warmed up in {self.seconds:.1f} s: {len(self.calls)} sizes{loaded}"
        lines = [first, *(f"  {call}" for call in self.calls)]
        return "\n".join([*lines, *(f"  missing: {what}: {why}" for what, why in self.missing.items())])


def warmup(
    compiled: Callable[..., Any],
    inputs: Any,
    *,
    backward: bool | None = None,
    progress: bool = False,
) -> WarmUp:
    """Compile, and on a GPU record, all that was declared for `compiled`, from an example call, before traffic comes.

    `compiled`: what torch.compile returned.  `inputs`: the arguments of one call, as a tuple, or as a dict of keyword
    arguments, or one tensor; a list has several such calls (prefill and decode, say), each with sizes of its own.  Grad
    mode, autocast and inference mode are those of the caller: warm up as you will call.  `backward`: whether outputs go
    backward too, with ones; None: where grad mode is on and they require gradients.  `progress`: say how far it is on
    standard error, with tqdm's bar where that is installed.

    Calls are made of the example's elements, repeated or cut off, so that they stay valid.  Buffers, gradients and
    random number generators are put back; what else `compiled` changes (a cache in a list, a file) it changes.
    Variants compile one after another; the kernels of each, in parallel, as the compiler's own settings say.  With
    `"compile": "background"` workers compile them in parallel, and are waited for.  With several ranks, all of them
    call it, with the same sizes.

    Returns what became of each size.  Raises what the example's own call raises, before anything else is called, and
    TypeError where `inputs` is no call, or has none.
    """
    began = time.monotonic()
    function = _signature_of(compiled)
    if isinstance(inputs, list) and not inputs:
        raise TypeError("warmup(inputs=[]) has no call: give a tensor, a tuple or a dict of arguments, or several")
    examples = [ExampleCall(function, *_as_call(entry)) for entry in (inputs if isinstance(inputs, list) else [inputs])]
    rows: list[Rehearsed] = []
    regions: list[Region] = []
    covered: set[tuple[int, int]] = set()
    had = events.stats()["loaded_ahead"]
    with _put_back(compiled, examples), background.waited_for():
        waiting: list[tuple[ExampleCall, dict[str, int], _Asked]] = []
        tried: dict[_Asked, Rehearsed] = {}
        for example in examples:
            before = _calls()
            rows.append(_called(compiled, example, {}, backward))
            reached = [region for region in _living() if _calls_of(region) != before.get(region.serial, ())]
            warm_start.wait_until_warm()  # what earlier processes used is loaded first
            for region in reached:
                region.compile_ahead()
            regions += [region for region in reached if region not in regions]
            waiting += [(example, sizes, asked) for sizes, asked in _sizes_to_call(reached, example, covered)]
        waiting.sort(key=lambda entry: -_bytes_of(*entry[:2]))
        background.wait()
        native.wait()  # else what is recorded now is built again later
        with _shown(len(waiting), progress) as say:
            for example, sizes, asked in waiting:
                say(sizes, None)
                try:
                    row = _called(compiled, example, sizes, backward)
                except Exception as error:
                    if from_outside(error):
                        raise
                    row = Rehearsed(sizes, (), 0.0, failed=describe(error))
                    log.info("warm-up with %s failed", sizes, exc_info=True)
                rows.append(row)
                tried[asked] = row
                say(sizes, row)
    loaded = events.stats()["loaded_ahead"] - had
    return WarmUp(tuple(rows), time.monotonic() - began, _missing(regions, covered, tried), loaded)


# ---------------------------------------------------------------- one size


def _called(
    compiled: Callable[..., Any], example: ExampleCall, sizes: dict[str, int], backward: bool | None
) -> Rehearsed:
    began, before, had = time.monotonic(), _calls(), _pool_bytes()
    given: list[Call] = []
    for _ in range(CALLS):
        # the last call's inputs are there still, so these lie elsewhere, as those of requests will: they are copied
        given = [*given[-1:], example.resized(sizes)]
        args, kwargs = given[-1]
        outputs = compiled(*args, **kwargs)
        if backward or (backward is None and torch.is_grad_enabled()):
            _go_backward(outputs)
        del outputs, args, kwargs
        background.wait()  # the next call runs what this one has asked for
    ran = [text for region in _living() for text in _ran(region, before.get(region.serial, ()))]
    return Rehearsed(sizes, tuple(ran), time.monotonic() - began, max(_pool_bytes() - had, 0))


def _go_backward(outputs: Any) -> None:
    ends = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
    if not ends:
        return
    leaves = _leaves(ends)
    had = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    finally:
        for leaf, grad in had:
            leaf.grad = grad


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples, dicts and dataclasses of them."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(outputs):
        for entry in dataclasses.fields(outputs):
            yield from _tensors(getattr(outputs, entry.name))


def _leaves(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose gradients a backward from `ends` accumulates."""
    waiting: list[Any] = [end.grad_fn for end in ends]
    leaves, seen = [end for end in ends if end.grad_fn is None], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [follower for follower, _ in node.next_functions]
    return list({id(leaf): leaf for leaf in leaves}.values())


# ---------------------------------------------------------------- which sizes


def _sizes_to_call(
    regions: Sequence[Region], example: ExampleCall, covered: set[_Asked]
) -> Iterator[tuple[dict[str, int], _Asked]]:
    """Sizes for each condition of `regions` that no earlier one answers, and for generic, each once, and not those of
    the example; with each, what they are for.

    Conditions of which earlier ones answer all sizes that were tried are added to `covered`: the region's serial number
    and theirs.
    """
    seen: set[tuple[tuple[str, int], ...]] = set()
    for region in regions:
        graph = region.captured
        if graph is None or region.user_code.partial:  # after a graph break its names are of something else
            continue
        named = {name: size for name, size in graph.sizes.items() if example.size(name) is not None}
        at = {size.expr: example.size(name) or 0 for name, size in named.items() if isinstance(size.expr, sympy.Symbol)}
        conditions = [variant.condition for variant in region.variants if variant.condition is not None]
        wanted: list[tuple[int, dict[sympy.Symbol, int]]] = []
        for number in range(len(conditions) + 1):
            values = _values_for(graph, conditions, number, at)
            if values is None:
                covered.add((region.serial, number))
            else:
                wanted.append((number, values))
        for number, values in (*wanted, *((len(conditions), values) for values in _padded(region, at))):
            sizes = {
                name: int(size.expr.xreplace(values))
                for name, size in named.items()
                if size.expr.free_symbols and size.expr.free_symbols <= values.keys()
            }
            key = tuple(sorted(sizes.items()))
            if key not in seen and any(example.size(name) != size for name, size in sizes.items()):
                seen.add(key)
                yield sizes, (region.serial, number)


def _padded(region: Region, at: Mapping[sympy.Symbol, int]) -> Iterator[dict[sympy.Symbol, int]]:
    """Every declared size that calls are padded up to, of several every combination; open lists up to the example's."""
    active = {} if region.padding is None else region.padding.active
    symbols = {name: region.padding.symbols[name] for name in active} if region.padding is not None else {}
    if not active or not set(symbols.values()) <= at.keys():
        return
    for sizes in itertools.product(*(buckets.up_to(at[symbols[name]]) for name, buckets in active.items())):
        yield {**at, **dict(zip(symbols.values(), sizes, strict=True))}


def _values_for(
    graph: CapturedGraph, conditions: Sequence[Condition], number: int, at: Mapping[sympy.Symbol, int]
) -> dict[sympy.Symbol, int] | None:
    """Values of the symbols that the condition of this number answers (behind the last: generic), near those of the
    example; None where none were found, or it is never asked."""
    generic = number == len(conditions)
    condition = None if generic else conditions[number]
    if condition is not None and condition.never is not None and not condition.elsewhere:
        return None
    wanted = {} if condition is None else condition.facts
    if not wanted.keys() <= at.keys():
        return None
    earlier = conditions if generic else conditions[:number]
    for step in range(_TRIED):
        values = dict(at)
        if generic:
            values = {symbol: value + step for symbol, value in at.items()}
        for symbol, facts in wanted.items():
            assert condition is not None
            bounded = facts if condition.elsewhere else facts.intersect(declared.bounds(graph, symbol))
            found = next(itertools.islice(_holding(bounded, at[symbol]), step, None), None)
            if found is None:
                return None
            values[symbol] = found
        if condition is not None and not _meets(condition, values):
            if condition.check is None:
                continue
            values |= {symbol: value + step for symbol, value in at.items() if symbol not in wanted}
            if not _meets(condition, values):
                continue
        if not any(_meets(other, values) for other in earlier if other.never is None):
            return values
    return None


def _holding(facts: Facts, near: int) -> Iterator[int]:
    """Integers that satisfy `facts`: those that were named, else from the largest that is bounded or near on."""
    if facts.values is not None:
        yield from facts.values
        return
    low = max(facts.min if facts.min is not None else 2, 0)
    high = facts.max if facts.max is not None else max(near, low) + _TRIED * facts.multiple_of
    first = high if facts.max is not None else max(near, low)
    around = itertools.chain(range(first, high + 1), range(first - 1, low - 1, -1))
    yield from (value for value in around if facts.holds(value))


def _meets(condition: Condition, values: Mapping[sympy.Symbol, int]) -> bool:
    def number(expr: Any) -> int | None:
        return int(expr.xreplace(values)) if expr.free_symbols <= values.keys() else None

    for size, facts in condition.terms:
        value = number(size.expr)
        if value is None or not facts.holds(value):
            return False
    if condition.check is None or condition.check_size is None:
        return True
    value = number(condition.check_size.expr)
    try:
        return value is not None and bool(condition.check(value))
    except Exception as error:
        if from_outside(error):
            raise
        return False


def _bytes_of(example: ExampleCall, sizes: Mapping[str, int]) -> int:
    """Bytes of all tensors of a call, without making it."""
    total = 0
    for tensor in example.tensors():
        shape = list(tensor.shape)
        for name, size in sizes.items():
            found = example.dimension(name, tensor)
            if found is not None:
                shape[found] = size
        count = tensor.element_size()
        for size in shape:
            count *= size
        total += count
    return total


# ---------------------------------------------------------------- what is there


def _living() -> list[Region]:
    alive = [region for region in registry.living() if isinstance(region, Region)]
    return sorted(alive, key=lambda region: region.serial)


def _calls() -> dict[int, tuple[int, ...]]:
    return {region.serial: _calls_of(region) for region in _living()}


def _calls_of(region: Region) -> tuple[int, ...]:
    return tuple(variant.calls for variant in (*region.variants, region.generic))


def _ran(region: Region, before: Sequence[int]) -> Iterator[str]:
    variants = (*region.variants, region.generic)
    for variant, had in itertools.zip_longest(variants, before, fillvalue=0):
        if not isinstance(variant, int) and variant.calls > had:
            yield variant.text


_NONE_FOUND = "no size was found that meets it and no earlier condition"
_APART = "it is traced apart, after a graph break, where the call's sizes may be others: call the model with such sizes"


def _missing(regions: Sequence[Region], covered: set[_Asked], tried: Mapping[_Asked, Rehearsed]) -> dict[str, str]:
    missing: dict[str, str] = {}
    everywhere = _living()
    for region in regions:
        linked = [other for other in everywhere if other.user_code.same_function(region.user_code)]
        for number, variant in enumerate(region.variants):
            condition = variant.condition
            if variant.state == "ready" or condition is None:
                continue
            # torch traces such sizes apart, and an earlier condition answers all of them there
            if condition.elsewhere and (region.serial, number) in covered:
                continue
            if (
                (variant.reason or "").startswith("unreachable")
                or condition.decided
                or any(
                    other is not region and number < len(other.variants) and _answers(other, number) for other in linked
                )
            ):
                continue
            called = tried.get((region.serial, number))
            not_called = _APART if region.user_code.partial else _NONE_FOUND
            why = not_called if called is None else called.said
            missing[f"{region.user_code}: {variant.text}"] = variant.reason or why
    return missing


def _answers(region: Region, number: int) -> bool:
    """Whether a graph that Dynamo traced apart (of size 1, say) has code for the condition of this number."""
    variant = region.variants[number]
    condition = variant.condition
    if variant.state == "ready":
        return True
    return condition is not None and condition.decided and region.generic.state == "ready"


def _pool_bytes() -> int:
    runtime = sys.modules.get("multigraph_backend.cudagraphs.runtime")
    return 0 if runtime is None else sum(tree.device.pool_bytes() for tree in runtime.trees())


# ---------------------------------------------------------------- around it all


def _as_call(entry: Any) -> Call:
    if isinstance(entry, torch.Tensor):
        return (entry,), {}
    if isinstance(entry, Mapping):
        return (), dict(entry)
    if isinstance(entry, tuple):
        return entry, {}
    raise TypeError(
        f"warmup(inputs=...) takes a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such "
        f"calls, not {type(entry).__name__}"
    )


def _signature_of(compiled: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(compiled, torch.nn.Module):
        module = getattr(compiled, "_orig_mod", compiled)
        forward: Callable[..., Any] = module.forward
        return forward
    unwrapped: Callable[..., Any] = inspect.unwrap(compiled)
    signature = _compat.signature_ahead_of_time(unwrapped)
    return unwrapped if signature is None else _Signed(signature)


class _Signed:
    """Stands for a function that was compiled ahead of time, which takes whatever it is given, by its signature."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("it only tells the names of arguments")


@contextlib.contextmanager
def _put_back(compiled: Callable[..., Any], examples: Sequence[ExampleCall]) -> Iterator[None]:
    """What calls inside do to buffers and to random number generators is undone."""
    given = [value for example in examples for value in (*example.args, *example.kwargs.values()) if _is_module(value)]
    modules = list(dict.fromkeys(inner for module in (*_modules_of(compiled), *given) for inner in module.modules()))
    places: list[tuple[torch.nn.Module, str, Any]] = [
        (module, name, buffer) for module in modules for name, buffer in module._buffers.items()
    ]
    kept = {id(buffer): (buffer, buffer.detach().clone()) for _, _, buffer in places if buffer is not None}
    parameters = [entry for module in modules for entry in module.parameters(recurse=False)]
    used = [tensor for example in examples for tensor in example.tensors()]
    tensors = [*(buffer for buffer, _ in kept.values()), *parameters, *used]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        with torch.no_grad():
            for buffer, was in kept.values():
                if not _same(buffer, was):
                    (buffer if buffer.shape == was.shape else buffer.resize_(was.shape)).copy_(was)
        for module, name, buffer in places:  # a forward may also put another tensor there
            if name in module._buffers and module._buffers[name] is not buffer:
                module._buffers[name] = buffer


def _modules_of(compiled: Any) -> Iterator[torch.nn.Module]:
    """The modules that are called: itself, what it is a method of, what its function closes over or names globally."""
    function = compiled if isinstance(compiled, torch.nn.Module) else inspect.unwrap(compiled)
    while isinstance(function, functools.partial):
        yield from (entry for entry in (*function.args, *function.keywords.values()) if _is_module(entry))
        function = function.func
    code = getattr(function, "__code__", None)
    known = getattr(function, "__globals__", {})
    found = [
        function,
        getattr(function, "__self__", None),
        *map(_content, getattr(function, "__closure__", None) or ()),
        *(known.get(name) for name in (code.co_names if code is not None else ())),
    ]
    yield from (entry for entry in found if _is_module(entry))


def _is_module(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put there yet
        return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same elements, zeros of the same sign, and no NaN."""
    equal = torch.equal(one, other)
    return equal and (not one.is_floating_point() or torch.equal(one.signbit(), other.signbit()))


@contextlib.contextmanager
def _shown(total: int, wanted: bool) -> Iterator[Callable[[Mapping[str, int], Rehearsed | None], None]]:
    """Yields what tells of each size, before it is called (None) and after."""
    if not wanted:
        yield lambda sizes, row: None
        return
    if importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm

        with tqdm(total=total, desc="warm-up", unit="size", file=sys.stderr) as bar:

            def show(sizes: Mapping[str, int], row: Rehearsed | None) -> None:
                if row is None:
                    bar.set_postfix_str(", ".join(f"{name}={size}" for name, size in sizes.items()))
                else:
                    bar.set_postfix_str(str(row))
                    bar.update()

            yield show
        return
    done = itertools.count(1)

    def line(sizes: Mapping[str, int], row: Rehearsed | None) -> None:
        if row is not None:
            print(f"warm-up {next(done)}/{total}: {row}", file=sys.stderr, flush=True)

    yield line
