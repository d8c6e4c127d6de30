"""Random programs of `random_collectives.py` on several ranks, compiled: one rank runs a variant, the others generic.

    python tests/support/distributed/collectives_on_ranks.py RANK WORLD_SIZE PORT --device cuda --programs 100 --first 0

Each call is compared with the same call run eagerly, gradients too, and what the forms that ran issue is compared
between the ranks.  A line of JSON says what was done; where a rank hangs, its last line names the program.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

import multigraph_backend
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.region import registry
from tests.support.distributed import random_collectives as programs

CALLS = 4  # on a GPU: the first warms up, the second records, the others replay
_control: list[Any] = []


def problems(seed: int, rank: int, size: int, device: str, done: Counter[str]) -> Iterator[str]:
    """What is wrong with one program; what was done is added to `done`."""
    entry = programs.made(seed)
    special = seed % size == rank
    options = {"specialize": entry.conditions[:1] if special else [], "record_small": True}
    function = torch.compile(entry.program, backend="multigraph", dynamic=True, fullgraph=True, options=options)
    multigraph_backend.reset_stats()
    rows, columns = entry.sizes[0]
    for call in range(CALLS):
        generator = torch.Generator().manual_seed((seed * CALLS + call) * size + rank)
        # some gradients cancel out: in single precision nothing of them is right
        x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        w = torch.randn(columns, generator=generator, dtype=torch.float64)
        theirs, wanted = results(entry.program, x.to(device), w.to(device), entry.trains)
        ours, got = results(function, x.to(device), w.to(device), entry.trains)
        for name, mine, other in (("output", ours, theirs), ("gradient", got, wanted)):
            if mine is not None and (off := difference(mine, other)) > entry.tolerance:
                yield f"call {call}: its {name} is off by {off:.2e} of eager's"
    (region,) = registry.living()
    stats = multigraph_backend.stats()
    if stats["eager_calls"] or (stats["failures"] and not stats["refused_collectives"]):
        yield f"not all calls ran compiled: {stats}\n{multigraph_backend.explain()}"
    variant = region.variants[0] if special else None
    ran = variant if variant is not None and variant.calls == CALLS else region.generic
    if ran.calls != CALLS or (special and ran is region.generic and not stats["refused_collectives"]):
        yield f"{ran.text} ran {ran.calls} times: {multigraph_backend.explain()}"
    elif (form := ran.forms[-1].lowered) is not None:
        mine = issued(region, form, {"x[0]": rows, "x[1]": columns, "w[0]": columns})
        done["collectives"] += sum(map(len, mine))
        every: list[Any] = [None] * size
        dist.all_gather_object(every, mine, group=control())
        if any(other != every[0] for other in every):
            yield f"ranks issue different collectives: {every}"
    done["variants"] += variant is not None and ran is variant
    done["refused"] += stats["refused_collectives"]
    done["recordings"] += stats["recordings"]
    done["trained"] += entry.trains


def results(function: Any, x: torch.Tensor, w: torch.Tensor, trains: bool) -> tuple[torch.Tensor, Any]:
    w.requires_grad_(trains)
    output = function(x, w)
    gradient = torch.autograd.grad(output.square().sum(), w)[0] if trains else None
    return output.detach().clone(), gradient


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the norm of `theirs`; infinite where a shape differs or a number is none."""
    if ours.shape != theirs.shape:
        return float("inf")
    off = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-6))
    return off if off == off else float("inf")


def issued(region: Any, form: Lowered, sizes: dict[str, int]) -> tuple[list[Any], list[Any]]:
    """What the form issues for these sizes: forward, and backward."""
    values = {
        size.expr: sizes[name] for name, size in region._graph.sizes.items() if isinstance(size.expr, sympy.Symbol)
    }
    assert form.issued is not None
    forward, backward = form.issued.forward, form.issued.backward
    return programs.entries(form, forward, values), programs.entries(form, backward, values)


def control() -> Any:
    """A group over gloo, beside what is tested."""
    if not _control:
        _control.append(dist.new_group(backend="gloo"))
    return _control[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("port")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--programs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port)
    settings: dict[str, Any] = {}
    if args.device == "cuda":
        torch.cuda.set_device(args.rank)
        settings["device_id"] = torch.device("cuda", args.rank)
    limit = datetime.timedelta(seconds=120)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=args.rank, world_size=args.size, timeout=limit, **settings)
    done: Counter[str] = Counter(programs=0)
    wrong: list[str] = []
    for seed in range(args.first, args.first + args.programs):
        print(f"program {seed}", flush=True)
        faulthandler.dump_traceback_later(130, exit=True)  # a rank that hangs says where
        wrong += [f"program {seed}: {text}" for text in problems(seed, args.rank, args.size, args.device, done)]
        done["programs"] += 1
        torch._dynamo.reset()
        gc.collect()
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({**done, "wrong": wrong}), flush=True)
    dist.barrier(group=control())
    dist.destroy_process_group()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
