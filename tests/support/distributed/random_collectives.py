"""Random programs with two to six collectives, random conditions on their sizes, and what each form of one issues.

    python tests/support/distributed/random_collectives.py --programs 1000 --json collectives.json
    python tests/support/distributed/random_collectives.py --programs 1000 --device cuda --jobs 12 --json out.json

For each program its generic graph and some variants are traced as their compiles trace them.  Each must issue what the
program issues when it runs eagerly, counted at the dispatcher; and the check must call none of them different.  The
process is a group of one rank over gloo.

On a GPU, or with `--ranks 2`, the programs are compiled and run by two ranks, over NCCL or gloo, one on a variant and
the other on generic (`collectives_on_ranks.py`); `--jobs` pairs of processes share the programs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

from multigraph_backend import _compat
from multigraph_backend.capture import declared, from_dynamo, user_code
from multigraph_backend.distributed import sequence
from multigraph_backend.distributed.sequence import Issued, SameSizes
from multigraph_backend.lower import lowering
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.options import Options

CHECKOUT = Path(__file__).parents[3]
Program = Callable[..., torch.Tensor]
# named otherwise up to torch 2.12
GATHER: Callable[..., torch.Tensor] = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
SCATTER: Callable[..., torch.Tensor] = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)
Entry = tuple[str, str, int]  # kind, type, elements

_STEPS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "all_reduce": lambda y, group: functional.all_reduce(y.contiguous(), "sum", group),
    "all_reduce in bfloat16": lambda y, group: functional.all_reduce(y.bfloat16().contiguous(), "sum", group).to(
        y.dtype
    ),
    "gather rows": lambda y, group: GATHER(y.contiguous(), 0, group),
    "gather columns": lambda y, group: GATHER(y.t().contiguous(), 0, group).t(),
    "scatter rows": lambda y, group: SCATTER(torch.cat([y] * dist.get_world_size()), "sum", 0, group),
    "of a part": lambda y, group: y + functional.all_reduce(y[1:].sum(0), "sum", group),
    "of the squares": lambda y, group: y * functional.all_reduce(y @ y.t(), "sum", group).mean().tanh(),
}
_BETWEEN: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sin, torch.relu, lambda y: y * 0.5 + 1, lambda y: torch.softmax(y, 1), lambda y: y / (1 + y.abs()),
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    program: Program
    conditions: list[dict[str, object]]
    sizes: list[tuple[int, int]]
    trains: bool
    tolerance: float = 1e-6  # of the norm of its results, in float64


def made(seed: int) -> Made:
    """A program of `x` and a weight, conditions on the sizes of `x`, and sizes that fit each in turn, then none."""
    chance = random.Random(seed)
    steps = [(chance.choice(list(_STEPS)), chance.choice(_BETWEEN)) for _ in range(chance.randint(2, 6))]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        for name, between in steps:
            y = between(_STEPS[name](y, dist.group.WORLD))
        return y.mean(1)

    conditions: list[dict[str, object]] = []
    sizes = []
    for _ in range(2):
        rows, columns = chance.randint(2, 9), chance.randint(2, 9)
        multiple = chance.choice((4, 8))
        kinds: tuple[tuple[dict[str, object], tuple[int, int]], ...] = (
            ({"x[0]": rows}, (rows, 11)),
            ({"x[1]": columns}, (11, columns)),
            ({"x[0]": {"multiple_of": multiple}}, (3 * multiple, 11)),
            ({"x[0]": rows, "x[1]": {"multiple_of": multiple}}, (rows, 2 * multiple)),
            ({"x[1]": {"min": 2, "max": columns + 2}}, (13, columns + 1)),
        )
        condition, size = chance.choice(kinds)
        conditions.append(condition)
        sizes.append(size)
    tolerance = 3e-2 if any("bfloat16" in name for name, _ in steps) else 1e-6
    return Made(program, conditions, [*sizes, (17, 19)], chance.random() < 0.5, tolerance)


class Log(TorchDispatchMode):
    """Each collective that passes torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sequence.issues(func.name()):
            value = args[0]
            self.entries.append((sequence.kind_of(func.name()), str(value.dtype).removeprefix("torch."), value.numel()))
        return func(*args, **(kwargs or {}))


def eagerly(entry: Made, inputs: Sequence[torch.Tensor]) -> tuple[list[Entry], list[Entry]]:
    """What the program issues in its forward and in its backward."""
    with Log() as forward:
        output = entry.program(*inputs)
    with Log() as backward:
        if entry.trains:
            output.sum().backward()
    return forward.entries, backward.entries


def entries(lowered: Lowered, issued: Sequence[sequence.Collective], values: dict[Any, int]) -> list[Entry]:
    """What a form says that it issues, for the sizes `values` of Dynamo's symbols."""
    known: dict[str, int] = {}
    for symbol, expr in lowered.sizes.replaced.items():
        for inner in getattr(expr, "free_symbols", ()):
            (solution,) = sympy.solve(sympy.Eq(expr, values[symbol]), inner) if expr != inner else (values[symbol],)
            known[str(inner)] = int(solution)
    return [(entry.kind, entry.dtypes[0], int(eval(entry.counts[0], {}, known))) for entry in issued]


def problems(entry: Made) -> Iterator[str]:
    """What is wrong with what the forms of a program say; nothing if all is well."""
    told: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = from_dynamo.capture(gm, example_inputs, user_code.current())
        options, state = Options.build({"specialize": entry.conditions}), CompileState.take()
        conditions, _ = declared.resolve(graph, options.specialize)

        def run(*args: Any) -> Any:
            values = graph.values(args)
            generic = lowering.only_traced(graph, {}, args, options, state)
            inputs = [arg.detach().requires_grad_(arg.requires_grad) for arg in args if isinstance(arg, torch.Tensor)]
            seen = eagerly(entry, inputs)
            forms = [("generic", generic)]
            for condition in conditions:
                if all(facts.holds(int(size.location.read(args))) for size, facts in condition.terms):
                    forms.append((condition.text, lowering.only_traced(graph, condition.facts, args, options, state)))
            told.append(", ".join(name for name, _ in forms))
            for name, form in forms:
                found = form.issued
                assert isinstance(found, Issued)
                if found.unknown:
                    wrong.append(f"{name}: {found.unknown}")
                if entries(form, found.forward, values) != seen[0]:
                    wrong.append(f"{name}, forward: {found.forward}, and eagerly {seen[0]}")
                if sorted(entries(form, found.backward, values)) != sorted(seen[1]):
                    wrong.append(f"{name}, backward: {found.backward}, and eagerly {seen[1]}")
                assert generic.issued is not None
                different = sequence.difference(generic.issued, found, SameSizes(generic.sizes, form.sizes))
                if different is not None:
                    wrong.append(f"{name} would be refused: {different}")
            return graph.module(*args)

        return run

    wrong: list[str] = []
    compiled = torch.compile(entry.program, backend=backend, dynamic=True, fullgraph=True)
    for rows, columns in entry.sizes:
        compiled(torch.randn(rows, columns), torch.randn(columns, requires_grad=entry.trains))
    if not any("," in text for text in told):
        wrong.append(f"no variant was traced: {told}")
    torch._dynamo.reset()
    yield from wrong


def alone() -> None:
    """Let this process be a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def all_alone(first: int, count: int) -> tuple[dict[str, Any], list[str]]:
    """The programs from seed `first` on, in this process: what was done, and what is wrong."""
    alone()
    wrong = [f"program {seed}: {text}" for seed in range(first, first + count) for text in problems(made(seed))]
    dist.destroy_process_group()
    return {"programs": count}, wrong


def on_ranks(first: int, count: int, args: argparse.Namespace, device: str) -> tuple[dict[str, Any], list[str]]:
    """The same by pairs of processes."""
    from tests.support.distributed import processes

    share = -(-count // args.jobs)
    starts = range(first, first + count, share)

    def job(start: int) -> list[processes.Ended]:
        words = ["--device", device, "--first", str(start), "--programs", str(min(share, first + count - start))]
        port = str(processes.free_port())
        ranks = [[str(rank), str(args.ranks), port, *words] for rank in range(args.ranks)]
        environ = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return processes.run(processes.HERE / "collectives_on_ranks.py", ranks, args.seconds, environ)

    done: Counter[str] = Counter()
    wrong: list[str] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for start, ranks in zip(starts, pool.map(job, starts), strict=True):
            for rank, ended in enumerate(ranks):
                lines = [line for line in ended.said.splitlines() if line.startswith('{"programs"')]
                if not lines:
                    how = "hangs" if ended.status is None else f"ended with {ended.status}"
                    wrong.append(f"from program {start} on, rank {rank} {how}: {ended.said[-3000:]}")
                    continue
                told = json.loads(lines[-1])
                wrong += [f"rank {rank}: {text}" for text in told.pop("wrong")]
                done.update(told if rank == 0 else {name: told[name] for name in ("variants", "refused", "recordings")})
    if done["programs"] != count:
        wrong.append(f"{done['programs']} programs of {count} were done")
    if done["variants"] + done["refused"] != done["programs"]:
        wrong.append(f"{done['variants']} programs had a rank on a variant")
    return dict(done), wrong


def main() -> int:
    sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
    from measure import Column, Goal, Results, arguments, goals_text

    parser = arguments(__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="2 on a GPU, else 1")
    parser.add_argument("--jobs", type=int, default=1, help="pairs of processes at a time (1)")
    parser.add_argument("--seconds", type=float, default=540, help="of a pair at most (540)")
    args = parser.parse_args()
    columns = (
        Column("how", "how"),
        Column("ranks", "ranks"),
        Column("programs", "programs"),
        Column("collectives", "collectives"),
        Column("trained", "with gradients"),
        Column("variants", "with a variant"),
        Column("refused", "refused"),
        Column("recordings", "recordings"),
        Column("problems", "problems"),
        Column("seconds", "seconds", 0),
        Column("goals", "goals"),
    )
    results = Results("collectives", "Random programs with collectives: each form against eager", columns, args)
    args.ranks = args.ranks or (2 if results.device == "cuda" else 1)
    began = time.monotonic()
    if args.ranks == 1:
        done, wrong = all_alone(args.first, args.programs)
    else:
        done, wrong = on_ranks(args.first, args.programs, args, results.device)
    for text in wrong:
        print(text, flush=True)
    row = {**done, "problems": len(wrong), "seconds": time.monotonic() - began}
    row["goals"] = goals_text((Goal("problems", "problems", 0),), row)
    how = "traced" if args.ranks == 1 else f"compiled, over {'nccl' if results.device == 'cuda' else 'gloo'}"
    error = f"{len(wrong)} problems, the first: {wrong[0]}" if wrong else None
    results.add({"how": how, "ranks": args.ranks}, row, error, headline=True)
    return results.finish()


if __name__ == "__main__":
    assert not _compat.missing("variants")
    sys.exit(main())
