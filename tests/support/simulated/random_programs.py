"""Random programs over recorded pieces, each run twice in lockstep: on the simulated device, and as plain calls.

`test_every_order.py` tries all small programs of one shape.  What goes wrong in a runtime of recordings is often what
none of them has: views kept while their base is dropped, a storage kept alone, an input that a piece changes, a failed
recording between two threads, an eviction while outputs are alive.  Here a seed draws pieces and what a program does
with them, all of that at once.

In: a seed.  Out: what was exercised, counted; or `Wrong`, with the steps that led there.

The two *sides* hold the same values under the same names.  Every decision is taken from the plain side, so that a
program does not depend on what the runtime does.  After each call every value that is held must be equal on both, and
two values must share memory on one side where they do on the other.  In the end everything is dropped, and nothing may
be left in the pool.

Values are whole numbers below 251 in floating point: exact in every order of adding, and NaN where memory is poisoned.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo  # the first kernel without memory would import it, in the midst of a program

from multigraph_backend import native
from multigraph_backend.cudagraphs.devices.device import DeviceFailed
from multigraph_backend.cudagraphs.devices.simulated.arena import Segments
from multigraph_backend.cudagraphs.devices.simulated.device import CALLS, SimulatedDevice
from multigraph_backend.cudagraphs.devices.simulated.loans import Loan
from multigraph_backend.cudagraphs.devices.simulated.memory import bytes_of
from multigraph_backend.cudagraphs.limits import Limits, in_bytes
from multigraph_backend.cudagraphs.recordings import memory
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_spec import PieceSpec
from multigraph_backend.cudagraphs.recordings.tree import Tree
from multigraph_backend.process import frames
from tests.support.simulated.pieces import Entered, StepMarks, boxed

MODULUS = 251
#: driver calls whose failure a caller gets to see: the recording was made, and its launch fails
RAISING = frozenset({"replay", "copy", "fresh_storage", "wait_for"})
#: seconds after which a call is taken for one that never returns; and the thread that waits within a call takes longer
LONG = 10.0
#: threads of autograd, and of calls that other calls wait for
AUTOGRAD, WITHIN = 9, 20
#: those that happen between a capture's begin and its end
IN_CAPTURES = frozenset({"allocate", "launch", "capture_end"})


class Wrong(AssertionError):
    """The runtime did what the plain program does not."""


class Alarm(BaseException):
    """What a program is interrupted by, as by Ctrl-C."""


# ---------------------------------------------------------------- pieces


@dataclass(frozen=True)
class Input:
    """kind: "user" (anything), "static" (a parameter, or a buffer if it is mutated), "hidden" (what only compiled code
    holds), "key", "float", "generator", "none".  layout: "row", "strided", "expanded", "overlapping"."""

    kind: str
    layout: str = "row"
    mutated: bool = False
    reused: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.layout == 'row' else ' ' + self.layout}{'!' * self.mutated}{'~' * self.reused}"


@dataclass(frozen=True)
class Shape:
    """What a piece is: `steps` over the list of its tensors, and `outputs`, each with what it takes them from."""

    inputs: tuple[Input, ...]
    steps: tuple[tuple[Any, ...], ...]
    outputs: tuple[tuple[Any, ...], ...]
    visible: tuple[bool, ...]
    is_backward: bool
    random: bool

    def positions(self, **wanted: Any) -> list[int]:
        return [
            at
            for at, entry in enumerate(self.inputs)
            if all(getattr(entry, name) == value for name, value in wanted.items())
        ]

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        shown = ", ".join(
            str(out) + ("" if seen else " hidden") for out, seen in zip(self.outputs, self.visible, strict=True)
        )
        return f"{'backward ' * self.is_backward}({inputs}) {list(self.steps)} -> {shown}"


def draw_shape(rng: random.Random, is_backward: bool) -> Shape:
    layouts = ["row"] * 8 + ["strided", "expanded"] + ["overlapping"] * (rng.random() < 0.1)
    inputs: list[Input] = []
    if rng.random() < 0.4:
        inputs.append(Input("key"))
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(
            ["static", "hidden", "hidden", "user"] if is_backward else ["user", "user", "static", "hidden"]
        )
        layout = rng.choice(layouts) if kind == "user" else "row"
        mutated = rng.random() < (0.1 if kind == "user" else 0.3) and layout in ("row", "strided")
        reused = kind == "hidden" and rng.random() < 0.5
        inputs.append(Input(kind, layout, mutated and not (reused or (is_backward and kind == "hidden")), reused))
    if rng.random() < 0.1:
        inputs.append(Input("generator"))
    if rng.random() < 0.1:
        inputs.append(Input("none"))
    rng.shuffle(inputs)
    tensors = [at for at, entry in enumerate(inputs) if entry.kind in ("user", "static", "hidden")]
    steps: list[tuple[Any, ...]] = []
    rows = len(tensors)
    for at, position in enumerate(tensors):
        if (inputs[position].mutated) or (inputs[position].reused and rng.random() < 0.6):
            steps.append(("add_", at, rng.randrange(rows), rng.randrange(1, 9)))
    draws = any(entry.kind == "generator" for entry in inputs)
    stochastic = rng.random() < 0.1
    for _ in range(rng.randint(1, 4)):
        what = rng.choice(["map", "map", "roll"] + ["rand"] * stochastic + ["draw"] * draws)
        steps.append((what, rng.randrange(rows), rng.randrange(rows), rng.randrange(1, 9)))
        rows += 1
    outputs: list[tuple[Any, ...]] = []
    for _ in range(rng.randint(1, 4)):
        what = rng.choice(
            ["is"] * 6 + ["tail", "tail", "folded", "sum", "mask"] + ["constant", "none", "number", "empty", "nothing"]
        )
        # the newest values more often than inputs
        outputs.append((what, max(rng.randrange(rows), rng.randrange(rows))))
    hidden = rng.choice([0.0, 0.5, 0.9])
    visible = tuple(rng.random() >= hidden or what in ("none", "number") for what, _ in outputs)
    return Shape(tuple(inputs), tuple(steps), tuple(outputs), visible, is_backward, stochastic or draws)


def body(shape: Shape, constant: torch.Tensor) -> Callable[..., tuple[Any, ...]]:
    """The function that `shape` describes."""

    def run(*args: Any) -> tuple[Any, ...]:
        key = next((arg for arg in args if isinstance(arg, int)), 2)
        scale = next((arg for arg in args if isinstance(arg, float)), 1.0)
        generator = next((arg for arg in args if isinstance(arg, torch.Generator)), None)
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        del args
        rows = [_row(value) for value in given]
        for what, first, second, number in shape.steps:
            a, b = rows[first], rows[second]
            if what == "add_":
                a.mul_(3).add_(b if b is not a else number).remainder_(MODULUS)
                continue
            if what == "map":
                made = torch.remainder(a * 3 + b * 2 + number, MODULUS)
            elif what == "roll":
                made = torch.remainder(a.roll(1) + b + number, MODULUS)
            else:
                noise = torch.empty(a.shape, dtype=a.dtype).uniform_(0, 100, generator=generator)
                made = torch.remainder(a + noise.floor(), MODULUS)
            rows.append(made)
            del a, b, made
        outputs = tuple(_output(what, at, rows, given, constant, key, scale) for what, at in shape.outputs)
        return outputs

    return run


def _row(value: torch.Tensor) -> torch.Tensor:
    if value.dim() == 1:
        return value
    return torch.remainder(value.sum(0 if value.stride(0) == 0 else 1), MODULUS)


def _output(
    what: str,
    at: int,
    rows: list[torch.Tensor],
    given: list[torch.Tensor],
    constant: torch.Tensor,
    key: int,
    scale: float,
) -> Any:
    row = given[at] if at < len(given) else rows[at]
    if what == "tail":
        return row[1:]
    if what == "folded":
        return row[: row.shape[0] // 2 * 2].unflatten(0, (-1, 2)).t() if row.dim() == 1 and row.shape[0] else row[:0]
    if what == "sum":
        return rows[at].sum()
    if what == "mask":
        return rows[at][1:] > 100
    if what == "signed":
        return torch.copysign(rows[at] + 1, torch.full_like(rows[at], scale))
    if what == "empty":
        return rows[at].new_empty((0, 3))
    other: dict[str, Any] = {"constant": constant, "none": None, "number": key + 1, "nothing": rows[at][:0], "is": row}
    return other[what]


# ---------------------------------------------------------------- the two sides


class Threads:
    """Real threads that take turns: one runs at a time, and which is said by the program."""

    def __init__(self) -> None:
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}
        self._done: dict[int, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []

    def run(self, number: int, work: Callable[[], Any]) -> Any:
        """Do `work` in thread `number`; 0 is the calling one."""
        if number == 0:
            return work()
        if number not in self._queues:
            self._queues[number], self._done[number] = queue.SimpleQueue(), queue.SimpleQueue()
            queues = self._queues[number], self._done[number]
            thread = threading.Thread(target=self._serve, args=queues, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._queues[number].put(work)
        del work
        try:
            result, error = self._done[number].get(timeout=LONG)
        except queue.Empty:
            raise Wrong("a call never returns") from None
        if error is not None:
            raise error
        return result

    def _serve(self, todo: queue.SimpleQueue[Any], done: queue.SimpleQueue[Any]) -> None:
        while (work := todo.get()) is not None:
            told: list[Any] = []  # emptied as it is handed over: this thread may be stopped right behind that
            try:
                told.append((work(), None))
            except BaseException as caught:
                told.append((None, caught))
            del work
            done.put(told.pop())

    def close(self) -> None:
        for entry in self._queues.values():
            entry.put(None)
        for thread in self._threads:
            thread.join()


class Side:
    """Values by name, parameters, and what the user keeps; the recorded side calls pieces, the plain one functions."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.lasting: dict[Any, torch.Tensor] = {}
        self.generator = torch.Generator()

    def take(self, recipes: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self._take(*recipe) for recipe in recipes]

    def _take(self, what: str, *details: Any) -> Any:
        if what == "plain":
            return details[0]
        if what == "generator":
            return self.generator
        if what == "new":
            return place(*details)
        if what == "lasting":
            return self.lasting[details[0]]
        name, size, offset = details
        value = self.values[name]
        if size is None:
            return value
        return value[offset : offset + size]


def place(content: torch.Tensor, layout: str, offset: int = 0) -> torch.Tensor:
    """`content`, a row, in memory of its own and in `layout`."""
    size = content.shape[0]
    if layout == "strided":
        base = torch.zeros(2 * size + offset)
        base[offset::2][:size].copy_(content)
        return base[offset::2][:size]
    base = torch.zeros(size + 3 + offset)
    base[offset : offset + size].copy_(content)
    if layout == "expanded":
        return base[offset : offset + size].expand(3, size)
    if layout == "overlapping":
        return base[offset:].unfold(0, 3, 1)[:size]
    return base[offset : offset + size]


class Weight(torch.nn.Parameter):
    """A class that changes nothing."""


class Loaded(torch.nn.Parameter):
    """A class that is asked whatever Python asks of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Program:
    """One seed."""

    def __init__(self, seed: int, calls: int | None = None, say: Callable[[str], object] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.steps: list[str] = []
        self._say = say
        self.marks = 0
        self.most = rng.choice([1, 2, 5])
        self.limits = Limits(
            depth=rng.choice([2, 4, 64, 64]),
            per_device=rng.choice([1, 2, 4, 1024, 1024]),
            pool_bytes=rng.choice([None, None, 512, 2048]),
            failures=rng.choice([1, 2, 1000]),
            copied_bytes=rng.choice([0, 1 << 20]),
            unreplayed=rng.choice([1, 2, 4, 32]),
            idle=rng.choice([0.0, 1e6]),
            patience=0.0,
        )
        #: recordings that give way to larger ones, drawn apart: the programs of a seed stay what they were
        self.giving = giving = random.Random(f"{seed}, giving way")
        gives_way = giving.random() < 0.3
        many = gives_way and giving.random() < 0.8  # recordings of several sizes, most of them dead at the next call
        if many:
            self.limits = replace(self.limits, per_device=1024, pool_bytes=None, unreplayed=32)
        if random.Random(f"{seed}, small inputs").random() < 0.5:  # all are small here: what stays is read in place
            self.limits = replace(self.limits, small_bytes=0)
        capacity = rng.choice([1 << 11, 1 << 13, 1 << 13])
        segments = Segments(64, 128, 512, 256, 128) if gives_way and capacity > 1 << 11 else None
        #: memory that ends, and code that needs some besides while it runs; drawn apart, too
        self.lack = lack = random.Random(f"{seed}, memory")
        self.narrow = lack.random() < 0.25
        if self.narrow:
            share = lack.choice([0, 0.05, 0.1, 0.1, 256])
            bounded = lack.choice([None, None, 0.125, 512])
            self.limits = replace(self.limits, pool_bytes=bounded, keep_free=share)
        device_bytes = lack.choice([1 << 12, 1 << 13]) if self.narrow else 1 << 62
        #: memory of the pool that others borrow; drawn apart, too
        self.credit = random.Random(f"{seed}, loans")
        self.device = SimulatedDevice(capacity, segments=segments, device_bytes=device_bytes)
        self.device.failures_spoil_the_pool = rng.random() < 0.3
        self.paying = rng.random() < 0.2  # and then no recording that copies pays
        self.device.copies_us = 1e9
        self.tree = Tree(self.device, self.limits, StepMarks(lambda: self.marks), poisons=rng.random() < 0.3)
        if gives_way:
            self.tree.sharing.least = 0  # bytes: of any pool
        #: at which step calls become native, where they can; drawn apart, too
        self.native_at = random.Random(f"{seed}, native").choice([None, 0, 0, 3, 10])
        #: for what came later; the programs of a seed stay what they were
        self.other = other = random.Random(f"{seed}, what came later")
        self.copies = other.random() < 0.2
        #: whether the account is read, drawn apart: to read it looks at what is alive
        self.reading = random.Random(f"{seed}, accounts")
        #: memory of the plain program that compiled code held before the user did, by handle
        self.parted: dict[int, torch.UntypedStorage] = {}
        self.weights = other.choice([None, None, None, Weight, Loaded])  # of which class parameters are
        self.recorded, self.plain = Side(), Side()
        self.hidden: set[int] = set()
        self.names = iter(range(1 << 30))
        pieces = rng.randint(1, 6)
        backwards = {at for at in range(1, pieces) if rng.random() < 0.35}
        self.shapes = [draw_shape(rng, at in backwards) for at in range(pieces)]
        if self.copies:
            self.shapes = [self._showing(shape) for shape in self.shapes]
        #: Python floats; drawn apart, too
        self.floats = random.Random(f"{seed}, Python floats")
        if self.floats.random() < 0.1:
            self.shapes = [shape if shape.is_backward else self._signed(shape) for shape in self.shapes]
        self.many = many
        if many:
            self.shapes = [
                shape if shape.positions(kind="key") else replace(shape, inputs=(*shape.inputs, Input("key")))
                for shape in self.shapes
            ]
        self.needs: dict[int, int] = {}
        self.pieces: list[Piece] = []
        self.functions: list[Callable[..., tuple[Any, ...]]] = []
        for shape in self.shapes:
            self._make(shape)
        self.calls = calls or rng.randint(6, 40)
        # what this program does at all, and how often
        self.threads = Threads()
        self.callers = rng.choice([1, 1, 1, 2, 3])
        self.streams = rng.choice([1, 1, 2, 3])
        self.trouble = rng.choice([0.0, 0.0, 0.15, 0.4])
        self.regular = rng.random() < 0.5  # the same pieces in the same order, with the same kinds of inputs
        self.keeping = rng.choice([0.2, 0.6, 0.9])
        if many:
            self.callers, self.keeping = giving.choice([1, 1, 1, 2]), giving.choice([0.0, 0.2, 0.6])
        self.marking = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.meddling = rng.choice([0.0, 0.0, 0.2])
        self.rare = rng.choice([0.0, 0.03, 0.1])
        self.beside = other.choice([0.0, 0.0, 0.4])
        self.resizing = other.choice([0.0, 0.0, 0.4])
        #: whether parameters are freed and gathered anew; drawn apart, too
        self.gathers = random.Random(f"{seed}, gathered parameters")
        self.gathering = self.gathers.choice([0.0, 0.0, 0.0, 0.2, 0.7])
        #: names that work on another stream, not waited for, reads or writes, with whether it writes
        self.busy: dict[int, bool] = {}
        self.thread = self.at = 0
        self._interruption: list[Any] = []
        self.waiting = rng.choice([0.0, 0.0, 0.0, 0.3])
        if self.narrow and lack.random() < 0.6:  # limits are checked where nothing else goes wrong
            self.callers, self.trouble, self.meddling, self.waiting = 1, 0.0, 0.0, 0.0
        self.lending = self.credit.random() < 0.3
        self.loans: list[Loan] = []
        self._within: Callable[[], None] | None = None
        self._waits_with: dict[int, bool] = {}
        self._looking: contextlib.AbstractContextManager[None] | None = None
        self._collects = gc.isenabled()
        self._driver = self.device._driver
        self.device._driver = self._interrupted  # type: ignore[method-assign]

    def _showing(self, shape: Shape) -> Shape:
        """`shape`, mostly with one more output: what only compiled code holds, or a part of it, for the user."""
        tensors = [entry for entry in shape.inputs if entry.kind in ("user", "static", "hidden")]
        held = [at for at, entry in enumerate(tensors) if entry.kind == "hidden"]
        if not held or self.other.random() < 0.2:
            return shape
        output = (self.other.choice(["is", "tail"]), self.other.choice(held))
        return replace(shape, outputs=(*shape.outputs, output), visible=(*shape.visible, True))

    def _signed(self, shape: Shape) -> Shape:
        """`shape` with a float that one more output has the sign of."""
        rows = len(shape.positions(kind="user") + shape.positions(kind="static") + shape.positions(kind="hidden"))
        output = ("signed", self.floats.randrange(rows))
        inputs = (*shape.inputs, Input("float"))
        return replace(shape, inputs=inputs, outputs=(*shape.outputs, output), visible=(*shape.visible, True))

    def _make(self, shape: Shape, at: int | None = None) -> None:
        """A piece of `shape`, at `at` in place of another."""
        content = torch.arange(5.0)
        constant, other = content.clone(), content.clone()
        changes = shape.random or shape.positions(mutated=True) or shape.positions(reused=True)
        needs = self.lack.choice([0, 0, 256, 1024, 2048]) if self.narrow else 0
        function = self._with_calls_within(self._with_needs(body(shape, constant), needs))
        piece = Entered(
            self.tree,
            boxed(function),
            PieceSpec(
                names=tuple(f"x{number}" for number in range(len(shape.inputs))),
                visible=shape.visible,
                static=frozenset(
                    [
                        *shape.positions(kind="static"),
                        *(shape.positions(kind="hidden") if shape.is_backward else ()),
                    ]
                ),
                mutated=frozenset(shape.positions(mutated=True)),
                reused=frozenset(shape.positions(reused=True)),
                constants=(constant,),
                is_backward=shape.is_backward,
                label=f"piece {len(self.pieces) if at is None else at}",
                random=shape.random,
                must_pay=self.paying,
                most=self.most,
                copies=self.copies,
                repeatable=not (changes or shape.is_backward),
            ),
        )
        self.needs[len(self.pieces) if at is None else at] = needs
        number = len(self.pieces) if at is None else at
        self.recorded.lasting["constant", number], self.plain.lasting["constant", number] = constant, other
        if at is None:
            self.pieces.append(piece)
            self.functions.append(body(shape, other))
        else:
            self.pieces[at], self.functions[at] = piece, body(shape, other)

    def _with_calls_within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which at times waits first for a thread that calls another piece."""

        def run(*args: Any) -> Any:
            within, self._within = self._within, None
            if within is not None:
                within()
            return function(*args)

        return run

    def _with_needs(self, function: Callable[..., Any], nbytes: int) -> Callable[..., Any]:
        """`function`, which at last, when it has changed what it changes, needs `nbytes` besides."""

        def run(*args: Any) -> Any:
            outputs = function(*args)
            self.device.use(nbytes)
            return outputs

        return run if nbytes else function

    def note(self, text: str) -> None:
        self.steps.append(text)
        if self._say:
            self._say(text)

    # ---------------------------------------------------------------- running

    def run(self) -> Counter[str]:
        for at, shape in enumerate(self.shapes):
            self.note(f"piece {at}: {shape}")
        try:
            with torch.no_grad():
                for number in range(self.calls):
                    self._be_native(number)
                    for step in self._between():
                        step()
                        self.check()
                    self._call(self._choose())
                    self.check()
                self._end()
        except (Exception, Alarm) as error:
            steps = "\n  ".join(self.steps)
            raise Wrong(f"{type(error).__name__}: {error}\n{self.limits}\n  {steps}") from error
        finally:
            self.threads.close()
            if self._looking is not None:
                self._look()
        if gc.isenabled() != self._collects:
            gc.enable()
            raise Wrong("the garbage collector is not as it was")
        return self.counts

    def _be_native(self, number: int) -> None:
        """Calls are native from some call on, where they can be and the tree has the time."""
        if self.native_at is None or number < self.native_at or (calls := native.ready()) is None:
            return
        if self.tree.take(calls):
            self.native_at = None
            self.counts["native"] += 1

    def _choose(self) -> int:
        if self.regular and self.rng.random() < 0.93:
            self.at = (self.at + 1) % len(self.pieces)
            return self.at
        return self.rng.randrange(len(self.pieces))

    def _between(self) -> Iterator[Callable[[], None]]:
        """What the program does before its next call."""
        rng = self.rng
        if self.busy and self.other.random() < 0.3:
            yield self._synchronize
        for name in list(self.plain.values):
            if rng.random() > self.keeping:
                yield functools.partial(self._drop, name)
        if rng.random() < self.marking:
            yield self._mark
        seen = [name for name in self.plain.values if name not in self.hidden]
        tensors = [name for name in seen if isinstance(self.plain.values[name], torch.Tensor)]
        if tensors and rng.random() < 0.2:
            yield functools.partial(self._view, rng.choice(tensors))
        if tensors and rng.random() < 0.08:
            yield functools.partial(self._storage, rng.choice(tensors))
        if tensors and rng.random() < 0.15:
            yield functools.partial(self._write, rng.choice(tensors))
        if tensors and self.other.random() < self.beside:
            yield functools.partial(self._work_beside, self.other.choice(tensors), self.other.random() < 0.3)
        if self.plain.values and self.other.random() < self.resizing:
            yield functools.partial(self._resize, self.other.choice(list(self.plain.values)))
        if self.gathers.random() < self.gathering:
            yield self._gather
        if rng.random() < 0.2:
            self.thread = rng.randrange(self.callers)
        if rng.random() < self.rare:
            at = rng.randrange(len(self.pieces))
            yield rng.choice([functools.partial(self._replace, at), self._forget, self._collect])
        if self.narrow and self.lack.random() < 0.15:
            yield self._load
        if self.lending and self.credit.random() < 0.5:
            yield self._lend
        if rng.random() < self.trouble:
            call, after = rng.choice(CALLS), rng.choice([0, 0, 0, 1, 2, 5])
            alarm = rng.random() < 0.3
            self.note(f"{call} is to {'be interrupted' if alarm else 'fail'} after {after}")
            self.device.fail_at(call, after, Alarm("injected") if alarm else None)
        if self.trouble and self.other.random() < 0.1:
            call = self.other.choice(["finish", "move_out"])  # a program moves seldom
            self.note(f"{call} is to fail")
            self.device.fail_at(call)
        if rng.random() < self.meddling:
            self._interruption = [rng.randrange(6), rng.choice(["mark", "drop", "collect", "frames"])]

    def _load(self) -> None:
        """Others take memory of the device, or give some back."""
        device = self.device
        rest = device.total_bytes() - device.reserved_bytes() + device.cached
        device.ballast = self.lack.choice([0, rest // 4, rest // 2, rest - rest // 8])
        device.cached = self.lack.choice([0, (rest - device.ballast) // 2])
        self.note(f"{device.ballast} bytes are taken, and {device.cached} cached")
        self.counts["changes of free memory"] += 1

    def _lend(self) -> None:
        """Memory of the pool is lent, taken by others, or given back by them."""
        what = self.credit.random()
        if what < 0.35:
            self.note("the device is out of memory")
            self._unless_injected(lambda: self._on_device(self.tree.lend))
        if what < 0.7:
            if (loan := self.device.borrow(self.credit.choice([1, 64, 300, 1000]))) is not None:
                self.note(f"{loan.nbytes} bytes are lent")
                self.counts["loans"] += 1
                self.loans.append(loan)
        elif self.loans:
            loan = self.loans.pop(self.credit.randrange(len(self.loans)))
            self.note(f"{loan.nbytes} bytes come back")
            if self.credit.random() < 0.3:
                self.device.behind(7, loan.over)
            else:
                loan.over()
        if not all(loan.intact() for loan in self.loans):
            raise Wrong("somebody has written over memory that is lent")

    def _work_beside(self, name: int, writes: bool) -> None:
        """Work on a stream of the user's own, with a tensor that he holds until he has waited for it."""
        value = self.plain.values.get(name)
        if value is None or value.dtype is torch.bool or 0 in value.stride() or value.dim() != 1 or self._is_busy(name):
            return
        # a later call may change it
        if self._is_mixed(name) or any(other in self.plain.lasting for other in self._sharers(name)):
            return
        self.counts["work on another stream"] += 1
        if writes:
            self.note(f"another stream writes to {name}")
            self.device.behind(7, lambda value: value.add_(1).remainder_(MODULUS), self.recorded.values[name])
            value.add_(1).remainder_(MODULUS)
        else:
            new = next(self.names)
            self.note(f"another stream copies {name} to {new}")
            self.recorded.values[new], self.plain.values[new] = torch.zeros_like(value), value.clone()
            self.device.behind(
                7, lambda to, value: to.copy_(value), self.recorded.values[new], self.recorded.values[name]
            )
            self.busy[new] = True
        self.busy[name] = writes

    def _resize(self, name: int) -> None:
        """Resize what is held: let it grow, or empty its memory and fill it again; the latter may hooks of saved
        tensors too."""
        value = self.plain.values.get(name)
        if (
            value is None
            or self._is_busy(name)
            or self._is_mixed(name)
            or not all(_storage_of(side.values[name]).resizable() for side in (self.recorded, self.plain))
        ):
            return
        row = isinstance(value, torch.Tensor) and value.dim() == 1 and value.stride() == (1,) and value.numel() > 0
        alone = sum(value is other for other in (*self.plain.values.values(), *self.plain.lasting.values())) == 1
        grows = alone and row and name not in self.hidden and value.dtype is torch.float32 and self.other.random() < 0.6
        self.counts["outputs resized"] += 1
        self.note(f"{'grow' if grows else 'empty and fill'} {name}")
        content = torch.arange(value.shape[0] + 40.0) if grows else None
        del value
        for side in (self.recorded, self.plain):
            if content is not None:
                side.values[name].resize_(content.shape[0]).copy_(content)
                continue
            storage = _storage_of(side.values[name])
            kept = bytes_of(storage).clone()
            storage.resize_(0)
            storage.resize_(kept.shape[0])
            bytes_of(storage).copy_(kept)

    def _gather(self) -> None:
        """Parameters' memory is given back and comes from anywhere, with what it held."""
        if self.busy:
            return
        chance = self.gathers.random()
        for key, value in self.recorded.lasting.items():
            storage = _storage_of(value)
            if not isinstance(key[0], int) or not storage.resizable() or self.gathers.random() > chance:
                continue
            self.note(f"gather {key}")
            self.counts["parameters gathered"] += 1
            kept = bytes_of(storage).clone()
            storage.resize_(0)
            taken = torch.empty(kept.shape[0], dtype=torch.uint8) if self.gathers.random() < 0.5 else None
            storage.resize_(kept.shape[0])
            bytes_of(storage).copy_(kept)
            del taken

    def _synchronize(self) -> None:
        self.note("wait for the other stream")
        self.device.synchronize()
        self.busy.clear()

    def _is_busy(self, name: int) -> bool:
        return any(other in self.busy for other in self._sharers(name))

    def _is_mixed(self, name: Any) -> bool:
        """Whether the user and compiled code hold, or held, the same memory; where outputs are copies they may or may
        not, and two of the user's that were compiled code's may or may not share."""
        if not self.copies:
            return False
        sharers = self._sharers(name)
        values = self.plain.values if name in self.plain.values else self.plain.lasting
        return len({other in self.hidden for other in sharers}) > 1 or _storage_of(values[name])._cdata in self.parted

    def _is_written(self, name: Any) -> bool:
        return any(self.busy.get(other) for other in self._sharers(name))

    def _drop(self, name: int) -> None:
        if name in self.plain.values and self._is_busy(name):
            return
        self.note(f"drop {name}")
        for side in (self.recorded, self.plain):
            side.values.pop(name, None)
        self.hidden.discard(name)

    def _mark(self) -> None:
        self.note("mark")
        self.counts["marks"] += 1
        self.marks -= 1

    def _view(self, name: int) -> None:
        value = self.plain.values.get(name)
        if value is None or value.dim() != 1 or value.shape[0] < 3 or self._is_busy(name):
            return
        new, keep = next(self.names), self.rng.random() < 0.4
        self.note(f"{new} = {name}[1:-1]{'' if keep else f', drop {name}'}")
        self.counts["views of held outputs"] += 1
        for side in (self.recorded, self.plain):
            side.values[new] = side.values[name][1:-1]
            if not keep:
                del side.values[name]

    def _storage(self, name: int) -> None:
        if name not in self.plain.values or self._is_busy(name):
            return
        new = next(self.names)
        self.note(f"{new} = storage of {name}, drop {name}")
        self.counts["storages held alone"] += 1
        for side in (self.recorded, self.plain):
            side.values[new] = side.values.pop(name).untyped_storage()

    def _write(self, name: int) -> None:
        value = self.plain.values.get(name)
        if value is None or value.dtype is torch.bool or 0 in value.stride() or value.stride() == (1, 1):
            return
        del value
        if self._is_busy(name) or self._is_mixed(name):
            return
        self.note(f"write to {name}")
        self.counts["outputs written to"] += 1
        for side in (self.recorded, self.plain):
            side.values[name].add_(1).remainder_(MODULUS)

    def _replace(self, at: int) -> None:
        self.note(f"drop piece {at}")
        self.counts["pieces dropped"] += 1
        self._unless_injected(lambda: self.tree.drop([self.pieces[at]]))
        self._make(self.shapes[at], at)

    def _forget(self) -> None:
        self.note("forget")
        self.counts["forgotten"] += 1
        self._unless_injected(lambda: self._on_device(self.tree.forget))

    def _unless_injected(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (DeviceFailed, torch.OutOfMemoryError, Alarm) as error:
            if "injected" not in str(error):
                raise

    def _collect(self) -> None:
        self.note("collect")
        gc.collect()

    def _on_device(self, work: Callable[[], Any]) -> Any:
        """`work` in the current thread, on a stream that the program draws."""
        stream = self.rng.randrange(self.streams)

        def there() -> Any:
            self.device.set_stream(stream)
            return work()

        return self.threads.run(self.thread, there)

    def _interrupted(self, call: str, detail: Any = None) -> None:
        """Passed by each call of the driver: at the one that the program has drawn, something happens elsewhere."""
        if self._interruption:
            self._interruption[0] -= 1
            if self._interruption[0] < 0:
                what = self._interruption[1]
                self._interruption = []
                other = threading.Thread(target=self._meanwhile, args=(what,))
                other.start()
                other.join()
        if call in IN_CAPTURES and gc.isenabled() and self.device.captures:
            raise Wrong("garbage may be collected inside of a capture")
        self._driver(call, detail)

    def _meanwhile(self, what: str) -> None:
        self.note(f"meanwhile: {what}")
        self.counts["interruptions"] += 1
        if what == "mark":
            self.marks -= 1
        elif what == "collect":
            gc.collect()
        elif what == "frames":
            self._look()
        else:
            for name in list(self.plain.values)[::2]:
                self._drop(name)

    def _look(self) -> None:
        """Another thread begins to look at frames, or ends."""
        if self._looking is None:
            self._looking = frames.without_collections()
            self._looking.__enter__()
        else:
            self._looking.__exit__(None, None, None)
            self._looking = None

    # ---------------------------------------------------------------- a call

    def _recipes(self, at: int, key: int) -> tuple[list[tuple[Any, ...]], list[int]]:
        """How to get each input, on either side; and the names that are handed over with the call."""
        shape, rng = self.shapes[at], self.rng
        size = 4 * key
        recipes: list[tuple[Any, ...]] = []
        handed: list[int] = []
        # storages of the plain side, also those of a call that waits for this one -> whether an input there is changed
        shared = dict(self._waits_with) if self.thread == WITHIN else {}
        for position, entry in enumerate(shape.inputs):
            if entry.kind in ("key", "float", "none", "generator"):
                recipes.append(("generator",) if entry.kind == "generator" else ("plain", self._plain(entry, key)))
                continue
            recipe = self._recipe(at, position, entry, size)
            changes = entry.mutated or entry.reused
            handle = self._handle(recipe)
            if handle is not None and handle in shared and (changes or shared[handle]):
                # compiled code gets memory that it changes through one input alone
                recipe, handle = ("new", self._content(size), entry.layout, 0), None
            if recipe[0] == "value" and entry.kind == "hidden":
                name = recipe[1]
                if entry.reused and self._sharers(name) != [name]:
                    recipe, handle = ("new", self._content(size), entry.layout, 0), None
                elif entry.reused or (rng.random() < 0.8 and name not in handed):
                    handed.append(name)
            if handle is not None:
                shared[handle] = shared.get(handle, False) or changes
            recipes.append(recipe)
        return recipes, handed

    def _plain(self, entry: Input, key: int) -> Any:
        if entry.kind == "float":
            self.counts["calls with a float"] += 1
            return float(self.floats.choice(("0.0", "0.0", "-0.0", "1.0", "nan", "-inf")))
        return key if entry.kind == "key" else None

    def _handle(self, recipe: tuple[Any, ...]) -> int | None:
        if recipe[0] == "new":
            return None
        value = self.plain.lasting[recipe[1]] if recipe[0] == "lasting" else self.plain.values[recipe[1]]
        return int(value.untyped_storage()._cdata)

    def _sharers(self, name: Any) -> list[Any]:
        everything: dict[Any, Any] = {**self.plain.values, **self.plain.lasting}
        handle = _storage_of(everything[name])._cdata
        return [other for other, value in everything.items() if _storage_of(value)._cdata == handle]

    def _recipe(self, at: int, position: int, entry: Input, size: int) -> tuple[Any, ...]:
        rng = self.rng
        if entry.kind == "static":
            which = 0 if rng.random() < (0.95 if self.regular else 0.7) else rng.randrange(1, 8)
            return self._lasting((at, position, size, which), size, entry.layout)
        if entry.layout == "row":
            held = [
                name
                for name, value in self.plain.values.items()
                if (name in self.hidden) == (entry.kind == "hidden")
                and not (self._is_busy(name) if entry.mutated else self._is_written(name))
                and not ((entry.mutated or entry.reused) and self._is_mixed(name))
                and isinstance(value, torch.Tensor)
                and value.dim() == 1
                and value.dtype is torch.float32
                and value.stride(0) == 1
                and value.shape[0] >= size
            ]
            if held and rng.random() < (0.9 if entry.kind == "hidden" else 0.5):
                name = held[-1] if rng.random() < 0.7 else rng.choice(held)
                extra = self.plain.values[name].shape[0] - size
                return ("value", name, None, 0) if not extra else ("value", name, size, rng.randint(0, extra))
        if entry.kind == "user" and rng.random() < 0.4:
            return self._lasting((entry.layout, size, rng.randrange(3)), size, entry.layout)
        return ("new", self._content(size), entry.layout, rng.choice([0, 0, 0, 1, 4]))

    def _content(self, size: int) -> torch.Tensor:
        return torch.tensor([float(self.rng.randrange(MODULUS)) for _ in range(size)])

    def _lasting(self, key: tuple[Any, ...], size: int, layout: str) -> tuple[Any, ...]:
        """Memory that stays; rows of the user's are parts of one storage that overlap."""
        if key not in self.plain.lasting:
            content = self._content(size)
            base = (layout, size, "base")
            for side in (self.recorded, self.plain):
                if layout == "row" and key[0] == "row":
                    if base not in side.lasting:
                        side.lasting[base] = torch.zeros(3 * size)
                    offset = key[2] * max(size // 2, 1)
                    side.lasting[key] = side.lasting[base][offset : offset + size]
                else:
                    side.lasting[key] = place(content, layout)
                    if self.weights is not None and isinstance(key[0], int):
                        side.lasting[key] = self.weights(side.lasting[key], requires_grad=False)
        return ("lasting", key)

    def _call(self, at: int) -> None:
        rng, shape = self.rng, self.shapes[at]
        keys = [2, 2, 2, 3, 1] + [0] * (rng.random() < 0.2)
        key = rng.choice(keys[: 1 if self.regular and rng.random() < 0.8 else None])
        if self.many and self.giving.random() < 0.7:
            key = self.giving.choice([1, 2, 3, 4])
        if not shape.positions(kind="key"):
            key = 2
        recipes, handed = self._recipes(at, key)
        for entry, recipe in zip(shape.inputs, recipes, strict=True):
            if entry.mutated:
                self.counts[f"changed: {self._kind(entry, recipe)}"] += 1
        if recipes and rng.random() < 0.15:
            for recipe in recipes:  # the user refills what he passes
                if recipe[0] == "lasting" and self.plain.lasting[recipe[1]].dim() == 1:
                    content = self._content(self.plain.lasting[recipe[1]].shape[0])
                    for side in (self.recorded, self.plain):
                        side.lasting[recipe[1]].copy_(content)
        names = [next(self.names) for _ in shape.outputs]
        self.counts["calls"] += 1
        self.counts["calls whose outputs are copies"] += self.copies
        self.device.user_captures = captures = rng.random() < self.rare
        self.counts["calls in a capture of the caller"] += captures
        backward_thread = shape.is_backward and rng.random() < 0.5
        text = ", ".join(_recipe_text(recipe) for recipe in recipes)
        self.note(
            f"{names} = piece {at}({text}) in thread {self.thread}{' of autograd' * backward_thread}"
            f"{f', handing over {handed}' if handed else ''}{', captured by the caller' * captures}"
        )
        seed = rng.randrange(1 << 30)
        pending = dict(self.device._failures)
        of_code = {_storage_of(self.plain.values[name])._cdata for name in self.hidden}
        args, plain_args = self.recorded.take(recipes), self.plain.take(recipes)
        # a graph of the caller's, and an input that is still needed, keep pools where they are
        stays = captures or any(self.device._memory.of(_storage_of(self.recorded.values[name])) for name in handed)
        for name in handed:
            self._drop_handed(name)
        torch.manual_seed(seed)
        self.recorded.generator.manual_seed(seed)
        if not (captures or self.thread == WITHIN) and rng.random() < self.waiting:
            within = rng.randrange(len(self.pieces)), random.Random(rng.random()), seed
            self._within = functools.partial(self._call_within, *within)
            self._waits_with = {}
            for entry, value in zip(shape.inputs, plain_args, strict=True):
                if isinstance(value, torch.Tensor):
                    handle = value.untyped_storage()._cdata
                    changes = entry.mutated or entry.reused or self._waits_with.get(handle, False)
                    self._waits_with[handle] = changes
        before = self.thread
        if backward_thread and self.thread != WITHIN:
            self.thread = AUTOGRAD
        held, made = self.device.reserved_bytes() - self.device.cached, self.tree.counts["recordings"]
        try:
            outputs = self._on_device(functools.partial(self.pieces[at], args))
        except (DeviceFailed, torch.OutOfMemoryError, Alarm) as error:
            fired = {call for call in pending if call not in self.device._failures}
            if isinstance(error, torch.OutOfMemoryError) and "injected" not in str(error):
                self._ran_out(at, plain_args, error, stays)
                args.clear()
                return
            if not (isinstance(error, Alarm) or fired & RAISING):
                raise
            self.counts["calls that raised"] += 1
            self.counts["calls that were interrupted"] += isinstance(error, Alarm)
            if self.device._stream_captures and self.thread != WITHIN:  # else a call that waits for this one captures
                raise Wrong("the stream goes on capturing") from error
            self.note(f"raised {error}")
            error.__traceback__ = None
            if args or not shape.inputs:
                self._as_it_is(shape, args, plain_args)
            else:  # its code ran, and what came afterwards failed
                torch.manual_seed(seed)
                self.plain.generator.manual_seed(seed)
                self.functions[at](*plain_args)
            args.clear()
            outputs = None
        finally:
            self.thread, self._within = before, None
            self.device.user_captures = False
        for call in pending:
            self.counts[f"failures of {call}"] += call not in self.device._failures
        if outputs is None:
            return
        if args:
            raise Wrong("the list of inputs was not cleared")
        self._check_limits(held, made)
        torch.manual_seed(seed)
        self.plain.generator.manual_seed(seed)
        expected = self.functions[at](*plain_args)
        del plain_args
        if len(outputs) != len(expected):
            raise Wrong(f"{len(outputs)} outputs")
        for name, output, value, shown in zip(names, outputs, expected, shape.visible, strict=True):
            if isinstance(value, torch.Tensor):
                self.recorded.values[name], self.plain.values[name] = output, value
                if not shown:
                    self.hidden.add(name)
                elif self.copies and value.untyped_storage()._cdata in of_code:
                    self.parted[value.untyped_storage()._cdata] = value.untyped_storage()
            elif output != value:
                raise Wrong(f"{output} for {value}")

    @property
    def _undisturbed(self) -> bool:
        """Whether no other thread is in the midst of a call, and no driver call fails."""
        return self.callers == 1 and not (self.waiting or self.trouble or self.meddling)

    def _ran_out(self, at: int, plain_args: Sequence[Any], error: BaseException, stays: bool) -> None:
        """The caller has got an error for lack of memory: what the code changes until then is what it is, also where
        an input that was handed over shares memory with what is still held.  `stays`: no pool could go."""
        self.counts["calls that ran out of memory"] += 1
        self.note(f"raised {error}")
        error.__traceback__ = None
        device = self.device
        free = device.cached + device.free_bytes()
        if not stays and not any(node.alive() for node in self.tree.path):  # then all pools could go
            free = device.total_bytes() - device.ballast
        if self.pieces[at].spec.repeatable and self._undisturbed and self.needs[at] <= free:
            raise Wrong(f"out of memory with {free} bytes free, of which it needs {self.needs[at]}")
        self.device._memory.scatter()
        changed = {
            value.untyped_storage()._cdata
            for entry, value in zip(self.shapes[at].inputs, plain_args, strict=True)
            if entry.mutated or entry.reused
        }
        for kind in ("values", "lasting"):
            held, expected = getattr(self.recorded, kind), getattr(self.plain, kind)
            for name, value in expected.items():
                if _storage_of(value)._cdata not in changed:
                    continue
                if isinstance(value, torch.Tensor):
                    value.copy_(held[name])
                elif value.nbytes() == held[name].nbytes():
                    bytes_of(value).copy_(bytes_of(held[name]))

    def _check_limits(self, held: int, made: int) -> None:
        """After a call, before which pools had `held` bytes, and `made` recordings had been made."""
        tree, device = self.tree, self.device
        now = device.reserved_bytes() - device.cached
        if not self.narrow or tree.path or not tree.size or not self._undisturbed:
            return
        limit, share = self.limits.pool_bytes, in_bytes(self.limits.keep_free, device.total_bytes())
        if limit is not None and now > in_bytes(limit, device.total_bytes()):
            raise Wrong(f"pools have {now} bytes, and {limit} are allowed")
        if tree.counts["recordings"] > made and now > held and device.free_bytes() + device.cached < share:
            raise Wrong(f"a recording leaves {device.free_bytes() + device.cached} bytes, and should leave {share}")

    def _call_within(self, at: int, rng: random.Random, seed: int) -> None:
        """A call in a thread that the code of another call waits for."""
        states = self.rng, self.thread
        self.rng, self.thread = rng, WITHIN
        self.counts["calls that others waited for"] += 1
        self.note("meanwhile, waited for:")
        try:
            self.threads.run(WITHIN + 1, functools.partial(self._call, at))
        finally:
            self.rng, self.thread = states
            torch.manual_seed(seed)
            self.recorded.generator.manual_seed(seed)

    def _drop_handed(self, name: int) -> None:
        for side in (self.recorded, self.plain):
            side.values.pop(name, None)
        self.hidden.discard(name)

    def _kind(self, entry: Input, recipe: tuple[Any, ...]) -> str:
        if recipe[0] == "value":
            return "an output"
        if entry.kind == "static":
            return "a parameter or buffer"
        return "the user's, again" if recipe[0] == "lasting" else "the user's, new"

    def _as_it_is(self, shape: Shape, args: list[Any], plain_args: list[Any]) -> None:
        """After a launch that failed: what the piece changes is what it is."""
        self.device._memory.scatter()
        for entry, value, other in zip(shape.inputs, args, plain_args, strict=True):
            if entry.mutated:
                other.copy_(value)

    # ---------------------------------------------------------------- checks

    def check(self) -> None:
        handles: dict[int, int] = {}
        sides: dict[int, int] = {}
        for kind in ("values", "lasting"):
            held, expected = getattr(self.recorded, kind), getattr(self.plain, kind)
            for name, value in expected.items():
                found = held[name]
                if self.busy and self._is_written(name):
                    continue
                if isinstance(value, torch.UntypedStorage):
                    # what comes back in the buffer of a temporary may have less around it
                    if found.nbytes() == value.nbytes():
                        self._same(name, bytes_of(found), bytes_of(value))
                else:
                    self._same(name, found, value)
                    found, value = found.untyped_storage(), value.untyped_storage()
                copied = kind == "values" and self.copies and name not in self.hidden
                if copied and self.device._memory.of(_storage_of(held[name])) is not None:
                    raise Wrong(f"{name} lies in the pool")
                if self._is_mixed(name):
                    continue
                if value.nbytes() and (kind == "lasting" or _elements(expected[name])):
                    one, other = found._cdata, value._cdata
                    if handles.setdefault(one, other) != other or sides.setdefault(other, one) != one:
                        raise Wrong(f"{name} shares memory with other values than in the plain program")
        if self.reading.random() < 0.5:
            self._add_up()

    def _add_up(self) -> None:
        """The account of memory says what the program holds, and its parts are the whole."""
        self.counts["accounts"] += 1
        try:
            self._account()
        except Wrong:
            gc.collect()  # what an error held that was caught is alive until then
            self._account()

    def _account(self) -> None:
        with self.tree.lock:
            pools, recordings = memory.of_pools(self.tree), memory.of_recordings(self.tree).values()
        held = {generation: pool.held for generation, pool in self.device._pools.items()}
        values = [*self.recorded.values.values(), *self.recorded.lasting.values()]
        mapped = [found for value in values if (found := self.device._memory.of(_storage_of(value))) is not None]
        lying = {(found.pool.base, found.offset): found.nbytes for found in mapped}
        bases = {pool.base: generation for generation, pool in self.device._pools.items()}
        if {pool.generation: pool.held for pool in pools} != held:
            raise Wrong(f"pools of {held} bytes are {pools} in the account")
        for pool in pools:
            live = sum(nbytes for (base, _), nbytes in lying.items() if bases.get(base) == pool.generation)
            of_recordings = sum(entry.alive for entry in recordings if entry.generation == pool.generation)
            self.counts["accounts with something alive"] += live > 0
            self.counts["accounts of what warm-ups left"] += pool.warm > 0
            if pool.warm and not pool.in_use:
                continue  # of an old pool the account has what was there when it was left
            if pool.live != live:
                raise Wrong(f"{live} bytes are alive, and in the account {pool}")
            if pool.live != of_recordings + pool.warm:
                raise Wrong(f"recordings have {of_recordings} bytes alive of {pool}")
            if min(pool.live, pool.lent, pool.dead) < 0 or pool.live + pool.lent + pool.dead != pool.held:
                raise Wrong(f"the account does not add up: {pool}")
        for entry in recordings:
            self.counts["accounts of what was given up"] += entry.given_up
            if not 0 <= entry.alive <= entry.kept <= entry.peak or entry.kept + entry.shared != entry.peak:
                raise Wrong(f"the account does not add up: {entry}")

    def _same(self, name: Any, found: torch.Tensor, value: torch.Tensor) -> None:
        if type(found) is not type(value):
            raise Wrong(f"{name} is a {type(found).__name__}")
        if found.dtype != value.dtype or found.size() != value.size() or found.stride() != value.stride():
            raise Wrong(f"{name} has another layout: {found.size()}, {found.stride()}, {found.dtype}")
        if not torch.equal(found, value):
            raise Wrong(f"{name} is {found.tolist()}, and should be {value.tolist()}")

    def _end(self) -> None:
        """Drop everything; nothing is left in the pool."""
        self.device._failures.clear()
        self._interruption = []
        self._synchronize()
        self.check()
        if not all(loan.intact() for loan in self.loans):
            raise Wrong("somebody has written over memory that is lent")
        for loan in self.loans:
            loan.over()
        self._count()
        for name in list(self.plain.values):
            self._drop(name)
        self.note("the end")
        gc.collect()  # an error that was caught may hold inputs
        self._on_device(self.tree.forget)
        gc.collect()
        self.device._memory.gather()
        tree, device = self.tree, self.device
        left = {
            "recordings": tree.size or sum(1 for _ in tree.root.below()) - 1,
            "nodes on the path": len(tree.path),
            "old pools": len(device._pools) - 1,
            "blocks": len(device._pool.arena.blocks),
            "storages over the pool": len(device._memory.mapped),
        }
        if any(left.values()):
            raise Wrong(f"left in the end: {left}")

    def _count(self) -> None:
        tree, counts = self.tree, self.counts
        names = {"clones": "moved outputs", "failed": "failed recordings", "unrecorded": "unrecorded calls"}
        for name, count in tree.counts.items():
            counts[names.get(name, name)] += count
        nodes = [node for node in tree.root.below() if node.recording is not None]
        recordings = [node.recording for node in nodes if node.recording is not None]
        counts["replays"] += len(self.device.calls("replay"))
        counts["waits between streams"] += len(self.device.calls("wait_for"))
        counts["recordings with inputs that die in them"] += sum(bool(made.consumed) for made in recordings)
        counts["recordings that hand out copies"] += sum(any(slot.copied for slot in node.slots) for node in nodes)
        counts["recordings with managed inputs"] += sum(bool(made.plan.managed) for made in recordings)
        counts["recordings with parameters of a class"] += self.weights is not None and sum(
            not set(node.keyed.piece.spec.static).isdisjoint(node.recording.plan.fixed)
            for node in nodes
            if node.keyed is not None and node.recording is not None
        )
        counts["recordings that read what stays in place"] += sum(
            not {*made.plan.managed, *node.keyed.piece.spec.static, *node.keyed.piece.spec.mutated}.issuperset(
                made.plan.fixed
            )
            for node, made in ((node, node.recording) for node in nodes)
            if node.keyed is not None and made is not None
        )
        counts["recordings that copy what is gathered"] += sum(bool(made.plan.gathered) for made in recordings)
        counts["programs with several threads"] += tree.shared
        counts["new pools"] += self.device.generation
        counts["programs"] += 1


def _storage_of(value: Any) -> torch.UntypedStorage:
    return value.untyped_storage() if isinstance(value, torch.Tensor) else value


def _elements(value: Any) -> int:
    return int(value.nbytes() if isinstance(value, torch.UntypedStorage) else value.numel())


def _recipe_text(recipe: tuple[Any, ...]) -> str:
    what, *details = recipe
    if what == "new":
        return f"new {details[1]} at {details[2]}"
    if what == "value":
        name, size, offset = details
        return f"{name}" if size is None else f"{name}[{offset}:{offset + size}]"
    return f"{what} {details[0] if details else ''}".strip()


def run(seed: int, calls: int | None = None, say: Callable[[str], object] | None = None) -> Counter[str]:
    """Run one seed; what it exercised.  Raises `Wrong`."""
    return Program(seed, calls, say).run()
