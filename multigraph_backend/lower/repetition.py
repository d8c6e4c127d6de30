"""Where a graph repeats itself: bodies, each with the places where it stands again.

A model of 32 equal layers is traced as 32 layers.  What is compiled could be one layer and 32 calls of it.  This module
finds the layers in the steps of a graph, whether or not modules say where they are, also where they alternate, where
the first and the last differ, and where stages of several layers follow each other.

In:  the steps of a graph in order (`steps_of_graph`): what each does, as a value to compare, and its operands.
Out: a `Repetition`: bodies and calls.  Calls of one body do the same, step for step: the same operators with the same
     constants over values of the same kind, taken from the same earlier steps of the call or from the same argument of
     it.  What differs between the calls is their arguments, and nothing else.  Steps of a call lie one behind the
     other, calls do not overlap, and no call holds a step that stays.

How:  descriptions of steps become numbers.  The distances at which short windows of them come again are the candidates
for a period; few are tried, the most frequent.  For each the graph is cut into stretches that come again after so many
steps, at least by half, each stretch into blocks, where the least is lost by the cut, and equal blocks are one body.
Where steps stay, what lies between them is a candidate, too.  Blocks are told equal by comparing them, not by hashes.
Each candidate takes time linear in the graph, and their number is bounded.

What is lost by a cut is what a compiler would have computed on both sides of it in one kernel: values that are neither
made nor taken by a kernel of its own (a matrix product) between it and there; and tables, values that depend on nothing
(positions, their sines), between there and their first use, whatever lies between: a compiler computes them where they
are used.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 4  # steps that are looked for again
PERIODS = 12  # candidates that are tried
LEAST = 8  # steps of a body
CALL = 4  # what a call costs, in steps that are compiled
LOST = 3  # what it costs to keep apart what would be computed in one kernel, in steps, for each value and each call
#: of all steps, what bodies have to spare so that a compile is quicker with them (see `Repetition.worth`)
SPARED = 0.35
TWICE = 0.25  # ... and what one that is called twice has to


@dataclass(frozen=True)
class Step:
    """One step of a graph.

    description: what is done, to values of what kind, with what result; equal for steps that differ in operands only
    operands: a number for the result of that step, text for an input of the graph
    alone: whether it is a kernel of its own
    path: of the module that it was traced in
    stays: whether it may not be a part of a body
    taken: whether it only takes one out of several values, which no cut may keep from each other
    free: whether it computes nothing, but is a view of its first operand
    weight: how many steps it stands for: a checkpointed region is one step with a graph of its own
    """

    description: Hashable
    operands: tuple[int | str, ...] = ()
    alone: bool = False
    path: str = ""
    stays: bool = False
    taken: bool = False
    free: bool = False
    weight: int = 1


@dataclass(frozen=True)
class Call:
    """Steps from `start` on; `arguments` are what they take from elsewhere: earlier steps, or inputs by their names."""

    start: int
    arguments: tuple[int | str, ...]


@dataclass(frozen=True)
class Body:
    """`length`: in steps of the graph; `weight`: how many these stand for.  `results`: which of its steps, counted from
    its first, are used behind one of the calls."""

    length: int
    calls: tuple[Call, ...]
    results: tuple[int, ...]
    weight: int


@dataclass(frozen=True)
class Repetition:
    """See the module's text.  `steps`: how many those of the graph stand for.  Bodies in the order of first calls."""

    steps: int
    bodies: tuple[Body, ...] = ()

    @property
    def compiled(self) -> int:
        """Steps that are left to compile, when each body is compiled once."""
        return self.steps - sum((len(body.calls) - 1) * body.weight for body in self.bodies)

    def worth(self) -> Repetition:
        """What of it makes a compile quicker: all, less bodies that are called twice and are small, or nothing.

        A compiler takes little time for steps that it has seen in the same graph, and none for a kernel that it has;
        and a kernel at the end of a body may be another one than for the same steps elsewhere, for what a body is given
        is written over nowhere.  ConvNeXt has stages of few blocks; with a body for each its first call takes longer
        than with none (`benchmarks/first_calls.py`).
        """
        bodies = tuple(body for body in self.bodies if len(body.calls) > 2 or body.weight >= TWICE * self.steps)
        found = Repetition(self.steps, bodies)
        return found if found.compiled <= (1 - SPARED) * found.steps else Repetition(self.steps)

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Start and number of the body of each call, in order."""
        return sorted((call.start, number) for number, body in enumerate(self.bodies) for call in body.calls)

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {self.compiled} to compile"]
        for number, body in enumerate(self.bodies):
            starts = ", ".join(str(call.start) for call in body.calls)
            given = len(body.calls[0].arguments)
            results = ", ".join(map(str, body.results))
            lines.append(
                f"body {number}: {body.weight} steps, {given} arguments, results {results}; called at {starts}"
            )
        return "\n".join(lines)


def find(steps: Sequence[Step], lossless: bool = False) -> Repetition:
    """Bodies and calls such that as little as possible is compiled, weighed against what the calls cost.

    `lossless`: only calls that begin and end where nothing is lost.
    """
    graph = _Graph.of(steps)
    best, least = Repetition(graph.weight(0, len(steps))), float(graph.weight(0, len(steps)))
    for tried in _tried(graph, lossless):
        blocks = tried.lossless(graph) if lossless else tried
        cost = _cost(graph, blocks)
        if cost < least:
            best, least = _repetition(graph, blocks), cost
    return best


def between_entries(steps: Sequence[Step]) -> Repetition:
    """Only bodies that are whole entries of a list of modules, or lie between two: there programs hand on results."""
    graph = _Graph.of(steps)
    if not any(graph.boundary[:-1]):
        return Repetition(graph.weight(0, len(steps)))
    return _repetition(graph, _between(graph, [place for place, here in enumerate(graph.boundary) if here]))


def _tried(graph: _Graph, lossless: bool) -> Iterator[_Blocks]:
    named = any(graph.boundary[:-1])
    if named:
        yield _between(graph, [place for place, here in enumerate(graph.boundary) if here])
    if any(step.stays for step in graph.steps):
        stay = [index for index, step in enumerate(graph.steps) if step.stays]
        yield _between(graph, [place for index in stay for place in (index, index + 1)])
        if lossless:
            yield _between(graph, list(_lossless_between(graph, stay)))
    for period in _periods(graph):
        yield _blocks(graph, period, named=False, lossless=lossless)
        if named:
            yield _blocks(graph, period, named=True)


def _lossless_between(graph: _Graph, stay: Sequence[int]) -> Iterator[int]:
    """The first and the last place between steps that stay at which a cut loses nothing."""
    for one, other in itertools.pairwise([-1, *stay, len(graph.steps)]):
        places = [place for place in range(one + 1, other + 1) if not graph.lost[place]]
        yield from dict.fromkeys((*places[:1], *places[-1:]))


def verify(steps: Sequence[Step], found: Repetition) -> None:
    """Raise AssertionError where `found` does not keep what the module promises.  Compares steps themselves."""
    free = 0
    for start, number in found.calls:
        assert start >= free, "calls overlap"
        free = start + found.bodies[number].length
    assert free <= len(steps), "a call goes beyond the graph"
    for body in found.bodies:
        assert len(body.calls) > 1, "a body is called once"
        for call in body.calls:
            _verify_call(steps, body, call)


def _verify_call(steps: Sequence[Step], body: Body, call: Call) -> None:
    first = body.calls[0]
    for offset in range(body.length):
        mine, theirs = steps[first.start + offset], steps[call.start + offset]
        assert mine.description == theirs.description, f"step {offset} of calls at {first.start}, {call.start} differs"
        staying = mine.stays or theirs.stays
        assert not staying, f"step {offset} of calls at {first.start}, {call.start} stays"
        for one, other in itertools.zip_longest(mine.operands, theirs.operands):
            inside = isinstance(one, int) and one >= first.start
            if inside:
                assert isinstance(other, int), "operands differ"
                assert other - call.start == int(one) - first.start, "operands differ"
            else:
                assert first.arguments.index(one) == call.arguments.index(other), "arguments differ"
    inside_of_call = range(call.start, call.start + body.length)
    for later in range(call.start + body.length, len(steps)):
        for operand in steps[later].operands:
            if operand in inside_of_call:
                assert int(operand) - call.start in body.results, "a result is missing"


# ---------------------------------------------------------------- what is read off the steps once


@dataclass(frozen=True, eq=False)
class _Graph:
    """`tokens`: numbers of the descriptions, and of each step that stays its own.  `last`: the last use of each result.
    `before`: how many steps those before each place stand for.

    For each place before a step: what is `lost` by a cut there, how many values are `alive` across it, and whether
    modules of one list (`layers.3`, `layers.4`) meet there.
    """

    steps: Sequence[Step]
    tokens: Sequence[int]
    lost: Sequence[int]
    alive: Sequence[int]
    boundary: Sequence[bool]
    last: Sequence[int]
    before: Sequence[int]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> _Graph:
        numbers: dict[Hashable, int] = {}
        tokens = [
            -1 - index if step.stays else numbers.setdefault(step.description, len(numbers))
            for index, step in enumerate(steps)
        ]
        depths: list[int] = []
        tables: list[bool] = []
        last, fused, made_by = list(range(len(steps))), list(range(len(steps))), list(range(len(steps)))
        for index, step in enumerate(steps):
            made = [operand for operand in step.operands if isinstance(operand, int)]
            depths.append(max((depths[operand] for operand in made), default=0) + step.alone)
            told = len(made) == len(step.operands) and all(tables[operand] for operand in made)
            tables.append(told and not step.alone)
            if step.free and made:
                made_by[index] = made_by[made[0]]
            for operand in made:
                first_use, last[operand] = last[operand] == operand, index
                maker = made_by[operand]
                near = depths[maker] == depths[index] or (tables[maker] and first_use)
                if near and not (step.alone or steps[maker].alone or step.free):
                    fused[maker] = index
                if step.taken:
                    fused[operand] = index
        entries = [_entry(step.path) for step in steps]
        boundary = [index > 0 and entry != entries[index - 1] for index, entry in enumerate(entries)]
        before = [0, *itertools.accumulate(step.weight for step in steps)]
        return cls(steps, tokens, _across(fused), _across(last), [*boundary, True], last, before)

    def weight(self, start: int, end: int) -> int:
        """How many steps those between two places stand for."""
        return self.before[end] - self.before[start]

    def block(self, start: int, length: int) -> tuple[Hashable, tuple[int | str, ...]]:
        """What the steps from `start` on do, as a value that is equal where they do the same; and their arguments."""
        arguments: dict[int | str, int] = {}
        pattern: list[int] = []
        for index in range(start, start + length):
            step = self.steps[index]
            for operand in step.operands:
                if isinstance(operand, int) and operand >= start:
                    pattern.append(operand - start)
                else:
                    pattern.append(-1 - arguments.setdefault(operand, len(arguments)))
        tokens = tuple(self.tokens[start : start + length])
        return (tokens, tuple(pattern)), tuple(arguments)


def _across(until: Sequence[int]) -> list[int]:
    """How many intervals, from behind each step to `until`, lie across each place before a step, and the end."""
    change = [0] * (len(until) + 2)
    for index, end in enumerate(until):
        if end > index:
            change[index + 1] += 1
            change[end + 1] -= 1
    return list(itertools.accumulate(change))[: len(until) + 1]


def _entry(path: str) -> str:
    """The outermost entry of a list of modules that a path leads through: "layers.3" of "layers.3.attention"."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


# ---------------------------------------------------------------- periods


def _periods(graph: _Graph) -> list[int]:
    """Distances at which short windows come again, and those between entries of lists of modules; likeliest first."""
    seen: dict[tuple[int, ...], int] = {}
    found: collections.Counter[int] = collections.Counter()
    tokens = graph.tokens
    for start in range(len(tokens) - WINDOW + 1):
        window = tuple(tokens[start : start + WINDOW])
        if window in seen:
            found[start - seen[window]] += 1
        seen[window] = start
    places = [index for index, here in enumerate(graph.boundary) if here]
    named = collections.Counter(later - earlier for earlier, later in itertools.pairwise(places))
    likely = [
        *(period for period, _ in named.most_common(PERIODS // 3)),
        *(period for period, _ in found.most_common()),
    ]
    least = max(-(-LEAST * len(tokens) // max(graph.before[-1], 1)), 1)  # in steps that stand for as many as most do
    long_enough = (period if period >= least else period * -(-least // period) for period in likely)
    return list(itertools.islice(dict.fromkeys(long_enough), PERIODS))


def _stretches(tokens: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Begin and end of what comes again after `period` steps, at least by half in each window of so many steps."""
    matches, begin, end = 0, 0, 0
    for index in range(period, len(tokens)):
        matches += tokens[index] == tokens[index - period]
        if index >= 2 * period:
            matches -= tokens[index - period] == tokens[index - 2 * period]
        if index >= 2 * period - 1 and 2 * matches >= period:
            start = index - 2 * period + 1
            if start >= end:
                if end:
                    yield begin, end
                begin = start
            end = index + 1
    if end:
        yield begin, end


# ---------------------------------------------------------------- blocks


@dataclass
class _Blocks:
    """Equal blocks under the value that tells what they do: their length and weight, where they begin, with which
    arguments."""

    starts: dict[Hashable, list[tuple[int, tuple[int | str, ...]]]] = field(default_factory=dict)
    lengths: dict[Hashable, int] = field(default_factory=dict)
    weights: dict[Hashable, int] = field(default_factory=dict)

    def add(self, graph: _Graph, start: int, length: int) -> None:
        key, arguments = graph.block(start, length)
        self.lengths[key], self.weights[key] = length, graph.weight(start, start + length)
        self.starts.setdefault(key, []).append((start, arguments))

    def pay(self) -> _Blocks:
        """Only those that are worth a body of their own."""
        kept = {
            key: sorted(starts)
            for key, starts in self.starts.items()
            if self.weights[key] >= LEAST and (len(starts) - 1) * self.weights[key] > len(starts) * CALL
        }
        return _Blocks(kept, {key: self.lengths[key] for key in kept}, {key: self.weights[key] for key in kept})

    def lossless(self, graph: _Graph) -> _Blocks:
        """Only those that begin and end where nothing is lost."""
        kept = {
            key: [entry for entry in starts if not graph.lost[entry[0]] + graph.lost[entry[0] + self.lengths[key]]]
            for key, starts in self.starts.items()
        }
        return _Blocks(kept, self.lengths, self.weights).pay()

    def spans(self) -> list[tuple[int, int]]:
        return sorted((start, start + self.lengths[key]) for key, starts in self.starts.items() for start, _ in starts)


def _between(graph: _Graph, places: Sequence[int]) -> _Blocks:
    """What lies between `places`: the entries of a list of modules, in whatever order, and what lies between them."""
    blocks = _Blocks()
    for start, end in itertools.pairwise([0, *places, len(graph.steps)]):
        if graph.weight(start, end) >= LEAST:
            blocks.add(graph, start, end - start)
    return _with_rest(graph, blocks.pay())


def _blocks(graph: _Graph, period: int, named: bool, lossless: bool = False) -> _Blocks:
    """Bodies of `period` steps, and what lies between them where that comes again, too; cut at entries of lists, where
    it is `named`, or where the least is lost; where it is `lossless`, nothing, if there is such a place."""
    blocks = _Blocks()
    for begin, end in sorted(_stretches(graph.tokens, period), key=lambda stretch: stretch[0] - stretch[1]):
        phases = _phases(graph, period, begin, end, named, lossless)
        candidates = [_cut(graph, period, begin + phase, end, blocks) for phase in phases]
        for start in min(candidates)[1]:
            blocks.add(graph, start, period)
    blocks = blocks.pay()
    _add_found(graph, blocks, period)
    return _with_rest(graph, blocks)


def _with_rest(graph: _Graph, blocks: _Blocks) -> _Blocks:
    """Also what lies between blocks, where it comes again as a whole."""
    for start, end in list(_free(graph, blocks)):
        if graph.weight(start, end) >= LEAST:
            blocks.add(graph, start, end - start)
    return blocks.pay()


def _phases(graph: _Graph, period: int, begin: int, end: int, named: bool, lossless: bool) -> list[int]:
    """Where a stretch may be cut first, few places: where the least is compiled and lost, where it begins, unless it is
    `lossless`; or entries of a list."""

    tokens = graph.tokens
    differ = [place + period >= end or tokens[place] != tokens[place + period] for place in range(begin, end)]
    first = next((place for place, here in enumerate(differ) if not here), 0) % period
    until = [0, *itertools.accumulate(differ)]  # how many steps differ from those a period on, before each place

    def weight(phase: int) -> tuple[int, int, bool, int, int]:
        """What is lost; the less, the more blocks come again; whether most cuts are at no entry; what lives across one
        in the middle."""
        places = range(phase, end - begin + 1, period)
        again = sum(until[place + period] == until[place] for place in places[:-2])
        unnamed = 2 * sum(graph.boundary[begin + place] for place in places) < len(places)
        lost = sum(graph.lost[begin + place] for place in places)
        return lost, -again, unnamed, graph.alive[begin + places[len(places) // 2]], (phase - first) % period

    slack = min(period, end - begin - 2 * period + 1)
    weights = {phase: weight(phase) for phase in range(slack)}
    by_name = [phase for phase in weights if not weights[phase][2]]
    chosen = sorted(by_name if named and by_name else weights, key=lambda phase: weights[phase])[:2]
    if named or (lossless and not weights[chosen[0]][0]):
        return [phase for phase in chosen if named or not weights[phase][0]]
    return list(dict.fromkeys((*chosen, first)))


def _cut(graph: _Graph, period: int, first: int, end: int, blocks: _Blocks) -> tuple[float, list[int]]:
    """What is compiled of a stretch that is cut at `first` and then after each `period`, weighed; and the cuts."""
    starts = list(range(first, end - period + 1, period))
    keys: dict[Hashable, list[int]] = {}
    for start in starts:
        keys.setdefault(graph.block(start, period)[0], []).append(start)
    cost: float = LOST * sum(graph.lost[start] for start in starts[1:])
    for key, places in keys.items():
        weight, known = graph.weight(places[0], places[0] + period), key in blocks.starts
        if known or len(places) > 1:
            cost += (not known) * weight + len(places) * (CALL - weight)
    return cost, starts


def _free(graph: _Graph, blocks: _Blocks) -> Iterator[tuple[int, int]]:
    """What lies between the blocks."""
    at = 0
    for start, end in blocks.spans():
        if start > at:
            yield at, start
        at = end
    if at < len(graph.steps):
        yield at, len(graph.steps)


def _add_found(graph: _Graph, blocks: _Blocks, length: int) -> None:
    """Blocks of the graph's rest that do what a body of `length` steps does."""
    known = {_window_hash(graph.tokens[starts[0][0] : starts[0][0] + length]) for starts in blocks.starts.values()}
    for begin, end in list(_free(graph, blocks)):
        if not known or end - begin < length:
            continue
        value, top, start = _window_hash(graph.tokens[begin : begin + length]), pow(_BASE, length - 1, _PRIME), begin
        while True:
            past = 1
            if value in known:
                key, arguments = graph.block(start, length)
                if key in blocks.starts:
                    blocks.starts[key].append((start, arguments))
                past = length  # also where only the tokens are equal: each step is looked at once
            if start + past + length > end:
                break
            for _ in range(past):
                value = (value - (graph.tokens[start] + 1) * top) % _PRIME
                value = (value * _BASE + graph.tokens[start + length] + 1) % _PRIME
                start += 1


_BASE, _PRIME = 1_000_003, (1 << 61) - 1


def _window_hash(tokens: Sequence[int]) -> int:
    """Only says where to look: what is found is compared."""
    value = 0
    for token in tokens:
        value = (value * _BASE + token + 1) % _PRIME
    return value


def _cost(graph: _Graph, blocks: _Blocks) -> float:
    """Steps that are compiled, with what calls cost and what cuts lose, in steps."""
    cost = graph.weight(0, len(graph.steps))
    for key, starts in blocks.starts.items():
        cost += len(starts) * CALL - (len(starts) - 1) * blocks.weights[key]
        cost += LOST * sum(graph.lost[start] for start, _ in starts)
    return cost


def _repetition(graph: _Graph, blocks: _Blocks) -> Repetition:
    bodies: list[Body] = []
    for key, starts in blocks.starts.items():
        length = blocks.lengths[key]
        used: Mapping[int, None] = dict.fromkeys(
            offset for start, _ in starts for offset in range(length) if graph.last[start + offset] >= start + length
        )
        calls = tuple(Call(*entry) for entry in starts)
        bodies.append(Body(length, calls, tuple(sorted(used)), blocks.weights[key]))
    return Repetition(graph.weight(0, len(graph.steps)), tuple(sorted(bodies, key=lambda body: body.calls[0].start)))
