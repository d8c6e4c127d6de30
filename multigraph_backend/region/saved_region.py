"""A region as bytes, and back: what torch asks of what `aot_compile` made of it.

The bytes hold the captured graph, the options, the state of the first compile, which variants were used, and by what
their code is found; no compiled code.  That comes from torch's caches: a call of a loaded region takes what it needs
from there, past Inductor where it can (`cache/stored_code`), and what else was used is taken from there beside the
calls that follow.  Where the caches do not have all of it, the first call compiles what they lack.

In: a region in `aot_compile`, or the bytes of one.  Out: bytes, or a region.

Guarantee: what is loaded is the graph that was saved, of the same torch and the same multigraph, byte for byte, or
`CannotLoad` is raised and nothing runs.  What cannot be saved without changing its meaning raises `CannotSave`: a
parameter that the graph holds itself would be a copy of it afterwards.  The bytes are a pickle, as torch's own around
them: load what you have saved yourself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.cache import torch_files
from multigraph_backend.cache.manifest import UsedForm
from multigraph_backend.cache.stored_code import Stored
from multigraph_backend.capture import declared
from multigraph_backend.capture.graph import CapturedGraph, MarkedSize
from multigraph_backend.capture.structure import copy_structure, held_tensors, with_paths_alone
from multigraph_backend.lower import lowering
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.lower.stand_ins import Likeness
from multigraph_backend.options import Options, disabled_pieces
from multigraph_backend.process import garbage, sources
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.region import warm_start
from multigraph_backend.region.region import Region
from multigraph_backend.region.variant import Form, Variant

log = logging.getLogger(__name__)

_MAGIC = b"multigraph region 2\n"


class CannotSave(RuntimeError):
    """This region cannot be saved; the message says why."""


class CannotLoad(RuntimeError):
    """These bytes are no region that this process may run; the message says why."""


# ---------------------------------------------------------------- bytes


def save(region: Region | str) -> bytes:
    """A region as bytes; raises `CannotSave`."""
    if isinstance(region, str):
        raise CannotSave(f"multigraph: this graph cannot be saved: it was compiled at once, {region}")
    graph = region.captured
    assert graph is not None
    _refuse(graph, region.options, region.state)
    marks, lost = _marks(graph)
    module = _portable_module(graph)
    content = {
        "module": (
            module,
            [getattr(node, "_dynamo_source", None) for node in module.graph.find_nodes(op="placeholder")],
        ),
        "graph": dataclasses.replace(
            graph,
            module=None,  # type: ignore[arg-type]  # it is beside it
            marked_sizes=marks,
            user_code=dataclasses.replace(graph.user_code, owner=None),
            compile_id=None,
            notes=[*graph.notes, *lost],
        ),
        "known": {"codes": graph.codes, "holds_gpu": graph.holds_gpu, "held": () if not graph.held else None},
        "options": region.options,
        "state": region.state.portable(),
        "used": {variant.text: _forms(variant) for variant in (*region.variants, region.generic) if variant.forms},
        "stored": {
            variant.text: tuple(form.lowered.stored for form in variant.forms if form.lowered.stored is not None)
            for variant in (*region.variants, region.generic)
        },
    }
    try:
        content["module"] = _dumped(content["module"])
        payload = _dumped(content)
    except Exception as error:
        if from_outside(error):
            raise
        what = next((name for name, part in content.items() if _unpicklable(part)), "all of it together")
        raise CannotSave(f"{region.user_code} cannot be saved: {what}: {describe(error)}") from error
    header = {**_versions(), **_torch_here()}
    return _MAGIC + json.dumps({**header, "sha256": _digest(header, payload)}).encode() + b"\n" + payload


def _digest(header: Mapping[str, Any], payload: bytes) -> str:
    return hashlib.sha256(json.dumps(header).encode() + payload).hexdigest()


def _forms(variant: Variant) -> tuple[UsedForm, ...]:
    """Where torch's caches have its code."""
    return tuple(
        UsedForm((), form.lowered.cached, form.lowered.repeated, form.lowered.floats) for form in variant.forms
    )


def _versions() -> dict[str, str]:
    return {"torch": str(torch.version.__version__), "multigraph": sources.key()}


def _torch_here() -> dict[str, object]:
    """Which torch this is by its files, and what of it was looked for and is not there: a process that has the same
    files need not look, which would load all of Inductor."""
    asked = [[feature, inductor, list(found)] for (feature, inductor), found in _compat.lacking.items()]
    files = torch_files.identity()
    hashed = "" if not files or _compat.missing("stored code") else _compat.torch_key().hex()
    return {"files": files, "hashed": hashed, "lacking": asked}


def _is_torch_here(header: Mapping[str, Any]) -> bool:
    """Whether the saving process has had the very torch of this one; then what that lacks is known."""
    if not disabled_pieces(os.environ).isdisjoint({"stored_code", "all"}):
        return False
    if not header.get("files") or header["files"] != torch_files.identity():
        return False
    for feature, inductor, found in header.get("lacking", ()):
        _compat.lacking.setdefault((feature, inductor), tuple(found))
    if _compat.missing("stored code"):
        return False
    with contextlib.suppress(Exception):  # they were hashed here already
        _compat.torch_key.set(bytes.fromhex(header["hashed"]))
    return True


def _unpicklable(part: object) -> bool:
    try:
        _dumped(part)
    except Exception:
        return True
    return False


def _dumped(content: object) -> bytes:
    made: bytes = _compat.GraphPickler.dumps(
        content, _compat.GraphPicklerOptions(ops_filter=None, node_metadata_key_filter=None)
    )
    return made


def _refuse(graph: CapturedGraph, options: Options, state: CompileState) -> None:
    """Raise `CannotSave` for what would be something else after loading."""
    what, of_modules = None, getattr(graph.module, "_param_name_to_source", {})
    if next(graph.module.parameters(), None) is not None or any(tensor.requires_grad for tensor in graph.held):
        what = "a parameter, or another tensor that requires gradients"
    elif any(index >= len(graph.inputs) for index in graph.written):
        what = "a tensor that it changes in place"
    elif any(node.target in of_modules for nodes in held_tensors(graph.module).values() for node in nodes):
        what = "a buffer"
    elif any(part._buffers for part in graph.module.modules() if not isinstance(part, torch.fx.GraphModule)):
        what = "a module with buffers"
    if what is not None:
        raise CannotSave(f"{graph.user_code} cannot be saved: the graph holds {what}, of which it would have a copy")
    if state.hooks is not None:
        raise CannotSave(f"{graph.user_code} cannot be saved: hooks of saved tensors are in force")
    if not isinstance(options.compiler, str):
        raise CannotSave(f"{graph.user_code} cannot be saved: its compiler is a callable; register it under a name")


def _portable_module(graph: CapturedGraph) -> torch.fx.GraphModule:
    module = with_paths_alone(copy_structure(graph.module))
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                for key in ("source_fn_stack", "fwd_source_fn_stack"):
                    node.meta.pop(key, None)
    return module


def _marks(graph: CapturedGraph) -> tuple[tuple[MarkedSize, ...], list[str]]:
    """The stock marks as facts, where their callables were understood, and notes on those that are left out."""
    kept, lost = [], []
    for marked in graph.marked_sizes:
        facts = declared.learnt(marked.check)
        if facts is None:
            lost.append(f"{marked.name}: a mark was not saved, as nothing is known of its callable; generic runs")
        else:
            kept += [MarkedSize(marked.name, alternative.holds) for alternative in facts]
    return tuple(kept), lost


def load(data: bytes) -> Region:
    """The region that these bytes were of; raises `CannotLoad`."""
    if not data.startswith(_MAGIC):
        raise CannotLoad("these bytes are no region that multigraph has saved, or one of another format")
    try:
        line, _, payload = data[len(_MAGIC) :].partition(b"\n")
        header = json.loads(line)
        digest = header.pop("sha256")
    except (ValueError, KeyError, AttributeError) as error:
        raise CannotLoad(f"the saved region is damaged: {describe(error)}") from error
    for name, version in _versions().items():
        if header.get(name) != version:
            said = f"the region was saved by {name} {header.get(name)}, and this is {name} {version}"
            raise CannotLoad(f"{said}; compile and save it again")
    if _digest(header, payload) != digest:
        raise CannotLoad("the saved region is damaged: its bytes are not those that were saved")
    same_torch = _is_torch_here(header)
    try:
        content = _loaded(payload)
        graph = _LoadedGraph.of(content["graph"], content["module"], content["known"])
        state = CompileState.from_portable(content["state"])
    except Exception as error:
        if from_outside(error):
            raise
        raise CannotLoad(f"the saved region cannot be loaded here: {describe(error)}") from error
    disabled = disabled_pieces(os.environ)
    if not disabled.isdisjoint({"variants", "all"}):
        graph.marked_sizes = ()
    stored = content["stored"] if same_torch else {}
    return _LoadedRegion(graph, content["options"].without(disabled), state, content["used"], stored)


def _loaded(data: bytes) -> Any:
    return _compat.GraphPickler.loads(data, _compat.FakeTensorMode(shape_env=_compat.ShapeEnv()))


class _LoadedGraph(CapturedGraph):
    """A captured graph whose module is loaded when it is asked for: code of torch's caches runs without it."""

    @classmethod
    def of(cls, graph: CapturedGraph, module: bytes, known: Mapping[str, object]) -> CapturedGraph:
        """`module`: as bytes; `known`: what would be asked of it, by the names of cached properties."""
        made = cls.__new__(cls)
        vars(made).update(
            vars(graph), _module=module, **{name: value for name, value in known.items() if value is not None}
        )
        del vars(made)["module"]
        if known["held"] is None:  # the tensors that it holds belong to the state in which it is loaded
            _ = made.module
        return made

    @functools.cached_property
    def module(self) -> torch.fx.GraphModule:  # type: ignore[override]
        module: torch.fx.GraphModule
        try:
            with torch.inference_mode(False), garbage.paused():
                module, names = _loaded(vars(self)["_module"])
                module.recompile()
        except Exception as error:
            if from_outside(error):
                raise
            raise CannotLoad(f"the graph of {self.user_code} cannot be loaded here: {describe(error)}") from error
        for node, source in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
            if source is not None:
                node._dynamo_source = source
        return module


class _LoadedRegion(Region):
    """A region that takes what was used where it was saved from torch's caches: what a call needs in that call, the
    rest beside the calls that follow.  Where they do not have all of it, its first call makes all of it ready.

    `used`: by the text of a condition, the code that was there; `stored`: by what it is loaded past Inductor.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        options: Options,
        state: CompileState,
        used: Mapping[str, tuple[UsedForm, ...]],
        stored: Mapping[str, tuple[Stored, ...]],
    ) -> None:
        super().__init__(graph, options, state)
        self._used, self._stored = used, stored
        self.may_be_saved()
        self._all_pending = self._all_pending or bool(used)

    def _compile_all(self, args: Sequence[Any]) -> None:
        there = self.options.compile != "eager" and self.options.warm_start
        there = there and warm_start.in_caches(self._graph, self.options)
        there = there and all(warm_start.is_there(form) for forms in self._used.values() for form in forms)
        likeness = Likeness.of(self._graph, args) if there else None
        if likeness is None:
            super()._compile_all(args)
            return
        self._all_pending = False
        for variant, values in self._examples(args):
            named = {str(symbol): value for symbol, value in values.items()}
            warm_start.load_beside_calls(self, variant.text, likeness, named)

    def _examples(self, args: Sequence[Any]) -> Iterator[tuple[Variant, dict[sympy.Symbol, Any]]]:
        for variant, values in super()._examples(args):
            if self.options.compile == "eager" or variant.text in self._used:
                yield variant, values

    def _saved_form(self, variant: Variant, args: Sequence[Any]) -> Form | None:
        return self._from_caches(variant, args) if variant.text in self._used else None

    def _is_kept(self, variant: Variant, args: Sequence[Any]) -> bool:
        used = self._used.get(variant.text, ())
        there = warm_start.in_caches(self._graph, self.options) and any(map(warm_start.is_there, used))
        return there or super()._is_kept(variant, args)

    def _take(
        self, variant: Variant, args: Sequence[Any], options: Options, pinned: Mapping[sympy.Symbol, int], floats: str
    ) -> Lowered:
        if stored := self._stored.get(variant.text):
            graph, facts, state = self._graph, variant.facts, self._state
            try:
                return lowering.lower(graph, facts, args, options, state, pinned, variant.text, False, floats, stored)
            except Exception as error:
                if from_outside(error):
                    raise
                log.debug("%s: %s is not loaded past Inductor: %s", self.user_code, variant.text, describe(error))
        return super()._take(variant, args, options, pinned, floats)

    def _noted(self, variant: Variant, args: Sequence[Any]) -> Sequence[UsedForm]:
        return (*super()._noted(variant, args), *self._used.get(variant.text, ()))
