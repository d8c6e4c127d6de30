"""One compile of one captured graph: facts in, a callable and its guards out.

In: a `CapturedGraph`, facts about its symbols, example arguments, options, the state of the first compile.
Out: a `Lowered`: a callable over the same arguments, and the guards under which it is right.

The way of a compile, a `CompileJob`:

    lower                        the job is put together, and run in a compiling thread, under the compile lock
      _packed_or_not             with packed tensors; if that fails, once more without
        _repeated_or_not         with bodies for blocks that come again; if that fails, once more without
          _floats_or_constants   with Python floats as symbols; if that cannot be, once more with their values
            _attempt             in the state of the first compile: fresh inputs with the facts built in
                                 (`fresh_inputs`), the chosen compiler under a new tracing context (`compilers`), then
                                 everything that the compile assumed (`guards`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy
import torch

from multigraph_backend import _compat, events
from multigraph_backend.cache import cpp_kernels, stored_code
from multigraph_backend.cache.manifest import NOTHING_SAID, RepeatedBlocks
from multigraph_backend.cache.stored_code import Stored
from multigraph_backend.capture.aliasing import sharing
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.declare.facts import Facts
from multigraph_backend.distributed import compiling, groups
from multigraph_backend.distributed.sequence import Issued, Sizes
from multigraph_backend.lower import fresh_inputs, guards
from multigraph_backend.lower.compile_thread import compile_within, describe
from multigraph_backend.lower.compilers import (
    CHANGES_INPUTS,
    KEPT_RIGHT,
    CompiledFunction,
    compile_module,
    records,
    retrying_unpacked,
)
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.fresh_inputs import FreshInputs
from multigraph_backend.lower.guards import Guards
from multigraph_backend.lower.only_cached import NotCached
from multigraph_backend.options import Options
from multigraph_backend.process import garbage, rank
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.saved_tensors import account as saved_account
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.hooks import without_hooks
from multigraph_backend.saved_tensors.rules import Offload, hook_rules

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.direct_call import DirectCall
    from multigraph_backend.cudagraphs.output_code import How, RecordedCode
    from multigraph_backend.lower.retained import BackwardCompile

log = logging.getLogger(__name__)

_LITE = "fallback_by_default"  # Inductor's mode "lite", in which it runs its own marks of strides, and wrongly
_AS_THEY_STAND = "repeated blocks are compiled as they stand"


@dataclass(frozen=True)
class Lowered:
    """Compiled code of one form of a graph; `guards` say for which arguments it is right.

    `direct`: a shorter way to what `run` runs, known after the first call.
    `saved`: what became of the tensors that it saves for backward, where there are rules for them.
    `issued`: its collectives, where the graph has any, over symbols of the compile; `sizes` says what these are.
    `codes`: what of it can be recorded, while that is there; a backward that is compiled late comes later.
    `cached`: kind and key of what torch's caches took or gave, as far as it was new to this process; "native" is what
    the C++ compiler made of kernels.
    `repeated`: what became of blocks that come again; nothing is said of them where that was not asked for.
    `floats`: where it computes with Python floats, the name under which torch's caches have it; see `_FloatsInCaches`.
    `stored`: by what it is loaded past Inductor, where it may be saved, and torch's caches keep it as one;
    `past_inductor`: so it was.
    """

    run: CompiledFunction
    guards: Guards
    seconds: float
    direct: DirectCall | None = None
    saved: tuple[SavedTensors, ...] = ()
    issued: Issued | None = None
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    codes: Sequence[weakref.ref[RecordedCode]] = ()
    cached: tuple[tuple[str, str], ...] = ()
    repeated: RepeatedBlocks = NOTHING_SAID
    floats: str = ""
    stored: Stored | None = None
    past_inductor: bool = False

    @property
    def boxed(self) -> RecordedCode | None:
        """Code that `shortest` does nothing but hand a list of its arguments."""
        return None if self.direct is None else self.direct.boxed

    @property
    def shortest(self) -> CompiledFunction:
        """`run`, or less of it where that is the same."""
        return self.run if self.direct is None else self.direct.function or self.run


def lower(
    graph: CapturedGraph,
    facts: Mapping[sympy.Symbol, Facts],
    args: Sequence[Any],
    options: Options,
    state: CompileState,
    pinned: Mapping[sympy.Symbol, int] | None = None,
    name: str = "generic",
    only_cached: bool = False,
    floats: str = "",
    stored: Sequence[Stored] = (),
) -> Lowered:
    """Compile `graph` for arguments like `args`, with `facts` known.

    `facts` are what the dispatcher checks; `pinned` symbols are fixed too, and the guards check it.  `name` is for
    torch's traces.  `only_cached`: take the code from torch's caches, beside a program that goes on.  `floats`: the
    name under which they have code that computes with Python floats, or get it (`new_name`); "" where they shall not.
    `stored`: take the code of one of these compiles of the same graph, past Inductor.
    Raises what the compiler raises, `CompileTimeout` past `options.compile_timeout` seconds, `CannotLower` when the
    result could not be proven right, `NotCached` and `NotStored`.
    """
    job = dataclasses.replace(_job(graph, facts, args, options, state, pinned or {}, name), floats=floats)
    if only_cached or stored:
        job = dataclasses.replace(job, only_cached=True, once_a_host="", stored=tuple(stored))
    lowered = compile_within(options.compile_timeout, job.run, state.context())
    log.debug("%s: facts [%s], guards %s", graph.user_code, _text(job.known), lowered.guards.text)
    return lowered


def _job(
    graph: CapturedGraph,
    facts: Mapping[sympy.Symbol, Facts],
    args: Sequence[Any],
    options: Options,
    state: CompileState,
    pinned: Mapping[sympy.Symbol, int],
    name: str,
) -> CompileJob:
    if options.compiler in KEPT_RIGHT and graph.mutates_inputs and (lacking := _compat.missing("changed inputs")):
        raise _compat.MissingSymbol(f"{CHANGES_INPUTS}: {lacking[0]}")
    known = {**facts, **{symbol: Facts(values=(value,)) for symbol, value in pinned.items()}}
    recorded = records(graph.holds_gpu, args, options)
    unrepeated = None
    if options.repeat and (standing := _not_repeated(graph, options)) is not None:
        unrepeated = standing if options.repeat == "always" else None
        options = dataclasses.replace(options, repeat=False)
    cache_tag = f"{_text(known)}|{recorded and options.recording}"
    cache_tag += _repeat_tag(options)
    if graph.communicates:
        cache_tag += f"|{groups.backends()}|{groups.registered_buffers()}|{groups.growing_ranges()}"
    hooked = state.hooks is not None and options.compiler == "inductor"
    options = dataclasses.replace(options, inductor=compiling.quiet(options.inductor))
    if state.hooks is not None and hooked:
        options = dataclasses.replace(options, saved_tensors=(*options.saved_tensors, *hook_rules(state.hooks)))
    return CompileJob(
        graph,
        args,
        known,
        pinned,
        options,
        state,
        name,
        recorded=recorded,
        hooked=hooked,
        shared=bool(sharing(graph, args)),
        unrepeated=unrepeated,
        bundled=recorded or options.packing or graph.communicates or state.grad or state.saved,
        cache_tag=cache_tag,
        once_a_host=_identity(graph, args, options, cache_tag, state.grad) if rank.live() else "",
    )


def _repeat_tag(options: Options) -> str:
    """Tells code with bodies apart in torch's caches: also by what finds, makes and calls them."""
    return f"|repeat {options.repeat} {_sources_of_bodies()}" if options.repeat else ""


@functools.cache
def _sources_of_bodies() -> str:
    names = [
        *("block_operator", "body_graphs", "bodies_in_partitions", "equal_steps", "inlined"),
        *("modes_of_trace", "one_body", "order_of_steps", "repetition", "steps_of_graph", "traced_once"),
    ]
    paths = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in names)
    said: str = _compat.get_hash_for_files(paths).hex()[:16]
    return said


def _not_repeated(graph: CapturedGraph, options: Options) -> str | None:
    """Why blocks that come again are compiled as they stand, though the options ask for bodies; None where they are
    looked for.  What bodies were not yet shown to be right with, they are not used with."""
    if lacking := (*_compat.missing("repeated blocks"), *_compat.missing("changed inputs")):
        return f"this torch differs: {lacking[0]}"
    if problem := _compat.without("set_grad_enabled"):
        return f"this torch differs: {problem}"
    if graph.communicates:
        return "the graph has collectives"
    if any(isinstance(rule.pack, Offload) for rule in options.saved_tensors):
        return "saved tensors are offloaded"
    if dict(options.inductor).get(_LITE, getattr(_compat.inductor_config, _LITE, False)):
        return "operators are eager's, and little is compiled"
    return None


def _text(known: Mapping[sympy.Symbol, Facts]) -> str:
    return ";".join(facts.describe(str(symbol)) for symbol, facts in known.items())


@dataclass(frozen=True, eq=False)
class CompileJob:
    """One compile: of what, for which arguments, with what known, under which options and in which state.

    `known`: facts about symbols: those that dispatch checks, and those of the `pinned` ones, which are fixed in this
    compile though nothing was declared so, and which its guards check.
    `recorded`: the code is to be recorded.  `hooked`: hooks of torch's are part of it.  `shared`: inputs share memory.
    `unrepeated`: why blocks that come again are compiled as they stand, though the options ask for bodies.
    `bundled`: AOTAutograd's cache keeps what the compiler returns.  `cache_tag`: tells the job from others of the graph
    in keys of caches.  `once_a_host`: what is compiled, as text that is the same in every process; "" where no other
    rank may compile the same.  `only_cached`: nothing is traced or generated.  `floats`, `stored`: see `lower`.
    """

    graph: CapturedGraph
    args: Sequence[Any]
    known: Mapping[sympy.Symbol, Facts]
    pinned: Mapping[sympy.Symbol, int]
    options: Options
    state: CompileState
    name: str
    recorded: bool
    hooked: bool
    shared: bool
    unrepeated: str | None
    bundled: bool
    cache_tag: str
    once_a_host: str
    only_cached: bool = False
    floats: str = ""
    stored: tuple[Stored, ...] = ()

    def run(self, process_wide: contextlib.ExitStack) -> Lowered:
        """In the compiling thread; what is changed for the whole process is entered on `process_wide`."""
        graph = self.graph
        with events.compile_phase(str(graph.user_code), self.name, graph.compile_id):
            if self.stored:
                return self._attempt(process_wide, constant_floats(graph, self.args))
            lowered = self._packed_or_not(process_wide)
        said = {
            "graph": str(graph.user_code),
            "condition": self.name,
            "facts": _text(self.known),
            "added": lowered.guards.text,
            "seconds": lowered.seconds,
        }
        events.compile_artifact(said, lambda: graph.module.print_readable(print_output=False), graph.compile_id)
        return lowered

    def _packed_or_not(self, process_wide: contextlib.ExitStack) -> Lowered:
        if not self.options.packing:
            return self._repeated_or_not(process_wide)
        try:
            return self._repeated_or_not(process_wide)
        except Exception as error:
            if from_outside(error) or self.only_cached:
                raise
            process_wide.close()
            reason = retrying_unpacked(str(self.graph.user_code), error)
        unpacked = dataclasses.replace(self, options=self.options.without_packs())
        lowered = unpacked._repeated_or_not(process_wide)
        return dataclasses.replace(lowered, saved=(SavedTensors((), failed=reason),))

    def _repeated_or_not(self, process_wide: contextlib.ExitStack) -> Lowered:
        """With one body for the calls of a block that comes again; where that compile fails, once more without: first
        with blocks that AOTAutograd traces one by one, where it did not, then with none."""
        if not self.options.repeat:
            lowered = self._floats_or_constants(process_wide)
            said = f"{_AS_THEY_STAND}: {self.unrepeated}" if self.unrepeated else ""
            return dataclasses.replace(lowered, repeated=RepeatedBlocks(said))
        asked = self.options.repeat == "always"
        from multigraph_backend.lower import one_body  # a process that loads its code has no use for it

        found: Sequence[one_body.Repeated] = ()
        try:
            with one_body.collecting() as found:
                lowered = self._traced_once_or_not(process_wide)
        except Exception as error:
            if from_outside(error) or self.only_cached or (found and not any(graph.comes_again for graph in found)):
                raise
            process_wide.close()
            reason = f"the compile with calls of one body failed: {describe(error)}"
        else:
            for _ in range(sum(graph.calls for graph in found)):
                events.count("body_calls")
            said = " | ".join(str(graph) for graph in found if asked or graph.comes_again)
            if asked and not said:
                said = "not known, for the code was compiled before, and came from torch's caches"
            said = f"repeated blocks: {said}" if said else ""
            return dataclasses.replace(lowered, repeated=RepeatedBlocks(said, any(graph.bodies for graph in found)))
        events.count("repeat_retries")
        tag = self.cache_tag.replace(_repeat_tag(self.options), "")
        whole = dataclasses.replace(self.options, repeat=False)
        again = dataclasses.replace(self, options=whole, unrepeated=reason, cache_tag=tag)
        lowered = again._repeated_or_not(process_wide)
        code = str(self.graph.user_code)  # where that fails too, bodies were not the reason
        events.warn_once(f"{code}: {reason}", "%s: blocks that come again are compiled as they stand: %s", code, reason)
        return lowered

    def _traced_once_or_not(self, process_wide: contextlib.ExitStack) -> Lowered:
        from multigraph_backend.lower import one_body, traced_once

        for passed in itertools.count():
            with traced_once.attempt(passed=passed) as attempt:
                try:
                    return self._floats_or_constants(process_wide)
                except Exception as error:
                    missed = isinstance(error, NotCached)  # code may be kept of the graph cut otherwise, or as it was
                    if from_outside(error) or not attempt.lifted or (self.only_cached and not missed):
                        raise
                    process_wide.close()
                    one_body.collect_anew()
                    reason = str(error) if isinstance(error, fresh_inputs.CannotLower) else describe(error)
            if not attempt.more:
                break
        log.debug("%s: blocks are traced one by one: %s", self.graph.user_code, reason)
        with traced_once.attempt(why_not=reason):
            return self._floats_or_constants(process_wide)

    def _floats_or_constants(self, process_wide: contextlib.ExitStack) -> Lowered:
        if not self.graph.floats_are_constants:
            try:
                return self._attempt(process_wide, constant_floats(self.graph, self.args))
            except _compat.TensorifyScalarRestartAnalysis:
                # a Python float is used where no tensor can stand for it: Dynamo would trace anew with its value
                self.graph.floats_are_constants = True
                process_wide.close()
            except fresh_inputs.LosesSign:  # for these values alone
                floats = all_floats(self.graph, self.args)
                if len(floats) == len(constant_floats(self.graph, self.args)):
                    raise
                process_wide.close()
                return self._attempt(process_wide, floats)
        return self._attempt(process_wide, constant_floats(self.graph, self.args))

    def _attempt(self, process_wide: contextlib.ExitStack, floats: Mapping[sympy.Symbol, float]) -> Lowered:
        started = time.perf_counter()
        graph = self.graph
        noting = self.options.compiler == "inductor" and not _compat.missing("warm start")
        kept = _FloatsInCaches.of(self, floats, noting)
        # AOTAutogradCache forgets guards about inputs that alias on a hit: such a compile goes past it
        autograd_cache = not self.shared and (kept is None or kept.name != "")
        patience = compiling.patience(self.options.compile_timeout)
        if self.only_cached and not autograd_cache:
            raise NotCached("AOTAutograd's cache cannot keep it")
        if self.only_cached:  # calls go on, and a collection of all that is alive would stop them
            process_wide.enter_context(garbage.paused())
        else:
            process_wide.enter_context(compiling.once_a_host(self.once_a_host, patience))
        noted = _compat.noted_artifacts() if noting else 0
        libraries = set(_kernel_libraries()) if noting else ()
        with (
            self.state.restored(
                process_wide,
                self.cache_tag if kept is None else kept.tag(self.cache_tag),
                autograd_cache,
                self.bundled,
                not self.only_cached,
            ),
            _compat.own_float_specializations(),
            saved_account.collecting() as saved,
        ):
            fresh = fresh_inputs.build(graph, self.known, self.args, floats, inputs_alone=bool(self.stored))
            told = self._fingerprint(fresh, floats) if noting else ""
            context = _compat.TracingContext(fresh.fake_mode)
            with _noting_floats(graph, fresh) as asked, _compat.tracing(context):
                run, direct, codes, alive = self._call_compiler(fresh, told)
            kernels = self._kernels(told, noted)
            relied_on = guards.guards_of(graph, fresh, context, self.args, {**self.pinned, **floats})
            if not _compat.missing("moved parameters"):  # `Module.to` exchanges subclasses that nobody refers to weakly
                _compat.clear_fake_mode_weakrefs(fresh.fake_mode)
        if self.hooked and any(said.packed for said in saved):
            run = without_hooks(run)
        cached: tuple[tuple[str, str], ...] = ()
        if noting:
            made_now = [("native", key) for key in _kernel_libraries() if key not in libraries]
            cached = (*_compat.artifact_keys(noted), *made_now)
        if kept is not None:
            kept, cached = kept.without_what_relies(asked, cached)
        made = Lowered(
            run,
            relied_on,
            time.perf_counter() - started,
            direct,
            tuple(saved),
            codes=alive,
            cached=cached,
            floats="" if kept is None else kept.name,
            stored=_stored(cached, told, kept, kernels),
            past_inductor=bool(self.stored),
        )
        if not graph.communicates:
            return made
        return dataclasses.replace(made, issued=_issued(codes), sizes=_sizes(fresh))

    def _call_compiler(
        self, fresh: FreshInputs, told: str
    ) -> tuple[CompiledFunction, DirectCall | None, Sequence[RecordedCode], Sequence[weakref.ref[RecordedCode]]]:
        """Code over the graph's arguments, a shorter way to it where there is one, and what of it can be recorded; the
        last also for those who may not keep it, with what is compiled late."""
        graph, options = self.graph, self.options
        make = self._take_stored(told) if self.stored else compile_module
        alive: list[weakref.ref[RecordedCode]] | None = [] if self.recorded else None
        # other ranks would wait for the collectives of a backward that is compiled when it is needed
        when_needed = None if graph.communicates else self._when_needed(alive)
        if options.compiler != "inductor" or not (self.recorded or graph.communicates):
            compiled = make(
                fresh.module,
                fresh.inputs,
                options,
                ignore_shape_env=True,
                when_needed=when_needed,
                only_cached=self.only_cached,
            )
            return _over_arguments(compiled, fresh), None, (), ()
        from multigraph_backend.cudagraphs import direct_call, output_code

        label = f"{graph.user_code}, {self.name}"
        how: How = "recorded" if self.recorded else "unrecorded"
        with output_code.attached(label) as codes:
            compiled = make(
                fresh.module,
                fresh.inputs,
                options,
                label,
                how,
                ignore_shape_env=True,
                when_needed=when_needed,
                only_cached=self.only_cached,
            )
            run = _over_arguments(compiled, fresh)
        alive = [] if alive is None else alive
        alive += map(weakref.ref, codes)
        direct = None if fresh.divided else direct_call.find(run, codes)
        return (run, None, codes, alive) if direct is None else (direct.first, direct, codes, alive)

    def _fingerprint(self, fresh: FreshInputs, floats: Mapping[sympy.Symbol, float]) -> str:
        """What the compile depends on, where it may be saved; "" else, or where that cannot be told."""
        if not self.state.saved:
            return ""
        facts = [(str(symbol), facts.describe(str(symbol))) for symbol, facts in self.known.items()]
        constants = [(str(symbol), value) for symbol, value in floats.items()]
        known = [facts, constants, fresh.numbers, fresh.zeros, fresh.divided, fresh.offsets]
        return stored_code.fingerprint(self.graph.codes, fresh.inputs, known, self.options)

    def _take_stored(self, told: str) -> Callable[..., CompiledFunction]:
        """In place of a compiler: past Inductor, the code that was compiled under the fingerprint `told`."""
        if (found := self._found(told)) is None:
            raise stored_code.NotStored("none was compiled under the same conditions")
        knobs = dict(self.options.inductor)
        if self.recorded:
            from multigraph_backend.cudagraphs import output_code

            knobs.update(output_code.KNOBS)
        return lambda module, inputs, *args, **settings: stored_code.load(found, inputs, knobs)

    def _found(self, told: str) -> Stored | None:
        """Of the compiles whose code may be taken, the one under the fingerprint `told`."""
        name = "" if len(constant_floats(self.graph, self.args)) == len(self.graph.floats) else self.floats
        return next((one for one in self.stored if told and one.fingerprint == told and one.floats == name), None)

    def _kernels(self, told: str, noted: int) -> cpp_kernels.Libraries:
        """In which libraries the C++ kernels of a compile are that may be saved; torch noted it behind `noted`."""
        if (found := self._found(told)) is not None:
            return found.libraries
        if not told or self.only_cached or _compat.missing("stored code"):
            return {}
        keys = [key for kind, key in _compat.artifact_keys(noted) if kind == "aot_autograd"]
        try:
            with _compat.inductor_config.patch(dict(self.options.inductor)):
                return cpp_kernels.libraries_of(keys)
        except Exception as error:  # Inductor finds them
            if from_outside(error):
                raise
            log.debug("%s: where its kernels are is not known: %s", self.graph.user_code, describe(error))
            return {}

    def _when_needed(self, alive: list[weakref.ref[RecordedCode]] | None) -> _WhenNeeded:
        return _WhenNeeded(self.state, self.cache_tag, self.bundled, self.options.compile_timeout, alive)


@dataclass(frozen=True, eq=False)
class _WhenNeeded:
    """Runs a backward's compile when a call first needs it, in the state of the first compile.

    Code keeps it, so it holds nothing of the call that its job was for.  `alive`: where it notes what it has compiled;
    None where nothing is recorded.
    """

    state: CompileState
    cache_tag: str
    bundled: bool
    timeout: float | None
    alive: list[weakref.ref[RecordedCode]] | None

    def __call__(self, compile_backward: BackwardCompile) -> Any:
        return compile_within(self.timeout, functools.partial(self._run, compile_backward), self.state.context())

    def _run(self, compile_backward: BackwardCompile, process_wide: contextlib.ExitStack) -> Any:
        with self.state.restored(process_wide, self.cache_tag, autograd_cache=False, bundled=self.bundled):
            if self.alive is None:
                return compile_backward(process_wide)
            from multigraph_backend.cudagraphs import output_code

            with output_code.attached() as codes:
                made = compile_backward(process_wide)
            self.alive.extend(map(weakref.ref, codes))
            return made


def _kernel_libraries() -> tuple[str, ...]:
    return (*_compat.kernel_libraries(), *cpp_kernels.loaded())


def _stored(
    cached: Sequence[tuple[str, str]], fingerprint: str, floats: _FloatsInCaches | None, kernels: cpp_kernels.Libraries
) -> Stored | None:
    """By what a compile that put `cached` into torch's caches is loaded past Inductor."""
    keys = [key for kind, key in cached if kind == "aot_autograd"]
    if len(keys) != 1 or not fingerprint:
        return None
    return Stored(keys[0], fingerprint, "" if floats is None else floats.name, kernels)


def _identity(graph: CapturedGraph, args: Sequence[Any], options: Options, cache_tag: str, grad: bool) -> str:
    """What a compile is of, as text that is the same in every process that compiles the same."""
    layouts = [
        f"{arg.dtype}{arg.dim()}{arg.device}" if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in args
    ]
    knobs = [name for name, _ in options.inductor]
    return repr((graph.codes[0], layouts, cache_tag, options.recording, knobs, grad))


def _over_arguments(run: Any, fresh: FreshInputs) -> CompiledFunction:
    """What a compiler returned, without what only Dynamo needs, taking the graph's arguments."""
    if not callable(run):
        raise TypeError(f"the compiler returned {type(run).__name__}, which is not callable")
    run = _compat.innermost_fn(run)  # only the dispatcher calls it, and Dynamo calls that outside of its own frames
    for attribute in ("zero_grad", "named_parameters", "named_buffers"):  # they keep the graph's copy alive
        vars(run).pop(attribute, None) if hasattr(run, "__dict__") else None
    return _taking_parts(run, len(fresh.inputs), fresh.divided) if fresh.divided else run


def _taking_parts(run: CompiledFunction, count: int, divided: Mapping[int, int]) -> CompiledFunction:
    """Pass `argument // m` where the code was compiled to take k of a size `m*k`."""
    parameters = ", ".join(f"a{index}" for index in range(count))
    passed = ", ".join(f"a{index} // {divided[index]}" if index in divided else f"a{index}" for index in range(count))
    adapted: CompiledFunction = eval(f"lambda {parameters}: run({passed})", {"run": run})
    return adapted


def kept_by_caches(graph: CapturedGraph, args: Sequence[Any]) -> bool:
    """Whether torch's caches keep code that is compiled for `args`, so that whoever compiles the same finds it."""
    return not sharing(graph, args) and len(constant_floats(graph, args)) == len(graph.floats)


# ---------------------------------------------------------------- Python floats


def constant_floats(graph: CapturedGraph, args: Sequence[Any]) -> dict[sympy.Symbol, float]:
    """The Python floats that a compile for `args` takes for constants, with their values.

    Those that a symbol cannot stand for: all, where the graph needs them as numbers; infinities, not-a-number and -0.0;
    and 0.0 where the graph computes with floats.
    """
    floats = all_floats(graph, args)
    if graph.floats_are_constants:
        return floats
    return {symbol: value for symbol, value in floats.items() if not _is_symbolic(value, graph.computes_floats)}


def all_floats(graph: CapturedGraph, args: Sequence[Any]) -> dict[sympy.Symbol, float]:
    """The Python floats of a call, with their values."""
    if not graph.floats:
        return {}
    values = graph.values(args)
    return {symbol: float(values[symbol]) for symbol in graph.floats}


def telling_floats(graph: CapturedGraph, args: Sequence[Any]) -> dict[sympy.Symbol, float]:
    """The Python floats whose values a compile for `args` may come to rely on: what it fails of may lie in them."""
    if not graph.floats:
        return {}
    floats = constant_floats(graph, args)
    asked = {symbol: graph.symbols[symbol].location for symbol in graph.floats if symbol in graph.asked_floats}
    return {**floats, **{symbol: float(where.read(args)) for symbol, where in asked.items() if where is not None}}


@contextlib.contextmanager
def _noting_floats(graph: CapturedGraph, fresh: FreshInputs) -> Iterator[set[sympy.Symbol]]:
    """Note which Python floats are asked for their values meanwhile, also where the compile fails; what it yields has
    them afterwards."""
    found: set[sympy.Symbol] = set()
    try:
        yield found
    finally:
        env = fresh.shape_env
        asked = {symbol for guard in env.guards[fresh.known_guards :] for symbol in guard.expr.free_symbols}
        asked.update(env.replacements)
        found |= {symbol for symbol in graph.floats if fresh.replaced.get(symbol) in asked}
        graph.asked_floats |= found


def new_name() -> str:
    """A name for code that computes with Python floats, which nobody has asked for yet."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class _FloatsInCaches:
    """How torch's caches have code that computes with Python floats.

    On a hit AOTAutograd's cache forgets what a compile relied on of floats.  So such a compile is kept under a name of
    its own, which nobody can ask for by chance, and is taken out again where it has asked for a float's value.  Who
    is told the name (`Lowered.floats`) gets code that is right for all ordinary floats; "" where there is none.
    """

    name: str

    @classmethod
    def of(cls, job: CompileJob, constants: Mapping[sympy.Symbol, float], noting: bool) -> _FloatsInCaches | None:
        """For a compile that takes the floats in `constants` for constants; None where that is all of them."""
        if len(constants) == len(job.graph.floats):
            return None
        return cls(job.floats if noting else "")

    def tag(self, cache_tag: str) -> str:
        return f"{cache_tag}|floats {self.name}"

    def without_what_relies(
        self, asked: set[sympy.Symbol], cached: tuple[tuple[str, str], ...]
    ) -> tuple[_FloatsInCaches, tuple[tuple[str, str], ...]]:
        """What is left in the caches of a compile that has asked for the values of floats, of what it put there."""
        if not asked:
            return self, cached
        for kind, key in cached:
            if kind == "aot_autograd":
                shutil.rmtree(_compat.cache_entry(kind, key), ignore_errors=True)
        return _FloatsInCaches(""), tuple(entry for entry in cached if entry[0] != "aot_autograd")


def _is_symbolic(value: float, computed: bool) -> bool:
    return math.isfinite(value) and (value != 0 or (not computed and math.copysign(1.0, value) > 0))


# ---------------------------------------------------------------- collectives


def only_traced(
    graph: CapturedGraph,
    facts: Mapping[sympy.Symbol, Facts],
    args: Sequence[Any],
    options: Options,
    state: CompileState,
) -> Lowered:
    """What a compile with `facts` would issue, by tracing and parting the graph as it does; no code is generated, and
    `run` raises.

    Raises as `lower` does.
    """
    trace = functools.partial(_trace, graph, facts, args, options, state)
    return compile_within(options.compile_timeout, trace, state.context())


def _trace(
    graph: CapturedGraph,
    facts: Mapping[sympy.Symbol, Facts],
    args: Sequence[Any],
    options: Options,
    state: CompileState,
    process_wide: contextlib.ExitStack,
) -> Lowered:
    from multigraph_backend.cudagraphs import output_code

    started = time.perf_counter()
    floats = constant_floats(graph, args)
    with state.restored(process_wide, "", autograd_cache=False), _compat.own_float_specializations():
        fresh = fresh_inputs.build(graph, facts, args, floats)
        with _compat.tracing(_compat.TracingContext(fresh.fake_mode)), output_code.attached() as codes:
            compile_module(fresh.module, fresh.inputs, options, str(graph.user_code), "traced", ignore_shape_env=True)
    made = Lowered(_not_compiled, guards.NONE, time.perf_counter() - started)
    return dataclasses.replace(made, issued=_issued(codes), sizes=_sizes(fresh))


def _not_compiled(*args: Any) -> Sequence[Any]:
    raise RuntimeError("this graph was traced, and never compiled")


def _issued(codes: Sequence[RecordedCode]) -> Issued:
    """What the compiled graphs of one form issue together."""
    specs = [code.spec for code in codes]
    unknown = next((spec.not_known for spec in specs if spec.not_known), None)
    if not specs:
        unknown = "its compiler does not tell"
    phases = {
        backward: tuple(entry for spec in specs if spec.is_backward == backward for entry in spec.collectives)
        for backward in (False, True)
    }
    return Issued(phases[False], phases[True], unknown)


def _sizes(fresh: FreshInputs) -> Sizes:
    made = Sizes(dict(fresh.replaced))
    equal = {symbol: fresh.shape_env.replace(symbol) for symbol in made.symbols.values()}
    return dataclasses.replace(made, equal=equal)
