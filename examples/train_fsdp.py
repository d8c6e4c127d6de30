"""A small language model trained under FSDP2, its blocks compiled by multigraph.

Trains the decoder of tiny_lm.py on the sources of Python's standard library. Each rank reads other lines; parameters,
gradients and the optimizer's state are divided among the ranks. Each block is compiled, then given to `fully_shard`:
its hooks gather the parameters before the compiled code runs and free them afterwards.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    torchrun --nproc-per-node 2 examples/train_fsdp.py --quick     (over gloo where there is no GPU)
"""

import argparse
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from progress import Progress
from tiny_lm import TinyLM, standard_library_text
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import multigraph_backend


def batch(text: Tensor, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Lines of `text` and what follows each of their letters."""
    starts = torch.randint(len(text) - length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    lines = torch.stack([text[int(start) : int(start) + length + 1] for start in starts]).long()
    return lines[:, :-1], lines[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else 0)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width, layers, rows, length, steps = (32, 2, 4, 32, 12) if args.quick else (512, 8, 32, 256, 300)
    torch.manual_seed(0)
    model = TinyLM(width, layers, max_length=length).to(device)
    for index, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, backend="multigraph", options={"on_failure": "raise"})
        fully_shard(compiled)
        model.blocks[index] = compiled
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = standard_library_text()
    progress = Progress("training", steps, "steps") if rank == 0 else None
    losses = []
    for step in range(steps):
        tokens, following = batch(text, rows, length, step * ranks + rank)
        logits = model(tokens.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), following.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(float(mean) / ranks)
        if progress is not None:
            progress.at(step + 1, f"loss {losses[-1]:.3f}")
    if rank == 0:
        print(multigraph_backend.explain())
        print(f"ranks: {ranks}")
        print(f"first loss: {losses[0]:.3f}")
        print(f"last loss: {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
