"""A recorded call that is waited for: what passes before the GPU has anything to do, and what it then takes.

hand-made     Inductor's code under torch.cuda.graph, by hand: one copy of the inputs, one replay (see replay.py)
bare replay   that replay alone: what no call can do without
multigraph    torch.compile(backend="multigraph")
multigraph, sealed   the same while no guards are checked
multigraph, ahead    what torch's `aot_compile` makes of it: no guards, and no frame of Dynamo's

Dynamo us    from the call to the function that the backend has made: guards, and arguments gathered for it; ahead of
             time it is part of "entry us"
entry us     from there to the launch: which variant, whose turn, which recording, and whether it may be replayed
launch us    of the launch with copies of inputs, as the host sees it
after us     from there until the caller has his outputs: the GPU is at work
waiting us   until the GPU is done
whole us     from the call to that, with the clocks that are read between
floor        Dynamo's part and the bare replay, over the hand-made whole: what `torch.compile` reaches with a backend
             that takes no time at all, and copies for nothing

Medians of calls that each come after a device at rest, in turns.

    python benchmarks/waited.py --json waited.json

On a CPU nothing is recorded: there are the whole and Dynamo's part.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import replay
import torch
from measure import (
    Call,
    Column,
    Goal,
    Results,
    arguments,
    attempt,
    goals_text,
    input_sets,
    own_code,
    paired_ratio,
    wait,
    worst_difference,
)
from replay import AHEAD, SEALED, HandMade, Program, ahead_of_time

from multigraph_backend.backend import multigraph
from multigraph_backend.cudagraphs import output_code
from multigraph_backend.cudagraphs.recordings.nodes import Node

HAND, BARE, OURS = "hand-made", "bare replay", "multigraph"
COLUMNS = (
    Column("program", "program"),
    Column("form", "form"),
    Column("dynamo_us", "Dynamo us", 1),
    Column("entry_us", "entry us", 1),
    Column("launch_us", "launch us", 1),
    Column("after_us", "after us", 1),
    Column("waiting_us", "waiting us", 1),
    Column("whole_us", "whole us", 1),
    Column("over_hand", "over hand-made", 3),
    Column("floor", "floor", 3),
    Column("goals", "goals"),
)
PROGRAMS: tuple[Callable[[str], Program], ...] = (replay.decoder, replay.tiny)
GOAL = Goal("over hand-made", "over_hand", 1.06)

CALLED, MADE, LAUNCHES, LAUNCHED, RETURNED, DONE = "called", "made", "launches", "launched", "returned", "done"
#: columns of what lies between two moments
PARTS = {
    "dynamo_us": (CALLED, MADE),
    "entry_us": (MADE, LAUNCHES),
    "launch_us": (LAUNCHES, LAUNCHED),
    "after_us": (LAUNCHED, RETURNED),
    "waiting_us": (RETURNED, DONE),
    "whole_us": (CALLED, DONE),
}


class Clock:
    """When the parts of the call that is on begin and end."""

    def __init__(self) -> None:
        self.moments: dict[str, float] = {}

    def call(self, form: Call, inputs: Sequence[Any]) -> dict[str, float]:
        """Microseconds of the parts of one call, as far as its moments are known."""
        wait()
        moments = self.moments = {CALLED: time.perf_counter()}
        form(*inputs)
        moments[RETURNED] = time.perf_counter()
        wait()
        moments[DONE] = time.perf_counter()
        moments.setdefault(MADE, moments[CALLED])
        return {
            part: (moments[end] - moments[begin]) * 1e6
            for part, (begin, end) in PARTS.items()
            if begin in moments and end in moments
        }

    def around(self, function: Callable[..., Any], begin: str, end: str | None = None) -> Callable[..., Any]:
        """`function`, with a note of when it begins and ends."""

        def timed(*args: Any) -> Any:
            self.moments[begin] = time.perf_counter()
            result = function(*args)
            if end is not None:
                self.moments[end] = time.perf_counter()
            return result

        return timed


class Comparison:
    """The forms of one program: warm, like eager, and with clocks around what they launch."""

    def __init__(self, program: Program, device: str) -> None:
        torch._dynamo.reset()
        self.program, self.clock = program, Clock()
        self.inputs = input_sets(program.inputs, most=4)
        options = {"on_failure": "raise"}

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Call:
            return self.clock.around(multigraph(gm, example_inputs, options=options), MADE)

        self.forms: dict[str, Call] = {
            OURS: torch.compile(own_code(program.function), backend=backend),
            AHEAD: ahead_of_time(program, options),
        }
        for form in self.forms.values():
            self._warm(form)
            for node in launched_by(partial(form, *self.inputs[0])):
                assert node.recording is not None
                names = node.run.__globals__
                if names["launch"] == node.recording.graph.replay and "stage" in names:
                    raise RuntimeError("its inputs are copied apart from the launch: calls are not native")
                names["launch"] = self.clock.around(names["launch"], LAUNCHES, LAUNCHED)
        self.forms[SEALED] = self.forms[OURS]
        if device == "cuda":
            inductor = torch.compile(own_code(program.function))
            self._warm(inductor)
            by_hand = HandMade(program, inductor)
            self.forms[HAND] = by_hand
            self.forms[BARE] = lambda *inputs: by_hand.graph.replay()

    def _warm(self, form: Call) -> None:
        """Raises RuntimeError where it is not as eager."""
        for number in range(40):
            form(*self.inputs[number % len(self.inputs)])
        inputs = self.program.inputs()
        off = worst_difference([form(*inputs)], [self.program.function(*inputs)])
        if not off < self.program.bound:
            raise RuntimeError(f"differs from eager by {off:.1e}")

    def measure(self, rounds: int) -> dict[str, list[dict[str, float]]]:
        """Of each form the parts of each call."""
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in self.forms}
        for _ in range(rounds):
            for name, form in self.forms.items():
                torch.compiler.set_stance("default", skip_guard_eval_unsafe=name == SEALED)
                form(*self.inputs[0])
                taken[name] += [self.clock.call(form, inputs) for inputs in self.inputs]
        torch.compiler.set_stance("default")
        return taken


def launched_by(call: Callable[[], object]) -> list[Node]:
    """The recordings that one call replays."""
    trees = {piece.tree for code in output_code.living() for piece in code.pieces}
    nodes = [node for tree in trees for node in tree.root.below() if node.recording is not None]
    before = [node.calls for node in nodes]
    call()
    return [node for node, calls in zip(nodes, before, strict=True) if node.calls > calls]


def rows(program: Program, device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """A row for each form."""
    with torch.no_grad():
        taken = Comparison(program, device).measure(rounds)
    found: dict[str, dict[str, Any]] = {}
    for name in (HAND, BARE, OURS, SEALED, AHEAD):
        calls = taken.get(name, [])
        if not calls:
            continue
        row: dict[str, Any] = {part: statistics.median(call[part] for call in calls) for part in calls[0]}
        if name not in (OURS, SEALED):
            del row["dynamo_us"]
        if HAND in taken:
            row |= _beside_by_hand(name, row, taken)
        found[name] = row
    return found


def _beside_by_hand(name: str, row: Mapping[str, Any], taken: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    whole = {form: [call["whole_us"] for call in calls] for form, calls in taken.items()}
    by_hand = statistics.median(whole[HAND])
    beside: dict[str, Any] = {"over_hand": paired_ratio(whole[name], whole[HAND])}
    if "dynamo_us" in row:
        beside["floor"] = (row["dynamo_us"] + statistics.median(whole[BARE])) / by_hand
    if name in (OURS, SEALED, AHEAD):
        beside["goals"] = goals_text((GOAL,), beside)
    return beside


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, help="turns of four calls of each form (200)")
    args = parser.parse_args()
    results = Results("waited", "A recorded call that is waited for: its parts, beside one by hand", COLUMNS, args)
    rounds = args.rounds or (3 if args.quick else 200)
    for make in PROGRAMS[1:] if args.quick else PROGRAMS:
        program = make(results.device)
        found, error = attempt(partial(rows, program, results.device, rounds))
        for form in found or (OURS,):
            results.add({"program": program.name, "form": form}, (found or {}).get(form, {}), error, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
