"""What a capture on a simulated device records, and what it refuses.

In: the operations that pass torch's dispatcher while a function runs.  Out: kernels, which name their tensors by where
they lie.  An operation is not run: a view is made of the real tensors, for all else shapes come from meta tensors (from
zeros, where an operation has no meta kernel), and results get memory of the pool.  Memory whose last tensor has died
serves again in the same capture, as soon as the next piece is allocated.

Code that goes around the dispatcher (Inductor's C++ kernels, `torch.tensor`) is not seen; a capture in which it writes
to the pool, or hands memory of its own to an operation, is refused.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices.device import Layout
from multigraph_backend.cudagraphs.devices.simulated.memory import Mapped, Memory, Outside, Pool, Reference, tensor_over

NOT_CAPTURED = "operation not permitted when stream is capturing"

#: operations that return their input's memory although their schema does not say so
_VIEWS = frozenset({"aten::_unsafe_view"})
#: operations that return memory with whatever it holds
_EMPTIES = ("aten::empty", "aten::new_empty")
#: bytes of the largest number: a kernel takes those that come from the host (as in `x[0] = 7`) by value
_SCALAR = 16
#: operations that must not be tried out
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def each(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` (arguments or results of an operation) with `change` applied to its leaves."""
    if isinstance(value, (list, tuple)):
        return type(value)(each(change, item) for item in value)
    if isinstance(value, dict):
        return {name: each(change, item) for name, item in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    each(leaves.append, value)
    return leaves


@dataclass(frozen=True)
class Told:
    """In place of a reference: `layout` lies `offset` bytes behind the first element of input `which`, of those that
    are patched (see `devices.patches`)."""

    which: int
    offset: int
    layout: Layout


@dataclass
class Kernel:
    """One operation; `outputs` holds, for each leaf of its result, where it goes (None: nowhere, or it is there)."""

    func: Any
    arguments: Any  # args, kwargs
    outputs: list[Reference | None]

    def run(self, told: Callable[[Told], torch.Tensor]) -> None:
        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Told):
                return told(leaf)
            return leaf.tensor() if isinstance(leaf, Reference) else leaf

        args, kwargs = each(filled, self.arguments)
        result = self.func(*args, **kwargs)
        if self.func.namespace == "_c10d_functional":
            result = each(torch.ops._c10d_functional.wait_tensor, result)
        for place, leaf in zip(self.outputs, _leaves(result), strict=True):
            if place is not None:
                place.tensor().copy_(leaf)

    def described(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """What has to be the same in another capture, and the addresses that it is given."""
        places = [leaf for leaf in _leaves((self.arguments, self.outputs)) if isinstance(leaf, Reference)]
        numbers = [repr(leaf) for leaf in _leaves(self.arguments) if not isinstance(leaf, Reference)]
        layouts = [(place.layout.size, place.layout.stride, str(place.layout.dtype)) for place in places]
        same = (hash(str(self.func)), hash(tuple(numbers)), hash(tuple(layouts)))
        return same, tuple(place.address.to_bytes(8, "little") for place in places)

    def outside(self) -> set[Outside]:
        """Memory outside of the pool that it uses."""
        places = [leaf for leaf in _leaves((self.arguments, self.outputs)) if isinstance(leaf, Reference)]
        return {place.memory for place in places if isinstance(place.memory, Outside)}

    def tell(self, words: Mapping[int, tuple[int, int]]) -> None:
        """Let arguments be given at each launch: by number, which input, and an offset."""
        numbers = itertools.count()

        def patched(leaf: Any) -> Any:
            number = next(numbers) if isinstance(leaf, Reference | Told) else -1
            if number not in words or isinstance(leaf, Told):
                return leaf
            return Told(*words[number], leaf.layout)

        self.arguments = each(patched, self.arguments)


def _is_view(func: Any) -> bool:
    """Whether `func` runs no kernel: it only makes, or changes in place, how a tensor lies in its memory."""
    schema = func._schema
    if torch.Tag.inplace_view in func.tags or schema.name in _VIEWS:
        return True
    aliases = [item.alias_info for item in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _writes(func: Any) -> bool:
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


class Recorder(_compat.TorchDispatchMode):  # type: ignore[misc]
    """Turns operations into kernels, and keeps the books of one capture."""

    def __init__(
        self,
        pool: Pool,
        memory: Memory,
        owners: list[Mapped],
        usable: Callable[[torch.Tensor], bool],
        driver: Callable[[str, Any], None],
    ) -> None:
        super().__init__()
        self.pool = pool
        self.memory = memory
        self.usable = usable
        self.driver = driver
        self.owners = owners
        self.freed: list[tuple[int, int]] = []
        self.kernels: list[Kernel] = []
        self.outside: set[Outside] = set()
        self.made: dict[int, Mapped] = {}
        self.bytes = self.peak = 0  # of blocks that it has allocated: now, and the most
        self.touched: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        with self:
            # in inference mode, composite operations arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _is_view(func):
            return func(*args, **kwargs)
        result, arguments = self.shapes(func, args, kwargs)
        outputs: list[Reference | None] = []

        def realize(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in arguments:
                storage = self.allocate(leaf.untyped_storage().nbytes(), str(func))
                tensor = tensor_over(Layout.of(leaf), storage)
                outputs.append(self.reference(tensor))
                return tensor
            outputs.append(None)
            return arguments[id(leaf)][1] if id(leaf) in arguments else leaf

        result = each(realize, result)
        computes = any(outputs) and not func._schema.name.startswith(_EMPTIES)
        if computes or _writes(func) or not func._schema.returns:
            self.driver("launch", str(func))
            self.kernels.append(Kernel(func, each(self.reference, (args, kwargs)), outputs))
        return result

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise for what a capture cannot hold."""
        schema = func._schema
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if not self.usable(tensor) or tensor.is_conj() or tensor.is_neg():
                raise RuntimeError(f"{NOT_CAPTURED}: {func} uses a {type(tensor).__name__} on {tensor.device}")
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
            raise RuntimeError(f"{NOT_CAPTURED}: {func} on {kwargs['device']}")
        if schema.name.startswith("aten::resize"):
            raise RuntimeError(f"{NOT_CAPTURED}: {func} resizes its argument")
        dynamic = torch.Tag.dynamic_output_shape in func.tags
        if schema.name in ("aten::index", "aten::_unsafe_index"):
            dynamic = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
        if dynamic or torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{NOT_CAPTURED}: {func}")

    def shapes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """A result of `func` on blank tensors; and for each blank argument, by its `id`, itself and the real one."""
        kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
        places = any(argument.name == "device" for argument in func._schema.arguments)

        def attempt(device: str) -> tuple[Any, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
            blanks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

            def blank(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                layout = Layout.of(leaf)
                elements = torch.zeros(layout.span // layout.dtype.itemsize, dtype=layout.dtype, device=device)
                made = elements.as_strided(layout.size, layout.stride)
                blanks[id(made)] = (made, leaf)
                return made

            blank_args, blank_kwargs = each(blank, (args, {**kwargs, "device": device} if places else kwargs))
            with torch.random.fork_rng(devices=()):
                return func(*blank_args, **blank_kwargs), blanks

        try:
            result, blanks = attempt("meta")
        except Exception:
            if func.namespace in _COLLECTIVES:
                raise
            result, blanks = attempt("cpu")
        if any(blank.size() != real.size() for blank, real in blanks.values()):
            raise RuntimeError(f"{NOT_CAPTURED}: {func} resizes its argument")
        return result, blanks

    def reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        reference = self.memory.reference(leaf)
        if isinstance(reference.memory, Outside):
            self.outside.add(reference.memory)
        return reference

    def allocate(self, nbytes: int, origin: str) -> torch.UntypedStorage:
        if nbytes == 0:
            return torch.UntypedStorage(0, device="cpu")
        self.driver("allocate", nbytes)
        self.sweep()
        offset = self.pool.allocate(nbytes)
        self.touched.add((offset, self.pool.arena.blocks[offset]))
        self.bytes += self.pool.arena.blocks[offset]
        self.peak = max(self.peak, self.bytes)
        storage = self.memory.map(self.pool, offset, nbytes, origin)
        self.made[storage._cdata] = self.memory.mapped[storage._cdata]
        return storage

    def sweep(self) -> None:
        """Free what died since."""
        for handle, mapped in list(self.made.items()):
            if mapped.weak.expired():
                self.bytes -= self.pool.arena.free(mapped.offset)
                del self.made[handle]
                self.memory.mapped.pop(handle, None)
        for owner in [owner for owner in self.owners if owner.weak.expired()]:
            self.owners.remove(owner)
            self.freed.append((owner.offset, self.pool.arena.free(owner.offset)))

    def finish(self, outputs: Sequence[torch.Tensor]) -> dict[int, int]:
        """Offset and bytes of the blocks that `outputs` keep; raise if anything else keeps one."""
        live_out = {tensor.untyped_storage()._cdata for tensor in outputs}
        for collect in (False, True):
            if collect:
                gc.collect()
            self.sweep()
            leaked = [mapped for handle, mapped in self.made.items() if handle not in live_out]
            if not leaked:
                break
        else:
            held = ", ".join(f"{mapped.nbytes} bytes of {mapped.origin}" for mapped in leaked)
            raise RuntimeError(f"memory of the pool is still held by something other than the outputs: {held}")
        dead = {memory for memory in self.outside if memory.dead()}
        self.outside -= dead
        if any(memory.keep.numel() > _SCALAR for memory in dead):
            raise RuntimeError("the recording uses memory outside of the pool that has already died")
        if any(mapped.resized() for mapped in self.made.values()):
            raise RuntimeError(f"{NOT_CAPTURED}: a storage is resized")
        if any(mapped.content() != mapped.seen for mapped in self.memory.mapped.values()):
            raise RuntimeError("something wrote to memory of the pool while it was recorded, instead of being recorded")
        arena = self.pool.arena
        return {mapped.offset: arena.blocks[mapped.offset] for mapped in self.made.values()}
