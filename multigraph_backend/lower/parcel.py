"""A compile as bytes, for a worker process that takes its code to torch's caches.

In: what `lowering.lower` takes.  Out: bytes, by torch's own `GraphPickler`; in the worker, the same again: a graph,
arguments without memory, and torch in the state of the first compile (configuration, grad mode, autocast, and what else
of torch's settings a compiler's choices depend on).

Guarantee: what comes out compiles to the key that it has in the process that sent it, or this process does not find the
code there.  What cannot be sent raises `CannotSend`: functions that are not torch's, operators that others have
registered, hooks, tensors with values that are large or on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.capture.structure import graph_modules, with_paths_alone
from multigraph_backend.capture.user_code import UserCode
from multigraph_backend.declare.facts import Facts
from multigraph_backend.lower import fresh_inputs
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.options import Options

MOST_HELD = 64 << 20  # bytes of tensors that the graph holds, which are sent with their values

_FLAGS = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.mkldnn.enabled",
    "utils.deterministic.fill_uninitialized_memory",
)
# the newer names for what `allow_tf32` and `set_float32_matmul_precision` say; keys of caches have these; what others
# take their value from comes first
_PRECISIONS = (
    "backends.fp32_precision",
    "backends.cudnn.fp32_precision",  # of all that CUDA does
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
_PAIRS = (
    ("get_num_threads", "set_num_threads"),
    ("get_default_dtype", "set_default_dtype"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    ("backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp"),
    ("backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp"),
    ("backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp"),
    ("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp"),
)
_Read = TypeVar("_Read")
_OWN = ("compile_threads",)  # a worker's own affair, and no part of keys


class CannotSend(Exception):
    """A compile cannot be handed to another process; the message says why."""


@dataclass(frozen=True)
class _Tensor:
    """An input without its memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    requires_grad: bool
    parameter: bool
    inference: bool

    def made(self) -> torch.Tensor:
        with torch.inference_mode(self.inference):
            made = fresh_inputs.without_memory(
                self.size, self.stride, self.offset, self.dtype, torch.device(self.device)
            )
            if self.parameter:
                return torch.nn.Parameter(made, self.requires_grad)
            return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _SentGraph:
    """`sources`: of the placeholders of each graph module, which torch's pickler drops.  `lazy`: whether each makes its
    code when it is asked for it."""

    graph: CapturedGraph
    sources: tuple[tuple[Any, ...], ...]
    lazy: tuple[bool, ...]

    def as_it_was(self) -> CapturedGraph:
        modules = list(graph_modules(self.graph.module))
        for module, sources in zip(modules, self.sources, strict=True):
            for node, source in zip(module.graph.find_nodes(op="placeholder"), sources, strict=True):
                if source is not None:
                    node._dynamo_source = source
        lazy = dict(zip(map(id, modules), self.lazy, strict=True))
        return dataclasses.replace(self.graph, module=_as_was(modules[0], lazy))


class PackedGraph:
    """A captured graph as bytes, made when they are first asked for.  A thread at a time."""

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph = graph
        self._content: bytes | None = None

    def content(self) -> bytes:
        """Raises `CannotSend`."""
        if self._content is not None:
            return self._content
        content = _packed_graph(self.graph)
        if not self.graph.held:  # values may change until the next compile
            self._content = content
        return content


@dataclass(frozen=True)
class _Parcel:
    """What is sent: `lower`'s arguments, with the graph packed for itself, and what the worker has to set before."""

    graph: bytes
    args: tuple[Any, ...]
    facts: dict[sympy.Symbol, Facts]
    pinned: dict[sympy.Symbol, int]
    options: Options
    name: str
    grad: bool
    autocast: tuple[Any, ...]
    autocast_cache: bool
    device: int | None
    configs: dict[str, dict[str, Any]]  # what differs from the defaults, by the name of the module
    flags: dict[str, Any]
    home: str  # see `_home_of_formats`


@dataclass(frozen=True)
class Parcel:
    """In the worker: the graph, and what came with it."""

    graph: CapturedGraph
    sent: _Parcel

    def arguments(self) -> list[Any]:
        """For the compile, without memory."""
        return [entry.made() if isinstance(entry, _Tensor) else entry for entry in self.sent.args]

    @contextlib.contextmanager
    def state(self) -> Iterator[CompileState]:
        """torch as it was, and what `lowering.lower` takes for that."""
        sent = self.sent
        for name, value in sent.flags.items():
            _set_flag(name, value)
        _look_there_first(sent.home)
        with contextlib.ExitStack() as stack:
            for name, changed in sent.configs.items():
                stack.enter_context(importlib.import_module(name).patch(changed))
            state = CompileState.take()
            yield dataclasses.replace(
                state,
                grad=sent.grad,
                autocast=sent.autocast,
                autocast_cache=sent.autocast_cache,
                device=sent.device,
                hooks=None,
            )


def pack(
    packed: PackedGraph,
    facts: Mapping[sympy.Symbol, Facts],
    args: Sequence[Any],
    options: Options,
    state: CompileState,
    pinned: Mapping[sympy.Symbol, int],
    name: str,
    on_gpu: bool,
) -> bytes:
    """Raises `CannotSend`.  `on_gpu`: the worker compiles for a GPU."""
    if state.hooks is not None:
        raise CannotSend("saved_tensors_hooks are part of it")
    sent = _Parcel(
        packed.content(),
        tuple(_sent(entry.number, arg) for entry, arg in zip(packed.graph.inputs, args, strict=True)),
        dict(facts),
        dict(pinned),
        dataclasses.replace(
            options, specialize=(), compile="lazy", compile_timeout=None, on_failure="fallback", notes=()
        ),
        name,
        state.grad,
        state.autocast,
        state.autocast_cache,
        state.device if on_gpu else None,
        state.context().run(_changed_configs, state),
        _flags(),
        _home_of_formats(),
    )
    return _pickled(sent, _unpickled)[0]


def unpack(content: bytes) -> Parcel:
    """In the worker."""
    sent: _Parcel = _unpickled(content)
    return Parcel(_unpickled(sent.graph).as_it_was(), sent)


def _packed_graph(graph: CapturedGraph) -> bytes:
    _check_held(graph)
    code = graph.user_code
    bare = dataclasses.replace(
        graph,
        module=with_paths_alone(graph.copy_module()),  # pickling a graph writes to it
        marked_sizes=(),
        user_code=UserCode(code.function, code.file, code.line, code.models, code.name, partial=code.partial),
        compile_id=None,
        notes=[],
    )
    lazy = tuple(isinstance(module, _compat.LazyGraphModule) for module in graph_modules(graph.module))
    sent = _SentGraph(bare, _placeholders(graph.module), lazy)
    content, again = _pickled(sent, lambda content: _unpickled(content).as_it_was())
    for mine, theirs in zip(graph_modules(graph.module), graph_modules(again.module), strict=True):
        for node, other in zip(mine.graph.nodes, theirs.graph.nodes, strict=True):
            if node.op == "call_function" and node.target is not other.target:
                raise CannotSend(f"{node.target} is not what its name says")
    return content


def _pickled(what: object, read: Callable[[bytes], _Read]) -> tuple[bytes, _Read]:
    """As bytes, and what is read out of them again."""
    try:
        filtered = _compat.GraphPicklerOptions(ops_filter=_torchs_own, node_metadata_key_filter=_picklable_meta)
        content: bytes = _pickler().dumps(what, filtered)
        return content, read(content)
    except CannotSend:
        raise
    except Exception as error:
        raise CannotSend(f"it cannot be pickled: {describe(error)}") from error


def _unpickled(content: bytes) -> Any:
    return _compat.GraphPickler.loads(content, _compat.FakeTensorMode())


def _as_was(module: torch.fx.GraphModule, lazy: Mapping[int, bool]) -> torch.fx.GraphModule:
    """A module of the class that it had, with its inner ones: keys of caches depend on it."""
    for name, inner in list(module.named_children()):
        if isinstance(inner, torch.fx.GraphModule):
            setattr(module, name, _as_was(inner, lazy))
    if lazy[id(module)]:
        made: torch.fx.GraphModule = _compat.LazyGraphModule.__new__(_compat.LazyGraphModule)
        made.__dict__ = vars(module)
        made.graph.owning_module = made
        module = made
    module.recompile()
    return module


@functools.cache
def _pickler() -> Any:
    """torch's pickler, which refuses what is the program's own: a worker would import the program to read it."""
    known = {*sys.stdlib_module_names, "torch", "sympy", "mpmath", "numpy", "einops", "triton", "multigraph_backend"}

    class OfTorchAlone(_compat.GraphPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type | FunctionType) and value.__module__.partition(".")[0] not in known:
                raise CannotSend(
                    f"{value.__module__}.{value.__qualname__} is not torch's, and a worker does not have it"
                )
            return super().reducer_override(value)

    return OfTorchAlone


def _placeholders(module: torch.fx.GraphModule) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        tuple(getattr(node, "_dynamo_source", None) for node in inner.graph.find_nodes(op="placeholder"))
        for inner in graph_modules(module)
    )


def _sent(number: bool, arg: Any) -> Any:
    if not isinstance(arg, torch.Tensor) or number:
        return arg
    odd = arg.layout is not torch.strided or arg.is_quantized or arg.is_conj() or arg.is_neg()
    if odd or _compat.is_traceable_wrapper_subclass(arg):
        raise CannotSend("an input is no plain tensor")
    return _Tensor(
        tuple(arg.size()),
        tuple(arg.stride()),
        int(arg.storage_offset()),
        arg.dtype,
        str(arg.device),
        arg.requires_grad,
        isinstance(arg, torch.nn.Parameter),
        arg.is_inference(),
    )


def _check_held(graph: CapturedGraph) -> None:
    total = 0
    for tensor in graph.held:
        if tensor.device.type != "cpu":
            raise CannotSend("the graph holds a tensor whose values are on a GPU")
        total += tensor.untyped_storage().nbytes()
    if total > MOST_HELD:
        raise CannotSend(f"the graph holds {total} bytes of tensors, and at most {MOST_HELD} are sent")


def _torchs_own(name: str) -> bool:
    """Operators that every process has: others are registered by a program."""
    return name.startswith(("torch.ops.aten", "torch.ops.prims", "torch.ops.fbgemm"))


def _picklable_meta(key: str) -> bool:
    return key in ("tensor_dict", "example_value", "stack_trace", "nn_module_stack", "is_wrapped", "user_cache_hash")


# ---------------------------------------------------------------- the state of torch


def _changed_configs(state: CompileState) -> dict[str, dict[str, Any]]:
    """Configuration that is not at its defaults, in the calling context.  Raises `CannotSend`."""
    taken = {getattr(_compat, name).__name__: values for name, values in state.configs}
    found: dict[str, dict[str, Any]] = {}
    for name, current, defaults in _compat.configurations():
        values = taken.get(name, current)
        changed = {
            key: value
            for key, value in values.items()
            if key in defaults and key not in _OWN and not _same(value, defaults[key])
        }
        if changed and name.startswith("torch."):
            found[name] = changed
    return found


def _same(value: object, default: object) -> bool:
    try:
        return value is default or (type(value) is type(default) and bool(value == default))
    except Exception:
        return False


def _home_of_formats() -> str:
    """The module by which pickle names torch's memory formats in this process, as parts of keys of torch's caches.

    They say of themselves that they are `torch.contiguous_format`, and not where; pickle takes the first of all modules
    that has a `torch`, in the order of their imports: in many programs, the one that imports torch first.
    """
    return str(pickle.whichmodule(torch.contiguous_format, "torch.contiguous_format"))  # type: ignore[attr-defined]


def _look_there_first(home: str) -> None:
    """In the worker: let pickle find them there, too."""
    if _home_of_formats() == home:
        return
    if home not in sys.modules:
        sys.modules[home] = ModuleType(home)
    if not hasattr(sys.modules[home], "torch"):
        sys.modules[home].torch = torch  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name != home]:
        sys.modules[name] = sys.modules.pop(name)  # behind it, in their order


def _of_torch(path: str) -> Any:
    return functools.reduce(getattr, path.split("."), torch)


def _flags() -> dict[str, Any]:
    """In the order in which they are to be set."""
    found: dict[str, Any] = {
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
    }
    for read, write in _PAIRS:
        with contextlib.suppress(RuntimeError, AttributeError):  # torch refuses old names beside new ones
            found[write] = _of_torch(read)()
    for name in (*_FLAGS, *_PRECISIONS):
        with contextlib.suppress(RuntimeError, AttributeError):
            found[name] = _of_torch(name)
    return found


def _set_flag(name: str, value: Any) -> None:
    """Set what differs: while some are set and others not yet, torch may refuse to say what old names stand at."""
    if name == "deterministic":
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
        return
    reads = next((read for read, write in _PAIRS if write == name), None)
    with contextlib.suppress(RuntimeError):
        if (_of_torch(name) if reads is None else _of_torch(reads)()) == value:
            return
    if reads is not None:
        _of_torch(name)(value)
        return
    place, _, last = name.rpartition(".")
    setattr(_of_torch(place), last, value)
