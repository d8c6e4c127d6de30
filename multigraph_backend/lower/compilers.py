"""The compiler that the options name, and what it is asked to do with a graph.

In: a graph module and its inputs, real or fake; options.  Out: what the compiler made of it.  Where code with packed
tensors cannot be compiled, the caller compiles once more without; what is said of that is here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from multigraph_backend import _compat, events
from multigraph_backend.lower import decomposed, donation
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.options import Options

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.output_code import How
    from multigraph_backend.lower.retained import CompileWhenNeeded

CompiledFunction = Callable[..., Sequence[Any]]

CHANGES_INPUTS = "the graph changes its inputs, what torch gets wrong there is not kept out, for this torch differs"
KEPT_RIGHT = ("inductor", "aot_eager")  # compilers under which it is


def records(holds_gpu: bool, inputs: Sequence[Any], options: Options) -> bool:
    """Whether a graph's code is to be recorded: it is wanted, and something of the graph or its inputs is on a GPU."""
    if not options.cudagraphs or options.compiler != "inductor":
        return False
    return holds_gpu or any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)


def compile_module(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    options: Options,
    label: str | None = None,
    how: How = "recorded",
    ignore_shape_env: bool = False,
    when_needed: CompileWhenNeeded | None = None,
    only_cached: bool = False,
) -> CompiledFunction:
    """The chosen compiler's code for `module`; with a `label` for messages, `how` says what becomes of it.

    `when_needed`: see `retained.inner_compile`.  `only_cached`: from torch's caches alone.
    Raises what the compiler raises, `CannotLower` for what it gets wrong, and `NotCached`.
    """
    decomposed.put_right(module)
    if options.compiler == "inductor":
        from multigraph_backend.lower.inductor import compile_graph  # loads Inductor

        return compile_graph(module, inputs, options, label, how, ignore_shape_env, when_needed, only_cached)
    if options.compiler == "aot_eager" and not _compat.missing("changed inputs"):
        run: CompiledFunction = _aot_eager(module, inputs)
    else:
        mode = {} if options.mode is None else {"mode": options.mode}
        run = _compat.lookup_compiler(options.compiler)(module, inputs, **mode)
    if options.compiler in donation.EAGER_COMPILERS and not _compat.without("TracingContext"):
        donation.nothing_donated(getattr(_compat.TracingContext.try_get(), "fw_metadata", None))
    return run


def _aot_eager(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledFunction:
    """torch's `aot_eager`, but for its partitioner."""
    from multigraph_backend.lower.gradients_of_changes import SafePartitioner  # loads AOTAutograd

    run: CompiledFunction = _compat.aot_autograd(
        fw_compiler=_compat.boxed_nop,
        bw_compiler=_compat.boxed_nop,
        partition_fn=SafePartitioner(),
        keep_inference_input_mutations=True,
    )(module, inputs)
    return run


def retrying_unpacked(code: str, error: BaseException) -> str:
    """Count and log that code is compiled again without packs, after `error`; the reason, for reports."""
    reason = f"the compile with packed tensors failed: {describe(error)}"
    events.count("unpacked_retries")
    events.warn_once(f"{code}: {reason}", "%s: saved tensors stay as they are: %s", code, reason)
    return reason
