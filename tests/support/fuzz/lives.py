"""Random lives of variants: calls of one graph while compiles fail, are mended and fail again, and time passes.

In: a seed, and a captured graph of `function`.  Out: what happened, counted; or `Wrong`.

Nothing is compiled: `lowering.lower` is played by a compiler that knows what it is asked for.  So a life takes
milliseconds, and a model, which knows the rules alone, says of each call what has to run it and which compiles it is
worth.  Code checks that the call is one that it was made for.

    the first declared condition that holds, the variant of it; else generic
    a variant that has no code for a call compiles it, unless it failed a short while ago; then generic, then eager
    a callable that is not understood is bound to the first size for which there is code
    code that depends on a Python float is one for each value, and so is a failure of it
    where nothing new happens, no call looks for code
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import CapturedGraph, MarkedSize
from multigraph_backend.lower import lowering
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.guards import NONE, Guards
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.options import Options
from multigraph_backend.region.region import Region, VariantFailed
from multigraph_backend.region.variant import MOST_FAILED_FLOATS, MOST_FORMS
from tests.support.fuzz.declarations import Condition, random_predicate

SIZES = (2, 3, 4, 5, 7, 8, 9, 16, 24)
FLOATS = (0.0, -0.0, 1.0, 2.0, 0.5, math.inf, -1.0)
GENERIC = "generic"
# what no size from 2 on satisfies: Dynamo traces 0 and 1 as graphs of their own
IMPOSSIBLE: tuple[Any, ...] = (0, 1, {"max": 1}, {"min": 0, "max": 1}, {"max": 3, "multiple_of": 4}, [0, 1])


class Wrong(AssertionError):
    """Something else happened than the rules say."""


def function(x: torch.Tensor, most: float) -> torch.Tensor:
    return torch.clamp(x, max=most) + x.shape[0]


@dataclass(frozen=True)
class Call:
    rows: int
    most: float
    later: float = 0.0  # seconds after the call before
    busy: bool = False  # Dynamo compiles here, and other threads, which may wait for that, compile all variants


@dataclass(frozen=True)
class Life:
    declared: tuple[Condition, ...]  # what some size satisfies
    specialize: tuple[dict[str, Any], ...]  # these, and among them what none does
    opaque: tuple[int, ...] | None  # a callable that is not understood: it holds for all sizes but these
    eagerly: bool
    raising: bool
    values: bool  # code is made for each value of the float
    failing: frozenset[str]  # variants that no code can be made for
    failing_sizes: frozenset[int]  # sizes that the callable's variant fails for
    failing_floats: frozenset[str]
    how: str  # "raises", "raises when run", "too few outputs"
    mended: int  # the call from which on nothing fails
    calls: tuple[Call, ...]


def draw(seed: int) -> Life:
    rng = random.Random(f"lives:{seed}")
    declared, specialize = [], []
    for _ in range(rng.randint(0, 3)):
        if rng.random() < 0.3:
            specialize.append({"x[0]": rng.choice(IMPOSSIBLE)})
        else:
            condition = Condition((("x[0]", random_predicate(rng, lists=True)),))
            declared.append(condition)
            specialize.append(condition.declarative())
    variants = list(_named(declared))
    opaque = tuple(rng.sample(SIZES, 2)) if rng.random() < 0.5 else None
    values = rng.random() < 0.5
    floats = FLOATS if values else FLOATS[2:5]
    calls: list[Call] = []
    while len(calls) < 14:
        later = rng.choice((0.0, 0.0, 0.0, 59.0, 60.0, 61.0, 4000.0))
        calls.append(Call(rng.choice(SIZES), rng.choice(floats), later, busy=rng.random() < 0.1))
        calls += [dataclasses.replace(calls[-1], later=0.0)] * rng.choice((0, 2, 3))
    return Life(
        tuple(declared),
        tuple(specialize),
        opaque,
        eagerly=rng.random() < 0.4,
        raising=rng.random() < 0.3,
        values=values,
        failing=frozenset(text for text in (*variants, GENERIC) if rng.random() < 0.3),
        failing_sizes=frozenset(size for size in SIZES if rng.random() < 0.4),
        failing_floats=frozenset(repr(value) for value in floats if values and rng.random() < 0.25),
        how=rng.choice(("raises", "raises", "raises when run", "too few outputs")),
        mended=rng.choice((6, 10, 100)),
        calls=tuple(calls),
    )


def _named(declared: Sequence[Condition]) -> dict[str, Condition]:
    """What is declared, one for each variant."""
    variants = [variant for condition in declared for variant in condition.variants()]
    return {f"{index}: {variant.declarative()}": variant for index, variant in enumerate(variants)}


# ---------------------------------------------------------------- the model


@dataclass(eq=False)
class Modelled:
    """One variant by the rules."""

    name: str
    condition: Condition | None
    opaque: bool = False
    forms: list[Any] = field(default_factory=list)  # the value that each is for
    bound: int | None = None  # the size that a callable has code for
    failures: int = 0
    retry: dict[Any, float] = field(default_factory=dict)

    @property
    def generic(self) -> bool:
        return self.name == GENERIC

    def rests(self, value: Any, now: float) -> bool:
        if len(self.forms) >= MOST_FORMS and not self.generic:
            return True
        resting = sorted((at for key, at in self.retry.items() if key is not None), reverse=True)
        several = resting[MOST_FAILED_FLOATS - 1] if len(resting) >= MOST_FAILED_FLOATS else -math.inf
        return now < max(several, self.retry.get(None, -math.inf), self.retry.get(value, -math.inf))

    def fails(self, value: Any, now: float) -> None:
        self.failures += 1
        self.retry[value] = now + 60.0 * 2.0 ** min(self.failures - 1, 10)
        if not self.forms:
            self.bound = None

    def compiled(self, value: Any, size: int) -> None:
        self.retry.pop(value, None)
        self.retry.pop(None, None)
        self.failures = self.failures if self.retry else 0
        self.forms.append(value)
        self.bound = size if self.opaque else None


class Model:
    """What each call has to do."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.now = 0.0
        self.at = 0
        self.variants = [Modelled(name, condition) for name, condition in _named(life.declared).items()]
        if life.opaque is not None:
            self.variants.append(Modelled("opaque", None, opaque=True))
        self.generic = Modelled(GENERIC, None)
        self.unproven: dict[tuple[str, Any], bool] = {}  # code that has not run -> whether it goes wrong
        self.pending = life.eagerly
        self.unreachable: set[str] = set()

    def fault(self, name: str, rows: int, most: float) -> bool:
        life = self.life
        if self.at >= life.mended:
            return False
        of_size = name == "opaque" and rows in life.failing_sizes
        return name in life.failing or of_size or repr(most) in life.failing_floats

    def target(self, rows: int) -> Modelled:
        for variant in self.variants:
            if variant.opaque:
                assert self.life.opaque is not None
                if rows not in self.life.opaque and variant.bound in (None, rows):
                    return variant
            elif variant.condition is not None and variant.condition.holds({"x[0]": rows}):
                return variant
        return self.generic

    def value(self, most: float) -> Any:
        """What code and failures are told apart by."""
        return repr(most) if self.life.values else None

    def call(self, call: Call) -> tuple[str, list[str]]:
        """-> what runs it ("raised": an error is raised), and the compiles, in order."""
        compiles: list[str] = []
        if self.pending:
            self.pending = False
            failed = [self._compile_made_up(variant, call, compiles) for variant in (*self.variants, self.generic)]
            if any(failed) and self.life.raising:
                return "raised", compiles
        for variant in dict.fromkeys((self.target(call.rows), self.generic)):
            value = self.value(call.most)
            if value not in variant.forms:
                if variant.rests(value, self.now) or call.busy:
                    continue
                compiles.append(variant.name)
                if self.fault(variant.name, call.rows, call.most) and self.life.how == "raises":
                    variant.fails(value, self.now)
                    if self.life.raising:
                        return "raised", compiles
                    continue
                self._add(variant, value, call)
            if self.unproven.pop((variant.name, value), False):  # its first run
                variant.forms.remove(value)
                variant.fails(value, self.now)
                return "raised" if self.life.raising else "eager", compiles
            return variant.name, compiles
        return "eager", compiles

    def _compile_made_up(self, variant: Modelled, call: Call, compiles: list[str]) -> bool:
        """Compile it before any call is for it; whether that fails."""
        if variant.opaque or variant.name in self.unreachable or call.busy:
            return False
        compiles.append(variant.name)
        if self.fault(variant.name, call.rows, call.most) and self.life.how == "raises":
            variant.fails(self.value(call.most), self.now)
            return True
        self._add(variant, self.value(call.most), call)
        return False

    def _add(self, variant: Modelled, value: Any, call: Call) -> None:
        variant.compiled(value, call.rows)
        self.unproven[variant.name, value] = self.fault(variant.name, call.rows, call.most)


# ---------------------------------------------------------------- multigraph


REQUEST: contextvars.ContextVar[int] = contextvars.ContextVar("REQUEST")  # which call it is


class Lock:
    """A variant's, which another thread may have for as long as this one waits."""

    busy = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.busy and blocking:
            raise Wrong("a call waits for a thread that may wait for it")
        return not self.busy

    def release(self) -> None: ...


class Watched(Region):
    """A region that says when a call has to look for code."""

    looked = 0

    def missed(self, target: int, args: tuple[Any, ...]) -> Any:
        self.looked += 1
        return super().missed(target, args)


class Played:
    """A region whose compiler is the life's."""

    def __init__(self, life: Life, graph: CapturedGraph, state: CompileState, model: Model) -> None:
        marks = ()
        if life.opaque is not None:
            left_out = life.opaque
            marks = (MarkedSize("x[0]", lambda size: size not in left_out),)
        self.life, self.model = life, model
        self.graph = dataclasses.replace(graph, marked_sizes=marks, asked_floats=frozenset())
        options = Options.build(
            {
                "specialize": list(life.specialize),
                "compile": "eager" if life.eagerly else "lazy",
                "on_failure": "raise" if life.raising else "fallback",
            },
            environ={},
        )
        self.region = Watched(self.graph, options, state)
        self.lock = Lock()
        for variant in (*self.region.variants, self.region.generic):
            variant.clock = lambda: model.now
            variant.lock = self.lock  # type: ignore[assignment]
        self.names = self._names()
        self.compiles: list[str] = []
        self.ran: list[str] = []
        self.run = self.region.dispatcher()

    def _names(self) -> dict[str, str]:
        """The region's text of each variant -> the model's name."""
        names = {GENERIC: GENERIC}
        wanted = [variant for variant in self.model.variants if not variant.opaque]
        for variant in self.region.variants:
            condition = variant.condition
            assert condition is not None
            if condition.check is not None:
                names[variant.text] = "opaque"
                continue
            assert condition.predicate is not None
            (facts,) = condition.predicate.facts().values()
            if not any(facts.holds(size) for size in range(2, 600)):
                if variant.state != "inactive":
                    raise Wrong(f"no call satisfies {variant.text}, and it is {variant.state}: {variant.reason}")
                continue
            modelled = wanted.pop(0)
            if condition.never is not None:
                if "unreachable" not in condition.never:
                    raise Wrong(f"{variant.text} is never: {condition.never}")
                self.model.unreachable.add(modelled.name)
            names.setdefault(variant.text, modelled.name)
        return names

    def lower(
        self,
        graph: CapturedGraph,
        facts: Any,
        args: Sequence[Any],
        options: Options,
        state: CompileState,
        pinned: Any = None,
        name: str = GENERIC,
        floats: str = "",
    ) -> Lowered:
        name = self.names[name]
        x, number = self._read(args)
        rows = int(x.shape[0])
        values = graph.values(args)
        if rows < 2 or not all(known.holds(values[symbol]) for symbol, known in facts.items()):
            raise Wrong(f"{name} is compiled for {rows} rows")
        most = float(number)
        seen = state.context().run(REQUEST.get)
        if seen != self.model.at:
            raise Wrong(f"a compile for call {self.model.at} sees what is set for call {seen}")
        self.compiles.append(name)
        if self.life.values:
            graph.asked_floats = frozenset(graph.floats)
        fault = self.model.fault(name, rows, most)
        if fault and self.life.how == "raises":
            raise RuntimeError("no such instruction")
        check = NONE
        if self.life.values or pinned:

            def same(args: Sequence[Any]) -> bool:
                x, number = self._read(args)
                return (not pinned or x.shape[0] == rows) and repr(float(number)) == repr(most)

            check = Guards("the same", same if self.life.values else lambda args: args[0] == rows)

        def run(*args: Any) -> Sequence[Any]:
            given, other = self._read(args)
            if (pinned and given.shape[0] != rows) or (self.life.values and repr(float(other)) != repr(most)):
                raise Wrong(f"{name} was made for {rows} rows and {most}, and runs {given.shape[0]} and {float(other)}")
            if fault and self.life.how == "raises when run":
                raise RuntimeError("no such instruction")
            outputs: Sequence[Any] = graph.module(*args)
            if fault:
                return outputs[:0]
            self.ran.append(name)
            return outputs

        return Lowered(run, check, 0.0)

    def _read(self, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        (x,) = [tensor for tensor in tensors if tensor.dim()]
        (number,) = [tensor for tensor in tensors if not tensor.dim()]
        return x, number

    def arguments(self, call: Call) -> list[Any]:
        """As Dynamo passes them."""
        x, number = torch.randn(call.rows, 3), torch.tensor(call.most, dtype=torch.float64)
        (layout,) = [entry.layout for entry in self.graph.inputs if entry.layout is not None and not entry.number]
        read = dict(zip(layout.size, x.shape, strict=True))
        return [
            read[entry.expr] if entry.expr is not None else number if entry.number else x for entry in self.graph.inputs
        ]


def play(seed: int, graph: CapturedGraph, state: CompileState) -> Counter[str]:
    """Raises `Wrong`."""
    life = draw(seed)
    model = Model(life)
    played = Played(life, graph, state, model)
    counts: Counter[str] = Counter()
    before: list[Call] = []
    with mock.patch.object(lowering, "lower", played.lower):
        for at, call in enumerate(life.calls):
            model.at, model.now = at, model.now + call.later
            wanted, compiles = model.call(call)
            played.compiles.clear()
            played.ran.clear()
            looked = played.region.looked
            args = played.arguments(call)
            expected = played.graph.module(*args)
            played.lock.busy = call.busy
            context = contextvars.copy_context()
            context.run(REQUEST.set, at)
            try:
                with mock.patch.object(_compat, "owns_compile_lock", return_value=call.busy):
                    got = context.run(played.run, *args)
                ran = played.ran[-1] if played.ran else "eager"
            except VariantFailed:
                got, ran = expected, "raised"
            looked = played.region.looked - looked
            where = f"seed {seed}, call {at}, {call}\n{life}"
            if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
                raise Wrong(f"{where}\nother numbers")
            if (ran, played.compiles) != (wanted, compiles):
                raise Wrong(f"{where}\n{wanted} had to run after {compiles}; {ran} ran after {played.compiles}")
            repeated = not call.busy and call.later == 0.0 and before[-2:] == [call] * 2
            if repeated and wanted != "eager" and not compiles and looked:
                raise Wrong(f"{where}\n{wanted} runs, and the call looks for code")
            before = [*before, dataclasses.replace(call, later=0.0)]
            counts[ran if ran in ("eager", "raised", GENERIC, "opaque") else "variants"] += 1
            counts["compiles"] += len(compiles)
            counts["repeated"] += repeated
    return counts
