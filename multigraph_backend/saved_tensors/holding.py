"""What this process holds when a training graph is compiled, and what its optimizer will hold.

On a GPU: torch's allocated bytes of the device, all of them, those of other models and of saved tensors that wait too.
On the CPU nobody counts; there the graph says what it is given.

State of an optimizer comes with its first step, after the first compile.  So optimizers are looked for that have any of
the graph's parameters; where two have the same one, the one with more parameters counts, for the other is likely to be
one of before.  What state they have is held already; what they are yet to make is known of torch's own: as many tensors
as `_STATES` says, like the parameters.  Where the user says bytes for each number of a parameter, that is taken; where
no optimizer is found, or one that is not torch's, two such tensors are assumed, Adam's, and the report says so.

In: a goal, the arguments of a graph.  Out: a `Reckoned`.  Nothing is changed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from multigraph_backend.saved_tensors import speeds
from multigraph_backend.saved_tensors.memory_goal import Goal
from multigraph_backend.saved_tensors.reckoning import Reckoned, rounded_up

_ADAM = 2
_FLAT = "LBFGS"  # the one that has its state, of all parameters, with the first of them
#: tensors like a parameter that torch's optimizers keep for it, by their settings
_STATES: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "SGD": lambda group: 1 if group.get("momentum") else 0,
    **dict.fromkeys(("Adam", "AdamW"), lambda group: 3 if group.get("amsgrad") else 2),
    **dict.fromkeys(("NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), lambda group: 2),
    **dict.fromkeys(("Adagrad", "Muon"), lambda group: 1),
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Adafactor": lambda group: 0,  # a row and a column of each
    "ASGD": lambda group: 1,
    "SparseAdam": lambda group: 2,
    _FLAT: lambda group: 2 * group["history_size"] + 2,  # steps, differences of gradients, the last of each
}


def reckon(goal: Goal, args: Sequence[object]) -> Reckoned:
    """What there is and will be beside what a graph over `args` saves."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    device = next((arg.device for arg in tensors if arg.is_cuda), torch.device("cpu"))
    wanted = goal.wanted(memory(device))
    machine, link = speeds.of(device)
    trained = {id(arg): arg for arg in tensors if arg.requires_grad and arg.is_leaf}
    found = _optimizers(trained)
    others = {id(entry): entry for one in found for entry in _parameters(one) if id(entry) not in trained}
    held = allocated(device)
    counted = held is None  # then what is there counts with what will be
    parameters = [arg for arg in trained.values() if isinstance(arg, torch.nn.Parameter)]
    state, by = _state(goal, found, [*parameters, *others.values()], counted)
    return Reckoned(
        goal=wanted,
        machine=machine,
        held=None if held is None else rounded_up(held),
        optimizer=rounded_up(state),
        optimizer_by=by,
        gradients=rounded_up(_gradients(trained.values(), counted)),
        elsewhere=rounded_up(_gradients(others.values(), counted)),
        calls=goal.calls,
        gradients_in_forward=goal.gradients_in_forward,
        link=link,
    )


def memory(device: torch.device) -> int:
    """Bytes of memory that a device has; on the CPU, of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allocated(device: torch.device) -> int | None:
    """Bytes of a device that are in use; None on the CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.memory_allocated(device))
    except RuntimeError:  # an allocator that has no such figure
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)


def _gradients(parameters: Iterable[torch.Tensor], counted: bool) -> int:
    """Of those that have none yet, for the others are held; of all, where nothing is."""
    return sum(_bytes(entry) for entry in parameters if counted or entry.grad is None)


def _state(
    goal: Goal, found: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.Tensor], counted: bool
) -> tuple[int, str]:
    """Bytes of state that are not held, and how that is known."""
    if goal.optimizer is not None:
        missing = [entry for entry in parameters if counted or not any(_has_state(one, entry) for one in found)]
        return int(goal.optimizer * sum(entry.numel() for entry in missing)), f"{goal.optimizer:g} bytes a number"
    if not found:
        return _ADAM * sum(map(_bytes, parameters)), "none is found; as Adam's"
    states = [_state_of(one, counted) for one in found]
    return sum(total for total, _ in states), "; ".join(dict.fromkeys(by for _, by in states))


def _state_of(one: torch.optim.Optimizer, counted: bool) -> tuple[int, str]:
    name = type(one).__name__
    known = type(one).__module__.startswith("torch.optim") and name in _STATES
    total, there = 0, 0
    for group in one.param_groups:
        for entry in group["params"]:
            if _has_state(one, entry):
                there += 1
                total += _tensors(one.state.get(entry)) if counted else 0
            elif entry.requires_grad:
                total += (_STATES[name](group) if known else _ADAM) * _bytes(entry)
    if there:
        return total, f"{name}, which has its state"
    return total, f"{name}'s, to come" if known else f"{name}, to come; as Adam's"


def _has_state(one: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    if type(one).__name__ == _FLAT:  # it counts its calls there before the first of them
        return _tensors(list(one.state.values())) > 0
    return bool(one.state.get(parameter))


def _tensors(state: object) -> int:
    """Bytes of all tensors in what an optimizer keeps for a parameter."""
    if isinstance(state, torch.Tensor):
        return _bytes(state)
    entries = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(_tensors, entries))


def _optimizers(trained: Mapping[int, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Those that have any parameter of the graph, and none that another of them has."""
    if not trained:
        return []
    made = [entry for entry in gc.get_objects() if issubclass(type(entry), torch.optim.Optimizer)]
    chosen, taken = list[torch.optim.Optimizer](), set[int]()
    for one in sorted(made, key=lambda entry: -len(_parameters(entry))):
        having = {id(parameter) for parameter in _parameters(one)}
        if not having.isdisjoint(trained) and having.isdisjoint(taken):
            chosen.append(one)
            taken |= having
    return chosen


def _parameters(one: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = getattr(one, "param_groups", [])
    return [entry for group in groups for entry in group["params"] if entry.requires_grad]


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
