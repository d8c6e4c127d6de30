"""Where the time of a packed training step goes: its kernels by kind, beside those of the unpacked step.

The forms are those of saved_tensors.py that pack, over the same model, with what they are divided by; nothing is
recorded, for a recording launches the same kernels.

phase          forward or backward, each with a profile of its own
kind           products: matrix products of libraries; attention: likewise; pointwise, reductions and templates:
               Inductor's kernels; copies: of memory, and fills; others
kernels        of one step
us             of these, of all of one step, on the GPU (of a CPU's the time in operators and Inductor's kernels)
more us        than of the same kind and phase unpacked; of "all" that of the whole step
more/unpacked  that over the time of all kernels of the unpacked step

What packing adds is seen so: casts and scales that fuse with nothing are pointwise kernels of their own; unpacking
before a product is pointwise in the backward; a fusion that is lost moves time between kinds.

    python benchmarks/step_kernels.py --json step_kernels.json
    python benchmarks/step_kernels.py --model gpt2-medium --only multigraph,fp8
"""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import saved_tensors
import torch
from measure import Column, Results, attempt, wait
from saved_tensors import Comparison, Form, Step, chosen, forms_of, stack_of

COLUMNS = (
    Column("form", "form"),
    Column("phase", "phase"),
    Column("kind", "kind"),
    Column("kernels", "kernels"),
    Column("us", "us", 0),
    Column("more_us", "more us", 0),
    Column("over_unpacked", "more/unpacked", 3),
)
FORMS = (
    "inductor, fp8", "multigraph, fp8", "multigraph, fp8 products", "multigraph, int8", "multigraph, int8 blocks",
    "multigraph, offload",
)  # fmt: skip
QUICK = ("multigraph, int8",)
ALL = "all"
KINDS = {
    "attention": r"flash|fmha|sdpa|scaled_dot|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(add|b)?mm$|mkl|::linear",
    "pointwise": r"triton_poi|cpp_fused",
    "reductions": r"triton_(red|per|mix)",
    "templates": r"triton_tem",
    "copies": r"memcpy|memset|copy_",
}
PHASES = ("forward", "backward")
STEPS = 3  # that a pass profiles, one after the other
Kernels = dict[tuple[str, str], tuple[float, float]]  # by phase and kind: how many of a step, and their microseconds


def kind_of(name: str) -> str:
    """What a kernel is, by its name."""
    return next((kind for kind, text in KINDS.items() if re.search(text, name, re.IGNORECASE)), "others")


def kernels_of(step: Step, inputs: tuple[torch.Tensor, ...], device: str) -> Kernels:
    """The kernels of a step."""
    counts: Counter[tuple[str, str]] = Counter()
    taken: defaultdict[tuple[str, str], float] = defaultdict(float)
    for _ in range(STEPS):
        step.release()
        losses: list[torch.Tensor] = []
        for phase in PHASES:
            for name, us in _profiled(partial(_run, step, phase, inputs, losses), device):
                counts[phase, kind_of(name)] += 1
                taken[phase, kind_of(name)] += us
    step.release()
    return {key: (counts[key] / STEPS, taken[key] / STEPS) for key in counts}


def _run(step: Step, phase: str, inputs: tuple[torch.Tensor, ...], losses: list[torch.Tensor]) -> None:
    if phase == "forward":
        losses.append(step.forward(*inputs))
    else:
        losses.pop().backward()


def _profiled(run: Callable[[], object], device: str) -> list[tuple[str, float]]:
    """The kernels that `run` has launched, by name, with microseconds."""
    cuda = device == "cuda"
    of = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    wait()
    with torch.profiler.profile(activities=[of], acc_events=True) as profile:
        run()
        wait()
    events = profile.events() or []
    if cuda:
        on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        return [(event.name, event.time_range.elapsed_us()) for event in events if event.device_type == on_gpu]
    return [(event.name, event.self_cpu_time_total) for event in events if event.self_cpu_time_total > 0]


def rows(form: Form, found: Kernels, unpacked: Kernels) -> list[dict[str, Any]]:
    """A row for each phase and kind, and one for all."""
    whole = sum(us for _, us in unpacked.values())
    made: list[dict[str, Any]] = []
    for phase in PHASES:
        for kind in [*KINDS, "others"]:
            count, us = found.get((phase, kind), (0.0, 0.0))
            before = unpacked.get((phase, kind), (0.0, 0.0))
            if count or before[0]:
                made.append(
                    {"phase": phase, "kind": kind, "kernels": round(count), "us": us, "more_us": us - before[1]}
                )
    us = sum(us for _, us in found.values())
    count = round(sum(count for count, _ in found.values()))
    made.append({"phase": ALL, "kind": ALL, "kernels": count, "us": us, "more_us": us - whole})
    return [{"form": form.name, **row, "over_unpacked": row["more_us"] / whole} for row in made]


def median_of(many: list[Kernels]) -> Kernels:
    """Of each phase and kind the median."""
    keys = {key for one in many for key in one}
    return {
        key: (
            statistics.median(one.get(key, (0.0, 0.0))[0] for one in many),
            statistics.median(one.get(key, (0.0, 0.0))[1] for one in many),
        )
        for key in keys
    }


def add_rows(args: Any, results: Results) -> None:
    stack = stack_of(args, results.device)
    forms = chosen(
        forms_of(stack, {"cudagraphs": False} if results.device == "cuda" else {}), args.only or wanted(args)
    )
    torch._dynamo.reset()
    comparison = Comparison(stack, forms)
    comparison.make(lambda form: False)
    inputs = stack.inputs()
    taken: dict[str, list[Kernels]] = {name: [] for name in comparison.steps}
    for step in comparison.steps.values():
        kernels_of(step, inputs, results.device)  # what a first profile sets up is in none that counts
    for _ in range(1 if args.quick else args.rounds or 5):
        for name, step in comparison.steps.items():
            taken[name].append(kernels_of(step, inputs, results.device))
    found = {name: median_of(many) for name, many in taken.items()}
    for form in forms:
        unpacked = found.get(form.unpacked)
        if (error := comparison.errors.get(form.name)) is not None or unpacked is None:
            results.add({"form": form.name}, {}, error or f"{form.unpacked} has failed")
            continue
        for row in rows(form, found[form.name], unpacked):
            about = {key: row.pop(key) for key in ("form", "phase", "kind")}
            more = {"model": args.model, "layers": stack.layers}
            results.add(about, {**row, **more}, headline=about["kind"] == ALL or abs(row["over_unpacked"]) > 0.002)


def wanted(args: Any) -> list[str]:
    return list(QUICK if args.quick else FORMS)


def main() -> int:
    args = saved_tensors.parser().parse_args()
    results = Results(
        "step_kernels", "A packed training step: its kernels by kind, beside the unpacked's", COLUMNS, args
    )
    profiles = results.device == "cpu"  # Inductor's kernels are in a profile of a CPU where they were compiled for that
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}) if profiles else contextlib.nullcontext():
        _, error = attempt(partial(add_rows, args, results))
    if error is not None:
        results.add({"form": "multigraph"}, {}, error)
    return results.finish(lambda row: row["form"].startswith("multigraph"))


if __name__ == "__main__":
    sys.exit(main())
