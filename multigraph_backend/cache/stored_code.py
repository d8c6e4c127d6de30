"""Code out of torch's cache past Inductor: for a saved function, whose graph is known, and what it was compiled under.

`compile_fx` takes code from the cache, too, but a process has loaded Inductor's lowerings by then, and hashed all files
of torch and of Triton.  What the hashes and the traced graph would show is known here: the graph is the one that was
saved, byte for byte, torch's files are the same (`torch_files`), and everything else that torch's key is made of is in
the fingerprint of a compile.

In:  the key of a compile in AOTAutograd's cache, and its fingerprint (`Stored`), both taken where it was compiled.
Out: the same callable as `compile_fx` would have made of that entry; `NotStored` where anything differs, and the
caller asks `compile_fx` then.

Guarantee: code is never run for a fingerprint that it was not compiled under.  A value that cannot be written down for
certain (a pass of the user's, a subclass of tensors) makes no fingerprint at all.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cache import cpp_kernels


class NotStored(Exception):
    """The code cannot be loaded past Inductor; the message says why."""


@dataclass(frozen=True)
class Stored:
    """One compile: its key in AOTAutograd's cache, its fingerprint, the name of code that computes with Python floats
    (`Lowered.floats`), and in which library each of its C++ kernels is."""

    key: str
    fingerprint: str
    floats: str = ""
    libraries: cpp_kernels.Libraries = dataclasses.field(default_factory=dict, hash=False)


# ---------------------------------------------------------------- what a compile depends on


def fingerprint(graphs: Sequence[str], inputs: Sequence[Any], known: object, asked: object) -> str:
    """Of a compile of the graphs of these texts for `inputs`, fake tensors and symbols, in the state that is in force.
    `known` is what is written into the graphs before, as data, `asked` what the user asked of them.  "" where it cannot
    be told from others."""
    if any("triton_kernel_wrapper" in code for code in graphs):  # what the kernels say is not in the graph
        return ""
    try:
        given = [_described(value) for value in inputs]
        said = [list(graphs), given, _plain(known), _plain(asked), _configuration(), _state()]
    except _NotPlain:
        return ""
    return hashlib.sha256(repr(said).encode()).hexdigest()


class _NotPlain(Exception):
    """A value whose text may be that of another value."""


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if type(value) is not _compat.FakeTensor:
            raise _NotPlain
        return f"{_compat.extract_tensor_metadata(value)}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"{type(value).__name__} {value.node.expr}"
    return _plain(value)


_PACKAGE = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _plain(value: Any) -> str:
    if value is None or type(value) in _PLAIN:
        return repr(value)
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{_plain(key)}: {_plain(entry)}' for key, entry in value.items())})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(_plain, value)))})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith(f"{_PACKAGE}."):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{_plain(type(value))}({_plain(fields)})"  # what the class does is in its key: the package's files
    raise _NotPlain


#: of configurations: what says how a process does its work, and not what comes out
_NOT_IN_CODE = re.compile(r"compile_threads|debug|.*_dir|cpp\.cxx")


def _configuration() -> str:
    """All that torch's compilers can be told, as it is in force."""
    return _plain({
        name: {key: value for key, value in config.get_config_copy().items() if not _NOT_IN_CODE.fullmatch(key)}
        for name, config in (("inductor", _compat.inductor_config), ("functorch", _compat.functorch_config))
    })  # fmt: skip


def _state() -> str:
    matmul = torch.backends.cuda.matmul
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return _plain([
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
        _machine(),
    ])  # fmt: skip


def _machine() -> list[object]:
    """What code was generated for."""
    found: list[object] = [_instructions(), os.environ.get("ATEN_CPU_CAPABILITY")]
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        found += [index, torch.version.cuda, torch.version.hip, properties.name, properties.major, properties.minor]
        found += [properties.multi_processor_count, properties.total_memory]
    return found


@functools.cache
def _instructions() -> str:
    """Which instructions the processor has, as the system tells them."""
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        raise _NotPlain from None
    lines = {line for line in said.splitlines() if line.startswith(("flags", "Features", "model name"))}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


# ---------------------------------------------------------------- its code


def load(stored: Stored, inputs: Sequence[Any], knobs: Mapping[str, object]) -> Callable[..., Any]:
    """What AOTAutograd's cache has of that compile for `inputs`, as a function of the same arguments; `knobs` are for
    Inductor.

    Raises `NotStored`, and what torch raises where its cache holds what it cannot load.
    """
    config = _compat.inductor_config
    if any(getattr(config, name, None) for name in _REMOTE):
        raise NotStored("results of measurements are looked for on other machines")
    found = _compat.StoredResults._lookup(stored.key, True, False, list(inputs), {}, None)
    if found is None:
        raise NotStored("torch's cache has none for such sizes")
    entry = found[0]
    if not isinstance(entry, _compat.StoredResult):
        raise NotStored("torch's cache keeps it in parts")
    from multigraph_backend.cache import revived  # loads Inductor's codecache

    for part in (entry.compiled_fw, entry.compiled_bw):
        if part is not None and isinstance(part.result, _compat.CompiledFxGraph):
            part.result = revived.Alone(part.result)
    boxes = {"cudagraphs": _compat.BoxedBool(False), "boxed_forward_device_index": _compat.BoxedDeviceIndex(None)}
    with revived.past_inductor(), cpp_kernels.known(stored.libraries), config.patch(dict(knobs)):
        run = entry.wrap_post_compile(list(inputs), entry.sanitized_aot_config, boxes)
    for name in ("total", "autograd_cache_hit", "ok"):
        _compat.counters["aot_autograd"][name] += 1
    return lambda *args: run(list(args))


_REMOTE = ("fx_graph_remote_cache", "autotune_remote_cache", "bundled_autotune_remote_cache")
