"""Recorded code where nothing can be recorded: it runs as it is, and says why once."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import _compat, events, native, report
from multigraph_backend.cudagraphs import account, output_code, runtime
from multigraph_backend.cudagraphs.numbers import Numbers
from multigraph_backend.cudagraphs.output_code import RecordedCode, Wanted
from multigraph_backend.cudagraphs.partition.graph_spec import Cut, GraphSpec, PartitionSpec
from multigraph_backend.cudagraphs.recordings.recording import NotAllRecorded
from tests.support.simulated.pieces import PIECE, SPEC, Bench, boxed, values

WANTED = Wanted(required=False, must_pay=True, most=5)


class Inner:
    """Stands for Inductor's code."""

    constants: dict[str, Any] | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        return ["ran", *inputs]


def code(spec: GraphSpec, label: str) -> RecordedCode:
    return RecordedCode(Inner(), spec, label, WANTED, inference=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"devices": (0, 1)}, "it spans 2 devices"),
        ({"refused": "size s1 of input x is no input"}, "size s1 of input x is no input"),
        ({"devices": (), "pieces": ()}, None),
    ],
)
def test_code_that_cannot_be_recorded_runs_and_says_why_once(
    changes: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    events.reset_stats()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = code(dataclasses.replace(SPEC, **changes), f"label {reason}")
            assert made.pieces == ()
            assert made([1]) == ["ran", 1]
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if reason is None else [f"label {reason} runs unrecorded: {reason}"])


@pytest.mark.parametrize("changes", [{}, {"refused": "it cannot be"}, {"devices": (), "pieces": ()}])
def test_code_that_takes_numbers_from_a_vector_is_given_it_recorded_or_not(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "unavailable", lambda: "there is no GPU")
    lifted = Numbers((1,), (), torch.device("cpu"))
    made = RecordedCode(
        Inner(), dataclasses.replace(SPEC, **changes), "with numbers", WANTED, inference=True, lifted=lifted
    )
    number = torch.tensor(0.5, dtype=torch.float64)
    assert made([1, number]) == ["ran", 1, number, torch.tensor([0.5])]
    again = pickle.loads(pickle.dumps(lifted))
    assert again == lifted


def test_a_device_that_cannot_be_set_up_costs_the_recordings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", fail)
    made = code(SPEC, "no device")
    assert (made.pieces, made([2])) == ((), ["ran", 2])


@pytest.mark.parametrize(
    ("changes", "of_piece", "repeatable"),
    [
        ({}, {}, True),
        ({"pure": False}, {}, False),
        ({"random": True}, {}, False),
        ({"is_backward": True}, {}, False),  # it may use the memory of what it is given again
        ({"not_known": "an operator that may issue some"}, {}, False),
        ({"mutated": (0,)}, {"mutated": (0,)}, False),
        ({"whole": False}, {"inputs": (None,), "outputs": (0,)}, False),  # of a temporary, too
    ],
)
def test_only_a_piece_that_changes_nothing_may_be_run_again(
    changes: dict[str, Any], of_piece: dict[str, Any], repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    monkeypatch.setattr(
        Inner, "recursively_apply_fns", lambda self, wrappers: [wrap(self) for wrap in wrappers], raising=False
    )
    spec = dataclasses.replace(SPEC, pure=True, random=False, pieces=(dataclasses.replace(PIECE, **of_piece),))
    (piece,) = code(dataclasses.replace(spec, **changes), "label").pieces
    assert piece.spec.repeatable == repeatable


def test_a_piece_knows_where_its_inputs_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    with output_code.attached() as codes:
        made = code(SPEC, "whole")
    (piece,) = made.pieces
    assert codes == [made]
    spec = piece.spec
    assert (spec.names, spec.traces, spec.must_pay, spec.most) == (("x",), ("the user's line",), True, 5)
    assert type(made.run) is type(piece.entry())


def test_pieces_are_called_natively_as_soon_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the code, and its parts, of which one is given a tuple, and one is not recorded."""
    calls = native.ready()
    assert calls is not None
    parts = [boxed(lambda x: (x * 2,)), boxed(lambda x: (x + 1,)), boxed(lambda both: (both[0] + both[1],))]
    monkeypatch.setattr(Inner, "parts", parts, raising=False)

    def apply(self: Inner, wrappers: list[Callable[[Any], Any]]) -> None:
        self.parts = [wrap(part) for wrap, part in zip(wrappers, self.parts, strict=True)]

    monkeypatch.setattr(Inner, "recursively_apply_fns", apply, raising=False)
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    pieces = (
        PIECE,
        dataclasses.replace(PIECE, number=1, unrecorded="no"),
        dataclasses.replace(PIECE, number=2, results=(2,)),
    )
    bench = Bench(native_calls=False)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    whole, cut = code(SPEC, "whole"), code(dataclasses.replace(SPEC, pieces=pieces, whole=False), "cut")
    gone = code(SPEC, "of a model that is gone")
    assert whole.run is whole.pieces[0]
    assert cut.inner.parts[0] is cut.pieces[0]
    del gone
    assert bench.tree.take(calls)
    assert type(whole.run).__name__ == type(cut.inner.parts[0]).__name__ == "Entry"
    assert cut.inner.parts[1] is parts[1]
    for _ in range(4):
        x, y = values(), values()
        assert torch.equal(cut.inner.parts[0]([x])[0], x * 2)
        assert torch.equal(cut.inner.parts[2]([(x, y)])[0], x + y)
    assert bench.recorded() == 2
    assert bench.replays() > 2


def test_code_from_a_cache_is_called_what_it_is_loaded_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cached(Inner):
        current_callable = None

        def post_compile(self, *args: Any) -> None:
            pass

    bench = Bench()
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    loaded = SimpleNamespace(cache_hit_post_compile=lambda inner, key, constants: (inner, None))
    monkeypatch.setattr(_compat, "FxGraphCache", loaded)
    made = RecordedCode(Cached(), SPEC, "one model, forward", WANTED, inference=True)
    assert made.pieces[0].spec.label == "one model, forward"
    with output_code.attached("another model") as codes:
        made.post_compile((), None, {})
    assert codes == [made]
    assert made.pieces[0].spec.label == made.label == "another model, forward"


class Parted:
    """Two pieces around an operator with two results, as Inductor's code calls them."""

    constants: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []  # no address comes twice by chance, and is taken for one that stays
        self.partitions = [boxed(lambda x: (x * 2,)), boxed(lambda both, x: (both[0] - both[1] * x,))]

    def recursively_apply_fns(self, wrappers: list[Any]) -> None:
        self.partitions = [wrap(piece) for wrap, piece in zip(wrappers, self.partitions, strict=True)]

    def __call__(self, inputs: list[Any]) -> Any:
        (x,) = inputs
        inputs.clear()
        (doubled,) = self.partitions[0]([x])
        both = doubled.sin(), doubled.cos()
        self.made += both
        given = [both, x]
        result = self.partitions[1](given)
        assert given == []  # as from Inductor's own function
        return result


def test_results_that_come_as_one_tuple_are_inputs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    first = dataclasses.replace(PIECE, outputs=(None,), visible=(False,))
    second = PartitionSpec(1, (None, 0), (0,), (1,), (), (True,), ("buf1", "x"), results=(2, 0))
    cut = Cut("a Python custom operator", ("my::two",))
    spec = dataclasses.replace(SPEC, static=(0,), pieces=(first, second), whole=False, cuts=(cut,))
    spec.verify()
    made = RecordedCode(Parted(), spec, "parted", WANTED, inference=True)
    _, piece = made.pieces
    assert (piece.spec.names, piece.spec.static, piece.spec.reused) == (("buf1[0]", "buf1[1]", "x"), {2}, {0, 1})
    x = torch.empty(8)
    for _ in range(5):
        x.normal_()
        torch.testing.assert_close(made([x]), ((2 * x).sin() - (2 * x).cos() * x,))
    assert bench.recorded() == 2
    assert bench.replays() == 2 * 4
    assert bench.unrecorded(*made.pieces) == {}


def test_the_account_has_cuts_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    cut = Cut("a copy between devices", ("aten::_to_copy",), 'File "model.py", line 3, in forward\n    x = x.cpu()')
    made = [code(dataclasses.replace(SPEC, cuts=(cut,), pieces=()), "b"), code(SPEC, "a")]
    made[1].refused = "it spans 2 devices"
    said = [str(report) for report in account.graphs(made)]
    assert said == [
        "a: nothing is recorded: it spans 2 devices",
        "b: 0 pieces\n  cut by a copy between devices: aten::_to_copy\n"
        '    File "model.py", line 3, in forward\n    x = x.cpu()',
    ]
    explanation = multigraph_backend.explain()
    assert {report.label for report in explanation.graphs} >= {"a", "b"}
    assert said[1] in str(explanation)
    assert json.loads(explanation.to_json())["graphs"]


def test_the_account_of_a_variant_is_of_all_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recordings, which are others than those of other variants, and tensors that its code holds."""
    bench = Bench()
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    monkeypatch.setattr(runtime, "trees", lambda: [bench.tree])

    class Repeats(Inner):
        def __call__(self, inputs: list[Any]) -> Any:
            (x,) = inputs
            inputs.clear()
            return (x.repeat(self.times),)

        def __init__(self, times: int, constants: dict[str, Any]) -> None:
            self.times, self.constants = times, constants

    table = torch.zeros(100)
    held = {"table": table, "part": table[3:7], "name": "no tensor"}
    with output_code.attached() as codes:
        made = [RecordedCode(Repeats(n, held), SPEC, f"repeats {n}", WANTED, inference=True) for n in (2, 4)]
        other = RecordedCode(Repeats(3, {}), SPEC, "of another variant", WANTED, inference=True)
    assert codes == [*made, other]
    x = torch.ones(8)  # one for all calls: whoever comes at another address at times is recorded again
    for _ in range(2):
        for entry in codes:
            entry([x])
    output = made[1]([x])
    assert output is not None
    of_piece = account.of_pieces([bench.tree])
    found = account.of_code(made, of_piece)
    assert (found.recordings, found.kept, found.alive, found.constants) == (2, 32 * (2 + 4), 32 * 4, 400)
    assert found.peak == max(entry.peak for code in made for piece in code.pieces for entry in of_piece[piece])
    assert account.of_code([other], of_piece).constants == 0
    whole = account.of(bench.tree)
    assert sum(entry.kept for entry in whole.memory) == found.kept + account.of_code([other], of_piece).kept
    assert sum(pool.live for pool in whole.pools) == found.alive

    variant = SimpleNamespace(forms=[SimpleNamespace(lowered=SimpleNamespace(codes=[weakref.ref(c) for c in made]))])
    of_variant = report._memory_of_variants()
    assert of_variant(variant) == found
    none = SimpleNamespace(forms=[SimpleNamespace(lowered=SimpleNamespace(codes=()))])
    assert of_variant(none) is None
    entry = report.VariantReport("generic", "ready", 3, 0.0, None, ("True",), memory=found)
    region = report.RegionReport(0, (), None, "f", "f.py", 1, {}, (), entry, (), ())
    assert str(report.Explanation((region,))) == (
        "graph 0: f (f.py:1)\n"
        "  generic  ready            3 calls  compiled in 0.00 s\n"
        f"    2 recordings, keeps 192 B (128 B alive), peak {found.peak} B, constants 400 B"
    )
    assert report.Explanation((region,)).to_dict()["regions"][0]["generic"]["memory"]["kept"] == 192


def test_require_raises_where_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable", lambda: "this torch differs: no such symbol")
    required = Wanted(required=True, must_pay=False, most=5)
    with pytest.raises(NotAllRecorded, match=r"strict: cudagraphs='require', but nothing .* no such symbol"):
        RecordedCode(Inner(), SPEC, "strict", required, inference=True)


def test_a_pickled_copy_holds_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable", lambda: "not here")
    made = RecordedCode(Inner(), SPEC, "pickled", WANTED, inference=True, only_changes=(3,))
    made.inner = SimpleNamespace(prepare_for_serialization=lambda: None)  # type: ignore[assignment]
    made.prepare_for_serialization()
    made.inner = None
    copy = pickle.loads(pickle.dumps(made))
    assert (copy.spec, copy.wanted, copy.label, copy.inference) == (SPEC, WANTED, "pickled", True)
    assert copy.only_changes == (3,)  # what AOTAutograd's metadata said, which caches do not give back
    with pytest.raises(RuntimeError, match="called before it was loaded"):
        copy([1])
