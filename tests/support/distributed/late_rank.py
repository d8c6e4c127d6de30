"""A program of two ranks: at the third call rank 1 comes only when rank 0 has said what it waits in.

python tests/support/distributed/late_rank.py RANK WORLD_SIZE PORT
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import multigraph_backend
from multigraph_backend.distributed import watchdog


def summed(x: torch.Tensor) -> torch.Tensor:
    y = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
    return functional.all_reduce(y.sum(0), "max", dist.group.WORLD) + y


def main() -> int:
    rank, size, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    minute = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=minute)
    options = {"specialize": [{"x[0]": 4}], "on_failure": "raise"}
    step = torch.compile(summed, backend="multigraph", dynamic=True, options=options)
    x = torch.randn(4, 3)
    for _ in range(2):
        torch.testing.assert_close(step(x), summed(x))
    watchdog.PART, watchdog.LOOKS = 0.02, 400  # so that the test takes seconds
    store = dist.TCPStore("127.0.0.1", port + 1, size, rank == 0, minute)
    dist.barrier()
    if rank == 0:
        threading.Thread(target=tell, args=(store,), daemon=True).start()
    else:
        store.wait(["said"])
    torch.testing.assert_close(step(x), summed(x))
    print("late_collectives", multigraph_backend.stats()["late_collectives"], flush=True)
    print("\n".join(watchdog.said()), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def tell(store: dist.Store) -> None:
    while not watchdog.said():
        time.sleep(0.01)
    store.set("said", "1")


if __name__ == "__main__":
    sys.exit(main())
