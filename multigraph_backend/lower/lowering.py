"""One compile of one captured graph: facts in, a callable and its condition out.

In: a `CapturedGraph`, facts about its symbols, example arguments, options, the state of the first compile.
Out: a `Lowered`: a callable over the same arguments, and the `AddedCondition` under which it is right.

The way: fresh inputs with the facts built in (`fresh_inputs`), the chosen compiler under a new tracing context, then
everything the compile assumed as a condition (`conditions`).  Runs in a compiling thread, under the compile lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch

from multigraph_backend import _compat, events
from multigraph_backend.capture import effects
from multigraph_backend.capture.aliasing import sharing
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.capture.structure import copy_structure
from multigraph_backend.declare.facts import Facts
from multigraph_backend.distributed import compiling, groups
from multigraph_backend.distributed.sequence import Issued, Sizes
from multigraph_backend.lower import donation, fresh_inputs
from multigraph_backend.lower.compile_thread import compile_within, describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.fresh_inputs import CannotLower, FreshInputs
from multigraph_backend.lower.guards import AddedCondition, added_condition
from multigraph_backend.options import Options
from multigraph_backend.process import rank
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.saved_tensors import account as saved_account
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.hooks import without_hooks
from multigraph_backend.saved_tensors.rules import hook_rules

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.direct_call import DirectCall
    from multigraph_backend.cudagraphs.output_code import How, RecordedCode
    from multigraph_backend.lower.retained import Compile, Later

log = logging.getLogger(__name__)

CompiledFunction = Callable[..., Sequence[Any]]

CHANGES_INPUTS = "the graph changes its inputs, what Inductor gets wrong there is not kept out, for this torch differs"


@dataclass(frozen=True)
class Lowered:
    """Compiled code of one form of a graph; `condition` says for which arguments it is right.

    `direct`: a shorter way to what `run` runs, known after the first call.
    `saved`: what became of the tensors that it saves for backward, where there are rules for them.
    `issued`: its collectives, where the graph has any, over symbols of the compile; `sizes` says what these are.
    """

    run: CompiledFunction
    condition: AddedCondition
    seconds: float
    direct: DirectCall | None = None
    saved: tuple[SavedTensors, ...] = ()
    issued: Issued | None = None
    sizes: Sizes = dataclasses.field(default_factory=Sizes)

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
) -> Lowered:
    """Compile `graph` for arguments like `args`, with `facts` known.

    `facts` are what the dispatcher checks; `pinned` symbols are fixed too, and the condition says so.  `name` is for
    torch's traces.  Raises what the compiler raises, `CompileTimeout` past `options.compile_timeout` seconds, and
    `CannotLower` when the result could not be proven right.
    """

    if options.compiler == "inductor" and graph.mutates_inputs and (lacking := _compat.missing("changed inputs")):
        raise _compat.MissingSymbol(f"{CHANGES_INPUTS}: {lacking[0]}")
    pinned = pinned or {}
    facts = {**facts, **{symbol: Facts(values=(value,)) for symbol, value in pinned.items()}}
    tag = ";".join(known.describe(str(symbol)) for symbol, known in facts.items())
    recorded = records(graph.module, args, options)
    cache_tag = f"{tag}|{recorded and options.recording}"
    options = dataclasses.replace(options, inductor=compiling.quiet(options.inductor))
    if graph.communicates:
        cache_tag += f"|{groups.backends()}|{groups.registered_buffers()}|{groups.growing_ranges()}"
    hooked = state.hooks is not None and options.compiler == "inductor"
    if state.hooks is not None and hooked:
        options = dataclasses.replace(options, saved_tensors=(*options.saved_tensors, *hook_rules(state.hooks)))
    what = _compiled(graph, args, options, cache_tag, state.grad) if rank.live() else ""
    packs = options.packing
    shared = bool(sharing(graph, args))
    bundled = recorded or packs or graph.communicates or state.grad

    def later(compile: Compile) -> Any:
        def compile_here(process_wide: contextlib.ExitStack) -> Any:
            with state.restored(process_wide, cache_tag, autograd_cache=False, bundled=bundled):
                return compile(process_wide)

        return compile_within(options.compile_timeout, compile_here, state.context())

    def attempt(process_wide: contextlib.ExitStack, floats: Mapping[sympy.Symbol, float], options: Options) -> Lowered:
        started = time.perf_counter()
        # AOTAutogradCache forgets guards about inputs that alias and about floats on a hit: such a compile goes past it
        autograd_cache = not shared and len(floats) == len(graph.floats)
        process_wide.enter_context(compiling.once_a_host(what, compiling.patience(options.compile_timeout)))
        with (
            state.restored(process_wide, cache_tag, autograd_cache, bundled),
            _compat.own_float_specializations(),
            saved_account.collecting() as saved,
        ):
            fresh = fresh_inputs.build(graph, facts, args, floats)
            context = _compat.TracingContext(fresh.fake_mode)
            with _compat.tracing(context):
                label = f"{graph.code}, {name}" if recorded or graph.communicates else None
                how: How = "recorded" if recorded else "unrecorded"
                again = None if graph.communicates else later  # other ranks would wait for its collectives
                run, direct, codes = _compile(fresh, options, label, how, context, again)
            condition = added_condition(graph, fresh, context, args, {**pinned, **floats})
        if hooked and any(said.packed for said in saved):
            run = without_hooks(run)
        made = Lowered(run, condition, time.perf_counter() - started, direct, tuple(saved))
        if not graph.communicates:
            return made
        return dataclasses.replace(made, issued=_issued(codes), sizes=_sizes(fresh))

    def compile(process_wide: contextlib.ExitStack) -> Lowered:
        with events.compile_phase(str(graph.code), name, graph.compile_id):
            lowered = compile_packed(process_wide)
        facts = {"graph": str(graph.code), "condition": name, "facts": tag, "added": lowered.condition.code}
        events.compile_artifact(
            {**facts, "seconds": lowered.seconds},
            lambda: graph.module.print_readable(print_output=False),
            graph.compile_id,
        )
        return lowered

    def compile_packed(process_wide: contextlib.ExitStack) -> Lowered:
        if not packs:
            return compile_here(process_wide, options)
        try:
            return compile_here(process_wide, options)
        except Exception as error:
            if from_outside(error):
                raise
            process_wide.close()
            reason = _retrying_unpacked(str(graph.code), error)
        lowered = compile_here(process_wide, options.without_packs())
        return dataclasses.replace(lowered, saved=(SavedTensors((), failed=reason),))

    def compile_here(process_wide: contextlib.ExitStack, options: Options) -> Lowered:
        if not graph.floats_are_constants:
            try:
                return attempt(process_wide, _constant_floats(graph, args), options)
            except _compat.TensorifyScalarRestartAnalysis:
                # a Python float is used where no tensor can stand for it: Dynamo would trace anew with its value
                graph.floats_are_constants = True
                process_wide.close()
        return attempt(process_wide, _constant_floats(graph, args), options)

    lowered = compile_within(options.compile_timeout, compile, state.context())
    log.debug("%s: facts [%s], condition %s", graph.code, tag, lowered.condition.code)
    return lowered


def _constant_floats(graph: CapturedGraph, args: Sequence[Any]) -> dict[sympy.Symbol, float]:
    """The Python floats that a compile for `args` takes for constants, with their values.

    Those that a symbol cannot stand for: all, where the graph needs them as numbers; infinities, not-a-number and -0.0;
    and 0.0 where the graph computes with floats.
    """
    if not graph.floats:
        return {}
    values = graph.values(args)
    floats = {symbol: float(values[symbol]) for symbol in graph.floats}
    if graph.floats_are_constants:
        return floats
    return {symbol: value for symbol, value in floats.items() if not _is_symbolic(value, graph.computes_floats)}


def _is_symbolic(value: float, computed: bool) -> bool:
    return math.isfinite(value) and (value != 0 or (not computed and math.copysign(1.0, value) > 0))


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """For another compile: a compiler changes the graph.  None where parts of it cannot be copied."""
    try:
        return copy_structure(module)
    except Exception as error:
        log.debug("a graph cannot be copied: %s", describe(error))
        return None


def _retrying_unpacked(code: str, error: BaseException) -> str:
    """Count and log that code is compiled again without packs, after `error`; the reason, for reports."""
    reason = f"the compile with packed tensors failed: {describe(error)}"
    events.count("unpacked_retries")
    events.warn_once(f"{code}: {reason}", "%s: saved tensors stay as they are: %s", code, reason)
    return reason


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

    def trace_only(process_wide: contextlib.ExitStack) -> Lowered:
        started = time.perf_counter()
        floats = _constant_floats(graph, args)
        with state.restored(process_wide, "", autograd_cache=False), _compat.own_float_specializations():
            fresh = fresh_inputs.build(graph, facts, args, floats)
            with _compat.tracing(_compat.TracingContext(fresh.fake_mode)):
                from multigraph_backend.cudagraphs import output_code

                with output_code.attached() as codes:
                    label = str(graph.code)
                    compile_module(fresh.module, fresh.inputs, options, label, "traced", ignore_shape_env=True)
        made = Lowered(_not_compiled, AddedCondition("True", None), time.perf_counter() - started)
        return dataclasses.replace(made, issued=_issued(codes), sizes=_sizes(fresh))

    return compile_within(options.compile_timeout, trace_only, state.context())


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


def records(module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> bool:
    """Whether code for `module` is to be recorded: it is wanted, and something of the graph is on a GPU."""
    if not options.cudagraphs or options.compiler != "inductor":
        return False
    values = [*inputs, *module.parameters(), *module.buffers()]
    values += [node.meta.get("example_value") for node in module.graph.nodes]
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


def compile_at_once(module: torch.fx.GraphModule, inputs: list[Any], options: Options, name: str) -> CompiledFunction:
    """The chosen compiler's code for `module`, in Dynamo's own trace.  Raises as `compile_module` does."""
    if options.compiler == "inductor" and effects.may_change_inputs(module):
        lacking = next(iter(_compat.missing("changed inputs")), None) or _compat.without("TracingContext")
        if lacking:
            raise CannotLower(f"{CHANGES_INPUTS}: {lacking}")
    recorded = records(module, inputs, options)
    plain = not recorded and not options.packing
    needed = ("lookup_backend",) if options.compiler != "inductor" else ("compile_fx", "inductor_config")
    if lacking := _compat.without(*needed, *(() if plain else ("functorch_config",))):
        raise CannotLower(f"this torch differs: {lacking}")
    if plain:
        return compile_module(module, inputs, options)
    recorded_as = name if recorded else None
    # its backward is compiled at the first call of it, when no setting of now is in force any more
    with _compat.functorch_config.patch(enable_autograd_cache=False):
        if not options.packing:
            return compile_module(module, inputs, options, recorded_as)
        untouched = _copied(module)
        try:
            with (
                saved_account.collecting() as saved,
                _compat.functorch_config.patch(force_non_lazy_backward_lowering=True),  # so that a failure shows now
            ):
                run = compile_module(module, inputs, options, recorded_as)
            for account in saved:
                saved_account.pass_on(account)
            return run
        except _compat.TensorifyScalarRestartAnalysis:  # Dynamo traces anew
            raise
        except Exception as error:
            if untouched is None or from_outside(error):
                raise
            reason = _retrying_unpacked(name, error)
        run = compile_module(untouched, inputs, options.without_packs(), recorded_as)
        saved_account.pass_on(SavedTensors((), failed=reason))
        return run


def compile_module(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    options: Options,
    label: str | None = None,
    how: How = "recorded",
    ignore_shape_env: bool = False,
    later: Later | None = None,
) -> CompiledFunction:
    """The chosen compiler's code for `module`; with a `label` for messages, `how` says what becomes of it.

    `later`: see `retained`.
    Raises what the compiler raises, and `CannotLower` for what it gets wrong.
    """
    if options.compiler == "inductor":
        from multigraph_backend.lower.inductor import compile_graph  # loads Inductor

        return compile_graph(module, inputs, options, label, how, ignore_shape_env, later)
    run: CompiledFunction = _compat.lookup_compiler(options.compiler)(module, inputs)
    if options.compiler in donation.EAGER_COMPILERS and not _compat.without("TracingContext"):
        donation.nothing_donated(getattr(_compat.TracingContext.try_get(), "fw_metadata", None))
    return run


def _compile(
    fresh: FreshInputs,
    options: Options,
    label: str | None,
    how: How,
    context: Any,
    later: Later | None,
) -> tuple[CompiledFunction, DirectCall | None, Sequence[RecordedCode]]:
    inputs = fresh.inputs
    if label is None or options.compiler != "inductor":
        run = compile_module(fresh.module, inputs, options, ignore_shape_env=True, later=later)
        return _bare(run, fresh), None, ()
    from multigraph_backend.cudagraphs import direct_call, output_code

    with output_code.attached() as codes:
        compiled = compile_module(fresh.module, inputs, options, label, how, ignore_shape_env=True, later=later)
        run = _bare(compiled, fresh)
    direct = None if fresh.divided else direct_call.find(run, codes, context.fw_metadata)
    return (run, None, codes) if direct is None else (direct.first, direct, codes)


def _bare(run: Any, fresh: FreshInputs) -> CompiledFunction:
    """What a compiler returned, without what only Dynamo needs, taking the graph's arguments."""
    if not callable(run):
        raise TypeError(f"the compiler returned {type(run).__name__}, which is not callable")
    run = _compat.innermost_fn(run)  # only the dispatcher calls it, and Dynamo calls that outside of its own frames
    for attribute in ("zero_grad", "named_parameters", "named_buffers"):  # they keep the graph's copy alive
        vars(run).pop(attribute, None) if hasattr(run, "__dict__") else None
    return _taking_parts(run, len(fresh.inputs), fresh.divided) if fresh.divided else run


def _compiled(graph: CapturedGraph, args: Sequence[Any], options: Options, tag: str, grad: bool) -> str:
    """What a compile is of, as text that is the same in every process that compiles the same."""
    layouts = [
        f"{arg.dtype}{arg.dim()}{arg.device}" if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in args
    ]
    knobs = [name for name, _ in options.inductor]
    return repr((graph.module.code, layouts, tag, options.recording, knobs, grad))


def _taking_parts(run: CompiledFunction, count: int, divided: Mapping[int, int]) -> CompiledFunction:
    """Pass `argument // m` where the code was compiled to take k of a size `m*k`."""
    parameters = ", ".join(f"a{index}" for index in range(count))
    passed = ", ".join(f"a{index} // {divided[index]}" if index in divided else f"a{index}" for index in range(count))
    adapted: CompiledFunction = eval(f"lambda {parameters}: run({passed})", {"run": run})
    return adapted


def stand_ins(graph: CapturedGraph, args: Sequence[Any], values: Mapping[sympy.Symbol, int]) -> list[Any]:
    """Arguments like `args` with other sizes, without memory: fake tensors for all that depends on `values`.

    For compiling before any call has such sizes.  Raises `CannotLower` for inputs that cannot be made up (views).
    """
    made: list[Any] = []

    def number(expr: Any) -> int:
        return int(expr.xreplace(values)) if isinstance(expr, sympy.Basic) else int(expr)

    for entry, arg in zip(graph.inputs, args, strict=True):
        if entry.expr is not None:
            free = entry.expr.free_symbols
            made.append(number(entry.expr) if free <= set(values) else arg)
        elif entry.layout is not None and _depends(entry.layout.size, entry.layout.stride, entry.layout.offset):
            if arg._is_view() or type(arg) not in (torch.Tensor, torch.nn.Parameter):
                raise CannotLower(f"input {entry.name} cannot be made up for other sizes (a view, or a subclass)")
            size, stride = [number(expr) for expr in entry.layout.size], [number(expr) for expr in entry.layout.stride]
            made.append(fresh_inputs.twin(arg, size, stride, number(entry.layout.offset)))
        else:
            made.append(arg)
    return made


def _depends(size: Sequence[Any], stride: Sequence[Any], offset: Any) -> bool:
    return any(isinstance(expr, sympy.Basic) and expr.free_symbols for expr in (*size, *stride, offset))
