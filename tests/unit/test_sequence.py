"""What a graph issues is read off it in order, and what is not the same on every rank is not taken for the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.distributed import sequence
from multigraph_backend.distributed.sequence import DATA, Collective, Issued, SameSizes, Sizes

c10d: Any = torch.ops._c10d_functional


def issued(function: Callable[..., Any], *inputs: torch.Tensor, symbolic: bool = False) -> list[str]:
    gm = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    return [str(entry) for entry in sequence.of_graph(gm)]


def gathered(x: torch.Tensor, group: str = "1") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))


def test_collectives_are_told_in_their_order_and_waits_are_not() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = c10d.wait_tensor(c10d.all_reduce(x * 2, "sum", "0"))
        return gathered(y.to(torch.bfloat16)) + c10d.wait_tensor(c10d.broadcast(gathered(x, "0"), 1, "0"))

    assert issued(program, torch.ones(4, 6)) == [
        "all_reduce(float32[24], sum) in group '0'",
        "all_gather_into_tensor(bfloat16[24], 2) in group '1'",
        "all_gather_into_tensor(float32[24], 2) in group '0'",
        "broadcast(float32[48], 1) in group '0'",
    ]


def test_counts_are_expressions_over_sizes_and_what_data_decides_is_said_to() -> None:
    x = torch.ones(4, 6)
    (text,) = issued(lambda x: c10d.wait_tensor(c10d.all_reduce(x.view(-1), "avg", "0")), x, symbolic=True)
    assert text.startswith("all_reduce(float32[s")
    assert "*s" in text
    chosen = issued(lambda x: c10d.wait_tensor(c10d.all_reduce(x.nonzero(), "sum", "0")), torch.ones(4), symbolic=True)
    assert chosen == [f"all_reduce(int64[{DATA}], sum) in group '0'"]


def test_in_place_and_coalesced_forms() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        c10d.wait_tensor(c10d.all_reduce_(x, "sum", "0"))
        return [c10d.wait_tensor(part) for part in c10d.all_reduce_coalesced([x, y], "sum", "0")]

    assert issued(program, torch.ones(4), torch.ones(3, dtype=torch.int32)) == [
        "all_reduce(float32[4], sum) in group '0'",
        "all_reduce_coalesced(float32[4], int32[3], sum) in group '0'",
    ]


def test_split_sizes_count_one_by_one() -> None:
    (text,) = issued(lambda x: c10d.wait_tensor(c10d.all_to_all_single(x, [3, 1], [2, 2], "0")), torch.ones(4))
    assert text == "all_to_all_single(float32[4], 2 of, 3, 1, 2 of, 2, 2) in group '0'"


def test_a_collective_that_control_flow_decides_about_is_not_known() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), torch.sin, (x,))

    gm = make_fx(program, tracing_mode="fake")(torch.ones(4))
    with pytest.raises(sequence.NotKnown, match="cond decides while it runs whether all_reduce"):
        sequence.of_graph(gm)
    assert sequence.holds_collectives(gm)
    assert not sequence.holds_collectives(make_fx(torch.sin)(torch.ones(4)))


def test_the_plain_form_survives_json() -> None:
    entry = Collective("all_reduce", "0", ("float32",), ("s0*4",), ("sum",), 64)
    assert Collective.from_dict(json.loads(json.dumps(dataclasses.asdict(entry)))) == entry


# ---------------------------------------------------------------- comparing

S0, S1 = sympy.symbols("s0 s1", integer=True, positive=True)  # of Dynamo's trace
G0, G1, K = sympy.symbols("g0 g1 k", integer=True, positive=True)
GENERIC = Sizes({S0: G0, S1: G1})


def reduced(count: str, how: str = "sum", kind: str = "all_reduce", group: str = "0") -> Collective:
    return Collective(kind, group, ("float32",), (count,), (how,))


def differs(ours: Sizes, theirs: list[Collective], other: list[Collective]) -> str | None:
    return sequence.difference(Issued(tuple(theirs)), Issued(tuple(other)), SameSizes(GENERIC, ours))


@pytest.mark.parametrize(
    ("sizes", "generic", "count"),
    [
        (Sizes({S0: sympy.Integer(4), S1: K}), "g0*g1", "4*k"),
        (Sizes({S0: 8 * K, S1: sympy.Integer(2)}), "g0*g1 // 4", "4*k"),
        (Sizes({S0: sympy.Integer(4), S1: sympy.Integer(6)}), "max(g0, g1)", "6"),
        (Sizes({S0: G0, S1: K}, {K: G0}), "g0*g1", "g0**2"),
        (Sizes(), "data", "data"),
    ],
)
def test_counts_are_equal_where_the_variant_runs(sizes: Sizes, generic: str, count: str) -> None:
    assert differs(sizes, [reduced(generic)], [reduced(count)]) is None


@pytest.mark.parametrize(
    ("sizes", "generic", "count"),
    [
        (Sizes({S0: sympy.Integer(4), S1: K}), "g0*g1", "8*k"),
        (Sizes({S0: G0, S1: K}), "g0*g1", "g0**2"),
        (Sizes({S0: 8 * K, S1: sympy.Integer(2)}), "g0*g1 // 4", "k"),
        (Sizes(), "g0", "4"),
        (Sizes({S0: sympy.Integer(4), S1: K}), "data", "4"),
        (Sizes({S0: sympy.Integer(4), S1: K}), "g0*u7", "4*u7"),
    ],
)
def test_counts_that_differ_or_are_not_understood_are_no_match(sizes: Sizes, generic: str, count: str) -> None:
    assert differs(sizes, [reduced(generic)], [reduced(count)]) is not None


def test_the_difference_names_the_collective() -> None:
    sizes = Sizes({S0: sympy.Integer(4), S1: K})
    one, other = reduced("g0"), reduced("4")
    assert differs(sizes, [one], []) == "its forward issues 0 collectives, and generic's 1"
    assert differs(sizes, [one, one], [other, reduced("4", "max")]) == (
        "collective 1 of its forward is all_reduce(float32[4], max) in group '0', "
        "and generic's all_reduce(float32[g0], sum) in group '0'"
    )
    assert "broadcast" in (differs(sizes, [one], [reduced("4", kind="broadcast")]) or "")
    assert "group '7'" in (differs(sizes, [one], [reduced("4", group="7")]) or "")
    swapped = sequence.difference(
        Issued((), (one, reduced("g1"))), Issued((), (reduced("k"), other)), SameSizes(GENERIC, sizes)
    )
    assert swapped is not None
    assert "backward" in swapped
    unknown = sequence.difference(Issued(), Issued(unknown="cond decides"), SameSizes(GENERIC, sizes))
    assert unknown == "the collectives that it issues are not known: cond decides"
