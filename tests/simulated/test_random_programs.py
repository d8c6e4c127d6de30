"""A short slice of the random programs, what it exercises, and mistakes in the runtime that it must find."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs.devices import bracket
from multigraph_backend.cudagraphs.devices.simulated.device import CALLS, SimulatedDevice
from multigraph_backend.cudagraphs.recordings import memory, planning, recording, replay
from multigraph_backend.cudagraphs.recordings.nodes import Holds, Node
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_spec import Boxed, PieceSpec
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece
from multigraph_backend.cudagraphs.recordings.room import Room
from multigraph_backend.cudagraphs.recordings.sharing import Sharing
from multigraph_backend.cudagraphs.recordings.slot import HandedOut, Slot
from multigraph_backend.cudagraphs.recordings.tree import Tree
from multigraph_backend.cudagraphs.recordings.warm_up import WarmUp
from multigraph_backend.process import garbage
from tests.support.simulated.random_programs import Wrong, run

SLICE = range(140)


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("multigraph_backend")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # programs collect garbage: not what was there before
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    logger.setLevel(level)


def test_every_value_is_what_it_is_without_recordings() -> None:
    counts: Counter[str] = Counter()
    for seed in SLICE:
        counts += run(seed)
    least = {
        "native": 80,
        "replays": 1000,
        "recordings": 400,
        "recorded again": 10,
        "moved outputs": 100,
        "evicted": 50,
        "failed recordings": 20,
        "recordings with managed inputs": 5,
        "recordings with inputs that die in them": 2,
        "warm-ups in the pool": 100,
        "gave way": 20,
        "moved from warm-ups": 20,
        "recordings that hand out copies": 20,
        "shared": 20,
        "not shared any more": 5,
        "waits between streams": 100,
        "storages held alone": 50,
        "views of held outputs": 100,
        "work on another stream": 30,
        "outputs resized": 30,
        "resized": 3,
        "calls whose outputs are copies": 200,
        "recordings with parameters of a class": 20,
        "recordings that copy what is gathered": 3,
        "pieces dropped": 10,
        "accounts with something alive": 500,
        "accounts of what warm-ups left": 100,
        "accounts of what was given up": 50,
        "calls in a capture of the caller": 20,
        "calls with a float": 80,
        "calls that ran out of memory": 20,
        "ran out of memory": 5,
        "gave way to others": 5,
        "changes of free memory": 50,
        "warm-ups elsewhere": 3,
        "interruptions": 50,
        "lent": 50,
        "loans": 50,
        "calls that others waited for": 50,
        "calls that raised": 10,
        "calls that were interrupted": 10,
        "changed: an output": 20,
        "changed: a parameter or buffer": 50,
        "changed: the user's, again": 10,
        "changed: the user's, new": 50,
    }
    least.update({f"failures of {call}": 1 for call in CALLS})
    assert {name: counts[name] for name, count in least.items() if counts[name] < count} == {}


def test_a_seed_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # what pays depends on it
    for seed in range(10):
        told: list[list[str]] = [[], []]
        for said in told:
            gc.collect()
            gc.disable()  # what is held, and so what is recorded, depends on when it runs: other threads allocate too
            try:
                run(seed, say=said.append)
            finally:
                gc.enable()
        assert told[0] == told[1]


# ---------------------------------------------------------------- what the check is worth


def _nothing_moves_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "_restart", lambda tree, kept=0: tree.path.clear())


def _storages_alone_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "alive", lambda slot, use_count: use_count(slot.handle) > slot.base)
    take = Slot.take_baseline

    def taken(slot: Slot, use_count: Callable[[int], int]) -> None:
        take(slot, use_count)
        slot.refs = 1 << 30

    patch.setattr(Slot, "take_baseline", taken)


def _who_holds_a_tensor_that_is_kept_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    take = Slot.take_baseline

    def taken(slot: Slot, use_count: Callable[[int], int]) -> None:
        take(slot, use_count)
        slot.kept_refs = 1 << 30

    patch.setattr(Slot, "take_baseline", taken)


def _tensors_that_are_kept_are_trusted(patch: pytest.MonkeyPatch) -> None:
    fill = HandedOut.fill

    def filled(handed: HandedOut, slots: Sequence[Slot]) -> None:
        fill(handed, slots)
        handed.kept.clear()
        handed.numbers.clear()

    patch.setattr(HandedOut, "fill", filled)


def _a_recording_leaves_nothing_of_those_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "_left", lambda node, names: ["    for earlier in path:", "        earlier.watched = ()"])


def _what_is_dead_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    build = replay.build_holds

    def forgetful(node: Node) -> Holds:
        node.dead = ()
        return build(node)

    patch.setattr(replay, "build_holds", forgetful)


def _numbers_are_no_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Piece, "_key", lambda piece, inputs: ())


def _floats_are_keys_by_what_they_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Piece, "_key", lambda piece, inputs: tuple(n for n in inputs if isinstance(n, int | float)))


def _hidden_values_always_die(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planning, "_dies_here", lambda device, slot, inputs: not slot.visible)
    patch.setattr(recording, "_consumed", lambda plan, captured: [])


def _views_begin_where_the_input_begins(patch: pytest.MonkeyPatch) -> None:
    view = replay._view
    patch.setattr(
        replay,
        "_view",
        lambda device, layout, tensor: view(
            device, recording.Layout(layout.size, layout.stride, 0, layout.dtype), tensor
        ),
    )


def _streams_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "_follow_stream", lambda tree: None)


def _outputs_are_moved_under_work_on_other_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "_settled", lambda tree: True)


def _moved_outputs_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDevice, "finish", lambda device: None)


def _storages_are_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "lies", lambda slot, device: True)
    patch.setattr(Slot, "holds", lambda slot, address: True)
    patch.setattr(replay, "_elsewhere", lambda node, names: [])


def _warm_ups_are_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    def watch(warm: WarmUp, blocks: object) -> None:
        warm.watched = ()

    patch.setattr(WarmUp, "_watch", watch)


def _copies_are_not_made(patch: pytest.MonkeyPatch) -> None:
    _pieces_are_taken_for(patch, copies=False)


def _changed_inputs_are_copied(patch: pytest.MonkeyPatch) -> None:
    _pieces_are_taken_for(patch, mutated=frozenset())


def _pieces_are_taken_for(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    init = Piece.__init__

    def changed(piece: Piece, tree: Tree, function: Boxed, spec: PieceSpec) -> None:
        init(piece, tree, function, replace(spec, **changes))

    patch.setattr(Piece, "__init__", changed)


def _expanded_dimensions_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recording, "overlaps_itself", lambda layout: False)


def _given_up_pools_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDevice, "leave", lambda device, generation: None)


def _failures_are_not_contained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("multigraph_backend.cudagraphs.recordings.tree.DeviceFailed", ZeroDivisionError)


def _given_up_recordings_get_children(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "linked", lambda tree, node: True)


def _only_errors_end_a_capture(patch: pytest.MonkeyPatch) -> None:
    def captured(
        begin: Callable[[], object], function: Callable[[], object], end: Callable[[], object], _: Callable[[], bool]
    ) -> bracket.Outcome:
        outcome = bracket.Outcome()
        try:
            begin()
            outcome.result = function()
        except Exception as error:
            outcome.problem = error
        with contextlib.suppress(Exception):
            end()
        return outcome

    patch.setattr(bracket, "captured", captured)


def _each_has_a_switch_of_its_own(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if on:
                gc.enable()

    patch.setattr(garbage, "paused", paused)


def _the_lock_is_held_while_code_runs(patch: pytest.MonkeyPatch) -> None:
    as_it_is = Tree.as_it_is

    def locked(tree: Tree, code: Callable[..., object], inputs: list[object], *more: Any) -> object:
        with tree.lock:
            return as_it_is(tree, code, inputs, *more)

    patch.setattr(Tree, "as_it_is", locked)
    patch.setattr("tests.support.simulated.random_programs.LONG", 2.0)


def _pools_are_left_with_recordings_in_them(patch: pytest.MonkeyPatch) -> None:
    leave = Room.leave_pools

    def leaves(room: Room) -> None:
        room._recorded_in.clear()
        leave(room)

    patch.setattr(Room, "leave_pools", leaves)


def _recordings_give_way_whose_outputs_are_alive(patch: pytest.MonkeyPatch) -> None:
    make_way, give_way = Tree._make_way, Sharing.give_way

    def blind(tree: Tree, keyed: KeyedPiece, inputs: list[object]) -> bool:
        path, tree.path = tree.path, []
        try:
            return make_way(tree, keyed, inputs)
        finally:
            tree.path = path

    def leaves_it_all(sharing: Sharing, keyed: KeyedPiece) -> None:
        sharing._room._recorded_in.clear()
        give_way(sharing, keyed)

    patch.setattr(Tree, "_make_way", blind)
    patch.setattr(Sharing, "give_way", leaves_it_all)


def _what_gave_way_is_found(patch: pytest.MonkeyPatch) -> None:
    def give_way(sharing: Sharing, keyed: KeyedPiece) -> None:
        sharing._nodes.device.new_pool()
        sharing._nodes.device.leave(sharing._nodes.device.generation - 1)

    patch.setattr(Sharing, "give_way", give_way)


def _what_is_given_up_is_not_given_up_below(patch: pytest.MonkeyPatch) -> None:
    below = Node.below
    patch.setattr(Node, "below", lambda node: iter([node]) if node.parent else below(node))


def _what_was_resized_counts_as_alive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory, "alive", lambda tree, slot: slot.alive(tree.use_count))


def _what_was_given_up_is_not_in_the_account(patch: pytest.MonkeyPatch) -> None:
    read = memory.of_recordings
    patch.setattr(
        memory, "of_recordings", lambda tree: {node: it for node, it in read(tree).items() if not it.given_up}
    )


def _limits_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "keep", lambda room, keyed, made, limits, had: room.grew(had))


def _what_has_outgrown_a_limit_stays(patch: pytest.MonkeyPatch) -> None:
    keep = Room.keep
    patch.setattr(Room, "keep", lambda room, *args: keep(room, *args) or 0)


def _nothing_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "give_way", lambda room: None)


def _all_code_is_run_again(patch: pytest.MonkeyPatch) -> None:
    _pieces_are_taken_for(patch, repeatable=True)


MUTANTS = [
    _nothing_moves_out,
    _storages_alone_are_not_seen,
    _who_holds_a_tensor_that_is_kept_is_not_seen,
    _tensors_that_are_kept_are_trusted,
    _a_recording_leaves_nothing_of_those_before,
    _what_is_dead_does_not_matter,
    _numbers_are_no_key,
    _floats_are_keys_by_what_they_equal,
    _hidden_values_always_die,
    _views_begin_where_the_input_begins,
    _streams_do_not_wait,
    _outputs_are_moved_under_work_on_other_streams,
    _moved_outputs_are_not_waited_for,
    _storages_are_trusted,
    _warm_ups_are_taken_for_dead,
    _copies_are_not_made,
    _changed_inputs_are_copied,
    _expanded_dimensions_are_forgotten,
    _given_up_pools_stay,
    _failures_are_not_contained,
    _given_up_recordings_get_children,
    _only_errors_end_a_capture,
    _each_has_a_switch_of_its_own,
    _the_lock_is_held_while_code_runs,
    _pools_are_left_with_recordings_in_them,
    _recordings_give_way_whose_outputs_are_alive,
    _what_gave_way_is_found,
    _what_is_given_up_is_not_given_up_below,
    _what_was_resized_counts_as_alive,
    _what_was_given_up_is_not_in_the_account,
    _limits_are_not_kept,
    _what_has_outgrown_a_limit_stays,
    _nothing_gives_way,
    _all_code_is_run_again,
]


#: programs that are known to show it, where few have what it concerns
KNOWN = {
    _storages_alone_are_not_seen: (4, 10),
    _what_is_dead_does_not_matter: (165, 272, 376, 386),
    _floats_are_keys_by_what_they_equal: (100, 135),
    _hidden_values_always_die: (297, 534),
    _views_begin_where_the_input_begins: (14, 24),
    _outputs_are_moved_under_work_on_other_streams: (1, 33),
    _moved_outputs_are_not_waited_for: (28, 81, 119),
    _storages_are_trusted: (6, 21),
    _expanded_dimensions_are_forgotten: (7, 12),
    _tensors_that_are_kept_are_trusted: (142,),
    _given_up_recordings_get_children: (24, 39),
    _each_has_a_switch_of_its_own: (118, 204, 225),
    _pools_are_left_with_recordings_in_them: (18, 24),
    _recordings_give_way_whose_outputs_are_alive: (6, 24),
    _what_gave_way_is_found: (9, 24),
    _what_was_resized_counts_as_alive: (6, 21),
    _what_was_given_up_is_not_in_the_account: (18, 24),
    _limits_are_not_kept: (0, 66),
    _what_has_outgrown_a_limit_stays: (34, 80),
    _nothing_gives_way: (18, 139),
    _all_code_is_run_again: (34, 50),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_runtime_with_one_mistake_is_caught(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(Wrong) as caught:
            _run_until_wrong(KNOWN.get(mutant, ()))
    assert "positional argument" not in str(caught.value), "the mistake is in the test: its patch does not fit"
    assert set(threading.enumerate()) <= before  # one of another test may have ended meanwhile


def _run_until_wrong(known: tuple[int, ...]) -> None:
    # where memory comes to lie differs from run to run, and what a mistake meets
    for seed in itertools.chain(known, range(10 * len(SLICE))):
        run(seed)
