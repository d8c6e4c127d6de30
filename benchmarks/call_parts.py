"""Where the microseconds of a recorded call go, before the GPU has anything to do: its parts, and their sum.

Dynamo      the frame that it runs in place of the user's, and what finds that: `torch.compile` with code that hands out
            tensors that are there, while no guards are checked
guards      what it takes longer where they are
dispatch    which variant it is, and the way past AOTAutograd's wrappers
entry       whose turn it is, step, stream and thread, and the recording behind the last one
checks      whether that may be replayed: addresses of inputs, what is alive of what it writes over
launch      its inputs copied, and all of it launched
outputs     tensors over its memory, and what is noted of the call
sum, whole  of these, and of the call itself, measured as one

Each part is called by itself, with one set of inputs, as often as the whole, in turns: the sum is no figure of the
whole. `dispatch`, `entry` and `outputs` are differences: of the function that Dynamo calls and the code that it calls
in the end, and so on inwards. What a straight list of replays could spare a graph of several pieces is `entry` and
`checks` of each but the first; what one native call could, `entry` and `outputs` without the tensors themselves.

host us     of one call that does not wait, median of passes
each us     what one more input, or output, adds (least squares over the sizes), and `fixed us` a call without any

    python benchmarks/call_parts.py --json call_parts.json

On a CPU nothing is recorded: there are the parts up to the compiled code, which stands for all that follows.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from measure import (
    Call,
    Column,
    Results,
    arguments,
    attempt,
    host_us,
    interleaved,
    own_code,
    unguarded,
    wait,
    worst_difference,
)
from slopes import Program, copied_inputs, line, outputs, static_inputs

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.cudagraphs import output_code
from multigraph_backend.cudagraphs.recordings.nodes import Node
from multigraph_backend.cudagraphs.recordings.piece import Piece

DYNAMO, GUARDS, DISPATCH, ENTRY, CHECKS = "Dynamo", "guards", "dispatch", "entry", "checks"
LAUNCH, OUTPUTS = "launch", "outputs"
CODE = "code"  # in place of all but the first two where nothing is recorded
SUM, WHOLE = "sum", "whole"
COLUMNS = (
    Column("of", "of"),
    Column("part", "part"),
    Column("sizes", "numbers"),
    Column("points", "host us"),
    Column("each_us", "us each", 3),
    Column("fixed_us", "fixed us", 2),
    Column("share", "of whole", 2),
)
CALLS = 20

#: what is counted, its numbers, and fewer for --quick
KINDS: dict[str, tuple[Callable[[int, str], Program], Sequence[int], Sequence[int]]] = {
    "copied inputs": (copied_inputs, (1, 8, 32), (1, 2)),
    "static inputs": (static_inputs, (1, 30, 300), (1, 2)),
    "outputs": (outputs, (1, 8, 32), (1, 2)),
}


class Compiled:
    """`program` under multigraph, and the function that Dynamo calls with what it calls it with."""

    def __init__(self, program: Program) -> None:
        self.function: Call | None = None
        self.arguments: tuple[Any, ...] = ()

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Call:
            made = multigraph(gm, example_inputs, options={"on_failure": "raise"})
            self.function = made

            def noting(*args: Any) -> Any:
                self.arguments = args
                return made(*args)

            return noting

        self.noting = torch.compile(own_code(program.function), backend=backend)


def hands_out(program: Program) -> Call:
    """Compiled to code that hands out tensors that are there."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Call:
        held: list[Any] = []

        def run(*args: Any) -> Any:
            if not held:
                held.extend(gm(*args))
            return held

        return run

    return torch.compile(own_code(program.function), backend=backend)


def inside(piece: Piece, inputs: Sequence[Any]) -> dict[str, Callable[[], object]]:
    """What a call of `piece` consists of, for inputs that a recording without a parent answers: each part as a
    function, and all of them as "piece".  Raises RuntimeError where none answers."""
    tree, given = piece.tree, list(inputs)
    piece(list(given))
    node = tree.root.child(piece.keyed_for(given), given)
    if node is None or node.trial is not None:
        raise RuntimeError("no recording answers these inputs, or it is still tried out")
    found: Node = node
    launch = _launch(found)

    def run() -> None:
        found.run(found, list(given))
        tree.path.clear()

    return {
        "piece": lambda: piece(list(given)),
        CHECKS: lambda: found.holds(given),
        "run": run,
        LAUNCH: lambda: launch(given),
    }


def _launch(node: Node) -> Callable[[list[Any]], object]:
    """What copies the inputs of a node's recording and launches it, as the function that replays it does."""
    names = getattr(node.run, "__globals__", {})
    recording = node.recording
    assert recording is not None
    launch: Callable[..., object] = names["launch"]
    if launch != recording.graph.replay:  # it is given the inputs, and copies them
        return launch
    if (stage := names.get("stage")) is not None:
        return lambda inputs: (stage(*[inputs[index] for index in recording.plan.copied]), launch())
    return lambda inputs: launch()


def measured(program: Program, rounds: int) -> dict[str, float]:
    """Microseconds of each part, of their sum and of the whole.  Raises RuntimeError where a form is not as eager."""
    known = {id(code) for code in output_code.living()}
    inputs = program.inputs()
    whole = torch.compile(own_code(program.function), backend=multigraph, options={"on_failure": "raise"})
    compiled, nothing = Compiled(program), hands_out(program)
    for form in (whole, compiled.noting, nothing):
        for _ in range(40):
            torch.compiler.cudagraph_mark_step_begin()
            form(*inputs)
    for form in (whole, compiled.noting):
        off = worst_difference(_tensors(form(*inputs)), _tensors(program.function(*inputs)))
        if not off < 1e-4:
            raise RuntimeError(f"differs from eager by {off:.1e}")
    function, arguments = compiled.function, compiled.arguments
    assert function is not None
    codes = [code for code in output_code.living() if id(code) not in known and code.pieces]
    calls: dict[str, Callable[[], object]] = {
        WHOLE: lambda: whole(*inputs),
        DYNAMO: lambda: nothing(*inputs),
        "function": lambda: function(*arguments),
    }
    if codes:
        calls |= inside(codes[-1].pieces[0], arguments)
    wait()
    passes = {name: host_us(call, [()], CALLS) for name, call in calls.items()}
    passes["unguarded"] = unguarded(passes[DYNAMO])
    taken = {name: statistics.median(found) for name, found in interleaved(passes, rounds).items()}
    found = {DYNAMO: taken["unguarded"], GUARDS: taken[DYNAMO] - taken["unguarded"]}
    if codes:
        found[DISPATCH] = taken["function"] - taken["piece"]
        found[ENTRY] = taken["piece"] - taken[CHECKS] - taken["run"]
        found |= {CHECKS: taken[CHECKS], LAUNCH: taken[LAUNCH], OUTPUTS: taken["run"] - taken[LAUNCH]}
    else:
        found[CODE] = taken["function"]
    return {**found, SUM: sum(found.values()), WHOLE: taken[WHOLE]}


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def rows(kind: str, device: str, quick: bool, rounds: int) -> Mapping[str, dict[str, Any]]:
    """A row for each part."""
    make, many, few = KINDS[kind]
    counts = few if quick else many
    taken = []
    for count in counts:
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        torch.manual_seed(0)
        with torch.no_grad():
            taken.append(measured(make(count, device), rounds))
    last = taken[-1]
    made = {}
    for part in last:
        points = [one[part] for one in taken]
        made[part] = {
            "sizes": " ".join(map(str, counts)),
            "points": " ".join(f"{us:.2f}" for us in points),
            **{key: value for key, value in line(counts, points).items() if key != "off_us"},
            "share": statistics.median(one[part] / one[WHOLE] for one in taken),
        }
    return made


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), help="all of them")
    parser.add_argument("--rounds", type=int, help="passes of each part (41)")
    args = parser.parse_args()
    results = Results("call_parts", "A recorded call: the host's microseconds, by part", COLUMNS, args)
    rounds = args.rounds or (3 if args.quick else 41)
    for kind in args.only or KINDS:
        made, error = attempt(partial(rows, kind, results.device, args.quick, rounds))
        for part in made or (WHOLE,):
            results.add({"of": kind, "part": part}, (made or {}).get(part, {}), error, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
