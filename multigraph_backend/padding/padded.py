"""A region's calls, padded: what stands before the dispatcher where `options["pad"]` names a size of the graph.

The first call judges the graph (`proof`).  From then on a call looks its size up in a table of sizes seen before, and
runs as it is or padded (`calls`); a size that comes for the first time passes `_first`, which asks whether it can be
padded, tries out what no rule decides (`probing`), and falls back to the call as it is where the padded one fails.

In: the names and sizes of the options, a captured graph, its dispatcher.  Out: a function that takes the dispatcher's
place, and an `Account` for reports.

Guarantees: a call that is not padded runs by the dispatcher, with the arguments that it had.  Nothing here keeps a
region alive: the function does, as the dispatcher did.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

from multigraph_backend import _compat, events, sealing
from multigraph_backend.allocator.sleeping import Asleep
from multigraph_backend.capture import declared
from multigraph_backend.capture.aliasing import written_alone
from multigraph_backend.capture.declared import Condition
from multigraph_backend.capture.effects import impure
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.declare.buckets import Buckets
from multigraph_backend.lower.compile_thread import CompileTimeout, describe, enter
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.options import Options
from multigraph_backend.padding import calls, probing, proof
from multigraph_backend.padding.calls import PaddedCall
from multigraph_backend.padding.proof import CannotPad, Doubt, Proof
from multigraph_backend.process.interruptions import from_outside

log = logging.getLogger(__name__)

State = Literal["declared", "proven", "tried", "refused"]

MOST_REMEMBERED = 1 << 16  # sizes seen before that are kept; then the table starts anew
_ASKS_TENSORS = re.compile(r"\.size\(|\.stride\(|offset|contiguous|_base|\(a\)| is a\[|overlapping")
_NO_COMPILE_STANCES = ("eager_on_recompile", "fail_on_recompile", "force_eager")


@dataclass
class Account:
    """What becomes of the padding of one graph.

    `sizes`: declared ones, by name.  `state`: "declared" until a call was judged; "proven", by rules; "tried", what no
    rule decides was tried out; "refused", for `reason`.  `refused`: sizes that are not padded, and why, by name.
    `tried`: operators that have no rule.  `calls`: how many were padded.
    """

    sizes: dict[str, Buckets]
    symbols: dict[str, sympy.Symbol]
    state: State = "declared"
    reason: str | None = None
    refused: dict[str, str] = field(default_factory=dict)
    tried: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._calls = events.call_counter("padded_calls", self)

    @property
    def tick(self) -> Callable[[], int]:
        return self._calls.tick

    @property
    def calls(self) -> int:
        return self._calls.value

    @property
    def active(self) -> dict[str, Buckets]:
        """Sizes that are padded, as far as is known."""
        return {} if self.state == "refused" else {n: b for n, b in self.sizes.items() if n not in self.refused}


def resolve(
    graph: CapturedGraph, options: Options, conditions: Sequence[Condition]
) -> tuple[Account | None, list[str], list[str]]:
    """What the options say of this graph, and notes for the report; behind them those of what was to be expected."""
    wanted = _of_conditions(conditions) if options.pad == "declared" else dict(options.pad)
    sizes: dict[str, Buckets] = {}
    symbols: dict[str, sympy.Symbol] = {}
    notes: list[str] = []
    expected: list[str] = []
    for name, buckets in wanted.items():
        found = graph.find(name)
        if found is None:
            if not graph.user_code.partial:
                notes.append(f"pad: {declared.unknown_name(graph, name)}")
            continue
        size = found if isinstance(found, int) else found.expr
        if isinstance(size, int) or size.is_Integer:
            if int(size) not in buckets.sizes:
                (expected if int(size) < 2 else notes).append(
                    f"pad: {name} is {int(size)} in this graph, and such calls are not padded: torch takes sizes 0 and "
                    "1 for constants, and those of the first call without dynamic=True or a mark"
                )
        elif not isinstance(size, sympy.Symbol):
            notes.append(f"pad: {name} is {size} in this graph: name the size that it is made of")
        elif not _is_size(graph, size):
            notes.append(f"pad: no tensor of this graph has a dimension of size {name}")
        elif size in symbols.values():
            first = next(other for other, symbol in symbols.items() if symbol == size)
            if sizes[first] != buckets:
                notes.append(
                    f"pad: {name} is the same size as {first} in this graph, and is padded as that is declared"
                )
        else:
            sizes[name], symbols[name] = buckets, size
    return Account(sizes, symbols) if sizes else None, notes, expected


def _is_size(graph: CapturedGraph, symbol: sympy.Symbol) -> bool:
    layouts = [entry.layout for entry in graph.inputs if entry.layout is not None and not entry.number]
    return any(size.has(symbol) for layout in layouts for size in layout.size)


def _of_conditions(conditions: Sequence[Condition]) -> dict[str, Buckets]:
    """The sizes for which variants are declared, by name."""
    found: dict[str, set[int]] = {}
    for condition in conditions:
        for name, facts in (condition.predicate.facts() if condition.predicate is not None else {}).items():
            if facts.values is not None:
                found.setdefault(name, set()).update(value for value in facts.values if value > 0)
    return {name: Buckets(tuple(sorted(values))) for name, values in found.items() if values}


def install(
    graph: CapturedGraph, options: Options, state: CompileState, account: Account, dispatch: Callable[..., Any]
) -> Callable[..., Any]:
    """The function that takes the dispatcher's place."""
    padding = Padding(graph, options, state, account, dispatch)
    current = padding.current

    def call(*a: Any) -> Any:
        return current[0](a)

    call.padding = padding  # type: ignore[attr-defined]
    return call


class Padding:
    """See the module's text.  `current[0]` runs a call, given its arguments as a tuple."""

    def __init__(
        self,
        graph: CapturedGraph,
        options: Options,
        state: CompileState,
        account: Account,
        dispatch: Callable[..., Any],
    ) -> None:
        self.graph, self.options, self.state, self.account, self.dispatch = graph, options, state, account, dispatch
        self.current: list[Callable[[tuple[Any, ...]], Any]] = [_first_of(self)]
        self._lock = threading.RLock()
        self._judging = False
        self._axes: list[tuple[sympy.Symbol, Buckets]] = []
        self._padded: PaddedCall | None = None
        self._holds: Callable[[tuple[Any, ...], tuple[int, ...]], bool] | None = None
        self._doubts: tuple[Doubt, ...] = ()
        self._mild = False
        self._known: dict[Any, tuple[int, ...] | None] = {}

    # ---------------------------------------------------------------- judging

    def first(self, args: tuple[Any, ...]) -> Any:
        """A call whose size is seen for the first time, or the first one of all."""
        if self.account.state == "declared" and not self._judged(args):
            return self.dispatch(*args)
        padded = self._padded
        if padded is None:  # refused
            return self.dispatch(*args)
        key = tuple(self._size(symbol, args) for symbol, _ in self._axes)
        if not all(type(size) is int for size in key):  # the call is being traced itself
            return self.dispatch(*args)
        to = tuple(_up(buckets, size) for (_, buckets), size in zip(self._axes, key, strict=True))
        if to == key or not padded.fits(args, *to):
            if to == key or padded.steady:
                self._remember(key, None)
            return self.dispatch(*args)
        if self._holds is not None and not self._holds(args, to):
            return self.dispatch(*args)
        return self._first_padded(padded, key, to, args)

    def _first_padded(self, padded: PaddedCall, key: Any, to: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        graph = self.graph
        if self._doubts:
            different = probing.difference(graph.module, padded, args, to, self._mild)
            if different is not None:
                names = ", ".join(dict.fromkeys(doubt.operator for doubt in self._doubts))
                self._refuse(f"rows depend on each other ({names}, tried with {_text(key, to)}): {different}")
                return self.dispatch(*args)
        if not graph.repeatable:
            outputs = padded.run(args, *to)
        else:
            try:
                outputs = padded.run(args, *to)
            except (torch.OutOfMemoryError, Asleep):
                raise
            except Exception as error:
                if from_outside(error):
                    raise
                outputs = self.dispatch(*args)  # raises the program's own error
                self._remember(key, None)
                what = f"{graph.user_code}: not padded from {_text(key, to)}"
                events.warn_once(what, "%s, for that raised %s", what, describe(error))
                return outputs
        self._remember(key, to)
        return outputs

    def _judged(self, args: tuple[Any, ...]) -> bool:
        """Whether the graph is judged, now if it must and may be."""
        stance = "default" if _compat.missing("stances") else _compat.stance()
        if stance in _NO_COMPILE_STANCES:
            return False
        if not enter(self._lock, self.options.compile_timeout):
            return False
        try:
            if self.account.state != "declared":
                return True
            if self._judging:  # a handler of a signal called what it interrupted
                return False
            if sealing.refused(f"{self.graph.user_code}: padding is judged") is not None:
                return False
            self._judging = True
            try:
                self._judge(args)
            finally:
                self._judging = False
        finally:
            self._lock.release()
        return True

    def _judge(self, args: tuple[Any, ...]) -> None:
        graph, account = self.graph, self.account
        try:
            self._refuse_by_sight(args)
            found = proof.prove(graph, args, list(account.symbols.values()), self.options.compile_timeout, self.state)
            self._decide(found)
        except (torch.OutOfMemoryError, Asleep):
            raise
        except CannotPad as reason:
            self._refuse(str(reason))
        except Exception as error:
            if from_outside(error):
                raise
            if isinstance(error, CompileTimeout):
                log.debug("%s: padding is not judged in time", graph.user_code)
            log.debug("%s: padding cannot be judged", graph.user_code, exc_info=True)
            self._refuse(f"the graph cannot be judged: {describe(error)}")

    def _refuse_by_sight(self, args: Sequence[Any]) -> None:
        """Raises `CannotPad` for what no operator has a part in."""
        graph = self.graph
        if lacking := _compat.missing("padding", inductor=False):
            raise CannotPad(f"this torch differs: {lacking[0]}")
        if graph.communicates:
            raise CannotPad("the graph issues collectives, and other ranks do not pad as this one does")
        tensors = [args[index] for index in graph.tensor_inputs]
        if self.state.grad and any(tensor.requires_grad for tensor in (*tensors, *graph.held)):
            raise CannotPad("gradients are recorded: call it under torch.no_grad() or torch.inference_mode()")
        symbols = set(self.account.symbols.values())
        for index in graph.tensor_inputs:
            entry, tensor = graph.inputs[index], args[index]
            assert entry.layout is not None
            if symbols.isdisjoint({symbol for size in entry.layout.size for symbol in size.free_symbols}):
                continue
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
                raise CannotPad(f"{entry.name} is a {type(tensor).__name__} with the layout {tensor.layout}")
        for symbol in symbols:
            if graph.symbols[symbol].location is None:
                raise CannotPad(f"no argument has the size {symbol} by itself")
        if not symbols.isdisjoint(graph.unread):
            raise CannotPad("torch assumes something of it together with values that no argument has")

    def _decide(self, found: Proof) -> None:
        """Which sizes are padded, by what was found of each."""
        graph, account = self.graph, self.account
        doubts: list[Doubt] = []
        for name, symbol in account.symbols.items():
            against = found.doubts[symbol]
            reason = self._against(against)
            if reason is not None:
                account.refused[name] = reason
                continue
            doubts += against
            self._axes.append((symbol, account.sizes[name]))
        if not self._axes:
            self._refuse(next(iter(account.refused.values())))
            return
        symbols = [symbol for symbol, _ in self._axes]
        padded = calls.make(graph, found, symbols, self.dispatch, account.tick)
        self._doubts, self._mild = tuple(dict.fromkeys(doubts)), found.rounds
        account.tried = tuple(dict.fromkeys(doubt.operator for doubt in self._doubts))
        check = found.guards.check
        steady = check is None or self._is_steady(found.guards.text, symbols)
        alone = written_alone(graph) if graph.mutates_inputs else None
        longer = padded.inputs if _ASKS_TENSORS.search(found.guards.text) else padded.numbers

        def holds(args: tuple[Any, ...], to: tuple[int, ...]) -> bool:
            if alone is not None and not alone(args):
                return False
            if check is None:
                return True
            return bool(check(args)) and bool(check(longer(args, *to)))

        self._holds = holds if check is not None or alone is not None else None
        self._padded = padded
        self.current[0] = self._fast(padded, check_each=not steady or not padded.steady or alone is not None)
        account.state = "tried" if self._doubts else "proven"
        for name, why in account.refused.items():
            self._say(f"{name} is not padded: {why}")
        log.info("%s: calls are padded (%s)\n%s", graph.user_code, account.state, padded.source)

    def _against(self, doubts: Sequence[Doubt]) -> str | None:
        """Why a size is not padded; None where it is, or what no rule decides can be tried out."""
        if not doubts:
            return None
        if doubts[0].known:
            return str(doubts[0])
        graph = self.graph
        if graph.mutates_inputs:
            return f"{doubts[0]}; and it cannot be tried out, for the graph {graph.once_because}"
        harmful = impure(graph.module, self.options.safe)
        if harmful is not None:
            name = next((str(doubt.operator) for doubt in doubts if "::" in doubt.operator), harmful)
            return (
                f"{doubts[0]}; and it is not tried out, for the graph calls {harmful}, which may have side effects: "
                f'if it has none, name it in the option "safe" ({name!r})'
            )
        return None

    def _is_steady(self, guards: str, symbols: Sequence[sympy.Symbol]) -> bool:
        """Whether guards ask for nothing but sizes that are padded."""
        texts = {
            info.location.text() for symbol in symbols if (info := self.graph.symbols[symbol]).location is not None
        }
        rest = guards
        for text in sorted(texts, key=len, reverse=True):
            rest = rest.replace(text, "")
        return re.search(r"\ba\[|\(a\)", rest) is None

    def _refuse(self, reason: str) -> None:
        self.account.state, self.account.reason = "refused", reason
        self._padded = None
        dispatch = self.dispatch
        self.current[0] = lambda args: dispatch(*args)
        self._say(f"calls are not padded: {reason}")
        events.count("refused_padding")

    def _say(self, what: str) -> None:
        events.warn_once(f"{self.graph.user_code}: {what}", "%s: %s", self.graph.user_code, what)

    # ---------------------------------------------------------------- calls

    def _size(self, symbol: sympy.Symbol, args: Sequence[Any]) -> Any:
        location = self.graph.symbols[symbol].location
        assert location is not None
        return location.read(args)

    def _remember(self, key: tuple[int, ...], to: tuple[int, ...] | None) -> None:
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[key[0] if len(key) == 1 else key] = to

    def _fast(self, padded: PaddedCall, check_each: bool) -> Callable[[tuple[Any, ...]], Any]:
        """Runs calls of sizes that were seen before."""
        known, dispatch, run, first, holds, fits = (
            self._known, self.dispatch, padded.run, _first_of(self), self._holds, padded.fits,
        )  # fmt: skip
        read = _reader([self.graph.symbols[symbol].location for symbol, _ in self._axes])
        unseen: tuple[int, ...] = ()

        def call(args: tuple[Any, ...]) -> Any:
            to = known.get(read(args), unseen)
            if to is None:
                return dispatch(*args)
            if not to:
                return first(args)
            return run(args, *to)

        def call_checked(args: tuple[Any, ...]) -> Any:
            to = known.get(read(args), unseen)
            if to is None:
                return dispatch(*args)
            if not to:
                return first(args)
            if not fits(args, *to) or (holds is not None and not holds(args, to)):
                return dispatch(*args)
            return run(args, *to)

        return call_checked if check_each else call


def _up(buckets: Buckets, size: int) -> int:
    """0 is never padded, nor what is above the largest declared size."""
    return (buckets.fitting(size) or size) if size > 0 else size


def _first_of(padding: Padding) -> Callable[[tuple[Any, ...]], Any]:
    """`padding.first`, without keeping it: whoever calls this does."""
    found = weakref.WeakMethod(padding.first)

    def first(args: tuple[Any, ...]) -> Any:
        method = found()
        assert method is not None
        return method(args)

    return first


def _reader(locations: Sequence[Any]) -> Callable[[tuple[Any, ...]], Any]:
    """The sizes of a call, as the table has them."""
    texts = [location.text() for location in locations]
    text = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
    read: Callable[[tuple[Any, ...]], Any] = eval(f"lambda a: {text}", {})
    return read


def _text(key: Sequence[int], to: Sequence[int]) -> str:
    return ", ".join(f"{size} to {longer}" for size, longer in zip(key, to, strict=True))
