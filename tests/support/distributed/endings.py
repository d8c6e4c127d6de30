"""A program that records collectives and ends in one of several ways; by itself, or it hangs and its caller ends it.

    python tests/support/distributed/endings.py ENDING RANK WORLD_SIZE PORT [--device cuda]
    python tests/support/distributed/soak_endings.py --runs 100

Without a GPU the recordings are the simulated device's, and the process group waits in its end, or in its destructor,
as NCCL's does: until no recording holds one of its collectives.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from multigraph_backend.cudagraphs import runtime

ENDINGS = ("destroy first", "destroy a part first", "reset first", "neither", "exception", "sys.exit", "SIGINT",
           "one rank killed", "destroy and begin anew")  # fmt: skip


class Waiting(dist.ProcessGroup):
    """A process group over gloo that ends as NCCL's does."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.name = "of the test"

    def allreduce(self, *args: Any) -> Any:
        return self.inner.allreduce(*args)

    def getBackendName(self) -> str:
        return "waiting"

    def shutdown(self) -> None:
        while any(tree.collectives.held() for tree in runtime.trees()):
            time.sleep(0.01)

    def setGroupName(self, name: str) -> None:
        self.name = name

    def getGroupName(self) -> str:
        return self.name

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return "waiting"


def at_the_end() -> None:
    """As the destructor of NCCL's group, which runs after what is registered later: waits until the recordings are
    gone."""
    while any(tree.collectives.held() for tree in runtime.trees()):
        time.sleep(0.01)
    print("group destructed", flush=True)


def simulated(rank: int) -> Any:
    """A recorded piece with a collective on the simulated device, as a function of a tensor."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
    from multigraph_backend.cudagraphs.partition.cuts import CutRules
    from multigraph_backend.cudagraphs.recordings.piece import Piece
    from multigraph_backend.cudagraphs.recordings.piece_spec import PieceSpec
    from tests.support.splitter import split

    tree = runtime.tree(0, make=lambda index: SimulatedDevice())
    rules = CutRules(device_type="cpu", backends=frozenset({"waiting", "gloo"}))
    gm = make_fx(program, tracing_mode="fake")(torch.ones(4))
    made = split(gm, rules)
    call = made.bind(
        [
            Piece(tree, function, PieceSpec(part.names, part.visible, groups=part.groups))
            for part, function in zip(made.spec.pieces, made.functions, strict=True)
        ]
    )
    return lambda x: call([x])[0]


def program(x: torch.Tensor) -> torch.Tensor:
    group: Any = dist.group.WORLD
    return functional.wait_tensor(functional.all_reduce(x.sin(), "sum", group.group_name)) * 2


def begin(rank: int, size: int, port: int, device: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1")
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=datetime.timedelta(seconds=60))
    backend = "nccl" if device == "cuda" else "waiting"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))


def recorded() -> int:
    return sum(tree.counts["recordings"] for tree in runtime.trees())


def work(function: Any, device: str, steps: int = 6) -> torch.Tensor:
    y = torch.empty(0)
    for step in range(steps):
        x = torch.full((1 << 12,) if device == "cuda" else (4,), float(step), device=device)
        y = function(x)
        torch.testing.assert_close(y, x.sin() * 2 * dist.get_world_size())
    if device == "cuda":
        torch.cuda.synchronize()
    return y


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ending", choices=ENDINGS)
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    rank, device, ending = args.rank, args.device, args.ending
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        atexit.register(at_the_end)
        dist.Backend.register_backend("waiting", Waiting, devices=["cpu"])
    begin(rank, args.size, args.port, device)
    if device == "cuda":
        # the tests of recordings that need not pay: this one is small
        function: Any = torch.compile(program, backend="multigraph", options={"record_small": True})
    else:
        function = simulated(rank)
    held = work(function, device)
    if not recorded():
        print("nothing was recorded", flush=True)
        return 3
    print(f"recorded {recorded()}", flush=True)
    return end(ending, rank, device, function, held, args.size, args.port)


def end(ending: str, rank: int, device: str, function: Any, held: torch.Tensor, size: int, port: int) -> int:
    match ending:
        case "destroy first":
            dist.destroy_process_group()
            assert held.sum().isfinite()
        case "destroy a part first":
            part = dist.new_group(list(range(size)))
            dist.destroy_process_group(part)
            work(function, device, 2)
            dist.destroy_process_group()
        case "reset first":
            torch._dynamo.reset()
            del held, function
            dist.destroy_process_group()
        case "exception":
            raise RuntimeError("this program ends with an exception")
        case "sys.exit":
            sys.exit(7)
        case "SIGINT":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is told to ignore it
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            time.sleep(30)
        case "one rank killed":
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)
        case "destroy and begin anew":
            dist.destroy_process_group()
            before = recorded()
            begin(rank, size, port + 1, device)
            if device == "cpu":
                time.sleep(0.3)  # the group that ends is looked for some times a second
            torch._dynamo.reset()
            work(function, device)
            assert recorded() > before, "nothing was recorded after the group began anew"
            dist.destroy_process_group()
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
