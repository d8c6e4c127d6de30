"""What runs per call of a recorded piece: generated once for each recording, nothing interpreted.

In: a `Recording`.  Out: two functions of the boxed inputs.  `holds` says whether the recording may be replayed for
them: fixed inputs lie where they were, what the recording writes over is dead, what dies in it is held by nobody else,
and what it hands out lies where it writes.
`run` copies the inputs that are copied in one launch, launches the recording, makes the outputs and clears the list.

For a piece of a parameter, a user's input and an output of an earlier recording, with two outputs of its own, the text
is this (the second input is copied, the third is read in place and dies inside; no user sees the second output):

    def holds(inputs):
        if not same(inputs, addresses, fixed):                      # inputs 0 and 2 lie where they lay
            return False
        for slot in dead:                                           # what else it writes over is dead
            if slot.alive(use_count):
                return False
        if list(map(use_count, handles)) != bases or list(map(references, take(inputs))) != counts:
            ...                                                     # input 2 is held by others than the list, maybe
        if not same(kept, kept_at, numbers):
            return False                                            # no user has moved what is handed out again,
        if shown and list(map(address_of, map(storage_of, shown))) != shown_at:
            return False                                            # or what was once, and he has come to see,
        if address_of(slot0.storage) != 140012:
            return False                                            # or resized another output
        return True

    def run(node, inputs):
        stage(inputs[1])                                            # one launch, into the buffer of input 1
        launch()
        if hooks(True) is None:
            outputs = (make0(storage0), kept1,)                     # a new tensor over the same memory, and one that
        else:                                                       # is handed out again: only autograd saves it
            outputs = (make0(storage0), make1(storage1),)
        inputs.clear()
        path[-1].watched = left1                                    # what may be alive of the recording before
        node.watched = watched
        node.calls += 1
        node.used = tree.clock = tree.clock + 1
        append(node)                                                # to the path
        return outputs

Where calls are native (`native`), `holds` is an object that asks the same in the same order, and a recording is staged
and launched in one call, `launch(inputs)`: what is recorded then begins with the copies, and is told at each launch
where its sources lie.  So are kernels that read inputs where they lie (`patching`); these take no part in `stage`.

Lines without a purpose for a recording are left out.  Outputs that are copies, and what is an input or a constant,
have lines of their own (`_copies_of_slots`, `_copies_of_inputs`, `_output`).
"""

from __future__ import annotations

import functools
import operator
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices.device import Device, Layout
from multigraph_backend.cudagraphs.recordings import poison
from multigraph_backend.cudagraphs.recordings.cost import Trial
from multigraph_backend.cudagraphs.recordings.nodes import Holds, Node, Nodes, Run, not_built
from multigraph_backend.cudagraphs.recordings.recording import Constant, Empty, OfInput, OfSlot, Recording
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.native import Calls

_WORD = torch.int64


def build(node: Node) -> None:
    """Generate what runs; again when a slot has moved or is to be copied.  Nothing over its slots may be alive."""
    assert node.recording is not None
    for slot in node.slots:
        if not slot.lies(node.tree.device):
            renew(node, slot)
    node.run = not_built  # drops what the old one held over the slots, before counts are taken
    _keep_tensors(node)
    node.watched = tuple(slot for slot in node.slots if not slot.copied)
    node.run = build_run(node.tree.device, node.recording, node)
    if node.trial is not None:
        node.run = functools.partial(_try, node.run)
    node.ready = True


def watch(node: Node, trial: Trial) -> None:
    """Let `trial`, which has to do with the one that `node` is on, see its replays from now on."""
    if node.trial is None and node.ready:
        node.run = functools.partial(_try, node.run)
    node.trial = trial


def renew(node: Node, slot: Slot, resized: bool = True) -> None:
    """Put a storage over the memory of `slot`, whose own lies elsewhere: it was moved, or the user has resized it.

    It can be neither moved nor resized, so what users get, or have resized, is a copy from now on.
    """
    device = node.tree.device
    node.unbuild()
    slot.put(device.storage_at(slot.address, slot.nbytes))
    slot.take_baseline(device.use_count)
    slot.movable = False
    slot.copied = slot.copied or slot.visible or resized
    if resized:
        node.tree.count_resized(node)


def _try(run: Run, node: Node, inputs: list[object]) -> tuple[object, ...]:
    """Run it and see what it costs; after some calls, keep it or give it up."""
    assert node.trial is not None
    started = time.perf_counter()
    outputs = run(node, inputs)
    if node.trial.ran((time.perf_counter() - started) * 1e6):
        node.run = run
        loss, node.trial = node.trial.loss(), None
        if loss is not None:
            node.tree.give_up(node, loss)
    return outputs


def _strayed(reference: weakref.ref[Node], indices: Sequence[int]) -> None:
    node = reference()
    if node is not None:
        node.tree.count_strays(node, indices)


def build_holds(node: Node) -> Holds:
    """The function that says whether the recording of `node`, which has been built, may be replayed; it does not hold
    the node."""
    assert node.recording is not None
    device, recording = node.tree.device, node.recording
    if node.tree.calls is not None:
        return _native_holds(node.tree.calls, node)
    lines = ["def holds(inputs):"]
    names: dict[str, Any] = {"use_count": device.use_count, "same": device.same_addresses}
    if recording.plan.fixed:
        plan = recording.plan
        names.update(addresses=plan.addresses, fixed=list(plan.fixed))
        lines += ["    if not same(inputs, addresses, fixed):", "        return False"]
    for index, generator in recording.plan.generators.items():
        names[f"generator{index}"] = generator
        lines += [f"    if inputs[{index}] is not generator{index}:", "        return False"]
    if node.dead:
        names["dead"] = node.dead
        lines += ["    for slot in dead:", "        if slot.alive(use_count):", "            return False"]
    lines += _consumed(recording, names)
    lines += _elsewhere(node, names)
    lines.append("    return True")
    holds: Holds = _function("holds", lines, names)
    return holds


def _native_holds(calls: Calls, node: Node) -> Holds:
    """The same, natively; where addresses are not those of the process (on a simulated device) these are compared as
    ever."""
    assert node.recording is not None
    device, plan, handed, outputs = node.tree.device, node.recording.plan, node.handed_out, node.recording.outputs
    over: dict[int, list[int]] = {slot.address: [] for slot, _ in node.recording.consumed}
    for index in plan.owned:
        if (address := plan.managed[index].address) in over:
            over[address].append(index)
    state: dict[str, Any] = {
        "fixed": tuple((index, plan.addresses[index]) for index in plan.fixed),
        "same": tuple(plan.generators.items()),
        "dead": node.dead,
        "consumed": tuple((slot, count, tuple(over[slot.address])) for slot, count in node.recording.consumed),
        "kept": None, "kept_at": None, "shown": None,
        "slots": [slot for slot in node.slots if slot.kept is None],
        "constants": tuple(
            (output.value.untyped_storage(), output.value.untyped_storage().data_ptr())
            for output in outputs
            if isinstance(output, Constant) and isinstance(output.value, torch.Tensor)
        ),
        "checks": (),
    }  # fmt: skip
    if handed.kept:
        state.update(kept=handed.kept, kept_at=handed.kept_at, shown=handed.shown)
    if not device.own_addresses:
        state.update(fixed=(), kept=None, slots=(), constants=(), checks=(_where_they_lie(node),))
    return calls.Holds(**state)


def _where_they_lie(node: Node) -> Holds:
    """The part of `holds` that compares addresses."""
    assert node.recording is not None
    plan = node.recording.plan
    names: dict[str, Any] = {"same": node.tree.device.same_addresses}
    lines = ["def holds(inputs):"]
    if plan.fixed:
        names.update(addresses=plan.addresses, fixed=list(plan.fixed))
        lines += ["    if not same(inputs, addresses, fixed):", "        return False"]
    lines += [*_elsewhere(node, names), "    return True"]
    holds: Holds = _function("holds", lines, names)
    return holds


def _consumed(recording: Recording, names: dict[str, Any]) -> list[str]:
    """Statements that find a slot which is to die in the recording, and is held by others than the list of inputs.

    Autograd keeps the very tensor that it saved, and hands it out again, where a graph is retained: so references to
    tensors are counted, too.  Mostly all counts are those of before, which is asked at once.
    """
    if not recording.consumed:
        return []
    over: dict[int, list[int]] = {slot.address: [] for slot, _ in recording.consumed}
    for index in recording.plan.owned:
        if (address := recording.plan.managed[index].address) in over:
            over[address].append(index)
    slots = [slot for slot, _ in recording.consumed]
    names.update(
        consumed=[(slot, count, tuple(over[slot.address])) for slot, count in recording.consumed],
        references=sys.getrefcount,
    )
    lines = [
        "    for slot, count, indices in consumed:",
        "        own = 0",
        "        for index in indices:",
        "            if inputs[index] is slot.kept:",
        "                own += 1",
        "            elif references(inputs[index]) > 2:",  # the list, and the call
        "                return False",
        "        if use_count(slot.handle) > slot.base + count - own:",
        "            return False",
        "        if references(slot.kept) > slot.kept_refs + own:",
        "            return False",
    ]
    if any([slot.kept is None or len(over[slot.address]) != 1 for slot in slots]):  # noqa: C419 - see `Node.alive`
        return lines
    indices = [over[slot.address][0] for slot in slots]
    names.update(
        handles=[slot.handle for slot in slots],
        bases=[slot.base for slot in slots],
        counts=[slot.kept_refs + 2 for slot in slots],  # the list of inputs, and what `take` returns
        take=operator.itemgetter(*indices) if len(indices) > 1 else lambda inputs, at=indices[0]: (inputs[at],),
    )
    return [
        "    if list(map(use_count, handles)) != bases or list(map(references, take(inputs))) != counts:",
        *(f"    {line}" for line in lines),
    ]


def _elsewhere(node: Node, names: dict[str, Any]) -> list[str]:
    """Statements that find a storage which the user has resized, and so moved: of an output, or of a constant that he
    was handed.  A storage that is resized lies elsewhere, also one that becomes smaller."""
    assert node.recording is not None
    device, handed, lines, moved = node.tree.device, node.handed_out, list[str](), list[str]()
    if handed.kept:
        names.update(kept=handed.kept, kept_at=handed.kept_at, numbers=handed.numbers)
        names.update(shown=handed.shown, shown_at=handed.shown_at, storage_of=operator.attrgetter("storage"))
        lines += ["    if not same(kept, kept_at, numbers):", "        return False"]
        lines += ["    if shown and list(map(address_of, map(storage_of, shown))) != shown_at:", "        return False"]
    for at, slot in enumerate(node.slots):
        if slot.kept is None:
            names[f"slot{at}"] = slot
            moved.append(f"address_of(slot{at}.storage) != {slot.address}")
    for number, output in enumerate(node.recording.outputs):
        if isinstance(output, Constant) and isinstance(output.value, torch.Tensor):
            storage = names[f"constant{number}"] = output.value.untyped_storage()
            moved.append(f"address_of(constant{number}) != {device.storage_address(storage)}")
    names["address_of"] = device.storage_address
    return [*lines, f"    if {' or '.join(moved)}:", "        return False"] if moved else lines


def build_run(device: Device, recording: Recording, node: Node) -> Run:
    """The function for replaying `recording`, the one of `node`, which it is given and appends to the path: it does not
    hold it, so that a node goes as soon as it is given up.

    Reads where its slots' storages are and which of them are copied, and takes the baseline of their counts: nothing
    over the slots may be alive, and it is built anew when one of these changes.
    """
    lines = ["def run(node, inputs):"]
    names: dict[str, Any] = {"copy": device.copy, "launch": recording.graph.replay}
    names.update(tree=node.tree, path=node.tree.path, append=node.tree.path.append, watched=node.watched)
    if node.tree.poisons:
        names.update(poison=poison.fill, own=recording.slots)
        lines.append("    poison(node, ())")
    launch = ["    launch()"]
    if recording.buffers:
        sources = []
        for number, (index, source) in enumerate(zip(recording.plan.copied, recording.sources, strict=True)):
            if source is not None:
                names[f"once{number}"] = source
            sources.append(f"inputs[{index}]" if source is None else f"once{number}(inputs[{index}])")
        assert recording.stager is not None
        names["stage"] = recording.stager.copy
        launch = [f"    stage({', '.join(sources)})", *launch]
    copied = recording.plan.copied
    patches = recording.patches
    strayed = None if patches is None else functools.partial(_strayed, weakref.ref(node))
    how = recording.sources, recording.stager, patches, strayed
    at_once = device.launcher(recording.graph, recording.random, copied, *how)
    told = recording.within or patches is not None
    assert at_once is not None or not told, "a recording that is told where its inputs lie was not told"
    if at_once is not None:
        names["launch"], launch = at_once, ["    launch(inputs)"]
    lines += launch
    if node.tree.poisons:
        lines.append("    poison(node, own)")
    lines += _copies_of_slots(device, recording.slots, names)
    lines += _copies_of_inputs(device, recording, node, names)
    outputs = [_output(node, recording, number, names) for number in range(len(recording.outputs))]
    again = [_kept(recording, number, names) or output for number, output in enumerate(outputs)]
    if again == outputs:
        lines += [f"    outputs = {_tuple(outputs)}"]
    else:  # hooks of the user are handed what is saved, and may do with it what they like
        names["hooks"] = _compat.saved_tensors_hooks
        lines += ["    if hooks(True) is None:", f"        outputs = {_tuple(again)}"]
        lines += ["    else:", f"        outputs = {_tuple(outputs)}"]
    lines += ["    inputs.clear()", *_left(node, names), "    node.watched = watched"]
    lines += [
        "    node.calls += 1",
        "    node.used = tree.clock = tree.clock + 1",
        "    append(node)",
        "    return outputs",
    ]
    if recording.overridden:  # its class need not answer what is asked here
        names["without"] = _compat.without_torch_function
        lines[1:] = ["    with without():", *(f"    {line}" for line in lines[1:])]
    run: Run = _function("run", lines, names)
    for slot in recording.slots:
        slot.take_baseline(device.use_count)
    return run


def _keep_tensors(node: Node) -> None:
    """Make the tensors that are handed out again and again: where no user can hold one, as of what a forward saves for
    its backward, and no other lies over its slot."""
    assert node.recording is not None
    over = Counter(output.slot for output in node.recording.outputs if isinstance(output, OfSlot))
    for slot in node.slots:
        slot.kept = None
    for output in node.recording.outputs:
        if not isinstance(output, OfSlot) or over[output.slot] > 1:
            continue
        slot = node.slots[output.slot]
        if not slot.visible and not slot.copied:
            with torch.inference_mode(False):  # another call may be under another mode, and write to it
                slot.kept = node.tree.device.make(output.layout, slot.storage)
    node.handed_out.fill(node.slots)


def _kept(recording: Recording, number: int, names: dict[str, Any]) -> str | None:
    """The name of the tensor that is handed out again for this output, where there is one."""
    output = recording.outputs[number]
    if not isinstance(output, OfSlot) or (tensor := recording.slots[output.slot].kept) is None:
        return None
    names[f"kept{number}"] = tensor
    return f"kept{number}"


def _left(node: Node, names: dict[str, Any]) -> list[str]:
    """Statements that say what may still be alive of the nodes before, once this one has run: not what had to be dead
    for that, or died in it.  It runs behind its parent, so the path's last nodes are those before it."""
    lines: list[str] = []
    gone = {id(slot) for slot in node.surely_dead()}
    before = node.parent if gone else None
    while before is not None and before.recording is not None:
        left = tuple(slot for slot in before.slots if id(slot) not in gone)
        if len(left) < len(before.slots):
            names[f"left{before.depth}"] = left
            lines.append(f"    path[{before.depth - node.depth}].watched = left{before.depth}")
        gone.update(map(id, before.surely_dead()))
        before = before.parent
    return lines


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' if values else ''})"


def _copies_of_slots(device: Device, slots: Sequence[Slot], names: dict[str, Any]) -> list[str]:
    """Statements that copy each copied slot to a storage of its own, `storage{number}`."""
    copied = [number for number, slot in enumerate(slots) if slot.copied]
    lines, there = list[str](), list[torch.Tensor]()
    for number, slot in enumerate(slots):
        if not slot.copied:
            names[f"storage{number}"] = slot.storage
            continue
        words = device.maker(_words(slot.nbytes))
        there.append(words(slot.storage))
        names.update({f"words{number}": words, f"recorded{number}": there[-1]})
        names[f"fresh{number}"] = functools.partial(device.fresh_storage, slot.nbytes)
        lines.append(f"    storage{number} = fresh{number}()")
    unload = device.unloader(there) if copied else None
    if unload is not None:
        names["unload"] = unload
        lines.append(f"    unload({', '.join(f'storage{number}' for number in copied)})")
    elif copied:
        to = ", ".join(f"words{number}(storage{number})" for number in copied)
        lines.append(f"    copy([{to}], [{', '.join(f'recorded{number}' for number in copied)}])")
    return lines


def _copies_of_inputs(device: Device, recording: Recording, node: Node, names: dict[str, Any]) -> list[str]:
    """Statements that copy what is handed out of inputs that lie in the pool, where it is to be copies: `copied`, by
    number of the output."""
    piece = node.keyed.piece if node.keyed is not None else None
    if piece is None or not piece.spec.copies:
        return []
    parts = []
    for number, (output, shown) in enumerate(zip(recording.outputs, piece.spec.visible, strict=True)):
        if not (shown and isinstance(output, OfInput)):
            continue
        if output.index in recording.plan.managed:
            names[f"copied{number}"] = functools.partial(copied, device, output.layout)
        elif output.index in {*recording.plan.copied, *recording.plan.patched}:  # from anywhere, perhaps from the pool
            names[f"copied{number}"] = functools.partial(_copied_from_pool, node.tree, output.layout)
        else:
            continue
        parts.append(f"{number}: copied{number}(inputs[{output.index}], taken)")
    return ["    taken = {}", f"    copied = {{{', '.join(parts)}}}"] if parts else []


def copied(
    device: Device, layout: Layout | None, tensor: torch.Tensor, taken: dict[int, torch.UntypedStorage]
) -> torch.Tensor:
    """`tensor`, or `layout` relative to its start, over a copy of its storage; `taken`: those there are, by handle."""
    storage = tensor.untyped_storage()
    if storage._cdata not in taken:
        words, fresh = _words(storage.nbytes()), device.fresh_storage(storage.nbytes())
        device.copy([device.make(words, fresh)], [device.make(words, storage)])
        taken[storage._cdata] = fresh
    seen = Layout.of(tensor) if layout is None else _absolute(layout, tensor)
    return device.make(seen, taken[storage._cdata])


def _copied_from_pool(
    tree: Nodes, layout: Layout | None, tensor: torch.Tensor, taken: dict[int, torch.UntypedStorage]
) -> torch.Tensor:
    """As `copied`, if `tensor` lies over memory of a recording on the path; else it, or the view of it."""
    handle = tensor.untyped_storage()._cdata
    if any(slot.handle == handle and slot.lies(tree.device) for node in tree.path for slot in node.slots):
        return copied(tree.device, layout, tensor, taken)
    return tensor if layout is None else _view(tree.device, layout, tensor)


def _words(nbytes: int) -> Layout:
    dtype = _WORD if nbytes % _WORD.itemsize == 0 else torch.uint8
    return Layout((nbytes // dtype.itemsize,), (1,), 0, dtype)


def _output(node: Node, recording: Recording, number: int, names: dict[str, Any]) -> str:
    output, device = recording.outputs[number], node.tree.device
    if isinstance(output, OfSlot):
        slot = recording.slots[output.slot]
        if node.is_backward and not slot.copied:
            names[f"make{number}"] = device.maker_over(output.layout, slot.storage)
            return f"make{number}()"
        names[f"make{number}"] = device.maker(output.layout)
        return f"make{number}(storage{output.slot})"
    if isinstance(output, OfInput):
        if f"copied{number}" in names:
            return f"copied[{number}]"
        if output.layout is None:
            return f"inputs[{output.index}]"
        names[f"view{number}"] = functools.partial(_view, device, output.layout)
        return f"view{number}(inputs[{output.index}])"
    if isinstance(output, Empty):
        names[f"make{number}"] = device.maker(output.layout)
        names[f"nothing{number}"] = functools.partial(device.fresh_storage, 0)
        return f"make{number}(nothing{number}())"
    assert isinstance(output, Constant)
    if isinstance(output.value, torch.Tensor):
        names[f"make{number}"] = functools.partial(_view, device, _relative(output.value))
        names[f"constant{number}"] = output.value
        return f"make{number}(constant{number})"
    names[f"value{number}"] = output.value
    return f"value{number}"


def _relative(tensor: torch.Tensor) -> Layout:
    layout = Layout.of(tensor)
    return Layout(layout.size, layout.stride, 0, layout.dtype)


def _view(device: Device, layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of `layout`, relative to the start of `tensor`, in the memory of `tensor`."""
    return device.make(_absolute(layout, tensor), tensor.untyped_storage())


def _absolute(layout: Layout, tensor: torch.Tensor) -> Layout:
    """`layout`, relative to the start of `tensor`, in the storage of `tensor`."""
    offset = tensor.storage_offset() * tensor.dtype.itemsize // layout.dtype.itemsize + layout.offset
    return Layout(layout.size, layout.stride, offset, layout.dtype)


def _function(name: str, lines: Sequence[str], names: dict[str, Any]) -> Any:
    exec(_code(name, "\n".join(lines)), names)
    return names.pop(name)  # in its own globals it would live until a garbage collection, with all that it holds


@functools.lru_cache(maxsize=256)
def _code(name: str, text: str) -> CodeType:
    """Compiled once for recordings that differ in numbers alone."""
    return compile(text, f"<multigraph {name} of a recording>", "exec")
