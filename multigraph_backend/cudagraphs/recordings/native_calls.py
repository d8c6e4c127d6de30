"""Native calls held against Python, before anything uses them.

In:  the module, as it was loaded.  Out: the module, measured: by how much its counts differ from those of Python and
torch, which is the same for all objects or the module is refused; and where `Slot` and `Node` keep what it reads.
Then each of its functions answers once as Python does, over tensors of the CPU.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.recordings.nodes import Node
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.native import Calls
from multigraph_backend.native.building import NotBuilt


def checked(module: ModuleType) -> Calls:
    """Raises `NotBuilt` where it does not answer as Python does."""
    module.measure(Slot, Node, 0, 0)
    module.measure(Slot, Node, *_differences(module))
    calls = cast(Calls, module)
    for problem in (_alive(module), _holds(calls), _entered(calls), _made(calls)):
        if problem is not None:
            raise NotBuilt(f"it was compiled, but {problem}")
    return calls


def _slot() -> Slot:
    storage = torch.UntypedStorage(64)
    slot = Slot(storage.data_ptr(), storage, True)
    slot.kept = torch.empty(0, dtype=torch.uint8).set_(storage)
    return slot


def _differences(module: ModuleType) -> tuple[int, int]:
    """By how much the counts of torch, and those of Python, are above its own.  Raises `NotBuilt`."""
    found = set()
    for more in range(3):
        slot = _slot()
        held = [torch.empty(0, dtype=torch.uint8).set_(slot.storage) for _ in range(more)]
        names = [slot.storage] * more + [slot.kept] * more
        own_uses, own_storage, own_kept = module.counts(slot)
        uses = _compat.storage_use_count(slot.handle) - own_uses
        found.add((uses, sys.getrefcount(slot.storage) - own_storage))
        found.add((uses, sys.getrefcount(slot.kept) - own_kept))
        del held, names
    if len(found) > 1:
        raise NotBuilt(f"it was compiled, but its counts are not those of torch and Python: {sorted(found)}")
    return found.pop()


def _alive(module: ModuleType) -> str | None:
    for what in ("nothing", "a tensor", "the storage", "the tensor that is kept"):
        slot = _slot()
        slot.take_baseline(_compat.storage_use_count)
        holders: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "a tensor": lambda: torch.empty(0, dtype=torch.uint8).set_(slot.storage),  # noqa: B023 - called here
            "the storage": lambda: slot.storage,  # noqa: B023
            "the tensor that is kept": lambda: slot.kept,  # noqa: B023
        }
        held = holders[what]()
        if (module.alive(slot), slot.alive(_compat.storage_use_count)) != (held is not None, held is not None):
            return f"it sees wrongly whether memory is alive of which {what} is held"
    if not module.alive(None):
        return "it takes what is no slot for dead"
    return None


def _holds(calls: Calls) -> str | None:
    tensors = [torch.ones(3), torch.ones(4)[1:], torch.ones(0)]
    slot = _slot()
    slot.take_baseline(_compat.storage_use_count)
    holds = calls.Holds(
        fixed=tuple((index, tensor.data_ptr()) for index, tensor in enumerate(tensors)),
        same=((3, None),), dead=(slot,), consumed=(), kept=None, kept_at=None, shown=None, slots=(slot,),
        constants=((tensors[0].untyped_storage(), tensors[0].data_ptr()),), checks=(),
    )  # fmt: skip
    if holds([*tensors, None]) is not True:
        return "it does not find inputs where they lie"
    elsewhere: list[list[Any]] = [[tensors[0].clone(), *tensors[1:], None], [*tensors, 0], [tensors[0], *tensors]]
    if any(holds(inputs) is not False for inputs in elsewhere):
        return "it does not see that inputs lie elsewhere"
    slot.address += 1
    if holds([*tensors, None]) is not False:
        return "it does not see that an output lies elsewhere"
    return None


def _entered(calls: Calls) -> str | None:
    """A piece whose last recording answers, and what Python is left with."""
    node, root, piece = Node.__new__(Node), Node.__new__(Node), cast(Any, object())
    node.ready, node.holds, node.run = True, lambda inputs: inputs == [1], lambda node, inputs: ("replayed", inputs[0])
    root.children, node.watched = {piece: [node]}, ()
    turns: Any = SimpleNamespace(owner=None, aside={})
    tree: Any = SimpleNamespace(root=root, step_mark=2, stream=3, thread=threading.get_ident(), captures=False)
    marks: Any = SimpleNamespace(mark_step_counter=2)
    entry = calls.Entry(
        piece=SimpleNamespace(_only=piece), tree=tree, turns=turns, path=[node], marks=marks,
        capturing=lambda: tree.captures, stream=lambda: 3, lock=threading.RLock(), any_thread=False,
        otherwise=lambda inputs: ("python", inputs[0]),
    )  # fmt: skip
    others: Sequence[tuple[Any, str, object]] = (
        (turns, "owner", -1), (turns, "aside", {1: {2}}), (tree, "step_mark", 0), (tree, "stream", 0),
        (tree, "thread", None), (tree, "captures", True), (marks, "mark_step_counter", 0), (node, "ready", False),
    )  # fmt: skip
    for holder, name, value in others:
        before = getattr(holder, name)
        setattr(holder, name, value)
        if entry([1]) != ("python", 1):
            return f"it replays where {name!r} is {value!r}"
        setattr(holder, name, before)
        if entry([1]) != ("replayed", 1):
            return "it does not find the recording that answers a call"
    return "it replays what may not be" if entry([2]) != ("python", 2) else None


def _made(calls: Calls) -> str | None:
    like = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()[1:, ::2]
    storage = torch.arange(100, 112, dtype=torch.float32).untyped_storage()
    expected = torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(), like.stride())
    for mode in (False, True):
        with torch.inference_mode(mode):
            for made in (calls.Maker(like, None)(storage), calls.Maker(like, storage)()):
                if not torch.equal(made, expected) or made.stride() != like.stride() or made.dtype != like.dtype:
                    return "it makes other tensors"
                plain = type(made) is torch.Tensor and not made.requires_grad and not made._is_view()
                if made.is_inference() != mode or not plain:
                    return "it makes tensors of another kind"
    return None
