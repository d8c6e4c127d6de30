"""Repeated blocks of a graph are found where they are equal, nowhere else, in linear time, and cut where least is lost.

Programs are steps of invented operators.  What is found is held to two judges that share nothing with the search: the
steps of all calls compared one by one (`repetition.verify`), and the program run with its bodies in place of its calls.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
from expecttest import assert_expected_inline

from multigraph_backend.lower import repetition
from multigraph_backend.lower.repetition import Repetition, Step, find, verify


class Program:
    """Steps, put together.  Operands are numbers of steps, or names of inputs."""

    def __init__(self, named: bool = False) -> None:
        self.steps: list[Step] = []
        self._named = named
        self.path = ""

    def add(self, what: Hashable, *operands: int | str, alone: bool = False, stays: bool = False) -> int:
        path = self.path if self._named else ""
        self.steps.append(Step(what, operands, alone, path, stays))
        return len(self.steps) - 1

    def layer(
        self,
        x: int | str,
        name: str,
        constant: float = 1.0,
        kind: str = "",
        tied: bool = False,
        writes: bool = False,
        deep: int = 0,
    ) -> int:
        """Two norms, and matrix products, each added to `x`: 12 steps, and `deep` more."""
        self.path = name
        normed = self.add("norm", x, f"{name}.norm")
        q = self.add("product", normed, f"{name}.q", alone=True)
        k = self.add("product", normed, f"{name}.q" if tied else f"{name}.k", alone=True)
        q, k = self.add("rotate", q, "cos"), self.add("rotate", k, "cos")
        y = self.add(f"attention{kind}", q, k, alone=True)
        y = self.add("product", y, f"{name}.o", alone=True)
        x = self.add("add", x, y)
        y = self.add("norm", x, f"{name}.norm2")
        y = self.add(("scale", constant), y)
        z = self.add("activation", y, stays=writes)
        for _ in range(deep):
            z = self.add("product", z, f"{name}.deep", alone=True)
        return self.add("add", x, z)


def run(steps: Sequence[Step]) -> list[Any]:
    """What each step computes, as the hash of what it was made of."""
    values: list[Any] = []
    for step in steps:
        values.append(hash((step.description, *(_of(values, operand) for operand in step.operands))))
    return values


def run_with_bodies(steps: Sequence[Step], found: Repetition) -> list[Any]:
    """The same, where each call runs the steps of its body's first call over arguments of its own; None where a call
    does not return what a step computes."""
    values: list[Any] = [None] * len(steps)
    calls = {start: (found.bodies[number], number) for start, number in found.calls}
    index = 0
    while index < len(steps):
        if index not in calls:
            step = steps[index]
            values[index] = hash((step.description, *(_of(values, operand) for operand in step.operands)))
            index += 1
            continue
        body, _ = calls[index]
        first = body.calls[0]
        (call,) = (call for call in body.calls if call.start == index)
        given = {name: _of(values, argument) for name, argument in zip(first.arguments, call.arguments, strict=True)}
        inside: list[Any] = []
        for step in steps[first.start : first.start + body.length]:
            taken = [
                inside[operand - first.start] if isinstance(operand, int) and operand >= first.start else given[operand]
                for operand in step.operands
            ]
            inside.append(hash((step.description, *taken)))
        for result in body.results:
            values[index + result] = inside[result]
        index += body.length
    return values


def _of(values: Sequence[Any], operand: int | str) -> Any:
    return operand if isinstance(operand, str) else values[operand]


def hold(steps: Sequence[Step]) -> Repetition:
    """`find`, held to both judges."""
    found = find(steps)
    verify(steps, found)
    expected, got = run(steps), run_with_bodies(steps, found)
    used = {operand for step in steps for operand in step.operands if isinstance(operand, int)}
    inside = {start + place for start, number in found.calls for place in range(found.bodies[number].length)}
    for index, (value, other) in enumerate(zip(expected, got, strict=True)):
        if other is not None:
            assert value == other, f"step {index} computes something else"
        else:
            assert index in inside
    assert all(got[operand] is not None for operand in used - inside)
    return found


def chain(count: int, named: bool = False, deep: int = 0, **of_one: Any) -> Program:
    """`count` layers behind an embedding and before a head; `of_one`: what is different in the third."""
    program = Program(named)
    x = program.add("embedding", "ids")
    for number in range(count):
        x = program.layer(x, f"layers.{number}", deep=deep, **(of_one if number == 2 else {}))
    program.path = ""
    program.add("head", x, "head", alone=True)
    return program


def test_equal_layers_are_one_body() -> None:
    assert_expected_inline(
        str(hold(chain(6).steps)),
        """\
74 steps, 26 to compile
body 0: 12 steps, 8 arguments, results 10, 11; called at 2, 14, 26, 38, 50""",
    )


def test_few_layers_are_cut_where_modules_end_and_many_where_nothing_is_lost() -> None:
    """A cut between layers parts a sum from the norm that reads it, which costs each call something; any other cut
    leaves one layer that is not called."""
    few, many = (hold(chain(count, named=True, deep=12).steps) for count in (3, 20))
    assert [call for call, _ in few.calls] == [1, 25, 49]
    assert {(start - 1) % 24 for start, _ in many.calls} == {1}, "behind the norm of the sum"


def test_as_many_calls_as_layers_where_the_norm_behind_the_last_is_as_theirs() -> None:
    """Cut behind the norm, where nothing is lost: the last call's norm is the one before the head.  Fewer values live
    across other cuts, which leave a layer that is not called."""
    program = Program()
    x: int | str = program.add("embedding", "ids")
    for number in range(4):
        x = program.layer(x, f"layers.{number}", deep=12)
    program.add("head", program.add("norm", x, "norm"), "head", alone=True)
    found = find(program.steps, lossless=True)
    verify(program.steps, found)
    assert [start for start, _ in found.calls] == [2, 26, 50, 74]
    assert hold(program.steps).compiled == found.compiled == 99 - 3 * 24


def test_layers_that_alternate_are_a_body_together_or_bodies_in_turn() -> None:
    program = Program()
    x = program.add("embedding", "ids")
    for number in range(9):
        x = program.layer(x, f"layers.{number}")
        if number % 3 == 2:
            for _ in range(9):
                x = program.add("mix", x, f"experts.{number}", alone=True)
    found = hold(program.steps)
    assert len(program.steps) == 136
    assert found.compiled <= 60


def test_constants_that_alternate_are_two_bodies_or_one_of_both() -> None:
    program = Program()
    x: int | str = "x"
    for number in range(8):
        x = program.layer(x, f"layers.{number}", kind=" in a window" if number % 2 else "")
    assert hold(program.steps).compiled <= 36


def test_stages_are_bodies_of_their_own() -> None:
    program = Program()
    x: int | str = "x"
    for stage in range(3):
        x = program.add("downsample", x, alone=True)
        for number in range(4):
            x = program.layer(x, f"stages.{stage}.{number}", kind=f" of {stage}")
    found = hold(program.steps)
    assert len(found.bodies) == 3
    assert found.compiled <= 3 * 24 + 3


def test_equal_layers_apart_from_each_other_are_one_body() -> None:
    program = Program(named=True)
    x: int | str = "x"
    for number, kind in enumerate("AABABBBAAB"):
        x = program.layer(x, f"layers.{number}", kind=kind)
    assert_expected_inline(
        str(hold(program.steps)),
        """\
120 steps, 36 to compile
body 0: 12 steps, 8 arguments, results 10, 11; called at 1, 13, 37, 85, 97
body 1: 12 steps, 8 arguments, results 10, 11; called at 25, 49, 61, 73""",
    )


@pytest.mark.parametrize(
    "different",
    [{"constant": 2.0}, {"kind": " over other strides"}, {"tied": True}, {"writes": True}],
    ids=["constant", "stride", "shared parameter", "in-place write"],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_layer_that_is_almost_equal_is_not_called(different: dict[str, Any], named: bool) -> None:
    """The third of six layers is steps 25 to 36; no call holds the step that differs."""
    found = hold(chain(6, named, **different).steps)
    assert found.bodies
    place = 25 + {"constant": 9, "kind": 5, "tied": 2, "writes": 10}[next(iter(different))]
    assert not any(start <= place < start + found.bodies[number].length for start, number in found.calls)


def test_where_each_layer_has_a_step_that_stays_what_lies_between_is_a_body() -> None:
    program = Program()
    x: int | str = "x"
    for number in range(6):
        x = program.layer(x, f"layers.{number}", writes=True, deep=9)
    found = hold(program.steps)
    assert [(body.length, len(body.calls)) for body in found.bodies] == [(20, 5)]


def test_values_of_one_step_are_not_cut_apart() -> None:
    """A step makes two values, one is read at once: nothing else would be lost by a cut between them."""
    program = Program()
    x: int | str = "x"
    for _ in range(5):
        both = program.add("product", x, alone=True)
        for _ in range(9):
            x = program.add("product", both, alone=True)
        x = len(program.steps)
        program.steps.append(Step("one of both", (both,), taken=True))
    found = hold(program.steps)
    assert found.bodies
    for start, number in found.calls:
        inside = range(start, start + found.bodies[number].length)
        for index, step in enumerate(program.steps):
            if step.taken:
                assert (index in inside) == (step.operands[0] in inside)


def body(weight: int, calls: int) -> repetition.Body:
    return repetition.Body(weight, tuple(repetition.Call(at, ()) for at in range(calls)), (0,), weight)


@pytest.mark.parametrize(
    ("bodies", "kept"),
    [
        ([(50, 3)], [(50, 3)]),  # 100 of 200 steps are spared
        ([(30, 3)], []),  # 60
        ([(35, 3)], [(35, 3)]),  # 70, just enough
        ([(49, 2), (35, 3)], [(35, 3)]),  # twice is enough for large ones alone
        ([(60, 2)], []),
        ([(80, 2)], [(80, 2)]),
        ([(49, 2), (49, 2)], []),
        ([], []),
    ],
)
def test_bodies_that_spare_little_are_not_worth_it(bodies: list[tuple[int, int]], kept: list[tuple[int, int]]) -> None:
    found = Repetition(200, tuple(body(*one) for one in bodies)).worth()
    assert [(one.weight, len(one.calls)) for one in found.bodies] == kept
    assert found.steps == 200


def test_calls_that_lose_nothing_begin_and_end_beside_kernels_of_their_own() -> None:
    steps = chain(6).steps
    found = find(steps, lossless=True)
    verify(steps, found)
    lost = repetition._Graph.of(steps).lost
    assert found.bodies
    assert all(not lost[start] for start, _ in found.calls)
    assert all(not lost[start + found.bodies[number].length] for start, number in found.calls)


def test_where_entries_meet_in_a_kernel_calls_that_lose_nothing_are_cut_elsewhere() -> None:
    """The sum at a layer's end and the norm at the next one's begin are one kernel.  To cut there would make one call
    more, and that weighs more than what is lost."""
    steps = chain(5, named=True, deep=12).steps
    found = find(steps, lossless=True)
    verify(steps, found)
    lost = repetition._Graph.of(steps).lost
    assert [(body.length, len(body.calls)) for body in found.bodies] == [(24, 4)]
    assert not any(lost[start] + lost[start + 24] for start, _ in found.calls)


def test_calls_that_lose_nothing_lie_between_what_each_layer_writes_and_takes_from_there() -> None:
    """A cache is written in one kernel with what is computed for it, and gathered in one with what attention takes."""
    program = Program()
    x = program.add("embedding", "ids", alone=True)
    for layer in range(4):
        normed = program.add("norm", x, f"{layer}.norm")
        q, k, v = (program.add(f"product {name}", normed, f"{layer}.{name}", alone=True) for name in "qkv")
        q, k = program.add("rotate", q, "cos"), program.add("rotate", k, "cos")
        caches = []
        for name, new in (("keys", k), ("values", v)):
            written = program.add("write", f"{layer}.{name}", new, stays=True)
            caches.append(program.add("gather", written, "slots"))
        caches = [program.add("copy", cache) for cache in caches]
        y = program.add("attention", q, *caches, alone=True)
        x = program.add("add", x, program.add("product o", y, f"{layer}.o", alone=True))
        y = program.add("activation", program.add("product up", x, f"{layer}.up", alone=True))
        x = program.add("add", x, program.add("product down", y, f"{layer}.down", alone=True))
    program.add("norm", x, "norm")
    found = find(program.steps, lossless=True)
    verify(program.steps, found)
    (body,) = found.bodies
    inside = [[program.steps[call.start + place].description for place in range(body.length)] for call in body.calls]
    behind = ["product o", "add", "product up", "activation", "product down", "add", "norm"]
    assert inside == [["attention", *behind, "product q", "product k", "product v", "rotate"]] * 3


def test_tables_are_not_cut_from_their_first_use() -> None:
    """Sines of positions are used behind a product, where a compiler computes them: in the next entry of a list."""
    program = Program(named=True)
    x: int | str = "x"
    tables = []
    table: int | str = "first"
    for number in range(12):
        program.path = f"layers.{number}"
        x = program.add("product", x, f"{number}.first", alone=True)
        x = program.add("rotate", x, table)
        tables.append((table, x))
        for place in range(20):
            x = program.add("product", x, f"{number}.{place}", alone=True)
        table = program.add("sine", program.add("positions"))
    found = find(program.steps, lossless=True)
    verify(program.steps, found)
    assert [(body.length, len(body.calls)) for body in found.bodies] == [(24, 11)]
    cuts = [place for start, _ in found.calls for place in (start, start + 24)]
    assert not any(made < cut <= used for made, used in tables[1:] for cut in cuts)


def test_a_table_that_all_layers_use_keeps_none_from_being_a_call() -> None:
    program = Program()
    table = program.add("sine", program.add("positions"))
    x: int | str = program.add("rotate", "x", table)
    for number in range(6):
        for place in range(9):
            x = program.add("product", x, f"{number}.{place}", alone=True)
        x = program.add("rotate", x, table)
    found = find(program.steps, lossless=True)
    verify(program.steps, found)
    assert [(body.length, len(body.calls)) for body in found.bodies] == [(10, 6)]


def random_program(seed: int) -> list[Step]:
    """Layers of a few kinds in runs, some almost equal, some steps between them."""
    rng = random.Random(seed)
    program = Program(named=rng.random() < 0.5)
    kinds = [rng.choice(("", " a", " b")) for _ in range(rng.randint(1, 3))]
    x: int | str = program.add("embedding", "ids")
    for number in range(rng.randint(2, 14)):
        kind = kinds[number % len(kinds)] if rng.random() < 0.9 else rng.choice(kinds)
        odd: dict[str, Any] = {}
        if rng.random() < 0.2:
            odd = rng.choice([{"constant": 2.0}, {"tied": True}, {"writes": True}])
        if rng.random() < 0.1:
            program.path = ""
            for _ in range(rng.randint(1, 12)):
                x = program.add("step between", x)
        name = f"layers.{number if rng.random() < 0.9 else 0}"
        x = program.layer(x, name, kind=kind, **odd)
        if rng.random() < 0.05:  # one more use of something from far away
            x = program.add("skip", x, rng.randrange(len(program.steps)))
    return program.steps


def test_random_chains_are_held_to_both_judges() -> None:
    found = [hold(random_program(seed)) for seed in range(300)]
    assert sum(bool(one.bodies) for one in found) > 200


def wrong(search: Callable[[Sequence[Step]], Repetition], seeds: int = 60) -> int:
    """For how many random programs the judge says that what `search` finds is wrong."""
    count = 0
    for seed in range(seeds):
        steps = random_program(seed)
        try:
            verify(steps, search(steps))
        except (AssertionError, ValueError):
            count += 1
    return count


def test_a_search_that_merges_almost_equal_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mutants take blocks of equal operators for equal: one whatever the operands are, one whatever constants."""

    def whatever_constants(steps: Sequence[Step]) -> Repetition:
        plain = [step.description[0] if isinstance(step.description, tuple) else step.description for step in steps]
        return find([dataclasses.replace(step, description=said) for step, said in zip(steps, plain, strict=True)])

    assert wrong(find) == 0
    assert wrong(whatever_constants) > 3
    whole = repetition._Graph.block

    def whatever_operands(self: Any, start: int, length: int) -> Any:
        (tokens, _), arguments = whole(self, start, length)
        return (tokens, ()), arguments

    monkeypatch.setattr(repetition._Graph, "block", whatever_operands)
    assert wrong(find) > 3


def counted(steps: Sequence[Step]) -> int:
    """Lines of the search that run for `steps`, each turn of a loop or comprehension counted."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != repetition.__file__:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        find(steps)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("kinds", [1, 3])
def test_the_search_takes_time_linear_in_the_graph(kinds: int) -> None:
    """Counted in lines that run, not in seconds: four times the layers are four times the lines."""

    def layers(count: int) -> list[Step]:
        program = Program(named=True)
        x: int | str = "x"
        for number in range(count):
            x = program.layer(x, f"layers.{number}", kind=str(number % kinds))
        return program.steps

    small, large = counted(layers(48)), counted(layers(192))
    assert large < 4.6 * small


def test_programs_that_hold_nothing_twice_stay_as_they_are() -> None:
    program = Program()
    x: int | str = "x"
    for number in range(40):
        x = program.add(f"step {number}", x)
    assert not hold(program.steps).bodies
    assert not hold([]).bodies
    assert not hold(chain(1).steps).bodies


def test_one_step_again_and_again_is_cut_into_bodies_and_the_judges_agree() -> None:
    program = Program()
    x: int | str = "x"
    for _ in range(100):
        x = program.add("step", x, alone=True)
    assert hold(program.steps).compiled < 60
