"""Random chains of equal and almost equal blocks, with bodies in place of what comes again, against eager.

    python tests/support/fuzz/repeated.py --cases 10000 --first 0 --jobs 2 --json out.json

A block differs from the others, if it does, by one thing: a constant, the stride of a parameter, a parameter that is
shared, a write in place, the order of two operands, an operator, dropout, a part without gradient or under autocast.
Some blocks hand out a view of what they are given or have made, some keep a parameter without gradient.  Inputs have
no, one, two or three rows, and some have zeros of both signs, infinities and NaN among their values.  Forward and
backward graphs are AOTAutograd's, and are run operator by operator with the calls that `one_body` has put in: no code
is generated, so a case takes a fraction of a second, and numbers are compared in double precision.  With
`--traced-once` Dynamo traces the program, blocks are lifted out before AOTAutograd (`traced_once`), and everything is
as a user has it, but that graphs run operator by operator; programs that may lose no kernel have `"repeat": "auto"`.

Some blocks are checkpointed then, all or each by chance, but those that write or hand out a view.

With `--sizes` sizes are dynamic in that, and each program is called with several: with 0, 1 and 2 rows, with as many
rows as sequences.  Blocks, some or all, compute with a size, ask for it, add a row or leave half of them out, or take a
tensor with a size of its own; some programs have variants, of one size or of multiples.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import logging
import multiprocessing
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import multigraph_backend
from multigraph_backend.lower import equal_steps, one_body
from multigraph_backend.lower import traced_once as lifted
from tests.support.commit import commit
from tests.support.no_code import no_code, not_compiled

WIDTH = 4
DIFFERENCES = (
    "constant", "stride", "shared", "shared inside", "write", "order", "operator", "dropout", "view", "view of input",
    "frozen", "reads buffer", "without gradient", "autocast", "drops half of attention",
)  # fmt: skip


OF_SIZES = ("divides by a size", "asks for a size", "adds a row", "leaves out rows", "flattens", "another size")


@dataclass(frozen=True)
class Block:
    kind: str
    different: str = ""
    of_sizes: str = ""
    checkpointed: bool = False


@dataclass(frozen=True)
class Program:
    seed: int
    blocks: tuple[Block, ...]
    training: bool
    dynamic: bool
    sizes: tuple[int, int] = (2, 3)
    edges: bool = False
    lossless: bool = False
    calls: tuple[tuple[int, int], ...] = ()
    specialize: tuple[dict[str, Any], ...] = ()


EDGES = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"))


def generate(seed: int) -> Program:
    rng = random.Random(seed)
    kinds = [rng.choice(("feed forward", "attention", "gate")) for _ in range(rng.choice((1, 1, 1, 2)))]
    odd = rng.choice((0.0, 0.1, 0.3))
    same = rng.choice(DIFFERENCES) if rng.random() < 0.3 else ""  # what all blocks have
    blocks = []
    for number in range(rng.randint(3, 8)):
        different = rng.choice(DIFFERENCES) if rng.random() < odd else same
        blocks.append(Block(kinds[number % len(kinds)], different))
    training, dynamic = rng.random() < 0.7, rng.random() < 0.1
    sizes = (2, 3) if dynamic or rng.random() < 0.5 else (rng.randint(0, 3), rng.randint(0, 3))
    return Program(seed, tuple(blocks), training, dynamic, sizes, rng.random() < 0.3, rng.random() < 0.3)


SPECIALIZE: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"x[0]": 3},), ({"x[1]": 4},), ({"x[1]": {"multiple_of": 2}},), ({"x[0]": 2, "x[1]": {"min": 3}},),
)  # fmt: skip


def generate_with_sizes(seed: int) -> Program:
    program = generate(seed)
    rng = random.Random(f"sizes of {seed}")
    odd = rng.choice((0.0, 0.0, 0.2))
    same = rng.choice(OF_SIZES) if rng.random() < 0.6 else ""
    blocks = tuple(
        dataclasses.replace(block, of_sizes=rng.choice(OF_SIZES) if rng.random() < odd else same)
        for block in program.blocks[:5]
    )
    calls = [(rng.randint(2, 4), rng.randint(2, 5))]
    if rng.random() < 0.2:
        calls = [(calls[0][0],) * 2]  # as many rows as sequences
    calls += [(rng.randint(2, 5), rng.randint(2, 9)), (rng.randint(0, 5), rng.randint(0, 4))]
    specialize = rng.choice(SPECIALIZE) if rng.random() < 0.3 else ()
    return dataclasses.replace(program, blocks=blocks, dynamic=True, calls=tuple(calls), specialize=specialize)


NOT_CHECKPOINTED = ("write", "view", "view of input")  # which nothing may do twice, or what Dynamo refuses there


def with_checkpoints(program: Program) -> Program:
    """The same with some blocks checkpointed, in some programs."""
    rng = random.Random(f"checkpoints of {program.seed}")
    odds = rng.choice((0.0, 0.0, 1.0, 0.5))
    chosen = [rng.random() < odds and block.different not in NOT_CHECKPOINTED for block in program.blocks]
    blocks = (dataclasses.replace(block, checkpointed=it) for block, it in zip(program.blocks, chosen, strict=True))
    return dataclasses.replace(program, blocks=tuple(blocks))


class BlockModule(nn.Module):
    def __init__(self, block: Block, before: BlockModule | None) -> None:
        super().__init__()
        self.block = block

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, dtype=torch.float64) / 2)

        self.norm = weight(WIDTH)
        self.up = weight(2 * WIDTH, WIDTH)
        self.gate = weight(2 * WIDTH, WIDTH)
        self.down = weight(WIDTH, 2 * WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        if block.different == "stride":
            self.up = nn.Parameter(self.up.detach().t().contiguous().t())
        if block.different == "shared" and before is not None:
            self.up = before.up
        if block.different == "shared inside":
            self.gate = self.up
        if block.different == "frozen":
            self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor, beside: torch.Tensor, results: list[torch.Tensor]) -> torch.Tensor:
        different, of_sizes = self.block.different, self.block.of_sizes
        constant = 1.75 if different == "constant" else 1.5
        if of_sizes == "adds a row":
            x = torch.cat((x, x[:, :1]), 1)
        elif of_sizes == "leaves out rows" and x.shape[1] > 1:
            x = x[:, : (x.shape[1] + 1) // 2]
        if different == "write":
            self.seen.add_(x.detach().mean((0, 1)))
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * self.norm
        if different == "reads buffer":
            y = y + self.seen
        up, gate = y @ self.up.t(), y @ self.gate.t()
        if self.block.kind == "attention":
            q, k = up.chunk(2, -1)
            v = gate[..., :WIDTH]
            if different == "drops half of attention":
                y = torch.cat((functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5), v), -1)
            else:
                y = torch.cat(((q @ k.transpose(-1, -2) * constant).softmax(-1) @ v, v), -1)
        elif self.block.kind == "gate":
            y = torch.sigmoid(gate - constant) * up
        else:
            y = functional.silu(gate) * up * constant
        y = gate - y if different == "order" else y - gate
        y = y.cos() if different == "operator" else y.sin()
        if of_sizes == "divides by a size":
            y = y / (x.shape[1] + 1) * x.shape[0]
        elif of_sizes == "asks for a size":
            y = y * 1.25 if x.shape[1] > 3 else y - 0.25
        elif of_sizes == "flattens":
            y = y.reshape(x.shape[0] * x.shape[1], y.shape[-1]).cos().view(x.shape[0], x.shape[1], y.shape[-1])
        elif of_sizes == "another size":
            y = y + beside.sin().sum() * beside.shape[0]
        if different == "without gradient":
            with torch.no_grad():
                y = y + (x.cos() * 0.5 + x.sin()).square().mean(-1, keepdim=True).exp().tanh().sin() * constant
        if different == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = y + (x.float() @ self.norm.float()).double().unsqueeze(-1)
        if different == "dropout":
            y = functional.dropout(y, 0.3, training=True)
        if different == "view":
            results.append(up.transpose(0, 1)[..., 1:])
        if different == "view of input":
            results.append(x.transpose(0, 1))
        return x + y @ self.down.t()


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        before: BlockModule | None = None
        for block in program.blocks:
            before = BlockModule(block, before)
            self.blocks.append(before)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        beside = x if beside is None else beside
        x = x.sin()
        for block in self.blocks:
            if block.block.checkpointed:
                x = checkpoint(block, x, beside, [], use_reentrant=False)
            else:
                x = block(x, beside, results)
        return [*results, x.cos()]


def build(program: Program) -> Model:
    torch.manual_seed(program.seed)
    return Model(program)


@dataclass
class Verdict:
    """`wrong`: what differs from eager, None where nothing does; `calls`: of bodies, in both graphs."""

    wrong: str | None = None
    calls: int = 0
    said: list[str] = field(default_factory=list)


Compiled = Callable[[Model, Verdict], Any]


def run_case(program: Program, compiled: Compiled | None = None, beside: Compiled | None = None) -> Verdict:
    """The program as `compiled` makes it (graphs of AOTAutograd's with bodies, if not told otherwise), and beside it in
    eager, or as `beside` makes it."""
    verdict = Verdict()
    model = build(program)
    other = copy.deepcopy(model)
    reference = model if beside is None else beside(model, Verdict())
    run = (compiled or operator_by_operator(program))(other, verdict)
    for turn in range(len(program.calls) or 2):
        x = _input(program, turn)
        expected = _step(program, reference, model, x, turn)
        try:
            got = _step(program, run, other, x, turn)
        except Exception as error:
            verdict.wrong = f"{program}: {type(error).__name__}: {error}"
            return verdict
        for name, mine in expected.items():
            try:
                torch.testing.assert_close(got[name], mine, rtol=1e-7, atol=1e-9, equal_nan=True)
            except AssertionError as error:
                verdict.wrong = f"{program}: {name}: {error}"
                return verdict
    return verdict


def _input(program: Program, turn: int) -> torch.Tensor:
    batch, rows = program.calls[turn] if program.calls else program.sizes
    size = batch, rows + turn if program.dynamic and not program.calls else rows, WIDTH
    x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(turn))
    if program.edges:
        rng = random.Random(f"{program.seed}, {turn}")
        for place in range(x.numel()):
            if rng.random() < 0.1:
                x.view(-1)[place] = rng.choice(EDGES)
    return x


def _beside(program: Program, x: torch.Tensor, turn: int) -> list[torch.Tensor]:
    """What blocks take beside the first input, where sizes are dynamic."""
    if not program.calls:
        return []
    size = 2 + (program.seed + turn) % 3, WIDTH
    beside = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(turn))
    for tensor in (x, beside):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    return [beside]


def _step(program: Program, run: Any, model: Model, x: torch.Tensor, turn: int) -> dict[str, Any]:
    training = program.training
    x = x.clone().requires_grad_(training)
    torch.manual_seed(turn)
    with torch.set_grad_enabled(training):
        results = run(x, *_beside(program, x, turn))
    found: dict[str, Any] = {f"result {place}": value.detach().clone() for place, value in enumerate(results)}
    if training:
        model.zero_grad()
        sum((value * (place + 1.5)).sum() for place, value in enumerate(results)).backward()
        found["gradient of x"] = x.grad
        found.update({f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()})
    found.update({name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


def operator_by_operator(program: Program) -> Compiled:
    def compiled(model: Model, verdict: Verdict) -> Any:
        def with_bodies(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            if not program.training:
                equal_steps.merge(gm)
            found, _ = one_body.put_in(gm, lossless=program.lossless)
            verdict.calls += found.calls
            verdict.said.append(str(found))

            def run(args: list[Any]) -> Any:
                taken, args[:] = list(args), []
                return gm(*taken)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def over_all(x: torch.Tensor, *values: torch.Tensor) -> Any:
            return torch.func.functional_call(model, dict(zip(held, values, strict=True)), (x,))

        run = aot_function(
            over_all,
            fw_compiler=with_bodies,
            bw_compiler=with_bodies,
            partition_fn=min_cut_rematerialization_partition,
            dynamic=program.dynamic,
        )
        return lambda x, *beside: run(x, *held.values())

    return compiled


def traced_once(
    model: Model, verdict: Verdict, specialize: Sequence[dict[str, Any]] = (), repeat: str = "always"
) -> Any:
    """As a user compiles it, but that graphs are run operator by operator; `verdict.calls`: those that were lifted."""
    torch._dynamo.reset()
    compiled = through_inductor(model, verdict, specialize, repeat)

    def run(*args: torch.Tensor) -> Any:
        with no_code(), mock.patch.object(lifted, "put_in", functools.partial(_counting, lifted.put_in, verdict)):
            results = compiled(*args)
        verdict.said = [str(region.generic.repeated) for region in multigraph_backend.explain().regions]
        return results

    return run


def stock(model: Model, verdict: Verdict) -> Any:
    """As stock's Inductor prepares its graphs, which are run operator by operator."""
    compiled = torch.compile(model, fullgraph=True, backend=functools.partial(compile_fx, inner_compile=not_compiled))

    def run(*args: torch.Tensor) -> Any:
        with no_code():
            return compiled(*args)

    return run


def _counting(put_in: Any, verdict: Verdict, *given: Any) -> Any:
    found = put_in(*given)
    verdict.calls += sum(calls for _, calls in (*found.bodies, *found.inlined))
    return found


def through_inductor(
    model: Model, verdict: Verdict, specialize: Sequence[dict[str, Any]] = (), repeat: str = "always"
) -> Any:
    """As a user compiles it, with code generated."""
    options = {"repeat": repeat, "on_failure": "raise", "specialize": list(specialize)}
    return torch.compile(model, backend="multigraph", fullgraph=True, options=options)


CHUNK = 20
TOLD = 10 * CHUNK  # programs after which it says how far it is


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after so long")
    parser.add_argument("--traced-once", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    of, began = commit("multigraph_backend"), time.monotonic()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    end, until = args.first + args.cases, time.time() + args.seconds
    said = 0
    chunks = [range(seed, min(seed + CHUNK, end)) for seed in range(args.first, end, CHUNK)]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        how = map(itertools.repeat, (args.traced_once, args.sizes, until))
        for counted, found in pool.map(_chunk, chunks, *how):
            counts += counted
            wrong += found
            if (done := counts["programs"]) >= said + TOLD:
                said, seconds = done, time.monotonic() - began
                print(f"{done} of {args.cases}, {len(wrong)} wrong, {seconds:.0f} s", file=sys.stderr, flush=True)
            for said in found:
                print(said, file=sys.stderr, flush=True)
    summary = {
        "commit": of,
        "torch": torch.__version__,
        "traced_once": args.traced_once,
        "sizes": args.sizes,
        "seeds": [args.first, end],
        **dict(sorted(counts.items())),
        "number_wrong": len(wrong),
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps({name: value for name, value in summary.items() if name != "wrong"}, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if wrong else 0


def _begin() -> None:
    """In each process, once."""
    torch.set_num_threads(1)
    logging.getLogger("multigraph_backend").setLevel(logging.CRITICAL)


def _chunk(seeds: range, once: bool, sizes: bool, until: float) -> tuple[Counter[str], list[str]]:
    """What the programs exercised, and what is wrong; none begins once it is later than `until`."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for program in map(generate_with_sizes if sizes else generate, seeds):
        if time.time() > until:
            break
        if once or sizes:
            program = with_checkpoints(program)
        repeat = "auto" if program.lossless else "always"
        once_traced = functools.partial(traced_once, specialize=program.specialize, repeat=repeat)
        verdict = run_case(program, once_traced if once or sizes else None)
        if verdict.wrong is not None and (once or sizes) and any(it.different == "autocast" for it in program.blocks):
            # Inductor of torch 2.11 makes sums of small products, which round otherwise than eager's
            verdict = run_case(program, once_traced, beside=stock)
            counts["programs that differ from eager as stock does"] += verdict.wrong is None
        counts["programs"] += 1
        counts["calls of bodies"] += verdict.calls
        counts["programs with calls of bodies"] += verdict.calls > 0
        counts["programs that may lose no kernel"] += program.lossless
        counts["programs with checkpoints"] += any(block.checkpointed for block in program.blocks)
        counts["programs with backwards"] += program.training
        counts["programs with zeros, infinities and NaN"] += program.edges
        counts["programs with sizes of 0, 1 or 2"] += min(map(min, (*program.calls, program.sizes))) < 2
        counts["programs with variants"] += bool(program.specialize)
        for said in verdict.said:
            for reason in re.findall(r"traced one by one: ([^;|]*)|compile with calls of one body failed: (.*)", said):
                counts["refused: " + "".join(reason).strip()] += 1
        if verdict.wrong is not None:
            wrong.append(verdict.wrong)
    return counts, wrong


if __name__ == "__main__":
    sys.exit(main())
