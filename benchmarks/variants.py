"""What a variant gains: the same program at one shape, compiled in five ways that take turns.

variant   multigraph, the declared condition known to the compiler
generic   multigraph's generic graph, first compiled at another shape
static    stock torch.compile(dynamic=False): the whole model for this shape alone; a variant should be as fast
dynamic   stock torch.compile(dynamic=True), first compiled at another shape

"us" is the work: on the GPU the replay of a CUDA graph of the calls, without Python and launches; on the CPU the whole
call. "host us" (GPU only) is what a call costs the thread that makes it. Ratios are medians over passes of one round.
Every output is compared with eager first, and each multigraph form must have run what its row says.

    python benchmarks/variants.py --json variants.json
    python benchmarks/variants.py --only decode
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import workloads
from measure import (
    Call,
    Column,
    Inputs,
    Results,
    arguments,
    assert_ran,
    attempt,
    device_passes,
    difference,
    host_us,
    input_sets,
    interleaved,
    own_code,
    paired_ratio,
    recorded,
)
from workloads import Workload

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("workload", "workload"),
    Column("shape", "shape"),
    Column("condition", "variant"),
    Column("us", "variant us", 1),
    Column("generic_us", "generic us", 1),
    Column("static_us", "static us", 1),
    Column("dynamic_us", "dynamic us", 1),
    Column("over_static", "variant/static", 3),
    Column("over_generic", "variant/generic", 3),
    Column("host_us", "host us", 1),
    Column("generic_host_us", "generic host", 1),
    Column("static_host_us", "static host", 1),
    Column("dynamic_host_us", "dynamic host", 1),
)


def chosen(device: str, quick: bool) -> list[partial[Workload]]:
    """What makes the workloads: not before they are needed."""
    if quick:
        return [partial(workloads.softmax_times_std, device, 8, 1008), partial(workloads.matmul_chain, device, 32)]
    columns = 4096 if device == "cuda" else 1024
    return [
        *(partial(workloads.decode, device, batch, 512) for batch in (1, 8, 32)),
        *(partial(workloads.prefill, device, *shape) for shape in ((1, 128), (4, 512))),
        *(partial(workloads.softmax_times_std, device, rows, columns) for rows in (512, 8)),
        *(partial(workloads.cumsum, device, rows, columns) for rows in (512, 8)),
        *(partial(workloads.matmul_chain, device, rows) for rows in (512, 64)),
    ]


STOCK_AND_GENERIC = ("generic", "static", "dynamic")

Taken = tuple[dict[str, list[float]], dict[str, list[float]]]  # microseconds of work and of the host, by form


class Comparison:
    """The forms of one workload, compiled and checked; a form that fails is left out, with its error."""

    def __init__(self, workload: Workload, device: str) -> None:
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        gc.collect()
        self.workload, self.device = workload, device
        self.inputs: Inputs = input_sets(lambda: workload.inputs(workload.shape))
        self.forms: dict[str, Call] = {}
        self.errors: dict[str, str] = {}
        self._reference = workload.program(*self.inputs[0])

    def compile(self) -> None:
        self._add("static", partial(torch.compile, fullgraph=True, dynamic=False))
        self._add("dynamic", partial(torch.compile, fullgraph=True, dynamic=True), elsewhere=True)
        self._add("generic", partial(_multigraph, []), "generic_calls", elsewhere=True)
        for kind, condition in self.workload.conditions.items():
            self._add(kind, partial(_multigraph, [condition]), "variant_calls")

    def _add(
        self, name: str, compiler: Callable[[Call], Call], counted: str | None = None, elsewhere: bool = False
    ) -> None:
        form, error = attempt(partial(self._checked, compiler, counted, elsewhere))
        if form is not None:
            self.forms[name] = form
        if error is not None:
            self.errors[name] = error
            multigraph_backend.reset_stats()

    def _checked(self, compiler: Callable[[Call], Call], counted: str | None, elsewhere: bool) -> Call:
        """A form that is warm for all inputs, gives what eager gives, and ran what it should."""
        form = compiler(own_code(self.workload.program))
        if elsewhere:
            form(*self.workload.inputs(self.workload.other))
        off = difference(form(*self.inputs[0]), self._reference)
        bound = 3e-2 if self._reference.dtype == torch.bfloat16 else 1e-4
        if not off < bound:  # NaN is wrong too
            raise RuntimeError(f"differs from eager by {off:.2e}")
        for arguments_of_call in self.inputs:
            form(*arguments_of_call)
        if counted is not None:
            assert_ran(form, self.inputs[0], counted)
        if self.device == "cuda":
            recorded(form, self.inputs[:1], 1)
        return form

    def measure(self, rounds: int) -> Taken:
        work = interleaved(device_passes(self.forms, self.inputs, self.device), rounds)
        if self.device == "cpu":
            return work, {}
        host = {name: host_us(form, self.inputs) for name, form in self.forms.items()}
        return work, interleaved(host, rounds)


def _multigraph(specialize: list[dict[str, Any]], program: Call) -> Call:
    options: dict[str, Any] = {"specialize": specialize, "on_failure": "raise"}
    return torch.compile(program, backend=multigraph, fullgraph=True, dynamic=True, options=options)


def values(kind: str, taken: Taken) -> dict[str, float]:
    """The values of the row of one kind of variant; what another form lacks is left out."""
    work, host = taken
    row: dict[str, float] = {}
    for name, prefix in ((kind, ""), ("generic", "generic_"), ("static", "static_"), ("dynamic", "dynamic_")):
        if name in work:
            row[f"{prefix}us"] = statistics.median(work[name])
        if name in host:
            row[f"{prefix}host_us"] = statistics.median(host[name])
    for name in ("static", "generic", "dynamic"):
        if kind in work and name in work:
            row[f"over_{name}"] = paired_ratio(work[kind], work[name])
        if kind in host and name in host:
            row[f"host_over_{name}"] = paired_ratio(host[kind], host[name])
    return row


def add_rows(make: Callable[[], Workload], device: str, rounds: int, results: Results) -> None:
    """All rows of one workload."""
    workload = make()
    comparison = Comparison(workload, device)
    comparison.compile()
    taken, error = attempt(partial(comparison.measure, rounds))
    shape = "x".join(str(size) for size in workload.shape)
    for kind, condition in workload.conditions.items():
        about = {"workload": workload.name, "shape": shape, "condition": kind, "declared": condition}
        failures = [comparison.errors[name] for name in (kind, *STOCK_AND_GENERIC) if name in comparison.errors]
        row = values(kind, taken) if taken is not None else {}
        results.add(about, row, next(iter(failures), error), headline=kind == "Eq")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", metavar="TEXT", help="workloads whose name or sizes have this in them")
    parser.add_argument("--rounds", type=int, help="passes of each form")
    args = parser.parse_args()
    results = Results("variants", "Variants: microseconds of a call, beside stock's", COLUMNS, args)
    rounds = args.rounds or (3 if args.quick else 60 if results.device == "cuda" else 20)
    with torch.no_grad():
        for make in chosen(results.device, args.quick):
            name = f"{make.func.__name__} {make.args[1:]}"  # as in decode (8, 512)
            if args.only and args.only not in name:
                continue
            _, error = attempt(partial(add_rows, make, results.device, rounds, results))
            if error is not None:
                results.add({"workload": name, "shape": None, "condition": None}, {}, error)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
