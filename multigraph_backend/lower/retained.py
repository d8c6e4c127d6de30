"""Backward code that may run again for the same forward: `retain_graph=True`, rows of a jacobian, `create_graph=True`.

torch donates to a backward what was saved for it alone: Inductor then writes results into memory of saved tensors, and
AOTAutograd refuses any call after which the graph is to stay, however little was written there (torch 2.11 to 2.15; a
user of stock has to know `torch._functorch.config.donated_buffer`).

    buf0 = exp; del exp  # reuse
    kernel(buf0, mm, tangents_1)          # exp is gone: a second run would read what the first one left

In: backward graphs that Inductor is to compile.  Out: code that does the same, and

- where it writes into no saved tensor, is the very code: nothing has to be done;
- where it does, runs as it is while the graph may go, and for a call after which the graph stays, runs code of the same
  graph that was compiled without donation, when such a call first came;
- where that code cannot be had (the code came from a cache, and its graph is not there; the compile failed, or came to
  rely on more than the first one), runs as it is on copies of the tensors that it writes into.

Invariant: a call after which autograd keeps the graph writes into no saved tensor.  What code writes into is read off
its source: every saved tensor that it hands on under another name.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat, events
from multigraph_backend.cache.revived import compile_by_inductor, revived
from multigraph_backend.lower import cache_keys, donation
from multigraph_backend.lower.compile_thread import describe, reaching_the_caller
from multigraph_backend.lower.first_compile import patch_back
from multigraph_backend.process.interruptions import from_outside

log = logging.getLogger(__name__)

InnerCompile = Callable[..., Any]
#: compiles a backward; what it changes for the whole process goes onto the stack that it is given
BackwardCompile = Callable[[contextlib.ExitStack], Any]
#: runs such a compile when a call first needs its code, in the state of the first compile; raises what it raises
CompileWhenNeeded = Callable[[BackwardCompile], Any]

#: rows of `_compat` that are found missing with variants; without them no code can be made that runs again
NEEDED = ("TracingContext", "inductor_config", "functorch_config")

_NO_COMPILE_STANCES = ("eager_on_recompile", "fail_on_recompile", "force_eager")

_OutputCode: Any = object if _compat.missing("cudagraphs") else _compat.OutputCode


class ReliesOnMore(RuntimeError):
    """Code without donation is right for fewer sizes than the code that it is to stand in for."""


def inner_compile(inner: InnerCompile | None, when_needed: CompileWhenNeeded | None = None) -> InnerCompile:
    """`inner`, or Inductor's own compile of one graph; backward code may run again for the same forward.

    `when_needed` runs the compile without donation; without it, or what that needs of torch, copies serve.
    """
    if _compat.without("virtualized"):
        when_needed = None
    return functools.partial(_compile, inner or compile_by_inductor, when_needed)


def _compile(
    compile_inner: InnerCompile,
    when_needed: CompileWhenNeeded | None,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    **settings: Any,
) -> Any:
    context = _compat.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if not settings.get("is_backward") or metadata is None:
        return compile_inner(gm, example_inputs, **settings)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    donated = list(getattr(metadata, "bw_donated_idxs", None) or ())
    untouched = _copied(gm) if donated and when_needed is not None else None  # Inductor changes the graph
    inputs = list(example_inputs)
    with _in_cache_as(donated):
        code = compile_inner(gm, example_inputs, **settings)
    donation.nothing_donated(metadata)
    changed = written(_source(code), names, donated)
    if not changed:
        return code
    again = None
    if when_needed is not None and untouched is not None:
        given = [names[index] for index in donated]
        undonated = _UndonatedCompile(compile_inner, untouched, inputs, settings, given, context)
        again = functools.partial(when_needed, undonated.compile)
    return RetainedCode(code, changed, again)


def _in_cache_as(donated: Sequence[int]) -> Any:
    """Inductor's cache forgets what was donated: code that writes into a tensor would be found where it must not."""
    return cache_keys.told_apart(f"donated {sorted(donated)}")


class RetainedCode(_OutputCode):  # type: ignore[misc]
    """Backward code `inner` that writes into its arguments at the positions `written`.

    `again` compiles the same graph without donation; None where the graph is not there.  `without` is what it made.
    """

    def __init__(self, inner: Any, written: Sequence[int], again: Callable[[], Any] | None = None) -> None:
        self.inner, self.written = inner, tuple(written)
        self._boxed_call = True
        self._again, self._lock = again, threading.RLock()
        self.without: Any = None
        # AOTAutograd's cache would keep the key alone, and find `inner` by it
        if _compat.functorch_config.bundled_autograd_cache:
            self._fx_graph_cache_key = getattr(inner, "_fx_graph_cache_key", None)

    def __call__(self, args: list[Any]) -> Any:
        try:
            stays = _compat.keeps_graph()
        except _compat.MissingSymbol:  # the code was made by a torch that could say so, and comes from a cache
            stays = True
        if not stays:
            return self.inner(args)
        if self._again is not None:
            self._compile_without()
        if self.without is not None:
            return self.without(args)
        for index in self.written:
            args[index] = _copy_of(args[index])
        events.count("copied_backwards")
        return self.inner(args)

    def _compile_without(self) -> None:
        """Once, while other threads wait; a thread that is compiling itself does not wait, and copies."""
        if not _may_compile() or not self._lock.acquire(blocking=not _compat.owns_compile_lock()):
            return
        try:
            if (again := self._again) is None:
                return
            try:
                with reaching_the_caller():
                    self.without = again()
                events.count("retained_backwards")
            except Exception as error:
                if from_outside(error):
                    raise
                message = f"a backward without donated memory could not be compiled: {describe(error)}"
                events.warn_once(message, "%s; calls with retain_graph copy what they would write into", message)
                log.debug("a backward without donated memory could not be compiled", exc_info=True)
            self._again = None
        finally:
            self._lock.release()

    # ---------------------------------------------------------------- what torch asks of compiled code

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        plain = isinstance(self.inner, _compat.CompiledFxGraph)
        if plain and self.inner.current_callable is None:  # from a cache
            self.inner = revived(self.inner, constants)
        self.inner.post_compile(example_inputs, constants, graph_kwargs)

    def prepare_for_serialization(self) -> None:
        # called on a copy of this object, which is then pickled
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_again": None, "_lock": None, "without": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self.inner.set_triton_bundle(triton_bundle)


def _copy_of(value: Any) -> Any:
    """With the same sizes and strides: generated code relies on both."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value)


def _may_compile() -> bool:
    """Not under the user's own capture, nor where torch's stance forbids it."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return bool(_compat.missing("stances")) or _compat.stance() not in _NO_COMPILE_STANCES


# ---------------------------------------------------------------- what code writes into


def _source(code: Any) -> str:
    """Of Inductor's code, or of the code around it; "" where there is none to read."""
    return str(getattr(getattr(code, "inner", code), "source_code", "") or "")


def written(source: str, names: Sequence[str], donated: Sequence[int]) -> tuple[int, ...]:
    """Which of `donated`, positions of the arguments `names`, code may write into: those that it hands on under other
    names, those that it does not name, and all where it is not in Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return tuple(donated)
    nodes = list(ast.walk(tree))
    known = {node.id for node in nodes if isinstance(node, ast.Name)}
    renamed = {_buffer(node.value) for node in nodes if isinstance(node, ast.Assign)}
    return tuple(index for index in donated if names[index] in renamed or names[index] not in known)


def _buffer(expression: ast.expr) -> str:
    """The buffer that an expression is a view of, or is; "" for anything else."""
    if isinstance(expression, ast.Call) and expression.args and ast.unparse(expression.func) == "reinterpret_tensor":
        return _buffer(expression.args[0])
    return expression.id if isinstance(expression, ast.Name) else ""


# ---------------------------------------------------------------- the compile without donation


class _UndonatedCompile:
    """A compile of a backward, and all that it depended on, to be made again with nothing donated."""

    def __init__(
        self,
        compile_inner: InnerCompile,
        gm: GraphModule,
        inputs: Sequence[Any],
        settings: Mapping[str, Any],
        donated: Sequence[str],
        context: Any,
    ) -> None:
        self._compile_inner, self._gm, self._inputs = compile_inner, gm, inputs
        self._settings, self._donated = settings, donated
        self._config = _compat.inductor_config.get_config_copy()
        self._fake_mode, self._metadata = context.fake_mode, context.fw_metadata

    def compile(self, process_wide: contextlib.ExitStack) -> Any:
        """Raises what the compiler raises, and `ReliesOnMore`."""
        context = _compat.TracingContext(self._fake_mode)
        context.fw_metadata = self._metadata  # which names nothing as donated by now
        before = self._relied_on()
        with contextlib.ExitStack() as own:
            patches = own if _compat.config_is_per_context() else process_wide
            patches.enter_context(patch_back(_compat.inductor_config, self._config))
            patches.enter_context(_in_cache_as(()))
            own.enter_context(torch.no_grad())
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                own.enter_context(torch.autocast(kind, enabled=False))
            own.enter_context(_compat.tracing(context))
            own.enter_context(_compat.set_fake_mode(self._fake_mode))
            code = self._compile_inner(self._gm, list(self._inputs), **self._settings)
        if self._relied_on() != before:
            raise ReliesOnMore("it relies on more about its sizes than the code that it stands in for")
        names = list(self._donated)
        if written(_source(code), names, range(len(names))):
            raise ReliesOnMore("it writes into saved tensors all the same")
        return code

    def _relied_on(self) -> tuple[int, int]:
        """How much compiles have come to rely on about the sizes of the graph."""
        env = self._fake_mode.shape_env
        return (0, 0) if env is None else (len(env.guards), len(env.replacements))


def _copied(gm: GraphModule) -> GraphModule | None:
    """The graph for another compile; None where a compile changes more than the graph: graphs that it calls."""
    if any(isinstance(module, GraphModule) for module in gm.children()):
        return None
    graph = Graph()
    copies: dict[Node, Node] = {}
    results: Any = graph.graph_copy(gm.graph, copies)
    graph.output(results).meta.update(gm.graph.output_node().meta)
    return GraphModule(gm, graph)
