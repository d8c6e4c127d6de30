"""Inputs that are read where they lie: what a recording is told at each launch, and when they are copied all the same.

The device says what its kernels are given as a driver does, so the proof is the one that is made on a GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from multigraph_backend import events, sealing
from multigraph_backend.cudagraphs import account
from multigraph_backend.cudagraphs.devices.patches import Limits, Unreadable
from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.recordings import patching
from multigraph_backend.cudagraphs.recordings.nodes import MOST_STRAYS
from multigraph_backend.cudagraphs.recordings.piece import Piece
from tests.support.simulated.pieces import Bench, call_right, values
from tests.support.simulated.random_programs import run

ANY = Limits(1, 1)


def bench(limits: Limits = ANY, **how: Any) -> Bench:
    made = Bench(**how)
    made.device.patching = limits
    return made


def double(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * 2,)


def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + y, x - y


def patched(piece: Piece) -> list[tuple[int, ...]]:
    """Of each recording, which inputs are patched."""
    nodes = [node for node in piece.tree.root.below() if node.keyed is not None and node.keyed.piece is piece]
    return [node.recording.plan.patched for node in nodes if node.recording is not None]


def why(piece: Piece) -> dict[int, str]:
    return {index: text for keyed in piece.by_key.values() for index, text in keyed.unpatched.items()}


def copies(of: Bench) -> int:
    return len(of.device.calls("copy"))


def test_nothing_is_copied_and_values_are_right() -> None:
    made = bench()
    piece = made.piece(both, 2, 2)
    for _ in range(6):
        call_right(piece, both, values(), values())
    assert patched(piece) == [(0, 1)]
    assert made.recorded() == 1
    assert copies(made) == 0
    assert str(account.of(made.tree).pieces[0].patched_inputs) == "('x0', 'x1')"
    assert "reads x0, x1 where it lies (2 kernels are told)" in str(account.of(made.tree))


def test_without_it_they_are_copied() -> None:
    made = Bench()
    piece = made.piece(both, 2, 2)
    for _ in range(4):
        call_right(piece, both, values(), values())
    assert patched(piece) == [()]
    assert copies(made) > 0


def test_the_same_input_twice_and_views_of_one() -> None:
    made = bench()
    piece = made.piece(both, 2, 2)
    for _ in range(3):
        x = values()
        call_right(piece, both, x, x)
    assert patched(piece) == [(0, 1)]
    for _ in range(3):
        base = values(16)
        call_right(piece, both, base[:8], base[4:12])
        call_right(piece, both, values(), values())


def test_small_inputs_are_copied() -> None:
    made = bench(Limits(33, 1))
    piece = made.piece(double, 1, 1)
    for _ in range(4):
        call_right(piece, double, values())
    assert (patched(piece), why(piece)) == ([()], {})
    assert copies(made) > 0


def test_an_input_that_several_kernels_read_has_to_be_larger() -> None:
    made = bench(Limits(32, 1))
    piece = made.piece(both, 2, 2)
    for _ in range(4):
        call_right(piece, both, values(), values())
    assert patched(piece) == [()]
    assert set(why(piece)) == {0, 1}
    said = str(account.of(made.tree))
    assert "copies x0, x1" in said
    assert "x0 is copied: 2 kernels read it" in said


def test_an_input_that_is_not_read_is_copied_and_others_are_not() -> None:
    def first(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2,)

    made = bench()
    piece = made.piece(first, 2, 1)
    for _ in range(4):
        call_right(piece, first, values(), values())
    assert patched(piece) == [(0,)]
    assert why(piece) == {1: "no kernel was seen to be given its address"}
    captures = len(made.device.calls("capture_begin"))
    other = made.piece(double, 1, 1)
    held = other([values()])  # so that it is recorded once more, behind another node
    held = other([values()])
    for _ in range(2):
        call_right(piece, first, values(), values())
    assert len(made.device.calls("capture_begin")) - captures <= 2 + 2  # what was refused is not tried again
    del held


def test_an_output_that_is_the_input_or_a_view_of_it_is_handed_out() -> None:
    def passes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x, x[2:]

    made = bench()
    piece = made.piece(passes, 1, 3)
    for _ in range(5):
        x = values()
        found = piece([x])
        assert found[1] is x
        assert found[2].data_ptr() == x.data_ptr() + 8
        torch.testing.assert_close(found[0], x * 2, rtol=0, atol=0)
    assert patched(piece) == [(0,)]


def test_an_output_of_an_earlier_recording_may_be_the_input() -> None:
    made = bench()
    piece, other = made.piece(double, 1, 1), made.piece(both, 2, 2)
    for _ in range(4):
        call_right(piece, double, values())
        call_right(other, both, values(), values())
    for _ in range(6):
        (x,) = piece([values()])
        call_right(other, both, values(), x)
        call_right(other, both, x, x)
        call_right(piece, double, x)
    assert made.unrecorded(piece, other) == {}


def test_an_output_of_the_recording_itself_may_be_its_next_input() -> None:
    made = bench()
    piece = made.piece(double, 1, 1)
    x, expected = values(), None
    expected = x.clone()
    for _ in range(8):
        (x,) = piece([x])
        expected = expected * 2
        torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_an_input_that_shares_memory_with_what_is_changed_is_copied_first() -> None:
    def change(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.add_(1)
        return (x * 2,)

    made = bench()
    piece = made.piece(change, 2, 1, static=(0,), mutated=(0,))
    state = values(16)
    for _ in range(4):
        x = values(16)
        assert torch.equal(piece([state, x])[0], x * 2)
    assert patched(piece) == [(1,)]
    before = state.clone()
    assert torch.equal(piece([state, state])[0], before * 2)  # as where it is copied: what it held at the call
    assert made.tree.counts["strays"] == 1


def test_an_input_that_is_changed_is_never_patched() -> None:
    def change(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        return (x * 2,)

    made = bench()
    piece = made.piece(change, 1, 1, mutated=(0,))
    for _ in range(4):
        x = values()
        expected = (x + 1) * 2
        assert torch.equal(piece([x])[0], expected)
    assert set(patched(piece)) <= {()}


@pytest.mark.parametrize(("given", "expected"), [((), [()]), ((0,), [(0,)])])
def test_what_may_be_used_again_is_not_patched(given: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    made = bench()
    piece = made.piece(double, 1, 1, reused=(0,), given=frozenset(given))
    for _ in range(4):
        call_right(piece, double, values())
    assert patched(piece) == expected
    assert ("the code may write to it" in why(piece).values()) is (not given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: values(9)[1:], "it does not lie on 16 bytes"),
        (lambda: values(1).expand(8), "it repeats elements"),
    ],
)
def test_what_kernels_may_not_be_told_is_copied(make: Any, said: str) -> None:
    made = bench(Limits(1, 16))
    piece = made.piece(double, 1, 1)
    for _ in range(4):
        call_right(piece, double, make())
    assert (patched(piece), why(piece)) == ([()], {0: said})


def test_one_that_comes_otherwise_is_copied_first_and_in_the_end_recorded_with_a_copy() -> None:
    made = bench(Limits(1, 16))
    piece = made.piece(double, 1, 1)
    for _ in range(3):
        call_right(piece, double, values())
    assert patched(piece) == [(0,)]
    for call in range(1, MOST_STRAYS + 3):
        call_right(piece, double, values(9)[1:])
        assert made.tree.counts["strays"] == min(call, MOST_STRAYS)
    assert patched(piece) == [()]
    assert made.recorded() == 2
    assert "often comes" in why(piece)[0]


def test_after_seal_it_stays() -> None:
    made = bench(Limits(1, 16))
    piece = made.piece(double, 1, 1)
    for _ in range(3):
        call_right(piece, double, values())
    sealing.seal("raise")
    try:
        for _ in range(2 * MOST_STRAYS):
            call_right(piece, double, values(9)[1:])
    finally:
        sealing.unseal()
    assert patched(piece) == [(0,)]


@pytest.mark.parametrize("known", [{"groups": ("a group",)}])
def test_pieces_with_collectives_are_left_alone(known: dict[str, Any]) -> None:
    made = bench()
    piece = made.piece(double, 1, 1, **known)
    for _ in range(4):
        call_right(piece, double, values())
    assert patched(piece) == [()]
    assert why(piece) == {0: "the piece has collectives"}


def test_captures_that_differ_prove_nothing() -> None:
    count = 0

    def counts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal count
        count += 1
        return (x * 2, x + count)

    made = bench()
    piece = made.piece(counts, 1, 2)
    for _ in range(5):
        x = values()
        assert torch.equal(piece([x])[0], x * 2)
    assert patched(piece) == [()]
    assert why(piece) == {0: "two captures launch different kernels"}


def test_where_the_driver_does_not_tell_inputs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench()

    def nodes(graph: object) -> object:
        raise Unreadable("the driver answers 1 to what is asked of a kernel")

    monkeypatch.setattr(made.device, "nodes", nodes)
    piece = made.piece(double, 1, 1)
    for _ in range(4):
        call_right(piece, double, values())
    assert (patched(piece), why(piece)) == ([()], {0: "the driver answers 1 to what is asked of a kernel"})
    assert made.recorded() == 1


def test_where_there_is_no_memory_to_try_it_inputs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench()

    def elsewhere(tensors: object) -> object:
        raise torch.OutOfMemoryError("none")

    monkeypatch.setattr(made.device, "elsewhere", elsewhere)
    piece = made.piece(double, 1, 1)
    for _ in range(4):
        call_right(piece, double, values())
    assert (patched(piece), why(piece)) == ([()], {0: "there was no memory to try it out"})


@pytest.mark.parametrize("spoils", [False, True])
def test_a_probe_that_fails_costs_no_recording(spoils: bool) -> None:
    made = bench()
    made.device.failures_spoil_the_pool = spoils
    piece = made.piece(double, 1, 1)
    call_right(piece, double, values())
    made.device.fail_at("launch")
    for _ in range(4):
        call_right(piece, double, values())
    assert patched(piece) == [()]
    assert "injected failure" in why(piece)[0]


def test_captured_anew_for_others_it_is_still_right() -> None:
    made = bench()
    piece = made.piece(both, 2, 2, must_pay=True)
    for _ in range(12):
        call_right(piece, both, values(), values())


def test_it_is_counted() -> None:
    before = dict(events.stats())
    made = bench()
    piece = made.piece(double, 1, 1)
    for _ in range(4):
        call_right(piece, double, values())
    after = events.stats()
    assert after["patched_recordings"] - before["patched_recordings"] == 1
    assert after["refused_patches"] == before["refused_patches"]


# ---------------------------------------------------------------- random programs


@pytest.fixture
def _patching(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SimulatedDevice.__init__

    def patching_device(self: SimulatedDevice, *args: Any, **how: Any) -> None:
        begin(self, *args, **how)
        self.patching = ANY

    monkeypatch.setattr(SimulatedDevice, "__init__", patching_device)


@pytest.mark.usefixtures("_patching")
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 60), marks=pytest.mark.slow)], ids=["few", "more"])
def test_random_programs_are_right(seeds: range) -> None:
    before, counts = events.stats(), Counter[str]()
    for seed in seeds:
        counts += run(seed)
    after = events.stats()
    assert after["patched_recordings"] - before["patched_recordings"] > len(seeds)
    assert counts["replays"] > 4 * len(seeds)


def test_no_two_inputs_are_moved_by_the_same_distance() -> None:
    device = bench().device
    tensors = [values(16) for _ in range(200)]
    for _ in range(20):
        twins, _ = device.elsewhere(tensors)
        moved = [device.address(twin) - device.address(x) for twin, x in zip(twins, tensors, strict=True)]
        assert len({0, *moved}) == len(tensors) + 1


@pytest.mark.usefixtures("_patching")
def test_random_programs_find_what_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """That inputs are asked whether they share memory with what is changed is of use there."""
    monkeypatch.setattr(patching, "_written", lambda *about: ())
    made = bench()

    def change(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.add_(1)
        return (x * 2,)

    piece = made.piece(change, 2, 1, static=(0,), mutated=(0,))
    state = values(16)
    for _ in range(4):
        piece([state, values(16)])
    before = state.clone()
    assert not torch.equal(piece([state, state])[0], before * 2)
