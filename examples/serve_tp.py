"""A tensor-parallel decoder served on several GPUs: collectives in recordings, and a variant on any rank.

Each rank has some heads and a part of the hidden layer of every block; two all-reduces a layer put them together. The
blocks are compiled once with a dynamic number of tokens; 16 tokens, and any multiple of 64, have variants. What comes
out is compared with the whole model, run eagerly on each rank.

    torchrun --nproc-per-node 2 examples/serve_tp.py
    torchrun --nproc-per-node 2 examples/serve_tp.py --quick     (over gloo where there is no GPU)

It ends without `destroy_process_group()`, which is no matter here.
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import multigraph_backend

SPECIALIZE: list[dict[str, Any]] = [{"x[0]": 16}, {"x[0]": {"multiple_of": 64}}]
TOKENS = [16, 64, 16, 40, 16, 128, 16, 24]  # of the requests, in turn


class Block(nn.Module):
    """One block, or with `ranks` > 1 the part of it that `rank` has; `part_of` cuts it out of a whole one."""

    def __init__(self, width: int, heads: int, ranks: int = 1) -> None:
        super().__init__()
        self.heads, self.width, self.ranks = heads // ranks, width // ranks, ranks
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, self.width, bias=False) for _ in range(3))
        self.out = nn.Linear(self.width, width, bias=False)
        self.up = nn.Linear(width, 4 * self.width, bias=False)
        self.down = nn.Linear(4 * self.width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        y = self.norms[0](x)
        q, k, v = (part(y).view(tokens, self.heads, -1).transpose(0, 1) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + self.together(self.out(attended.transpose(0, 1).reshape(tokens, self.width)))
        return x + self.together(self.down(F.silu(self.up(self.norms[1](x)))))

    def together(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        group: Any = dist.group.WORLD
        summed: Tensor = functional.all_reduce(x, "sum", group) if self.ranks > 1 else x
        return summed

    @torch.no_grad()
    def part_of(self, whole: "Block", rank: int) -> "Block":
        for name, parameter in self.named_parameters():
            source: Tensor = whole.get_parameter(name)
            rows = name.split(".")[0] in ("q", "k", "v", "up")
            columns = name.split(".")[0] in ("out", "down")
            if rows or columns:
                source = source.chunk(self.ranks, 0 if rows else 1)[rank]
            parameter.copy_(source)
        return self


class Decoder(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else 0)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    width, heads, layers, requests = (64, 8, 2, 16) if args.quick else (1024, 16, 8, 400)
    torch.manual_seed(0)  # every rank makes the same whole model, and keeps its part
    blocks = [Block(width, heads).to(device) for _ in range(layers)]
    whole = Decoder(*blocks)
    parts = [Block(width, heads, ranks).to(device).part_of(block, rank) for block in blocks]
    options: dict[str, Any] = {"specialize": SPECIALIZE, "on_failure": "raise"}
    served = torch.compile(Decoder(*parts), backend="multigraph", dynamic=True, options=options)
    progress = Progress("serving", requests, "requests") if first else None
    worst, seconds = 0.0, []
    with torch.no_grad():
        for number in range(requests):
            tokens = TOKENS[number % len(TOKENS)]
            x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(number)).to(device)
            began = time.perf_counter()
            output = served(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            wanted = whole(x)
            worst = max(worst, float((output - wanted).norm() / wanted.norm()))
            if progress is not None:
                progress.at(number + 1, f"{tokens} tokens")
    if first:
        print(multigraph_backend.explain())
        print(f"ranks: {ranks}")
        print(f"median milliseconds: {sorted(seconds)[len(seconds) // 2] * 1e3:.2f}")
        print(f"worst difference from the whole model: {worst:.1e}")
    if not worst < 1e-3:
        raise SystemExit("wrong numbers")


if __name__ == "__main__":
    main()
