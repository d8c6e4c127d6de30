"""One recording: a piece of compiled code captured for inputs at known places.

In: a boxed function, example inputs, for each input where it lies in a call (`InputPlan`).  Out: a `Recording`: the
driver's graph, where inputs have to be, and what each output is: memory of the recording itself (a `Slot`), an input
handed through or seen through another layout, a constant, a number.

Inputs that are copied get buffers inside the capture, so their memory serves again as soon as the piece is done with
them.  A saved tensor or an intermediate that nobody but the piece holds dies in it, and its memory serves again too.
Inputs that are patched are read where they lie, and kernels are told at each launch where that is (`patching`).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend.cudagraphs.devices.device import (
    Captured,
    CaptureFailed,
    Device,
    Graph,
    Layout,
    PoolState,
    Source,
    Stager,
    overrides_functions,
)
from multigraph_backend.cudagraphs.devices.patches import Patches
from multigraph_backend.cudagraphs.recordings.cost import Trial
from multigraph_backend.cudagraphs.recordings.piece_spec import Boxed, PieceSpec
from multigraph_backend.cudagraphs.recordings.slot import Slot

FIRST_CALL = "first call"


class NotRecorded(Exception):
    """This call cannot be recorded or replayed; its text says why.

    always: no later call can either.  index: the input that is the reason.
    """

    def __init__(self, reason: str, always: bool = False, index: int | None = None) -> None:
        super().__init__(reason)
        self.always, self.index = always, index


class NotAllRecorded(RuntimeError):
    """`cudagraphs="require"`, and something cannot be recorded; the text names each op and where it comes from."""


@dataclass(frozen=True)
class InputPlan:
    """Where each input of a piece has to be.

    `fixed`: positions that are read, and perhaps changed, at `addresses`.  `managed`: those of them that are outputs
    alive in the pool, with their slots.  `copied`: positions whose values are copied into buffers at each call.
    `owned`: managed positions that may die inside the piece.  `generators`: random number generators.  `gathered`: of
    copied or patched ones, handles of storages by which parameters are told apart.  `patched`: positions that are read
    wherever they lie.  All others are numbers, part of the piece's key, or None.
    """

    fixed: tuple[int, ...]
    addresses: list[int | None]
    managed: Mapping[int, Slot]
    copied: tuple[int, ...]
    owned: tuple[int, ...]
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    gathered: Mapping[int, int] = field(default_factory=dict)
    patched: tuple[int, ...] = ()


@dataclass(frozen=True)
class OfSlot:
    """An output in memory of the recording."""

    slot: int
    layout: Layout


@dataclass(frozen=True)
class OfInput:
    """An output that is an input (`layout` None), or the same memory in another layout, relative to its start."""

    index: int
    layout: Layout | None


@dataclass(frozen=True)
class Constant:
    """A number, None, or a tensor that is the same at each call."""

    value: Any


@dataclass(frozen=True)
class Empty:
    """An output without memory; each call has its own, which a user may let grow."""

    layout: Layout


Output = OfSlot | OfInput | Constant | Empty


@dataclass
class Recording:
    """See the module's text.

    buffers: per copied input, a tensor over its place in the pool; stager: what copies into them; trial: of one that
    has to pay for itself. code_us: microseconds that its code took the host while it was captured. overridden: whether
    a call asks things of an input whose class answers itself. random: whether a launch draws random numbers, which
    torch counts. within: whether it copies its inputs itself; copying: the driver's handle of what does. patches: what
    is told of inputs that are patched. peak, grown: see `Captured`.
    """

    graph: Graph
    plan: InputPlan
    buffers: list[torch.Tensor]
    sources: list[Source]
    outputs: list[Output]
    slots: list[Slot]
    consumed: list[tuple[Slot, int]]
    state: PoolState
    stager: Stager | None = None
    trial: Trial | None = None
    overridden: bool = False
    random: bool = False
    within: bool = False
    copying: int = 0
    patches: Patches | None = None
    peak: int = 0
    grown: int = 0
    code_us: float = 0.0


def record(
    device: Device,
    spec: PieceSpec,
    function: Boxed,
    inputs: Sequence[Any],
    plan: InputPlan,
    prepare: Callable[[Sequence[tuple[int, int]]], list[torch.UntypedStorage]],
    unlocked: Callable[[], contextlib.AbstractContextManager[None]],
    elsewhere: Mapping[int, torch.Tensor] | None = None,
) -> Recording:
    """Capture `function`, the code of a piece, for `inputs`.  `prepare` sets the pool to the state to record in, and
    makes owners of blocks; `unlocked` is entered while the code runs, which may wait for other threads.  `elsewhere`:
    tensors in place of the patched inputs; the recording is then there to be looked at, and cannot be launched.

    Nothing of it runs on the device.  Raises `NotRecorded`; the pool is then fit for another `prepare`.
    """
    parts = {index: _part(inputs[index]) for index in plan.copied}
    sources = [part.source(inputs[index]) if part.source else inputs[index] for index, part in parts.items()]
    as_bytes = not any([source.is_conj() or source.is_neg() for source in sources])  # noqa: C419 - see `Node.alive`
    within = device.within(sources) if sources and as_bytes else None
    # from here to the capture nothing may be allocated
    dying = {slot.address: slot.nbytes for slot in (plan.managed[index] for index in plan.owned)}
    owners = dict(zip(dying, prepare(list(dying.items())), strict=True))
    owned = {index: (plan.managed[index].address, Layout.of(inputs[index])) for index in plan.owned}
    lying: dict[int, tuple[int, int]] = {}
    passed: dict[int, StorageWeakRef] = {}
    given = {index: weakref.ref(tensor) for index, tensor in enumerate(inputs) if _is_tensor(tensor)}
    seconds, random = 0.0, spec.random or bool(plan.generators)

    def capture() -> list[Any]:
        args = list(inputs)
        for index, part in parts.items():
            buffer = torch.empty_strided(
                part.layout.size, part.layout.stride, dtype=part.layout.dtype, device=inputs[index].device
            )
            storage = buffer.untyped_storage()
            lying[index] = device.storage_address(storage), storage.nbytes()
            passed[index] = StorageWeakRef(storage)
            given[index], args[index] = weakref.ref(buffer), buffer
            del buffer, storage
        for index, twin in (elsewhere or {}).items():
            passed[index], args[index] = StorageWeakRef(twin.untyped_storage()), twin
            given[index] = weakref.ref(twin)
        if within is not None:
            within.launch([part.source(args[index]) if part.source else args[index] for index, part in parts.items()])
        for index, (address, layout) in owned.items():
            passed[index] = StorageWeakRef(owners[address])
            args[index] = device.make(layout, owners[address])
            given[index] = weakref.ref(args[index])
        owners.clear()
        nonlocal seconds
        with unlocked():
            started = time.perf_counter()
            result = list(function(args))
            seconds = time.perf_counter() - started
        return result

    described: list[Output] = []
    storages: list[torch.UntypedStorage] = []
    seen: list[bool] = []

    def fresh(result: list[Any]) -> list[torch.Tensor]:
        known = {index: tensor.untyped_storage()._cdata for index, tensor in enumerate(inputs) if _is_tensor(tensor)}
        for index, reference in passed.items():
            known.pop(index, None)
            # an output in the buffer of a temporary is a new value there, not the value that was passed
            if not reference.expired() and not (index in parts and index in spec.reused):
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                assert storage is not None
                known[index] = storage._cdata
        by_handle = {handle: index for index, handle in reversed(known.items())}
        fixed_forever = {tensor.untyped_storage()._cdata for tensor in spec.constants}
        live_out: list[torch.Tensor] = []
        slots: dict[int, int] = {}
        if len(result) != len(spec.visible):
            raise NotRecorded(f"it returns {len(result)} outputs where {len(spec.visible)} were expected", always=True)
        for output, shown in zip(result, spec.visible, strict=True):
            if not isinstance(output, torch.Tensor):
                described.append(_number(output))
                continue
            handle = output.untyped_storage()._cdata
            if handle in by_handle:
                index = by_handle[handle]
                same = output is given[index]()
                begins = 0 if index in parts or (elsewhere and index in elsewhere) else None
                described.append(_of_input(index, inputs[index], output, same, begins))
                if index in owned:
                    live_out.append(output)  # its block stays
                if index in plan.managed and shown and not spec.copies:
                    plan.managed[index].visible = True
            elif handle in fixed_forever:
                described.append(Constant(output))
            elif output.untyped_storage().nbytes() == 0:
                described.append(Empty(Layout.of(output)))
            else:
                _check_output(device, output)
                if handle not in slots:
                    slots[handle] = len(storages)
                    storages.append(output.untyped_storage())
                    seen.append(False)
                    live_out.append(output)
                seen[slots[handle]] |= shown
                described.append(OfSlot(slots[handle], Layout.of(output)))
        result.clear()  # outputs that are views of buffers end here, and the buffers with them
        return live_out

    try:
        generators = list(plan.generators.values())
        changed = within is not None or bool(plan.patched)
        captured = device.capture(capture, fresh, random, generators, changed, read=elsewhere is not None)
    except CaptureFailed as error:
        storages.clear()
        described.clear()
        if isinstance(error.__cause__, NotRecorded):
            raise error.__cause__ from None
        raise NotRecorded(f"recording failed: {error}") from error
    copying = 0 if within is None else within.node
    if elsewhere is not None:
        return Recording(captured.graph, plan, [], [], described, [], [], captured.state, copying=copying)
    buffers = [_over(device, lying[index], part) for index, part in parts.items()]
    asked = {*parts, *(output.index for output in described if isinstance(output, OfInput))}
    if within is not None:
        stager: Stager | None = within.finished(buffers)
    else:
        stager = device.stager(buffers, as_bytes) if buffers else None
    trial = None
    if spec.must_pay:
        trial = Trial(seconds * 1e6, device.time_copies(stager.copy, sources) if stager else lambda: 0.0)
    return Recording(
        graph=captured.graph,
        plan=plan,
        buffers=buffers,
        sources=[part.source for part in parts.values()],
        outputs=described,
        slots=[
            Slot(device.storage_address(storage), storage, shown, device.generation)
            for storage, shown in zip(storages, seen, strict=True)
        ],
        consumed=_consumed(plan, captured),
        state=captured.state,
        stager=stager,
        trial=trial,
        overridden=any(overrides_functions(inputs[index]) for index in asked),
        peak=captured.peak,
        grown=captured.grown,
        random=random,
        within=within is not None,
        copying=copying,
        code_us=seconds * 1e6,
    )


def _consumed(plan: InputPlan, captured: Captured) -> list[tuple[Slot, int]]:
    """Slots that die in the piece, with how many inputs are over each."""
    counts: dict[int, tuple[Slot, int]] = {}
    for index in plan.owned:
        slot = plan.managed[index]
        counts[slot.address] = slot, counts.get(slot.address, (slot, 0))[1] + 1
    return [entry for address, entry in counts.items() if address in captured.freed]


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class _Part:
    """Layout of an input's buffer, and for inputs that repeat elements, how to see each element once."""

    layout: Layout
    source: Source


def _part(tensor: torch.Tensor) -> _Part:
    layout = Layout.of(tensor)
    layout = Layout(layout.size, layout.stride, 0, layout.dtype)
    if not overlaps_itself(layout):
        return _Part(layout, None)
    return _Part(layout, _each_element_once(layout))


def _each_element_once(layout: Layout) -> Callable[[torch.Tensor], torch.Tensor]:
    repeated = [dim for dim, stride in enumerate(layout.stride) if stride == 0 and layout.size[dim] > 1]

    def once(tensor: torch.Tensor) -> torch.Tensor:
        for dim in repeated:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor

    return once


def overlaps_itself(layout: Layout) -> bool:
    """Whether two elements share memory because a dimension is expanded."""
    return any(stride == 0 and size > 1 for size, stride in zip(layout.size, layout.stride, strict=True))


def overlaps_otherwise(layout: Layout) -> bool:
    """Whether elements may share memory in a way that expanding does not explain (as after `unfold`)."""
    dims = sorted(
        (stride, size) for size, stride in zip(layout.size, layout.stride, strict=True) if size > 1 and stride
    )
    reached = 0
    for stride, size in dims:
        if stride <= reached:
            return True
        reached += (size - 1) * stride
    return False


def _over(device: Device, lying: tuple[int, int], part: _Part) -> torch.Tensor:
    buffer = device.make(part.layout, device.storage_at(*lying))
    return part.source(buffer) if part.source is not None else buffer


# ---------------------------------------------------------------- outputs


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _number(value: Any) -> Constant:
    if value is None or isinstance(value, bool | int | float):
        return Constant(value)
    raise NotRecorded(f"it returns a {type(value).__name__}", always=True)


def _check_output(device: Device, output: torch.Tensor) -> None:
    if not device.is_on_device(output) or type(output) not in (torch.Tensor, torch.nn.Parameter):
        raise NotRecorded(f"it returns a {type(output).__name__} on {output.device}", always=True)
    if output.is_conj() or output.is_neg() or output.requires_grad:
        raise NotRecorded("it returns a tensor with a conjugate, negative or gradient mark", always=True)


def _of_input(index: int, tensor: torch.Tensor, output: torch.Tensor, same: bool, start: int | None) -> OfInput:
    """`same`: whether it is the very tensor that was passed, and so of its class; `start`: where the input that was
    captured began in its storage; None: where `tensor` does."""
    layout = Layout.of(output)
    if start is None:
        start = tensor.storage_offset() * tensor.dtype.itemsize // layout.dtype.itemsize
    relative = Layout(layout.size, layout.stride, layout.offset - start, layout.dtype)
    as_given = Layout(tuple(tensor.size()), tuple(tensor.stride()), 0, tensor.dtype)
    handed_through = relative == as_given and (same or type(tensor) is torch.Tensor)
    return OfInput(index, None if handed_through else relative)
