"""Collectives in recordings, out of them, and never half in one: graphs that are cut, on the simulated device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.allocator import installing
from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.partition import cuts, of_inductor
from multigraph_backend.cudagraphs.partition.cuts import CutRules
from multigraph_backend.cudagraphs.partition.generated_code import GeneratedCode
from multigraph_backend.cudagraphs.partition.graph_spec import GraphSpec, Placeholder
from multigraph_backend.cudagraphs.partition.of_inductor import Taken
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_spec import PieceSpec
from multigraph_backend.cudagraphs.recordings.tree import Tree
from multigraph_backend.distributed import groups
from multigraph_backend.process import rank
from tests.support.simulated.pieces import Bench, call_right, values
from tests.support.splitter import Split, split

c10d: Any = torch.ops._c10d_functional
RECORDED = CutRules(device_type="cpu", backends=frozenset({"gloo"}))


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def waited(x: torch.Tensor) -> torch.Tensor:
    y = c10d.wait_tensor(c10d.all_reduce(x.sin(), "sum", "0"))
    return y * 2


def waited_later(x: torch.Tensor) -> torch.Tensor:
    started = c10d.all_reduce(x.sin(), "sum", "0")
    other = torch.mm(x, x).cos()
    return c10d.wait_tensor(started) + other


def two_groups_of_ops(x: torch.Tensor) -> torch.Tensor:
    y = c10d.wait_tensor(c10d.all_reduce(x.sin(), "sum", "0"))
    return waited_later(y)


def cut(function: Callable[..., Any], rules: CutRules) -> Split:
    return split(make_fx(function, tracing_mode="fake")(torch.ones(4, 4)), rules)


def cutting_mm(rules: CutRules) -> CutRules:
    return CutRules(frozenset({"aten::mm"}), rules.safe, rules.device_type, rules.collectives, rules.backends)


def reasons(made: Split) -> list[tuple[str, str]]:
    return [(op, entry.reason) for entry in made.spec.cuts for op in entry.ops]


def pieces(made: Split, tree: Tree) -> list[Piece]:
    return [
        Piece(tree, function, PieceSpec(part.names, part.visible, groups=part.groups))
        for part, function in zip(made.spec.pieces, made.functions, strict=True)
    ]


def run_three_times(made: Split, function: Callable[..., Any]) -> SimulatedDevice:
    device = SimulatedDevice()
    tree = Tree(device)
    call = made.bind(pieces(made, tree))
    inputs = [torch.randn(4, 4) for _ in range(4)]  # alive together: none comes at the address of another
    for x, given in zip(inputs, [x.clone() for x in inputs], strict=True):
        (result,) = call([given])
        torch.testing.assert_close(result, function(x))
    # more than one of a piece where what runs between two happens to come at one address twice
    functions = {node.keyed for node in tree.root.below()} - {None}
    assert len(functions) == len(made.spec.pieces)
    assert tree.counts["failed"] == 0
    return device


def test_a_collective_of_a_backend_that_can_be_recorded_is_in_the_piece_around_it() -> None:
    made = cut(waited, RECORDED)
    (piece,) = made.spec.pieces
    assert piece.groups == ("0",)
    assert made.spec.groups == ("0",)
    assert made.spec.cuts == ()
    assert [str(entry) for entry in made.spec.collectives] == ["all_reduce(float32[16], sum) in group '0'"]
    device = run_three_times(made, waited)
    launched = device.calls("launch")
    assert launched.count("_c10d_functional.all_reduce.default") == 1  # captured once, replayed since
    assert len(device.calls("replay")) == 3


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (CutRules(device_type="cpu"), "a collective over gloo, which no recording can hold"),
        (CutRules(device_type="cpu", collectives="cut", backends=frozenset({"gloo"})), cuts.COLLECTIVES),
        (CutRules(frozenset({"_c10d_functional::all_reduce"}), device_type="cpu", backends=frozenset({"gloo"})),
         cuts.LISTED),
    ],
)  # fmt: skip
def test_one_that_cannot_or_may_not_be_recorded_is_cut_with_its_wait_and_the_reason(
    rules: CutRules, reason: str
) -> None:
    made = cut(waited, rules)
    assert reasons(made) == [("_c10d_functional.all_reduce", reason), ("_c10d_functional.wait_tensor", reason)]
    assert [piece.groups for piece in made.spec.pieces] == [(), ()]
    run_three_times(made, waited)


def test_registered_buffers_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "registered_buffers", lambda: groups.REGISTERED)
    assert all(reason.startswith(cuts.SYMMETRIC) for _, reason in reasons(cut(waited, RECORDED)))


def test_what_lies_in_ranges_that_grow_is_cut_unless_nccl_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuts_with(*, expandable: bool, environ: str) -> list[tuple[str, str]]:
        installed = installing.Installed(None, None, "any_stream", expandable, "", None)  # type: ignore[arg-type]
        monkeypatch.setattr(installing, "_installed", installed)
        monkeypatch.setenv(groups.REGISTERS_CAPTURED, environ)
        return reasons(cut(waited, RECORDED))

    assert all("NCCL_GRAPH_REGISTER=0" in reason for _, reason in cuts_with(expandable=True, environ="1"))
    assert cuts_with(expandable=True, environ="1") != []
    assert cuts_with(expandable=True, environ="0") == cuts_with(expandable=False, environ="1") == []


def test_the_wait_belongs_to_the_piece_of_its_start_or_both_are_out() -> None:
    made = cut(waited_later, RECORDED)
    assert [piece.groups for piece in made.spec.pieces] == [("0",)]  # nothing lies between them that is cut
    made = cut(waited_later, cutting_mm(RECORDED))
    assert reasons(made) == [
        ("aten.mm", cuts.LISTED),
        ("_c10d_functional.all_reduce", cuts.APART),
        ("_c10d_functional.wait_tensor", cuts.APART),
    ]
    assert [piece.groups for piece in made.spec.pieces] == [(), (), ()]
    run_three_times(made, waited_later)


def test_only_the_halves_are_left_out() -> None:
    made = cut(two_groups_of_ops, cutting_mm(RECORDED))
    assert made.spec.pieces[0].groups == ("0",)
    assert [reason for _, reason in reasons(made)] == [cuts.LISTED, cuts.APART, cuts.APART]
    run_three_times(made, two_groups_of_ops)


def test_a_start_that_the_graph_does_not_wait_for_is_left_out() -> None:
    made = cut(lambda x: c10d.all_reduce(x.sin(), "sum", "0"), RECORDED)
    assert reasons(made) == [("_c10d_functional.all_reduce", cuts.APART)]
    made = cut(lambda x: c10d.wait_tensor(x).sin(), RECORDED)
    assert reasons(made) == [("_c10d_functional.wait_tensor", cuts.APART)]


# ---------------------------------------------------------------- what Inductor generates

_HEAD = "torch.ops._c10d_functional"


def generated(*lines: str) -> GeneratedCode:
    body = "\n    ".join(lines)
    return GeneratedCode(
        f"""
def partition_0(args):
    buf0, arg1_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        {body.replace(chr(10), chr(10) + "    ")}
    return (buf0, )
class Runner:
    def call(self, args):
        buf0, arg1_1 = args
        args.clear()
        partition0_args = [buf0, arg1_1]
        (buf9, ) = self.partitions[0](partition0_args)
        buf10 = {_HEAD}.all_gather_into_tensor.default(buf9, 2, 'tp')
        {_HEAD}.wait_tensor.default(buf10)
        return (buf10, )
runner = Runner(partitions=[partition_0])
"""
    )


def as_inductor_says(code: GeneratedCode, source: str) -> GraphSpec:
    """The spec of a graph of which Inductor has generated `source`."""
    entry = SimpleNamespace(input_index_mapping=[0, 1], output_index_mapping=[None], constant_names=[])
    compiled = SimpleNamespace(source_code=source, partition_maps=[entry], mutated_input_idxs=[])
    names = (Placeholder("buf0"), Placeholder("arg1_1"))
    graph = GraphSpec(False, names, 1, (), (), (True,), (), False, (), (0,))
    return of_inductor.from_inductor(compiled, Taken(graph, (), {}))


def test_a_piece_with_half_of_a_collective_is_a_piece_that_is_not_recorded() -> None:
    halves, whole = (REDUCED,), (REDUCED, f"{_HEAD}.wait_tensor.default(buf0)")
    for lines, apart in ((halves, True), (whole, False)):
        code = generated(*lines)
        spec = as_inductor_says(code, "\n".join(code.lines))
        assert spec.refused is None
        (piece,) = spec.pieces
        assert piece.groups == ("0",)
        assert piece.unrecorded == (cuts.APART if apart else None)
        assert spec.groups == (() if apart else ("0",))
        assert (cuts.APART in [entry.reason for entry in spec.cuts]) == apart
        assert GraphSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


REDUCED = f"{_HEAD}.all_reduce_.default(buf0, 'sum', '0')"


@pytest.mark.parametrize(
    "lines",
    [
        (REDUCED, f"{_HEAD}.wait_tensor.default(buf0)"),
        (f"buf1 = {_HEAD}.all_gather_into_tensor.default(arg1_1, 2, '0')", "del arg1_1",
         f"{_HEAD}.wait_tensor.default(buf1)"),
        (f"{_HEAD}.all_gather_into_tensor_out.default(arg1_1, 2, '0', out=buf0)", f"{_HEAD}.wait_tensor.default(buf0)"),
        (f"buf1 = {_HEAD}.all_reduce_coalesced.default([arg1_1, buf0], 'sum', '0')", "buf2 = buf1[0]", "buf3 = buf1[1]",
         f"{_HEAD}.wait_tensor.default(buf2)", f"{_HEAD}.wait_tensor.default(buf3)"),
        (REDUCED, f"{_HEAD}.wait_tensor.default(buf0)", "buf4 = buf0; del buf0  # reuse",
         REDUCED.replace("buf0", "buf4"), f"{_HEAD}.wait_tensor.default(reinterpret_tensor(buf4, (4, ), (1, ), 0))"),
    ],
)  # fmt: skip
def test_code_that_waits_where_it_starts_is_recorded(lines: tuple[str, ...]) -> None:
    code = generated(*lines)
    assert not code.waits_elsewhere(0)
    assert code.groups(0) == ("0",)
    assert code.issued()[-1] == ("all_gather_into_tensor", "tp")
    assert len(code.issued()) == 1 + sum("wait_tensor" not in line and "c10d" in line for line in lines)


@pytest.mark.parametrize(
    "lines",
    [
        (REDUCED,),
        (f"{_HEAD}.wait_tensor.default(buf0)",),
        (REDUCED, f"{_HEAD}.wait_tensor.default(arg1_1)"),
        (REDUCED, f"{_HEAD}.wait_tensor.default(buf0)", "buf4 = buf0; del buf0  # reuse",
         REDUCED.replace("buf0", "buf4")),
        ("for _ in range(2):", f"    {REDUCED}", f"    {_HEAD}.wait_tensor.default(buf0)"),
        (f"something({REDUCED})", f"{_HEAD}.wait_tensor.default(buf0)"),
    ],
)  # fmt: skip
def test_code_that_does_not_is_not(lines: tuple[str, ...]) -> None:
    assert generated(*lines).waits_elsewhere(0)


# ---------------------------------------------------------------- collectives of the user on outputs


def doubled(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2,)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "live", lambda: True)


@pytest.mark.usefixtures("ranks")
def test_with_other_ranks_the_device_is_waited_for_before_outputs_are_moved() -> None:
    bench = Bench()
    piece = bench.piece(doubled, 1, 1)
    held = []
    for _ in range(5):
        x = values()
        held.append((x, *call_right(piece, doubled, x)))
    assert bench.clones() == 1
    assert len(bench.device.calls("settle")) == 2, "for the first call's output, and for the recording's"
    for x, y in held:
        torch.testing.assert_close(y, x * 2)


@pytest.mark.usefixtures("ranks")
def test_outputs_stay_where_they_are_while_the_device_does_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that a user has begun on them, and that waits for another rank, may be reading them."""
    bench = Bench()
    piece = bench.piece(doubled, 1, 1)
    bench.device.stuck = True
    held = []
    for _ in range(5):
        x = values()
        held.append((x, *call_right(piece, doubled, x)))
    addresses = [y.data_ptr() for _, y in held]
    assert bench.clones() == 0
    assert len(bench.device.calls("settle")) == 1, "it is not waited for at each call"
    bench.device.stuck = False
    monkeypatch.setattr(bench.tree, "_not_before", 0.0)
    for _ in range(3):
        x = values()
        held.append((x, *call_right(piece, doubled, x)))
    assert bench.clones() >= 1
    assert len(set(addresses)) == len(addresses)
    for x, y in held:
        torch.testing.assert_close(y, x * 2)


def test_a_gather_whose_result_is_checked_by_its_operators_name_is_whole() -> None:
    gathered = (
        f"buf2 = {_HEAD}.all_gather_into_tensor.default(buf0, 2, '0')",
        f"assert_size_stride(buf2, (8, 4), (4, 1), '{_HEAD}.all_gather_into_tensor.default')",
        f"assert_alignment(buf2, 16, '{_HEAD}.all_gather_into_tensor.default')",
    )
    for waits, apart in (((f"{_HEAD}.wait_tensor.default(buf2)",), False), ((), True)):
        code = generated(*gathered, *waits)
        (piece,) = as_inductor_says(code, "\n".join(code.lines)).pieces
        assert piece.groups == ("0",)
        assert piece.unrecorded == (cuts.APART if apart else None)
    hidden = generated(*gathered, f"wait = {_HEAD}.wait_tensor.default", "wait(buf2)")
    assert hidden.waits_elsewhere(0)
