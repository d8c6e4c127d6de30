"""What a recorded call costs the host for each input, output, saved tensor and piece: several sizes, and a line.

copied inputs    inputs that lie elsewhere at each call
static inputs    parameters, which stay where they are
outputs          tensors that a call hands out, inference
saved tensors    a training step over so many layers of one parameter: each saves a tensor, and has a gradient
pieces           a graph that is cut in so many places, by an operator that no recording may hold

host us     of a call that is not waited for, its outputs dropped at once, by the number of them
us each     the slope of the line through these points (least squares), in microseconds for one more
fixed us    where that line meets a call with none of them
off us      the largest distance of a point from the line: where it is large, the cost is no line
each/stock  the slope over that of torch.compile(mode="reduce-overhead")

    python benchmarks/slopes.py --json slopes.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import (
    Call,
    Column,
    Goal,
    Results,
    arguments,
    attempt,
    goals_text,
    host_us,
    interleaved,
    own_code,
    wait,
    worst_difference,
)

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("of", "of"),
    Column("form", "form"),
    Column("sizes", "numbers"),
    Column("points", "host us"),
    Column("each_us", "us each", 3),
    Column("fixed_us", "fixed us", 1),
    Column("off_us", "off us", 1),
    Column("over_stock", "each/stock", 2),
    Column("goals", "goals"),
)
FORMS = ("stock", "multigraph")
WIDTH, SETS, CALLS = 64, 4, 10
LEAST = Goal("each us", "each_us", 0.05)
NOT_MORE = Goal("each/stock", "over_stock", 1.0)


@torch.library.custom_op("slopes::apart", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def apart(x: torch.Tensor) -> torch.Tensor:
    """What no recording may hold."""
    return x + 1


@apart.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Program:
    """`function` of `inputs`; in training its result is the loss of a step over `parameters`."""

    function: Call
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    parameters: tuple[torch.nn.Parameter, ...] = ()
    training: bool = False


def _one(device: str) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(WIDTH, device=device),)


def _parameters(count: int, device: str) -> tuple[torch.nn.Parameter, ...]:
    return tuple(torch.nn.Parameter(torch.rand(WIDTH, device=device) + 0.5) for _ in range(count))


def copied_inputs(count: int, device: str) -> Program:
    def function(*xs: torch.Tensor) -> torch.Tensor:
        return torch.stack(xs).mean(0)

    return Program(function, lambda: tuple(torch.randn(WIDTH, device=device) for _ in range(count)))


def static_inputs(count: int, device: str) -> Program:
    parameters = _parameters(count, device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack(parameters).mean(0)

    return Program(function, _one(device), parameters)


def outputs(count: int, device: str) -> Program:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x + number for number in range(count))

    return Program(function, _one(device))


def saved_tensors(count: int, device: str) -> Program:
    parameters = _parameters(count, device)

    def function(x: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            x = torch.softmax(x * parameter, 0) * WIDTH
        return x.square().mean()

    return Program(function, _one(device), parameters, training=True)


def pieces(count: int, device: str) -> Program:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = apart(torch.sin(x)) * 0.5
        return x

    return Program(function, _one(device))


#: what is counted, its numbers, fewer for --quick, and the goals of multigraph's line
KINDS: dict[str, tuple[Callable[[int, str], Program], Sequence[int], Sequence[int], tuple[Goal, ...]]] = {
    "copied inputs": (copied_inputs, (4, 16, 32, 64), (2, 4), (NOT_MORE,)),
    "static inputs": (static_inputs, (10, 100, 200, 300), (2, 4), (LEAST, NOT_MORE)),
    "outputs": (outputs, (4, 16, 64, 128), (2, 4), (NOT_MORE,)),
    "saved tensors": (saved_tensors, (4, 16, 32, 64), (2, 4), (NOT_MORE,)),
    "pieces": (pieces, (1, 2, 4, 8), (1, 2), (NOT_MORE,)),
}


def _step(program: Program, form: Call) -> Call:
    if not program.training:
        return form

    def step(*inputs: torch.Tensor) -> Any:
        for parameter in program.parameters:
            parameter.grad = None
        loss = form(*inputs)
        loss.backward()
        return loss

    return step


def _results(program: Program, found: Any) -> list[torch.Tensor]:
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    gradients = [parameter.grad for parameter in program.parameters if parameter.grad is not None]
    return [value.detach().clone() for value in (*results, *gradients)]


def points(kind: str, counts: Sequence[int], device: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call of each form, for each number.  Raises where a form is not what eager is."""
    make = KINDS[kind][0]
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for count in counts:
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        torch.manual_seed(0)
        program = make(count, device)
        with torch.set_grad_enabled(program.training):
            sets = [program.inputs() for _ in range(SETS)]
            compiled = {
                "stock": torch.compile(own_code(program.function), mode="reduce-overhead"),
                "multigraph": torch.compile(
                    own_code(program.function), backend=multigraph, options={"on_failure": "raise"}
                ),
            }
            steps = {form: _step(program, run) for form, run in compiled.items()}
            eager = _step(program, program.function)
            for form, run in steps.items():
                for number in range(12):
                    torch.compiler.cudagraph_mark_step_begin()
                    run(*sets[number % SETS])
                given = _results(program, run(*sets[0]))
                off = worst_difference(given, _results(program, eager(*sets[0])))
                if not off < 1e-4:
                    raise RuntimeError(f"{form} with {count}: differs from eager by {off:.1e}")
            wait()
            taken = interleaved({form: host_us(run, sets, CALLS) for form, run in steps.items()}, rounds)
        for form in FORMS:
            found[form].append(statistics.median(taken[form]))
    return found


def line(counts: Sequence[int], taken: Sequence[float]) -> dict[str, Any]:
    """The line through these points, and how far the farthest lies from it."""
    slope, fixed = statistics.linear_regression(counts, taken)
    off = max(abs(us - fixed - slope * count) for count, us in zip(counts, taken, strict=True))
    return {"each_us": slope, "fixed_us": fixed, "off_us": off}


def rows(kind: str, device: str, quick: bool, rounds: int) -> Mapping[str, dict[str, Any]]:
    """A row for each form."""
    _, many, few, goals = KINDS[kind]
    counts = few if quick else many
    taken = points(kind, counts, device, rounds)
    made = {
        form: {
            "sizes": " ".join(map(str, counts)),
            "points": " ".join(f"{us:.1f}" for us in taken[form]),
            **line(counts, taken[form]),
        }
        for form in FORMS
    }
    ours, stock = made["multigraph"], made["stock"]
    ours["over_stock"] = ours["each_us"] / stock["each_us"] if stock["each_us"] else None
    if device == "cuda":
        ours["goals"] = goals_text(goals, ours)
    return made


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), help="all of them")
    parser.add_argument("--rounds", type=int, help="passes of each form (41)")
    args = parser.parse_args()
    results = Results("slopes", "Slopes: what one more input, output, saved tensor or piece costs", COLUMNS, args)
    rounds = args.rounds or (3 if args.quick else 41)
    for kind in args.only or KINDS:
        made, error = attempt(partial(rows, kind, results.device, args.quick, rounds))
        for form in FORMS:
            results.add({"of": kind, "form": form}, (made or {}).get(form, {}), error, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
