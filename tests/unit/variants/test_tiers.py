"""Whether code that took longer to compile takes the place of code that was there soon is measured on calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from multigraph_backend import sealing
from multigraph_backend.region import tiers
from multigraph_backend.region.tiers import ALIKE, CALLS, MOST, TIMED, Tier


class Clock:
    """What calls take is what they say."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Variant:
    text = "generic"


class Region:
    """As a region: it says when a whole graph is asked for, and what was decided."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float], whole: Callable[[int], float]) -> None:
        self.variant = Variant()
        self.clock, self.asked, self.ends = clock, 0, list[bool | None]()
        self.calls = [0, 0]
        self.answers: list[bool | None] = []  # of `compile_whole`, before True
        self.busy = 0  # times that nothing can be decided
        first: Any = SimpleNamespace(shortest=lambda *args: self._ran(0, seconds, args))
        self.whole: Any = SimpleNamespace(
            lowered=SimpleNamespace(shortest=lambda *args: self._ran(1, whole, args)),
            proven=False,
            holds=lambda args: True,
        )
        self.tier = Tier(first, self.variant, self)  # type: ignore[arg-type]

    def _ran(self, which: int, seconds: Callable[[int], float], args: Sequence[Any]) -> str:
        self.clock.now += seconds(args[0])
        self.calls[which] += 1
        return f"outputs of {args}"

    def compile_whole(self, tier: Tier, args: Sequence[Any]) -> bool | None:
        self.asked += 1
        return self.answers.pop(0) if self.answers else True

    def first_of_whole(self, tier: Tier, whole: Any, args: Sequence[Any]) -> Any:
        whole.proven = True
        return self._ran(1, lambda size: 1000.0, args)  # which does not count

    def decided(self, tier: Tier) -> bool:
        if self.busy and tier.taken is not None:
            self.busy -= 1
            return False
        self.ends.append(tier.taken)
        if tier.taken is not None:
            tier.run = tier.whole = None
        return True

    def call(self, *sizes: int) -> None:
        for size in sizes:
            run = self.tier.run or self.tier.first.shortest
            assert run(size, "x") == f"outputs of {(size, 'x')}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tiers, "time", made)
    return made


def tried(clock: Clock, seconds: Callable[[int], float], whole: Callable[[int], float]) -> Region:
    """A region whose whole graph is tried from the next call on."""
    region = Region(clock, seconds, whole)
    region.call(*[4] * CALLS)
    region.tier.begin_trial(region.whole)
    return region


def test_the_whole_graph_is_asked_for_after_so_many_calls_and_once(clock: Clock) -> None:
    region = Region(clock, lambda size: 1.0, lambda size: 0.5)
    region.call(*[4] * (CALLS - 1))
    assert region.asked == 0
    assert region.tier.said == f"the whole graph is compiled after {CALLS} calls ({CALLS - 1} so far)"
    region.call(4, 4, 4)
    assert region.asked == 1
    assert region.tier.said == "the whole graph is being compiled"
    assert region.tier.run is None
    assert region.ends == [None]  # calls run the first code alone meanwhile


def test_where_it_cannot_be_asked_for_now_it_is_later(clock: Clock) -> None:
    region = Region(clock, lambda size: 1.0, lambda size: 0.5)
    region.answers = [None, False]
    region.call(*[4] * CALLS)
    assert region.tier.run is not None
    region.call(*[4] * (CALLS - 1))
    assert region.asked == 1
    region.call(4)
    assert (region.asked, region.tier.taken, region.tier.run) == (2, False, None)
    region.tier.begin_trial(region.whole)
    assert region.tier.run is None


@pytest.mark.parametrize(("takes", "taken"), [(0.5, True), (0.98, True), (0.995, False), (1.0, False), (2.0, False)])
def test_the_whole_graph_stays_where_it_takes_less_time(clock: Clock, takes: float, taken: bool) -> None:
    region = tried(clock, lambda size: 1.0, lambda size: takes)
    region.call(*[4] * 5)  # one of them, the first of the whole graph's, was only checked
    assert region.tier.said == "the whole graph is tried beside bodies (4 calls so far)"
    region.call(*[4] * 395)
    assert region.tier.taken is taken
    assert region.ends == [None, taken]
    assert f"{takes:.2f} x the time of bodies" in region.tier.said
    assert min(region.calls) >= TIMED
    calls = list(region.calls)
    region.call(4)
    assert sum(region.calls) == sum(calls) + 1


def test_sizes_that_come_by_turns_are_no_bias(clock: Clock) -> None:
    """A large size takes a hundred times as long, and comes first."""
    region = tried(clock, lambda size: 0.01 * size, lambda size: 0.0102 * size)
    region.call(*[400] * 60, *[4, 400] * 40, *[4] * 200)
    assert region.tier.taken is False
    assert "1.02 x" in region.tier.said


def test_sizes_that_are_all_different_decide_nothing(clock: Clock) -> None:
    region = tried(clock, lambda size: 1.0, lambda size: 0.1)
    region.call(*range(2, 2 + MOST + 16))
    assert region.tier.taken is False
    assert "too few calls were alike" in region.tier.said


def test_the_first_calls_of_each_size_do_not_count(clock: Clock) -> None:
    seen: dict[int, int] = {}

    def cold(size: int) -> float:
        seen[size] = seen.get(size, 0) + 1
        return 100.0 if seen[size] <= 3 else 0.5

    region = tried(clock, lambda size: 1.0, cold)
    region.call(*[4, 5, 6, 7] * 100)
    assert region.tier.taken is True
    assert "0.50 x" in region.tier.said


def test_after_seal_nothing_is_tried(clock: Clock) -> None:
    try:
        region = Region(clock, lambda size: 1.0, lambda size: 0.5)
        sealing.seal()
        region.call(*[4] * CALLS)
        assert (region.asked, region.tier.run) == (0, None)
        sealing.unseal()
        region = tried(clock, lambda size: 1.0, lambda size: 0.5)
        region.call(*[4] * ALIKE)
        sealing.seal()
        tried_before = region.calls[1]
        region.call(*[4] * 40)
        assert region.calls[1] == tried_before
        assert region.tier.taken is False
        assert "sealed" in region.tier.said
    finally:
        sealing.unseal()


def test_code_that_is_refused_is_called_no_more_also_while_nothing_can_be_decided(clock: Clock) -> None:
    region = tried(clock, lambda size: 1.0, lambda size: 0.5)
    region.busy = 3
    region.tier.refuse("it is wrong")
    region.call(*[4] * 10)
    assert region.calls[1] == 0
    assert region.ends == [None, False]
    assert region.tier.said == "it is wrong: bodies stay"


def test_where_its_guards_do_not_hold_calls_run_the_first(clock: Clock) -> None:
    region = tried(clock, lambda size: 1.0, lambda size: 0.5)
    region.whole.holds = lambda args: args[0] != 5
    region.call(*[5] * 50)
    assert region.calls[1] == 0
    region.call(*[4] * 200)
    assert region.tier.taken is True


def test_threads_decide_once(clock: Clock) -> None:
    region = tried(clock, lambda size: 1.0, lambda size: 0.5)
    threads = [threading.Thread(target=region.call, args=[4] * 100) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert region.tier.taken is not None
    assert region.ends.count(region.tier.taken) >= 1


class Node:
    """One of autograd's graph."""

    def __init__(self, name: str, *behind: Any) -> None:
        self.name = lambda: name
        self.next_functions = tuple((node, 0) for node in behind)


class Trained:
    """Outputs whose backward takes as long as it is said to, and which are views of what compiled code returned."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.before: list[Callable[[object], None]] = []
        self.behind: list[Callable[[object, object], None]] = []
        self.register_prehook, self.register_hook = self.before.append, self.behind.append
        self.grad_fn = Node("ViewBackward0", self)
        self.next_functions = ((None, 0), (None, 0))

    def name(self) -> str:
        return "CompiledFunctionBackward"

    def backward(self) -> None:
        for begins in self.before:
            begins(())
        self.clock.now += self.seconds
        for ends in self.behind:
            ends((), ())


def trained(clock: Clock, seconds: tuple[float, float], whole: tuple[float, float]) -> tuple[Region, list[Trained]]:
    """A region of a graph that is trained, whose calls and backwards take so long; and outputs of its calls."""
    made: list[Trained] = []

    def code(seconds: tuple[float, float]) -> Any:
        def ran(*args: Any) -> list[Any]:
            clock.now += seconds[0]
            made.append(Trained(clock, seconds[1]))
            return [None, made[-1]]

        return SimpleNamespace(shortest=ran)

    region = Region(clock, lambda size: 1.0, lambda size: 1.0)
    region.tier = Tier(code(seconds), region.variant, region)  # type: ignore[arg-type]
    form: Any = SimpleNamespace(lowered=code(whole), proven=True, holds=lambda args: True)
    region.tier.begin_trial(form)
    return region, made


@pytest.mark.parametrize(
    ("whole", "taken"), [((1.5, 1.0), True), ((0.5, 2.6), False), ((1.0, 1.9), True), ((1.0, 2.0), False)]
)
def test_of_what_is_trained_a_call_counts_with_its_backward(
    clock: Clock, whole: tuple[float, float], taken: bool
) -> None:
    region, made = trained(clock, (1.0, 2.0), whole)
    for _ in range(400):
        if region.tier.run is None:
            break
        region.tier.run(4)
        region.tier.run(4)
        made[-1].backward()  # two calls, and then their backwards
        made[-2].backward()
    assert region.tier.taken is taken
    assert f"{sum(whole) / 3:.2f} x the time of bodies" in region.tier.said


def test_calls_without_a_backward_decide_nothing(clock: Clock) -> None:
    region, made = trained(clock, (1.0, 2.0), (0.1, 0.1))
    for _ in range(MOST // 2):
        assert region.tier.run is not None
        region.tier.run(4)
    made[-1].backward()
    for _ in range(MOST - 1):
        assert region.tier.run is not None
        region.tier.run(4)
    assert region.tier.taken is None
    assert region.tier.run is not None
    region.tier.run(4)
    assert region.tier.taken is False
    assert "too few calls were followed by their backward" in region.tier.said


def test_the_backward_of_code_that_ran_before_is_not_the_calls() -> None:
    """An input that is handed out, or a view of one, which other compiled code has made."""
    first, own = (Node("CompiledFunctionBackward", None, None) for _ in range(2))
    given, view, result = (SimpleNamespace(grad_fn=node) for node in (first, Node("ViewBackward0", first), own))
    assert tiers._backward_of([given, view], (given, 4)) is None
    assert tiers._backward_of([given, view, 3, result], (given, 4)) is own
    assert tiers._backward_of(given, ()) is first


def test_a_tier_keeps_neither_its_region_nor_its_variant(clock: Clock) -> None:
    region = Region(clock, lambda size: 1.0, lambda size: 0.5)
    code: Any = SimpleNamespace(shortest=lambda *args: "outputs")
    tier, variant = Tier(code, region.variant, region), weakref.ref(region.variant)  # type: ignore[arg-type]
    tier.begin_trial(SimpleNamespace(lowered=code, proven=True, holds=lambda args: True))  # type: ignore[arg-type]
    del region
    gc.collect()
    assert variant() is None
    assert tier.taken is None
