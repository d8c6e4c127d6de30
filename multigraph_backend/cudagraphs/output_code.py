"""Inductor's compiled code with its recordings: what torch keeps, caches and calls in place of Inductor's own.

In: a graph that Inductor is to compile (forward, backward or inference).  Out: an `OutputCode` that calls Inductor's
code, whole or its pieces, through the tree of recordings of its device.

What a recording needs to know is taken once, while the graph is there, as a `GraphSpec` that is pickled with the code:
a process that gets the code from AOTAutograd's cache records again with the same metadata and messages.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, Protocol

import torch

from multigraph_backend import _compat, events
from multigraph_backend.allocator import sleeping
from multigraph_backend.cache.revived import compile_by_inductor, revived
from multigraph_backend.cudagraphs import numbers, runtime
from multigraph_backend.cudagraphs.limits import Limits, by_field
from multigraph_backend.cudagraphs.opened import Opened
from multigraph_backend.cudagraphs.partition import cuts, of_inductor
from multigraph_backend.cudagraphs.partition.cuts import CPU_OP, CutRules
from multigraph_backend.cudagraphs.partition.graph_spec import GraphSpec, PartitionSpec
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_spec import MOST, Boxed, PieceSpec
from multigraph_backend.cudagraphs.recordings.recording import NotAllRecorded
from multigraph_backend.cudagraphs.recordings.tree import Tree
from multigraph_backend.cudagraphs.recordings.turns import Awaited, Call
from multigraph_backend.distributed import communicating, watchdog

log = logging.getLogger(__name__)

_OutputCode: Any = object if _compat.missing("cudagraphs") else _compat.OutputCode


#: what makes Inductor part a graph into pieces that can be recorded; torch's own trees stay out all the same
KNOBS: Mapping[str, object] = {"triton.cudagraphs": True, "graph_partition": True}
#: what keeps Inductor from gathering what cannot be recorded; copies to the host run beside what is between them
PLACED = ("triton.reorder_for_reducing_graph_partitions", False)
#: what keeps Inductor from reducing rows and columns in one kernel, for a norm's backward: it parts the graph before it
#: moves the end of the second reduction to that kernel, and a piece behind a cut would miss the result
APART: Mapping[str, object] = {"triton.mix_order_reduction": False}
#: inputs of the user that a backward reads and that its copies are made ready for, beside what autograd hands it
MOST_THROUGH = 4


_living: weakref.WeakValueDictionary[int, RecordedCode] = weakref.WeakValueDictionary()


def living() -> list[RecordedCode]:
    """All there is, for reports."""
    return list(_living.values())


_attached: ContextVar[tuple[list[RecordedCode], str | None] | None] = ContextVar("attached", default=None)


@contextmanager
def attached(label: str | None = None) -> Iterator[list[RecordedCode]]:
    """What is compiled, or taken from a cache, within.  `label`: what messages call code from a cache from now on,
    which was perhaps made for another model."""
    codes: list[RecordedCode] = []
    token = _attached.set((codes, label))
    try:
        yield codes
    finally:
        _attached.reset(token)


class Wanted(NamedTuple):
    """What the user wants of recordings; see `PieceSpec`."""

    required: bool
    must_pay: bool
    most: int
    copies: bool = False
    limits: tuple[tuple[str, float | None], ...] = ()
    fresh: bool = False


#: of AOTAutograd's metadata, by what they count or hold: what its wrappers would have to do at a call
_TO_DO = (
    "num_mutated_inp_runtime_indices",
    "num_outputs_aliased",
    "num_intermediate_bases",
    "dynamic_outputs",
    "tokens",
    "is_rng_op_functionalized",
    "num_graphsafe_rng_states",
)


def only_changes(metadata: Any) -> tuple[int, ...] | None:
    """Positions of the arguments that a graph changes by itself, and autograd is to know of, where its metadata names
    nothing else for AOTAutograd's wrappers to do; else None."""
    if metadata is None or any(getattr(metadata, name, True) for name in _TO_DO):
        return None
    if metadata.grad_enabled_mutation is not None:
        return None
    changed = getattr(metadata, "mutated_graph_handled_indices_seen_by_autograd", None)
    return None if changed is None else tuple(changed)


#: makes of the way to call a piece what Inductor's code calls
Caller = Callable[[Boxed], Callable[[list[Any]], Any]]


class RecordedCode(_OutputCode):  # type: ignore[misc]
    """Inductor's code for one graph, run through recordings.

    `inner` is Inductor's, `spec` what is known of the graph, `label` what messages call it, `wanted` what the user
    wants of its recordings, `inference` whether no backward belongs to it, `only_changes` what the function of that
    name found, `lifted` what the code is given beside what its caller gives.  `run` is what a call runs.
    """

    def __init__(
        self,
        inner: Any,
        spec: GraphSpec,
        label: str,
        wanted: Wanted,
        inference: bool,
        only_changes: tuple[int, ...] | None = None,
        lifted: numbers.Numbers | None = None,
    ) -> None:
        self.inner, self.spec, self.label, self.wanted, self.inference = inner, spec, label, wanted, inference
        self.only_changes = only_changes  # kept with the code: caches give that, and no metadata
        self.lifted = lifted
        self._boxed_call = True
        self._fx_graph_cache_key = getattr(inner, "_fx_graph_cache_key", None)
        self.pieces: tuple[Piece, ...] = ()
        self._called: dict[int | None, tuple[Piece, Caller]] = {}
        self.refused: str | None = None
        self.run: Callable[[list[Any]], Any] = inner
        self._attach()

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(inputs)

    # ---------------------------------------------------------------- what torch asks of compiled code

    def constants(self) -> list[torch.Tensor]:
        """Tensors that the code holds itself."""
        held = getattr(self.inner, "constants", None) or {}
        return [value for value in held.values() if isinstance(value, torch.Tensor)]

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        graph_kwargs = {**graph_kwargs, "cudagraphs": _compat.BoxedBool(False)}  # torch's own trees stay out
        cached = self.inner.current_callable is None
        if cached:
            self.inner = revived(self.inner, constants)
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        if cached:
            if (attached := _attached.get()) is not None and attached[1] is not None:
                self.label = _of_phase(attached[1], self.spec.is_backward)
            self._attach()

    def prepare_for_serialization(self) -> None:
        # called on a copy of this object, which is then pickled
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()
        self.pieces, self._called = (), {}
        self.run = _unattached

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self.inner.set_triton_bundle(triton_bundle)

    # ---------------------------------------------------------------- recordings

    def _attach(self) -> None:
        """Put recordings between the callers of the code and the code."""
        _living[id(self)] = self
        for constant in self.constants():
            if constant.is_cuda:
                sleeping.survives(constant)
        if (attached := _attached.get()) is not None:
            attached[0].append(self)
        if self.spec.collectives:
            communicating.add_code(self)
            watchdog.watch()
        self.run = self._supplied(self.inner)
        self._put_between()

    def _put_between(self) -> None:
        if not self.spec.devices:  # nothing of it runs on a GPU
            return
        reason = self.spec.refused or runtime.unavailable()
        if reason is None and len(self.spec.devices) != 1:
            reason = f"it spans {len(self.spec.devices)} devices"
        if reason is None and self.spec.pieces:
            try:
                tree = runtime.tree(self.spec.devices[0])
            except Exception as error:
                reason = f"recordings could not be set up: {type(error).__name__}: {error}"
        self.refused = reason
        if reason is not None:
            if self.wanted.required:
                raise NotAllRecorded(f"{self.label}: cudagraphs='require', but nothing of it can be recorded: {reason}")
            events.warn_once(f"{self.label}: {reason}", "%s runs unrecorded: %s", self.label, reason)
            return
        if not self.spec.pieces:
            return
        with tree.lock:  # calls become native before this, or after
            self._cut_up(tree)
        weakref.finalize(self, tree.drop, self.pieces).atexit = False

    def _cut_up(self, tree: Tree) -> None:
        """Have pieces called in place of the code, or of its parts."""
        called: dict[int | None, tuple[Piece, Caller]] = {}

        def piece(function: Any, number: int | None) -> Callable[..., Any]:
            made, caller = called[number] = self._piece(tree, function, number)
            return caller(made.entry())

        spec = self.spec
        if spec.whole and spec.pieces[0].unrecorded is None:
            self.run = self._supplied(piece(self.inner, None))
        else:
            wrappers = [
                functools.partial(piece, number=number) if part.unrecorded is None else _as_it_is
                for number, part in enumerate(spec.pieces)
            ]
            self.inner.recursively_apply_fns(wrappers)
            inner, turns, awaited, required = self.inner, tree.turns, Awaited(), self.wanted.required
            limits = limits_of(tree, self.wanted.limits)

            def run(inputs: list[Any]) -> Any:
                call = Call(turns)
                try:
                    if call.begin(awaited, tree.patience(required, limits())):
                        return inner(inputs)
                    return tree.as_it_is(inner, inputs)
                finally:
                    call.end()
                    if tree.forgets:
                        tree.forget()

            self.run = self._supplied(run)
        self._called = called
        self.pieces = tuple(made for made, _ in called.values())
        if self.pieces:
            self.pieces[0].on_native = functools.partial(_call_natively, weakref.ref(self))

    def call_natively(self) -> None:
        """Have its pieces called by their quickest way, which has become another."""
        ways = {number: caller(made.entry()) for number, (made, caller) in self._called.items()}
        if None in ways:
            self.run = self._supplied(ways[None])
        elif (apply := self.inner.recursively_apply_fns) is not None:
            apply([functools.partial(_in_place_of, ways.get(part)) for part in range(len(self.spec.pieces))])

    def _supplied(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, given what its callers do not give."""
        return run if self.lifted is None else self.lifted.supplied(run)

    def _piece(self, tree: Tree, function: Any, number: int | None) -> tuple[Piece, Caller]:
        """Inductor's piece `number`, or all of its code (None), as it is recorded, and what makes of the way to call
        that what Inductor's code calls."""
        spec = self.spec
        opened = None
        if number is None:
            facts: GraphSpec | PartitionSpec = spec
            of_graph: Sequence[int | None]
            names, of_graph = tuple(entry.name for entry in spec.inputs), tuple(range(len(spec.inputs)))
        else:
            part = spec.pieces[number]
            if part.results:
                opened = Opened(part.results)
                part, function = opened.spec(part), opened.function(function)
            facts, names, of_graph = part, part.names, part.inputs
        # what a backward is given as static has partly come from the user, through the forward, and moves
        through = sum(name.startswith("primals") for name in names) if spec.is_backward else 0
        tree.device.prepare(len(names) - len(facts.static) + min(through, MOST_THROUGH), sum(facts.visible))
        reused = frozenset(at for at, index in enumerate(of_graph) if index is None or spec.is_backward)
        changes = reused or facts.mutated or spec.random or spec.collectives or spec.not_known
        known = PieceSpec(
            names=names,
            visible=facts.visible,
            traces=tuple(None if index is None else spec.inputs[index].stack_trace for index in of_graph),
            static=frozenset(facts.static),
            mutated=frozenset(facts.mutated),
            reused=reused,
            constants=tuple(self.constants()),
            is_backward=spec.is_backward,
            label=self.label if number is None else f"{self.label}, piece {number}",
            random=spec.random,
            required=self.wanted.required,
            must_pay=self.wanted.must_pay,
            most=self.wanted.most,
            groups=facts.groups,
            copies=self.wanted.copies,
            repeatable=spec.pure and not changes,
            fresh=self.wanted.fresh,
            unread=frozenset(spec.unread if number is None else ()),  # one of several is given what it reads
            given=_given(spec, of_graph),
        )
        piece = Piece(tree, function, known, limits_of(tree, self.wanted.limits))
        return piece, _as_it_is if opened is None else opened.caller


def _given(spec: GraphSpec, of_graph: Sequence[int | None]) -> frozenset[int]:
    """Positions of a backward's inputs that come from the user, by AOTAutograd's names: gradients of outputs, and what
    its forward was given.  Only what the forward has made is ever donated to the backward."""
    if not spec.is_backward:
        return frozenset()
    names = {at: spec.inputs[index].name for at, index in enumerate(of_graph) if index is not None}
    return frozenset(at for at, name in names.items() if _OF_USER.fullmatch(name))


_OF_USER = re.compile(r"(primals|tangents)_\d+")


def limits_of(tree: Tree, asked: Sequence[tuple[str, float | None]]) -> Callable[[], Limits]:
    """The limits of one model's recordings: those of the process now, but for what the model's options say."""
    changes = by_field(dict(asked))
    if not changes:
        return lambda: tree.limits
    return lambda: dataclasses.replace(tree.limits, **changes)


def _as_it_is(function: Any) -> Any:
    return function


def _in_place_of(way: Callable[..., Any] | None, function: Any) -> Any:
    return function if way is None else way


def _call_natively(code: weakref.ref[RecordedCode]) -> None:
    if (found := code()) is not None:
        found.call_natively()


def _unattached(inputs: list[Any]) -> Any:
    raise RuntimeError("compiled code was called before it was loaded")


#: what becomes of a graph: recorded code, code that only says which collectives it issues, or no code, only that
How = Literal["recorded", "unrecorded", "traced"]


class Options(Protocol):
    """What the user says of recordings; `multigraph_backend.options.Options` has it."""

    @property
    def cudagraphs(self) -> object: ...
    @property
    def cut(self) -> Sequence[str]: ...
    @property
    def safe(self) -> Sequence[str]: ...
    @property
    def collectives(self) -> Literal["record", "cut"]: ...
    @property
    def record_small(self) -> bool: ...
    @property
    def copy_outputs(self) -> bool: ...
    @property
    def max_recordings(self) -> int: ...
    @property
    def limits(self) -> tuple[tuple[str, float | None], ...]: ...
    @property
    def pad(self) -> object: ...


def inner_compile(options: Options, label: str, how: How = "recorded") -> Callable[..., Any]:
    """What compiles one graph in place of Inductor's function of that name; `label` is for messages."""
    if how != "recorded":
        return functools.partial(_compile_unrecorded, label, how == "traced")
    required = options.cudagraphs == "require" or bool(_compat.inductor_config.triton.cudagraph_or_error)
    pays = not (required or options.record_small)
    wanted = Wanted(
        required, pays, options.max_recordings, options.copy_outputs, options.limits, fresh=bool(options.pad)
    )
    return functools.partial(_compile_inner, _rules(options), wanted, label)


def cut_at(options: Options) -> Callable[[torch.fx.Node], str | None]:
    """What tells why a recording cannot hold a step; None of those that it can hold."""
    return functools.partial(cuts.unsupported, rules=_rules(options))


def _rules(options: Options) -> CutRules:
    return CutRules(cut=frozenset(options.cut), safe=frozenset(options.safe), collectives=options.collectives)


def _compile_inner(
    rules: CutRules,
    wanted: Wanted,
    label: str,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    **settings: Any,
) -> Any:
    """Inductor's compile of one graph, as `RecordedCode`.

    Raises `NotAllRecorded` where all of it is required to be recorded and cannot be.
    """
    settings["cudagraphs"] = _compat.BoxedBool(False)
    backward = bool(settings.get("is_backward"))
    label, inputs = _of_phase(label, backward), list(example_inputs)
    found = numbers.lift(gm, inputs, rules.device_type)
    taken = of_inductor.take(gm, settings.get("static_input_idxs") or (), backward, rules)  # Inductor changes the graph
    handed_on = numbers.hide(gm, taken.graph.unread, inputs)
    config = _compat.inductor_config
    cut = [*config.custom_should_partition_ops, *taken.cut_ops]
    with config.patch({"custom_should_partition_ops": cut, **(APART if cut or taken.graph.cuts else {})}):
        code = compile_by_inductor(gm, inputs, **settings)
    if not isinstance(code, _compat.CompiledFxGraph):
        if found is not None:
            raise RuntimeError(f"{label}: Inductor gave a {type(code).__name__}, which is not called as other code is")
        return code
    numbers.show_again(code, [*handed_on, *(() if found is None else found.at_home)])
    spec = of_inductor.from_inductor(code, taken)
    log.debug("%s:\n%s", label, spec.describe())
    if wanted.required:
        _check_all_recorded(spec, label)
    context = _compat.TracingContext.try_get()
    changes = None if context is None else only_changes(getattr(context, "fw_metadata", None))
    return RecordedCode(code, spec, label, wanted, bool(settings.get("is_inference")), changes, found)


def _compile_unrecorded(
    label: str, trace_only: bool, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    """Inductor's compile of a graph of which nothing is to be recorded, or no compile at all."""
    backward = bool(settings.get("is_backward"))
    taken = of_inductor.take(gm, settings.get("static_input_idxs") or (), backward, CutRules(device_type="none"))
    code = _unattached if trace_only else compile_by_inductor(gm, example_inputs, **settings)
    if not trace_only and not isinstance(code, _compat.CompiledFxGraph):
        return code
    spec = taken.graph if trace_only else of_inductor.from_inductor(code, taken)
    return RecordedCode(
        code, spec, _of_phase(label, backward), Wanted(False, True, MOST), bool(settings.get("is_inference"))
    )


def _of_phase(label: str, backward: bool) -> str:
    return f"{label}, {'backward' if backward else 'forward'}"


def _check_all_recorded(spec: GraphSpec, label: str) -> None:
    # what runs on the CPU is no loss by itself: copies to it and back are named
    cuts = [cut for cut in spec.cuts if cut.reason != CPU_OP]
    if not spec.devices or (spec.refused is None and not cuts and len(spec.devices) == 1):
        return
    causes = [] if spec.refused is None else [(spec.refused, "")]
    if len(spec.devices) > 1:
        causes.append((f"it spans {len(spec.devices)} devices", ""))
    causes += [(f"{', '.join(cut.ops)}: {cut.reason}", cut.stack_trace or "") for cut in cuts]
    # the first cause is on the first line: some who report an error show that line alone
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    lines = [f"{label}: cudagraphs='require', but not all of it can be recorded: {causes[0][0]}{more}"]
    for number, (cause, trace) in enumerate(causes):
        lines += [f"  {cause}"] if number else []
        lines += [f"    {line}" for line in trace.strip().splitlines()]
    raise NotAllRecorded("\n".join(lines))
