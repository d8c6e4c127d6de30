"""FSDP2 by torch's recipe, by torchrun: built on "meta", sharded block by block, prefetched, checkpointed by DCP.

    torchrun --nproc-per-node 2 tests/support/clients/train_fsdp2.py [--compile blocks | whole] [--mixed]

Parameters in bfloat16 and reduction in float32 (`--mixed`), clipping, and a checkpoint into which a second model,
sharded anew, is loaded, with its optimizer; it goes on.  The last line of rank 0 is the losses, as JSON.
"""

import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--compile", choices=("blocks", "whole"))
parser.add_argument("--mixed", action="store_true")
args = parser.parse_args()

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
WORDS, WIDTH, LAYERS = 64, 32, 3


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.w1, self.w2 = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def reset_parameters(self):
        for module in self.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
                module.reset_parameters()
        self.attention._reset_parameters()

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.w2(torch.nn.functional.silu(self.w1(self.norm2(x))))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x).float()


def make():
    """A sharded model without values, its optimizer, and what is called."""
    with torch.device("meta"):
        model = Transformer()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.mixed else MixedPrecisionPolicy()
    if args.compile == "blocks":
        for layer in model.layers:
            layer.compile(backend="multigraph")
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for here, there in zip(model.layers, list(model.layers)[1:], strict=False):
        here.set_modules_to_forward_prefetch([there])
        there.set_modules_to_backward_prefetch([here])
    model.to_empty(device=device)
    if args.compile == "whole":
        model.compile(backend="multigraph")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, WORDS, (2, 9), generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
model, optimizer = make()
with torch.no_grad():
    model.embedding.reset_parameters()
    model.output.reset_parameters()
    for layer in model.layers:
        layer.reset_parameters()
losses = train(model, optimizer, range(4))
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=shared[0])
again, optimizer = make()
with torch.no_grad():
    for parameter in again.parameters():
        parameter.zero_()
weights, state = get_state_dict(again, optimizer)
dcp.load({"model": weights, "optimizer": state}, checkpoint_id=shared[0])
set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=state)
losses += train(again, optimizer, range(4, 7))
if rank == 0:
    print(json.dumps({"losses": losses, "device": device.type}))
dist.destroy_process_group()
