"""The first run of new code: what speaks against it, and how a call is run once more where something does.

In:  the graph, the code and the arguments of a call.
Out: outputs that have the structure of the graph's, or the problem with them; and what sets random numbers back, so
that what runs the call once more draws what it would have drawn.

Guarantees: what says nothing of the code (no memory, memory that sleeps, what came from outside) is raised, and is not
taken for a problem with it.  A call that cannot be run again is told from others before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.allocator.sleeping import Asleep
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.process.interruptions import from_outside


class WrongOutputs(RuntimeError):
    """Compiled code returned something else than what the graph returns."""


def checked(graph: CapturedGraph, run: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Exception | None]:
    """The outputs of new code, or what speaks against it; what does not is raised."""
    try:
        outputs = run(*args)
    except (torch.OutOfMemoryError, Asleep):
        raise
    except Exception as error:
        if from_outside(error):  # it does not come again where the call is run again
            raise
        return None, error
    wrong = _wrong(graph.outputs, outputs)
    return (outputs, None) if wrong is None else (None, WrongOutputs(wrong))


def _wrong(expected: Sequence[str], outputs: Any) -> str | None:
    """What is wrong with the structure of `outputs`, None if nothing is."""
    if not isinstance(outputs, tuple | list):
        return f"it returned {type(outputs).__name__}, not a tuple of {len(expected)} outputs"
    if len(outputs) != len(expected):
        return f"it returned {len(outputs)} outputs where the graph has {len(expected)}"
    for index, (kind, value) in enumerate(zip(expected, outputs, strict=True)):
        if kind == "tensor" and not isinstance(value, torch.Tensor):
            return f"output {index} is {type(value).__name__}, not a tensor"
    return None


def draw_again(graph: CapturedGraph, args: Sequence[Any]) -> Callable[[], None] | None:
    """What sets the random number generators that a call with `args` may use back to their state of now, before it is
    run again; None: it cannot be run again, for the inputs may have changed then, other ranks have gone on, or the
    user's code has run."""
    if graph.once_because is not None:
        return None
    devices = sorted({arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
    if any(_compat.is_capturing() for _ in devices[:1]):  # a generator that is being recorded tells no state
        devices = []
    state, states = torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(state)
        for device, before in states:
            torch.cuda.set_rng_state(before, device)

    return restore


def not_again(graph: CapturedGraph, text: str, problem: Exception) -> Exception:
    """What is raised where code of the variant of that text met with `problem`, and the call cannot be run again."""
    if not isinstance(problem, WrongOutputs):
        return problem
    what = f"{graph.user_code}: {text}: {problem}"
    return WrongOutputs(f"{what}; the graph {graph.once_because}, so it cannot be run again")
