"""Native calls, each held against what Python says: counts, addresses, tensors, and what the driver is asked for."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigraph_backend import _compat, native
from multigraph_backend.capture import aliasing
from multigraph_backend.cudagraphs.devices import staging
from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes, shorten
from multigraph_backend.cudagraphs.recordings.slot import Slot

use_count = _compat.storage_use_count


def slot(kept: bool = False) -> Slot:
    storage = torch.UntypedStorage(64)
    made = Slot(storage.data_ptr(), storage, True)
    if kept:
        made.kept = over(made)
    made.take_baseline(use_count)
    return made


def over(of: Slot) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(of.storage)


def holds(calls: Any, **state: Any) -> Any:
    empty = {
        "fixed": (), "same": (), "dead": (), "consumed": (), "kept": None, "kept_at": None, "shown": None, "slots": (),
        "constants": (), "checks": (),
    }  # fmt: skip
    return calls.Holds(**{**empty, **state})


# ---------------------------------------------------------------- the end of the path


@pytest.mark.parametrize("seed", range(200))
def test_a_path_is_shortened_as_by_python(calls: Any, seed: int) -> None:
    chance = random.Random(seed)
    tree = Nodes(SimulatedDevice(), poisons=False)
    held: list[object] = []
    path = []
    for _ in range(chance.randrange(5)):
        node = Node(tree, tree.device.empty_state())
        slots = [slot(kept=chance.random() < 0.3) for _ in range(chance.randrange(4))]
        node.watched = tuple(slots)
        for one in slots:
            if chance.random() < 0.15:
                held.append(chance.choice([over(one), one.storage, over(one) if one.kept is None else one.kept]))
            elif chance.random() < 0.05:
                one.put(torch.UntypedStorage(64))
                one.take_baseline(use_count)
        path.append(node)
    ours, pythons = list(path), list(path)
    calls.shorten(ours)
    shorten(use_count, pythons)
    assert ours == pythons


def test_what_is_no_slot_keeps_its_node_on_the_path(calls: Any) -> None:
    tree = Nodes(SimulatedDevice(), poisons=False)
    node = Node(tree, tree.device.empty_state())
    node.watched = (object(),)  # type: ignore[assignment]
    path = [node]
    calls.shorten(path)
    assert path == [node]


@pytest.mark.parametrize("path", [None, (), [None]])
def test_a_path_that_is_none_is_an_error(calls: Any, path: Any) -> None:
    with pytest.raises(TypeError):
        calls.shorten(path)


# ---------------------------------------------------------------- whether a recording may be replayed


def test_fixed_inputs_have_to_lie_where_they_lay(calls: Any) -> None:
    inputs = [torch.ones(3), 7, torch.nn.Parameter(torch.ones(4))[1:], torch.ones(0)]
    ask = holds(calls, fixed=tuple((at, inputs[at].data_ptr()) for at in (0, 2, 3)))  # type: ignore[union-attr]
    assert ask(inputs) is True
    assert ask([inputs[0].detach(), 8, *inputs[2:]]) is True  # another object at the same place
    assert ask([inputs[0].clone(), *inputs[1:]]) is False  # type: ignore[union-attr]
    assert ask([*inputs[:2], inputs[2][1:], inputs[3]]) is False  # type: ignore[index]
    assert ask([*inputs[:3], torch.ones(1)]) is False
    assert ask([None, *inputs[1:]]) is False
    assert ask(inputs[:3]) is False
    with pytest.raises(TypeError):
        ask(tuple(inputs))


def test_subclasses_are_not_asked(calls: Any) -> None:
    class Tells(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it was asked")

    plain = torch.ones(3)
    ask = holds(calls, fixed=((0, plain.data_ptr()),))
    assert ask([plain.as_subclass(Tells)]) is True


def test_generators_have_to_be_the_same(calls: Any) -> None:
    generator = torch.Generator()
    ask = holds(calls, same=((1, generator),))
    assert ask([0, generator]) is True
    assert ask([0, torch.Generator()]) is False


def test_what_is_written_over_has_to_be_dead(calls: Any) -> None:
    one = slot()
    ask = holds(calls, dead=(one,))
    assert ask([]) is True
    held = over(one)
    assert ask([]) is False
    del held
    assert ask([]) is True


def consumed(inputs: list[Any], one: Slot, count: int) -> bool:
    """As the generated code asks it."""
    own = 0
    for index in range(count):
        if inputs[index] is one.kept:
            own += 1
        elif sys.getrefcount(inputs[index]) > 2:
            return False
    if use_count(one.handle) > one.base + count - own:
        return False
    return not sys.getrefcount(one.kept) > one.kept_refs + own


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("holder", ["nobody", "another tensor", "the same tensor", "the storage"])
def test_what_dies_in_a_recording_is_held_by_the_list_alone(calls: Any, kept: bool, holder: str) -> None:
    one = slot(kept)
    inputs: list[Any] = [one.kept if kept else over(one)]
    holders = {
        "nobody": lambda: None, "another tensor": lambda: over(one), "the same tensor": lambda: inputs[0],
        "the storage": lambda: inputs[0].untyped_storage(),
    }  # fmt: skip
    held = holders[holder]()
    ask = holds(calls, consumed=((one, 1, (0,)),))
    expected = consumed(inputs, one, 1)
    assert ask(inputs) is expected
    if holder in ("nobody", "the same tensor", "another tensor"):
        assert expected is (holder == "nobody")
    del held


def test_what_is_handed_out_has_to_lie_where_it_is_written(calls: Any) -> None:
    one, kept, shown = slot(), slot(kept=True), slot()
    assert kept.kept is not None
    lists: dict[str, Any] = {"kept": [kept.kept], "kept_at": [kept.kept.data_ptr()], "shown": [shown]}
    constant = torch.ones(8)
    begin = constant.untyped_storage().data_ptr()
    ask = holds(calls, slots=(one,), constants=((constant.untyped_storage(), begin),), **lists)
    assert ask([]) is True
    for move in (
        lambda: setattr(one, "address", one.address + 1),
        lambda: shown.put(torch.UntypedStorage(8)),
        lambda: constant.untyped_storage().resize_(1 << 16),
        lambda: lists["kept_at"].__setitem__(0, 5),
    ):
        before = [list(value) for value in lists.values()]
        move()
        assert ask([]) is False
        one.address, shown.storage = one.storage.data_ptr(), shown.storage
        shown.address = shown.storage.data_ptr()
        for value, was in zip(lists.values(), before, strict=True):
            value[:] = was
        ask = holds(
            calls,
            slots=(one,),
            constants=((constant.untyped_storage(), constant.untyped_storage().data_ptr()),),
            **lists,
        )
        assert ask([]) is True
    lists["kept"].clear()
    lists["kept_at"].clear()
    lists["shown"].clear()
    assert ask([]) is True


def test_checks_of_python_are_asked_last_and_their_errors_pass(calls: Any) -> None:
    asked: list[Any] = []

    def check(inputs: list[Any]) -> bool:
        asked.append(inputs)
        if not inputs:
            raise KeyError("gone")
        return bool(inputs[0])

    ask = holds(calls, same=((0, 1),), checks=(check,))
    assert ask([1]) is True
    assert ask([2]) is False
    assert ask([]) is False
    assert asked == [[1]]
    ask = holds(calls, checks=(check,))
    assert ask([0]) is False
    with pytest.raises(KeyError):
        ask([])


def test_an_object_lets_go_of_what_it_held(calls: Any) -> None:
    one, generator = slot(kept=True), torch.Generator()
    lists: list[list[Any]] = [[one.kept], [one.address], []]
    counted: list[Any] = [one, generator, *lists]

    def counts() -> list[int]:
        return [sys.getrefcount(value) for value in counted]

    before = counts()
    ask = holds(
        calls, same=((0, generator),), dead=[one], consumed=((one, 1, [0]),), slots=[one], kept=lists[0],
        kept_at=lists[1], shown=lists[2], checks=[print],
    )  # fmt: skip
    assert [now - was for now, was in zip(counts(), before, strict=True)] == [3, 1, 1, 1, 1]
    del ask
    assert counts() == before
    for wrong in ({"same": ((0,),)}, {"dead": (None,)}, {"consumed": ((one, 1, (-1,)),)}, {"fixed": ((0, "x"),)}):
        with pytest.raises((TypeError, ValueError)):
            holds(calls, **wrong)
    assert counts() == before


# ---------------------------------------------------------------- the way of a call to its recording


class Way:
    """An entry over one recording, whose answers and checks are functions that tests exchange."""

    def __init__(self, calls: Any, any_thread: bool = False) -> None:
        tree = Nodes(SimulatedDevice(), poisons=False)
        self.node, self.keyed, self.lock = Node(tree, tree.device.empty_state()), object(), threading.RLock()
        self.node.ready, self.node.holds = True, lambda inputs: True
        self.node.run = lambda node, inputs: (node, *inputs)
        tree.root.children = {self.keyed: [self.node]}  # type: ignore[dict-item]
        self.piece = SimpleNamespace(_only=self.keyed)
        self.turns = SimpleNamespace(owner=None, aside={})
        self.tree = SimpleNamespace(root=tree.root, step_mark=0, stream=0, thread=threading.get_ident())
        self.path: list[Node] = []
        self.left: list[list[Any]] = []

        def otherwise(inputs: list[Any]) -> str:
            self.left.append(list(inputs))
            return "python"

        self.entry = calls.Entry(
            piece=self.piece, tree=self.tree, turns=self.turns, path=self.path,
            marks=SimpleNamespace(mark_step_counter=0), capturing=lambda: False, stream=lambda: 0, lock=self.lock,
            any_thread=any_thread, otherwise=otherwise,
        )  # fmt: skip

    def lock_is_free(self) -> bool:
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(self.lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return taken == [True]


def test_a_recording_answers_at_once_with_what_it_is_given(calls: Any) -> None:
    way = Way(calls)
    inputs = [1, 2]
    assert way.entry(inputs) == (way.node, 1, 2)
    way.turns.owner = threading.get_ident()  # in the midst of a call of several pieces
    assert way.entry(inputs) == (way.node, 1, 2)
    assert way.left == []


def test_a_key_is_asked_for_where_numbers_are_among_the_inputs(calls: Any) -> None:
    way = Way(calls)
    way.piece._only, way.piece.keyed_for = None, lambda inputs: {7: way.keyed}.get(inputs[0], object())
    assert way.entry([7]) == (way.node, 7)
    assert way.entry([8]) == "python"
    way.piece.keyed_for = lambda inputs: 1 // 0
    with pytest.raises(ZeroDivisionError):
        way.entry([7])
    assert way.lock_is_free()


def test_only_the_recording_that_answered_last_is_asked(calls: Any) -> None:
    way = Way(calls)
    other = Node(way.node.tree, way.node.state)
    asked: list[Any] = []
    other.ready, other.holds = True, lambda inputs: bool(asked.append(inputs))
    way.tree.root.children[way.keyed].insert(0, other)
    assert way.entry([1]) == "python"
    assert (asked, way.left) == ([[1]], [[1]])


def test_it_goes_on_behind_what_is_alive(calls: Any) -> None:
    way = Way(calls)
    alive, dead = slot(), slot()
    held = over(alive)
    before, gone = (Node(way.node.tree, way.node.state) for _ in range(2))
    before.watched, gone.watched = (alive,), (dead,)
    before.children = {way.keyed: [way.node]}  # type: ignore[dict-item]
    way.tree.root.children = {}
    way.path[:] = [before, gone]
    assert way.entry([1]) == (way.node, 1)
    assert way.path == [before]
    del held
    assert way.entry([1]) == "python"  # behind the root there is none
    assert way.path == []


def test_calls_of_other_threads_are_left_to_python_but_of_a_backward(calls: Any) -> None:
    for any_thread in (False, True):
        way = Way(calls, any_thread)
        found: list[Any] = []
        thread = threading.Thread(target=lambda way=way, found=found: found.append(way.entry([1])))
        thread.start()
        thread.join()
        assert found == [(way.node, 1) if any_thread else "python"]


@pytest.mark.parametrize("what", ["holds", "run", "capturing"])
def test_errors_pass_and_leave_the_lock_free(calls: Any, what: str) -> None:
    way = Way(calls)

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt(what)

    if what == "capturing":
        way.entry = calls.Entry(
            piece=way.piece, tree=way.tree, turns=way.turns, path=way.path, marks=None, capturing=fails,
            stream=lambda: 0, lock=way.lock, any_thread=False, otherwise=lambda inputs: "python",
        )  # fmt: skip
    else:
        setattr(way.node, what, fails)
    with pytest.raises(KeyboardInterrupt, match=what):
        way.entry([1])
    assert way.lock_is_free()
    assert way.left == []


def test_it_waits_for_the_lock_and_holds_it_while_it_replays(calls: Any) -> None:
    way = Way(calls)
    free: list[bool] = []
    way.node.run = lambda node, inputs: free.append(way.lock_is_free())  # type: ignore[assignment, return-value]
    done: list[bool] = []
    with way.lock:
        way.tree.thread = None
        thread = threading.Thread(target=lambda: (way.entry([1]), done.append(True)))
        thread.start()
        thread.join(0.05)
        assert not done
        way.tree.thread = thread.ident
    thread.join()
    assert (free, done) == ([False], [True])
    assert way.lock_is_free()


def test_what_calls_it_with_anything_but_a_list_is_told(calls: Any) -> None:
    way = Way(calls)
    for args in ((), ((1,),), ([1], [2])):
        with pytest.raises(TypeError, match="list of its inputs"):
            way.entry(*args)


def test_an_entry_lets_go_of_its_piece(calls: Any) -> None:
    way = Way(calls)
    way.piece.entry = way.entry  # a cycle
    gone = weakref.ref(way.node)
    del way
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- whether what a call changes is its own


@pytest.mark.parametrize("seed", range(300))
def test_what_a_call_changes_is_its_own_where_python_says_so(
    calls: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    count, held = chance.randrange(1, 7), chance.randrange(3)
    written = {at for at in range(count + held) if chance.random() < 0.4}
    numbers = {at for at in range(count) if at not in written and chance.random() < 0.2}
    pool = [torch.ones(8) for _ in range(12)]
    keep = []  # other users of a storage, outside of the call

    def tensor() -> torch.Tensor:
        made = pool.pop()
        kind = chance.choice(["own", "own", "own", "window", "watched", "storage", "empty", "parameter"])
        if kind == "window":
            keep.append(made)
            return made[2:]
        if kind == "watched":
            keep.append(made.detach())
        if kind == "storage":
            keep.append(made.untyped_storage())  # type: ignore[arg-type]
        if kind == "parameter":
            return torch.nn.Parameter(made)
        return torch.ones(0) if kind == "empty" else made

    tensors = [tensor() for _ in range(count + held)]
    for at in range(count + held):
        if chance.random() < 0.2:
            other = chance.randrange(count + held)
            tensors[at] = chance.choice([tensors[other], tensors[other].detach(), tensors[other][:1]])
    args = [at if at in numbers else tensors[at] for at in range(count)]
    graph: Any = SimpleNamespace(
        inputs=[None] * count, held=tuple(tensors[count:]), written=written,
        tensor_inputs=[at for at in range(count) if at not in numbers],
    )  # fmt: skip
    ours = aliasing.written_alone(graph)
    assert type(ours).__name__ == "Alone"
    monkeypatch.setattr(native, "ready", lambda: None)
    pythons = aliasing.written_alone(graph)
    assert ours(tuple(args)) is pythons(tuple(args))
    assert ours(args) is pythons(args)


def test_what_it_holds_may_lead_back_to_it(calls: Any) -> None:
    class Model:
        pass

    model, tensor = Model(), torch.nn.Parameter(torch.ones(2))
    model.check = calls.Alone([0], [], [], [tensor])  # type: ignore[attr-defined]
    tensor.model = model  # type: ignore[attr-defined]
    gone = weakref.ref(model)
    del model, tensor
    gc.collect()
    assert gone() is None


def test_arguments_that_are_missing_or_no_tensors_are_errors(calls: Any) -> None:
    ask = calls.Alone([0], [1], [], [])
    x, y = torch.ones(2), torch.ones(2)
    assert ask((x, y)) is True
    for wrong in ((x,), None, (None, y), (torch.ones(2).to_sparse(), y)):
        with pytest.raises(TypeError):
            ask(wrong)
    view = x[:1]
    assert ask((x, y)) is True
    assert ask((x, view)) is False
    with pytest.raises(TypeError):
        ask((x, None))


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("bound", [False, True])
def test_tensors_are_those_that_torch_makes(calls: Any, dtype: torch.dtype, bound: bool) -> None:
    storage = torch.UntypedStorage(1024)
    torch.empty(0, dtype=torch.uint8).set_(storage).random_()
    for size, stride, offset in (((3, 4), (4, 1), 0), ((), (), 2), ((0, 3), (3, 1), 0), ((2, 3), (1, 7), 5)):
        expected = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        make = calls.Maker(expected, storage if bound else None)
        made = make() if bound else make(storage)
        assert (made.dtype, made.size(), made.stride(), made.storage_offset()) == (dtype, size, stride, offset)
        assert made.untyped_storage()._cdata == storage._cdata
        assert repr(made) == repr(expected)
        assert made.requires_grad_(dtype.is_floating_point).is_leaf
        assert made._version == 0


def test_a_tensor_is_made_over_a_storage_alone(calls: Any) -> None:
    make, bound = calls.Maker(torch.ones(2), None), calls.Maker(torch.ones(2), torch.UntypedStorage(8))
    for wrong in (
        lambda: make(),
        lambda: make(torch.ones(2)),
        lambda: make(1, 2),
        lambda: bound(torch.UntypedStorage(8)),
    ):
        with pytest.raises(TypeError):
            wrong()
    storage = torch.UntypedStorage(8)
    before = sys.getrefcount(storage)
    calls.Maker(torch.ones(2), storage)
    assert sys.getrefcount(storage) == before


# ---------------------------------------------------------------- launches


def launch(
    calls: Any,
    copied: int,
    size: int,
    otherwise: Any,
    copies: bool = True,
    node: int = 0,
    replay: Any = None,
    hooks: Any = (),
) -> Any:
    table = torch.zeros(4, dtype=torch.int64)
    # the function's number is how many sources the driver reads
    how = (size, 9, 128, 16, table.data_ptr(), staging.ALIGNED, size, tuple(range(1, copied + 1)), node)
    return calls.Launch(
        1234, -1, otherwise, how if copies else None, replay, replay is not None and not hooks, hooks, table
    )


@pytest.mark.parametrize("node", [0, 77])
@pytest.mark.parametrize(("copied", "size"), [(1, 1), (3, 4), (5, 8), (33, 64), (64, 64)])
def test_a_launch_copies_all_sources_and_then_replays(
    calls: Any, driver: Any, copied: int, size: int, node: int
) -> None:
    def otherwise(inputs: list[Any]) -> None:
        raise AssertionError("it was left to torch")

    go = launch(calls, copied, size, otherwise, node=node)
    for _ in range(3):
        inputs = ["a number", *(torch.ones(8) for _ in range(copied))]
        assert go(inputs) is None
        addresses = [tensor.data_ptr() for tensor in inputs[1:]]  # type: ignore[union-attr]
        assert list(driver.last.sources[:size]) == addresses + addresses[:1] * (size - copied)
        assert (driver.last.graph, driver.last.function, driver.last.programs) == (1234, size, 9)
        assert (driver.last.threads, driver.last.shared) == (128, 16)
    assert driver.count("graphs") == 3
    assert (driver.count("kernels"), driver.count("sets")) == ((0, 3) if node else (3, 0))
    assert driver.node == node


def test_a_launch_without_copies_replays(calls: Any, driver: Any) -> None:
    launch(calls, 1, 1, print, copies=False)([])
    assert (driver.count("graphs"), driver.count("kernels"), driver.last.graph) == (1, 0, 1234)


@pytest.mark.parametrize("node", [0, 5])
def test_torch_replays_where_it_has_to_count(calls: Any, driver: Any, node: int) -> None:
    replayed: list[int] = []
    copies = "sets" if node else "kernels"
    go = launch(calls, 1, 1, print, node=node, replay=lambda: replayed.append(driver.count(copies)))
    go([0, torch.ones(8)])
    assert replayed == [1]  # after the copies
    assert driver.count("graphs") == 0
    assert go([0, torch.ones(9)[1:]]) is None  # printed
    assert replayed == [1]


@pytest.mark.parametrize("node", [0, 5])
def test_torch_replays_while_somebody_listens(calls: Any, driver: Any, node: int) -> None:
    replayed: list[int] = []
    listening: dict[int, Any] = {}
    go = launch(calls, 1, 1, print, node=node, replay=lambda: replayed.append(1), hooks=({}, listening))
    inputs = [0, torch.ones(8)]
    go(inputs)
    listening[0] = print
    go(inputs)
    assert (driver.count("graphs"), len(replayed)) == (1, 1)
    listening.clear()
    go(inputs)
    assert (driver.count("graphs"), len(replayed)) == (2, 1)


@pytest.mark.parametrize("node", [0, 5])
def test_a_thread_that_has_no_context_gets_one(calls: Any, driver: Any, node: int) -> None:
    def otherwise(inputs: list[Any]) -> None:
        raise AssertionError("it was left to torch")

    driver.be("needs_context", 1)
    for _ in range(2):
        launch(calls, 1, 1, otherwise, node=node)([0, torch.ones(8)])
    assert (driver.count("graphs"), driver.count("contexts")) == (2, 1)


@pytest.mark.parametrize(("capturing", "expected"), [(0, 0), (1, 4321), (2, 0)])
def test_the_last_node_is_told_where_there_is_one(calls: Any, driver: Any, capturing: int, expected: int) -> None:
    driver.be("capturing", capturing)
    assert calls.sets_parameters()
    assert calls.last_node(-1) == expected


@pytest.mark.parametrize(
    "mark", [lambda: torch.ones(8, dtype=torch.complex64).conj(), lambda: torch._neg_view(torch.ones(8))]
)
def test_bytes_that_are_not_the_values_are_left_to_torch(calls: Any, driver: Any, mark: Any) -> None:
    left: list[Any] = []
    inputs: list[Any] = [0, mark()]
    launch(calls, 1, 1, left.append)(inputs)
    assert left == [inputs]
    assert driver.count("graphs") == 0
    assert holds(calls, fixed=((1, inputs[1].data_ptr()),))(inputs) is False


@pytest.mark.parametrize("why", ["misaligned", "no tensor", "missing", "graph", "kernel", "set"])
def test_what_cannot_be_launched_is_left_to_torch(calls: Any, driver: Any, why: str) -> None:
    left: list[Any] = []
    go = launch(calls, 2, 2, left.append, node=6 if why == "set" else 0)
    inputs: list[Any] = [0, torch.ones(8), torch.ones(8)]
    if why in ("graph", "kernel", "set"):
        driver.fail(why)
    elif why == "misaligned":
        inputs[2] = torch.ones(9)[1:]
    elif why == "no tensor":
        inputs[2] = None
    else:
        inputs.pop()
    go(inputs)
    assert left == [inputs]
    assert driver.count("graphs") == (why == "graph")

    def fails(inputs: list[Any]) -> None:
        raise RuntimeError("as torch says it")

    with pytest.raises(RuntimeError, match="as torch says it"):
        launch(calls, 2, 2, fails, node=6 if why == "set" else 0)(inputs)


def test_other_threads_run_while_a_launch_waits(calls: Any, driver: Any) -> None:
    go = launch(calls, 1, 1, print)
    inputs = [0, torch.ones(8)]
    threads = [threading.Thread(target=lambda: [go(inputs) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.count("kernels") > 0


@pytest.mark.parametrize("library", ["no such library.so", "libc.so.6"])
def test_a_library_that_launches_nothing_is_told(calls: Any, library: str) -> None:
    with pytest.raises(OSError, match=r"such library|does not launch"):
        calls.drive(library, torch.Tensor.__dlpack_c_exchange_api__)  # type: ignore[attr-defined]
