"""A language model's training as small repositories have it: the call of torch.compile is written into it.

    python tests/support/clients/train_language_model.py [--compile] [--steps N]

One process, or ranks by torchrun.  Autocast, a scaler, accumulation over two micro-batches, a schedule, clipping,
evaluation in between, a checkpoint that the second half resumes from, and sampling with a growing context.  The last
line of rank 0 is the losses and the sample, as JSON.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

WORDS, CONTEXT, WIDTH, HEADS, LAYERS, ROWS = 50, 32, 32, 2, 2, 4
ranks = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
if ranks > 1:
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
torch.manual_seed(1337)
dtype = torch.float16 if on_gpu else torch.bfloat16
autocast = torch.autocast(device.type, dtype)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = torch.nn.LayerNorm(WIDTH), Attention(), torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class LanguageModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
        self.ln_f, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.head.weight  # tied

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=-1)


text = torch.randint(0, WORDS, (2000,), generator=torch.Generator().manual_seed(3))


def batch(step, split):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + (split == "val"))
    begins = torch.randint(len(text) - CONTEXT - 1, (ROWS,), generator=generator).tolist()
    x, y = (torch.stack([text[begin + shift : begin + shift + CONTEXT] for begin in begins]) for shift in (0, 1))
    return x.to(device), y.to(device)


def make(state=None):
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=on_gpu)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    raw = model
    if args.compile:
        model = torch.compile(model)
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    return raw, model, optimizer


@torch.no_grad()
def estimate(model, step):
    model.eval()
    losses = []
    for number in range(2):
        with autocast:
            losses.append(model(*batch(step + number, "val"))[1].item())
    model.train()
    return sum(losses) / len(losses)


losses = []
raw, model, optimizer = make()
scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
for step in range(args.steps):
    if step == args.steps // 2:  # a run that was cut off goes on
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ckpt.pt")
            torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, path)
            raw, model, optimizer = make(torch.load(path, map_location=device))
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
    for micro in range(2):
        last = micro == 1 or ranks == 1
        with contextlib.nullcontext() if last else model.no_sync():
            with autocast:
                loss = model(*batch(2 * step + micro, "train"))[1] / 2
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses += [loss.item(), estimate(model, step)]

ids = torch.zeros(1, 1, dtype=torch.long, device=device)
model.eval()
with torch.no_grad(), autocast:
    for _ in range(4):
        ids = torch.cat((ids, model(ids[:, -CONTEXT:])[0][:, -1].argmax(-1, keepdim=True)), dim=1)
if ranks > 1:
    torch.distributed.destroy_process_group()
if rank == 0:
    print(json.dumps({"losses": losses, "sample": ids[0].tolist(), "device": device.type}))
