# ruff: noqa: E501, PT018
"""60 programs by a user who has read only multigraph's docs, about training loops under recordings.

python tests/support/gpu/training_programs.py [--jobs N] [name ...]

Each program is a loop that runs twice, in eager and compiled, from one model and one seed. What it notes is compared: losses, gradients,
parameters and buffers of every step. What it holds must be at the end what it was when it began to be held.
"""

import collections
import contextlib
import copy
import itertools
import random
import sys
import threading
import time

import torch
from apart import Skip, main
from torch.utils.checkpoint import checkpoint

import multigraph_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
F = torch.nn.functional


# ---------------------------------------------------------------------------------------------------------------- helpers


def needs_gpu():
    if not GPU:
        raise Skip("needs a GPU")


def settings(options):
    options = dict(options)
    if not GPU:
        options.setdefault("compiler", "aot_eager")
    else:
        options.setdefault("record_small", True)  # docs: keeps recordings that cost more than they save
    return options


def compiled_of(function, dynamic=None, **options):
    return torch.compile(function, backend="multigraph", dynamic=dynamic, options=settings(options))


def stats():
    return multigraph_backend.stats()


def recorded(at_least=1):
    if GPU:
        assert stats()["recordings"] >= at_least, (stats()["recordings"], str(multigraph_backend.explain()))


def synchronize():
    if GPU:
        torch.cuda.synchronize()


class Run:
    """One run of a loop, in eager or compiled: makes its data, and notes what it computes."""

    def __init__(self, model, compiled, seed, dynamic, options):
        self.model, self.compiled, self.seed = model, compiled, seed
        self.dynamic, self.options = dynamic, options
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.found = collections.defaultdict(list)
        self.held = []

    def compile(self, function, dynamic=None, **options):
        if not self.compiled:
            return function
        return compiled_of(function, dynamic if dynamic is not None else self.dynamic, **{**self.options, **options})

    def compile_in_place(self, module):
        if self.compiled:
            module.compile(backend="multigraph", dynamic=self.dynamic, options=settings(self.options))

    def x(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator).to(DEVICE)

    def note(self, name, *tensors):
        for tensor in tensors:
            self.found[name].append(None if tensor is None else tensor.detach().clone())

    def hold(self, name, tensor):
        """The tensor itself is kept to the end, and must not change."""
        self.note(name, tensor)
        self.watch(name, tensor)
        return tensor

    def watch(self, name, tensor):
        self.held.append((name, tensor, tensor.detach().clone()))

    def state(self, model=None, prefix=""):
        model = model or self.model
        for name, parameter in model.named_parameters():
            self.note(f"{prefix}gradient of {name}", parameter.grad)
            self.note(f"{prefix}{name}", parameter)
        for name, buffer in model.named_buffers():
            self.note(f"{prefix}buffer {name}", buffer)

    def intact(self):
        for number, (name, tensor, copied) in enumerate(self.held):
            torch.testing.assert_close(
                tensor.detach(),
                copied,
                rtol=0,
                atol=0,
                equal_nan=True,
                msg=lambda m, n=number, w=name: f"held {w} {n} changed: {m}",
            )


def same(loop, make, dynamic=None, rtol=1e-3, atol=1e-4, clean=True, records=True, **options):
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    model = make().to(DEVICE)
    runs = []
    for compiled in (False, True):
        run = Run(copy.deepcopy(model), compiled, seed, dynamic, options)
        torch.manual_seed(seed)
        loop(run)
        run.intact()
        runs.append(run)
    eager, ours = runs
    wanted = {name for name in eager.found if not name.startswith("own ")}
    assert wanted == {name for name in ours.found if not name.startswith("own ")}, set(eager.found) ^ set(ours.found)
    for name in sorted(wanted):
        expected, actual = eager.found[name], ours.found[name]
        assert len(expected) == len(actual), (name, len(expected), len(actual))
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert (one is None) == (other is None), f"{name}, number {number}: {one} where eager has {other}"
            if one is not None:
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=rtol,
                    atol=atol,
                    msg=lambda m, n=number, w=name: f"seed {seed}, {w}, number {n}: {m}",
                )
    if clean:
        assert stats()["failures"] == 0 and stats()["eager_calls"] == 0, str(multigraph_backend.explain())
    if records:
        recorded()
    return ours


class Mlp(torch.nn.Module):
    def __init__(self, width=16, hidden=32, out=None):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.norm = torch.nn.LayerNorm(hidden)
        self.mid = torch.nn.Linear(hidden, hidden)
        self.down = torch.nn.Linear(hidden, out or width)

    def forward(self, x):
        h = F.gelu(self.norm(self.up(x)))
        return self.down(torch.tanh(self.mid(h)))


class Loss(Mlp):
    """The loss is computed inside of the compiled function."""

    def forward(self, x, y=None):
        out = super().forward(x)
        return (out if y is None else out - y).square().mean()


class Conv(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.silu(self.second(x)).mean((2, 3)))


class Layer(torch.nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.one, self.two = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.one(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Words(torch.nn.Module):
    """A small language model whose embedding is its head, too."""

    def __init__(self, words=32, width=32):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.layer = Layer(width)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


def layers(count=3, width=16):
    return torch.nn.Sequential(*(Mlp(width) for _ in range(count)))


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def adam(model, lr=1e-2):
    return torch.optim.Adam(model.parameters(), lr=lr, eps=1e-3)  # a large eps: signs of tiny gradients decide nothing


def belongs_to_gradients(tensor, model):
    """Whether a backward has written a gradient over it, as stock's may: what is accumulated then changes it."""
    storage = tensor.untyped_storage()
    gradients = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return any(storage._cdata == other._cdata or storage.data_ptr() == other.data_ptr() for other in gradients)


def shared_memory(model, *others):
    """The storages of a model and of its inputs, by identity."""
    return {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *others)}


# --------------------------------------------------------------------------------------------------------------- ordinary


def ordinary_01_the_loss_is_held_in_a_variable():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(3):
                loss = f(t.x(8, 16)).square().mean() / 3
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_02_losses_of_a_step_in_a_list():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for _ in range(9):
            losses = []
            for _ in range(4):
                loss = f(t.x(8, 16), t.x(8, 16))
                (loss / 4).backward()
                losses.append(loss)  # inside of the graph: an output of the recording itself
            t.note("mean", torch.stack(losses).mean())
            t.note("loss", *losses)
            t.state()
            optimizer.step()
            optimizer.zero_grad()

    same(loop, Loss)


def ordinary_03_losses_detached_and_logits_kept_for_good():
    def loop(t):
        f, optimizer = t.compile(t.model), adam(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(2):
                logits = f(t.x(8, 16))
                loss = F.cross_entropy(logits, t.integers(16, 8))
                loss.backward()
                t.hold("loss", loss.detach())
                t.hold("logits", logits.detach())
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_04_zero_grad_after_the_forward_to_none_and_to_zero():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(10):
            for micro in range(2):
                loss = f(t.x(8, 16)).square().mean()
                if micro == 0:
                    optimizer.zero_grad(set_to_none=step % 3 == 0)
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_05_gradients_are_clipped():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model, 0.5)
        for _ in range(9):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(5):
                loss = (10 * f(t.x(4, 16))).square().mean()
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
            t.hold("norm", norm)
            t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_06_a_grad_scaler():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=3)
        for step in range(10):
            optimizer.zero_grad()
            for micro in range(2):
                loss = f(t.x(8, 16)).square().mean()
                if step == 6 and micro == 1:
                    loss = loss * float("inf")  # this step is left out
                scaler.scale(loss).backward()
                t.note("loss", loss)
            scaler.unscale_(optimizer)
            if step != 6:
                torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
                t.state()
            scaler.step(optimizer)
            scaler.update()
            t.note("scale", torch.tensor(scaler.get_scale()))
            t.note("parameters", *t.model.parameters())

    same(loop, Mlp)


def ordinary_07_micro_batches_of_other_lengths_now_and_then():
    def loop(t):
        f, optimizer = t.compile(t.model), adam(t.model)
        for step in range(12):
            optimizer.zero_grad()
            for micro in range(3):
                length = 7 if step % 4 == 2 and micro == 1 else 11 if step % 5 == 4 and micro == 2 else 8
                ids = t.integers(32, 2, length + 1)
                loss = F.cross_entropy(f(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Words)


def ordinary_08_the_number_of_micro_batches_changes():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for count in (2, 4, 3, 7, 2, 1, 5, 3, 6, 2):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(count):
                loss = f(t.x(8, 16), t.x(8, 16)) / count
                loss.backward()
                total = total + loss.detach()
            t.note("loss", total)
            t.state()
            optimizer.step()

    same(loop, Loss)


def ordinary_09_evaluation_between_micro_batches():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(9):
            optimizer.zero_grad()
            for micro in range(3):
                loss = F.cross_entropy(f(t.x(4, 2, 8, 8)), t.integers(4, 4))
                loss.backward()
                t.note("loss", loss)
                if micro == step % 3:
                    t.model.eval()
                    with torch.no_grad():
                        t.hold("evaluation", f(t.x(4, 2, 8, 8)))
                    t.model.train()
            t.state()
            optimizer.step()

    same(loop, Conv)


def ordinary_10_batch_norm_over_micro_batches():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(9):
            for _ in range(4):
                logits = f(t.x(6, 2, 8, 8))
                loss = F.cross_entropy(logits, t.integers(4, 6)) / 4
                loss.backward()
                t.note("loss", loss)
                t.note("mean", t.model.norm.running_mean)
            t.state()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

    same(loop, Conv)


def ordinary_11_shared_parameters():
    def loop(t):
        f, optimizer = t.compile(t.model), adam(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(2):
                ids = t.integers(32, 3, 9)
                loss = F.cross_entropy(f(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                t.note("loss", loss)
            assert t.model.head.weight.grad is t.model.embed.weight.grad
            t.state()
            optimizer.step()

    same(loop, Words)


def ordinary_12_frozen_parameters():
    def loop(t):
        t.model.up.requires_grad_(False)
        t.model.mid.bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in t.model.parameters() if p.requires_grad], lr=0.05)
        f = t.compile(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(3):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            assert t.model.up.weight.grad is None and t.model.mid.bias.grad is None
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_13_two_models_in_turns():
    def loop(t):
        maker, judge = t.model["maker"], t.model["judge"]
        make, judged = t.compile(maker), t.compile(judge)
        ours, theirs = adam(maker), adam(judge)
        for _ in range(9):
            theirs.zero_grad()
            for _ in range(2):
                loss = F.softplus(-judged(t.x(8, 16))).mean() + F.softplus(judged(make(t.x(8, 16)).detach())).mean()
                loss.backward()
                t.note("judge's loss", loss)
            t.state(judge, "judge's ")
            theirs.step()
            ours.zero_grad()
            for _ in range(2):
                loss = F.softplus(-judged(make(t.x(8, 16)))).mean()
                loss.backward()
                t.note("maker's loss", loss)
            t.state()
            ours.step()

    same(loop, lambda: torch.nn.ModuleDict({"maker": Mlp(), "judge": Mlp(out=1)}))


def ordinary_14_gradients_of_inputs_kept():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        kept = []
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(2):
                x = t.x(8, 16).requires_grad_()
                loss = f(x).square().mean()
                loss.backward()
                t.note("loss", loss)
                t.hold("gradient of the input", x.grad)
                kept.append(x)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_15_autograd_grad_in_place_of_backward():
    def loop(t):
        f = t.compile(t.model)
        parameters = list(t.model.parameters())
        for step in range(10):
            parts = []
            for _ in range(3):
                loss = f(t.x(8, 16)).square().mean()
                parts.append(torch.autograd.grad(loss, parameters))
                t.note("loss", loss)
            for index, parameter in enumerate(parameters):
                t.note(f"gradient {index}", *(part[index] for part in parts))
                with torch.no_grad():
                    parameter -= 0.05 * sum(part[index] for part in parts)
                t.note(f"parameter {index}", parameter)
            assert all(parameter.grad is None for parameter in parameters), step

    same(loop, Mlp)


def ordinary_16_a_transformer_layer_with_adamw():
    def loop(t):
        f = t.compile(t.model)
        optimizer = torch.optim.AdamW(t.model.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(6):
                loss = (f(t.x(2, 8, 32)) - t.x(2, 8, 32)).square().mean() / 6
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()
            schedule.step()

    same(loop, Layer)


def ordinary_17_autocast():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(9):
            optimizer.zero_grad()
            for micro in range(2):
                if step % 3 == 2 and micro == 1:  # one in full precision now and then
                    loss = f(t.x(8, 16)).square().mean()
                else:
                    with torch.autocast(DEVICE, dtype=torch.bfloat16):
                        loss = f(t.x(8, 16)).float().square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp, rtol=0.1, atol=2e-2)


def ordinary_18_checkpointing_inside():
    class Inside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for _ in range(8):
            optimizer.zero_grad()
            for _ in range(2):
                loss = f(t.x(2, 8, 32)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Inside)


def ordinary_19_checkpointing_around():
    def loop(t):
        one, two = t.compile(t.model[0]), t.compile(t.model[1])
        optimizer = sgd(t.model)
        for step in range(10):
            optimizer.zero_grad()
            for micro in range(2):
                x = t.x(8, 16).requires_grad_()  # reentrant checkpointing wants an input with a gradient
                reentrant = (step + micro) % 2 == 0
                h = checkpoint(one, x, use_reentrant=reentrant)
                loss = checkpoint(two, h, use_reentrant=reentrant).square().mean()
                loss.backward()
                t.note("loss", loss)
                t.note("gradient of the input", x.grad)
            t.state()
            optimizer.step()

    same(loop, lambda: layers(2))


def ordinary_20_a_compiled_optimizer_step():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        step = t.compile(optimizer.step)
        for number in range(10):
            optimizer.zero_grad(set_to_none=number % 4 != 3)
            for _ in range(2):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            step()
            t.note("parameters", *t.model.parameters())

    same(loop, Mlp)


def ordinary_21_each_layer_compiled():
    def loop(t):
        for layer in t.model:
            t.compile_in_place(layer)
        optimizer = sgd(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(3):
                loss = t.model(t.x(2, 6, 32)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, lambda: torch.nn.Sequential(*(Layer() for _ in range(4))))


def ordinary_22_a_graph_break_in_the_model():
    class Broken(Mlp):
        def forward(self, x):
            h = F.gelu(self.up(x))
            torch._dynamo.graph_break()
            h = torch.tanh(self.mid(self.norm(h)))
            torch._dynamo.graph_break()
            return self.down(h)

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            losses = []
            for _ in range(3):
                losses.append(f(t.x(8, 16)).square().mean())
                losses[-1].backward()
            t.note("loss", *losses)
            t.state()
            optimizer.step()

    same(loop, Broken)


def ordinary_23_functional_call():
    def loop(t):
        def function(values, x):
            return torch.func.functional_call(t.model, values, (x,)).square().mean()

        f = t.compile(function)
        values = {name: p.detach().clone().requires_grad_() for name, p in t.model.named_parameters()}
        for _ in range(9):
            for _ in range(2):
                loss = f(values, t.x(8, 16))
                loss.backward()
                t.note("loss", loss)
            for name, value in values.items():
                t.note(f"gradient of {name}", value.grad)
                t.note(name, value)
            values = {name: (v.detach() - 0.05 * v.grad).requires_grad_() for name, v in values.items()}

    same(loop, Mlp)


def ordinary_24_declared_sizes():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(12):
            optimizer.zero_grad()
            x = t.x((20, 16, 24)[step % 3], 16)
            for part in x.split(8):  # 8, 8, 4: a variant and generic within a step
                loss = f(part).square().sum() / len(x)
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp, dynamic=True, specialize=[{"x[0]": 8}])
    assert stats()["variants_compiled"] >= 1 and stats()["generic_compiled"] >= 1, stats()


def ordinary_25_copied_outputs_never_move():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        addresses = None
        for step in range(10):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(3):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.hold("loss", loss.detach())
            now = [p.grad.data_ptr() for p in t.model.parameters()]
            assert addresses in (None, now), step  # docs: all outputs are copies from the start, and never move
            addresses = now
            t.state()
            optimizer.step()

    same(loop, Mlp, copy_outputs=True)
    assert stats()["moved_outputs"] == 0, stats()["moved_outputs"]


def ordinary_26_several_forwards_before_their_backwards():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(10):
            optimizer.zero_grad()
            losses = [f(t.x(8, 16)).square().mean() for _ in range(3)]
            for loss in losses if step % 2 else losses[::-1]:
                loss.backward()
            t.note("loss", *losses)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_27_a_second_backward():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(10):
            optimizer.zero_grad()
            for _ in range(2):
                out = f(t.x(8, 16))
                loss = out.square().mean()
                if step % 3:
                    loss.backward(retain_graph=True)
                    t.note("first", *(p.grad for p in t.model.parameters()))
                    other = out.sin().mean()
                    other.backward()
                    t.note("other", other)
                else:
                    loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_28_a_forward_under_inference_mode_in_between():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(3):
                loss = f(t.x(8, 16)).square().mean()
                with torch.inference_mode():
                    t.hold("seen", f(t.x(8, 16)))
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def ordinary_29_plain_accumulation_moves_nothing():
    counts = []

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for _ in range(16):
            optimizer.zero_grad()
            for _ in range(4):
                loss = f(t.x(8, 16)).square().mean() / 4
                loss.backward()
                t.note("loss", loss)
                del loss
            t.state()
            optimizer.step()
            counts.append(stats()["recordings"])

    same(loop, Mlp)
    assert stats()["moved_outputs"] == 0, str(multigraph_backend.explain())
    assert stats()["failed_recordings"] == 0, str(multigraph_backend.explain())
    assert counts[-1] == counts[-8], counts  # nothing is recorded when the loop has come to rest
    assert "outputs moved" not in str(multigraph_backend.explain())


def ordinary_30_dropout_repeats_with_the_seed():
    class Dropped(Mlp):
        def forward(self, x, mask=None):
            h = F.gelu(self.norm(self.up(x)))
            if mask is None:
                mask = F.dropout(torch.ones_like(h), 0.5)
            return self.down(torch.tanh(self.mid(h * mask))), mask

    torch.manual_seed(5)
    model = Dropped().to(DEVICE)
    reference = copy.deepcopy(model)
    f, ours, theirs = compiled_of(model), sgd(model), sgd(reference)
    masks = []
    for step in range(10):
        ours.zero_grad()
        theirs.zero_grad()
        found = []
        for micro in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + micro)).to(DEVICE)
            torch.manual_seed(1000 + step if micro < 2 else 1)  # the first two micro-batches draw the same
            out, mask = f(x)
            loss = out.square().mean()
            loss.backward()
            expected = reference(x, mask.clone())[0].square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
            found.append(mask.detach().clone())
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in reference.parameters()], rtol=1e-3, atol=1e-4
        )
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2]), step
        masks.append(found)
        ours.step()
        theirs.step()
        torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-3, atol=1e-4)
    assert all(torch.equal(found[2], masks[0][2]) for found in masks)  # warmed up, recorded or replayed
    assert all(not torch.equal(one[0], two[0]) for one, two in itertools.pairwise(masks))
    recorded()


# ---------------------------------------------------------------------------------------------------------------- hostile


def hostile_01_accumulation_begins_only_later():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(14):
            count = 1 if step < 6 or step in (10, 11) else 4
            optimizer.zero_grad(set_to_none=step % 5 != 4)
            for _ in range(count):
                loss = f(t.x(8, 16), t.x(8, 16))
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Loss)


def hostile_02_steps_and_backwards_are_skipped():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(14):
            if step % 4 != 3:  # else the gradients of the last step are accumulated on
                optimizer.zero_grad(set_to_none=step % 3 != 0)
            for micro in range(4):
                loss = f(t.x(8, 16)).square().mean()
                t.note("loss", loss)
                if (step + micro) % 5 != 2:
                    loss.backward()
            t.state()
            if step % 4 != 2:
                optimizer.step()

    same(loop, Mlp)


def hostile_03_exceptions_between_micro_batches():
    class Stop(Exception):
        pass

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        armed = []

        def hook(gradient):
            if armed:
                raise Stop

        t.model.mid.weight.register_hook(hook)
        for step in range(14):
            optimizer.zero_grad()
            try:
                for micro in range(3):
                    loss = f(t.x(8, 16)).square().mean()
                    t.note("loss", loss)
                    if step in (2, 7) and micro == 1:
                        raise Stop
                    if step in (4, 9) and micro == 2:
                        armed.append(True)
                    loss.backward()
            except Stop:
                armed.clear()
                if step in (4, 9):
                    continue  # some gradients have been accumulated, and which is not promised
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_04_the_optimizer_steps_in_the_backward():
    def loop(t):
        f = t.compile(t.model)
        optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.5) for p in t.model.parameters()}
        names = {p: name for name, p in t.model.named_parameters()}

        def hook(parameter):
            t.note(f"gradient of {names[parameter]}", parameter.grad)
            if t.stepping:
                optimizers[parameter].step()
                parameter.grad = None

        for parameter in t.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for step in range(14):
            for micro in range(1 if step < 4 else 3):
                t.stepping = step < 4 or micro == 2
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()

    same(loop, Mlp)


def hostile_05_hooks_keep_gradients_for_several_steps():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for name, parameter in t.model.named_parameters():
            if "weight" in name:
                parameter.register_hook(lambda gradient, name=name: ring.append((name, gradient, gradient.clone())))
        ring = collections.deque(maxlen=17)
        for step in range(14):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                for name, gradient, copied in ring:
                    assert torch.equal(gradient, copied), (step, name)
            if step == 9:
                ring.clear()
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_06_gradients_replaced_and_changed_between_micro_batches():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        changes = [
            lambda p: setattr(p, "grad", p.grad.clone()),
            lambda p: p.grad.mul_(0.5),
            lambda p: setattr(p, "grad", p.grad.detach()),
            lambda p: setattr(p.grad, "data", p.grad.data * 2),
            lambda p: setattr(p, "grad", p.grad.cpu().to(DEVICE)),
            lambda p: setattr(p, "grad", None),
            lambda p: setattr(p, "grad", torch.ones_like(p)),
            lambda p: p.grad.zero_(),
            lambda p: p.grad.view(-1)[:3].add_(1),
            lambda p: setattr(p, "grad", p.grad.t().contiguous().t() if p.dim() == 2 else -p.grad),
        ]
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 3 != 1)
            for micro in range(3):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                if micro < 2:
                    for index, parameter in enumerate(t.model.parameters()):
                        if step >= 10 or index % 3 == micro:
                            changes[(step + index * (step >= 10)) % len(changes)](parameter)
            t.state()
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
            optimizer.step()

    same(loop, Mlp)


def hostile_07_gradients_kept_in_a_list_over_steps():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(12):
            optimizer.zero_grad()
            for micro in range(1 + step % 3):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                if micro == 0 and step % 4 == 1:  # a gradient that will be accumulated into, with a view of it
                    view = t.model.up.weight.grad.t()[2:5]
            for name, parameter in t.model.named_parameters():
                t.hold(f"kept gradient of {name}", parameter.grad)
            if step % 4 == 1:
                t.hold("view", view)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_08_save_on_cpu_in_some_steps_only():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(14):
            optimizer.zero_grad()
            for micro in range(2):
                on = step in (3, 4, 8) or (step > 9 and (step + micro) % 2)
                with torch.autograd.graph.save_on_cpu(pin_memory=False) if on else contextlib.nullcontext():
                    loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_09_hooks_that_set_data():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(14):
            optimizer.zero_grad()
            for micro in range(3):
                x = t.x(8, 16)
                fixed = shared_memory(t.model, x)

                def moved(saved, fixed=fixed):
                    if saved.untyped_storage()._cdata not in fixed:
                        saved.data = saved.data.clone()
                    return saved

                pack, unpack = [(moved, moved), (moved, lambda s: s), (lambda s: s, moved)][step % 3]
                on = t.compiled and step > 2 and (step + micro) % 4 != 3
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if on else contextlib.nullcontext():
                    loss = f(x)
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Loss)


def hostile_10_storages_of_saved_tensors_shrink_and_grow():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        shrunk = 0
        for step in range(14):
            optimizer.zero_grad()
            for micro in range(2):
                x, seen = t.x(8, 16), []

                def pack(saved, seen=seen):
                    seen.append(saved)
                    return saved

                on = t.compiled and step not in (0, 5, 6, 11)
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s) if on else contextlib.nullcontext():
                    loss = f(x)
                fixed = shared_memory(t.model, x, loss)
                storages = {s.untyped_storage()._cdata: s.untyped_storage() for s in seen}
                away = []
                for identity, storage in storages.items():
                    if identity not in fixed and storage.nbytes() > 8:
                        whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).clone()
                        away.append((storage, whole))
                        storage.resize_(0)
                if micro:
                    with torch.no_grad():
                        t.note("between", f(t.x(8, 16)))
                else:
                    t.x(8, 16)
                for storage, whole in away:
                    storage.resize_(whole.numel())
                    torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).copy_(whole)
                    shrunk += 1
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()
        assert shrunk or not t.compiled

    same(loop, Loss)


def hostile_11_hooks_that_keep_tensors_or_return_views():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(15):
            optimizer.zero_grad()
            for micro in range(2):
                seen = []
                kinds = [
                    (lambda s, seen=seen: seen.append(s) or s, lambda s: s),
                    (lambda s: s.view(s.shape), lambda s: s.detach()),
                    (lambda s: s.detach(), lambda s: s),
                    (lambda s, seen=seen: seen.append(s.detach()) or s.detach(), lambda s: s.view_as(s)),
                    (lambda s, seen=seen: (seen.append(s), s), lambda s: s[1]),
                ]
                pack, unpack = kinds[step % 5]
                on = t.compiled and (step + micro) % 4 != 0
                x = t.x(8, 16)
                fixed = shared_memory(t.model, x)  # parameters will change, by the optimizer
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if on else contextlib.nullcontext():
                    loss = f(x).square().mean()
                loss.backward()
                t.note("loss", loss)
                for tensor in seen[:6]:
                    if tensor.untyped_storage()._cdata not in fixed and not belongs_to_gradients(tensor, t.model):
                        t.watch(f"saved in step {step}", tensor)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_12_graphs_held_over_steps_in_any_order():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        waiting = []
        for step in range(24):
            loss = f(t.x(8, 16)).square().mean()
            waiting.append(loss)
            t.note("loss", loss)
            if step % 6 < 4:
                if len(waiting) > 2:
                    waiting.pop(t.random.randrange(len(waiting))).backward()
            else:  # all of them, and then a step: parameters may not change under a graph
                t.random.shuffle(waiting)
                while waiting:
                    waiting.pop().backward()
                t.state()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 12 == 5)
            t.state()

    same(loop, Mlp)


def hostile_13_graphs_dropped_without_a_backward():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        undone = collections.deque(maxlen=3)
        for step in range(14):
            optimizer.zero_grad()
            for micro in range(3):
                out = f(t.x(8, 16))
                loss = out.square().mean()
                t.note("loss", loss)
                if (step + micro) % 3 == 1:
                    undone.append((out, out.detach().clone()))  # its backward never runs
                else:
                    loss.backward()
                if step % 4 == 2:
                    f(t.x(8, 16))  # nobody looks
                del out, loss
                for held, copied in undone:
                    assert torch.equal(held, copied), (step, micro)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_14_saved_tensors_of_a_grad_fn_held():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        looked = 0
        for step in range(12):
            optimizer.zero_grad()
            for micro in range(2):
                x = t.x(8, 16)
                out = f(x)
                saved = []
                # what the first calls have saved lies in the pool, and while it is held nothing is recorded
                if t.compiled and step > 2 and (step + micro) % 3 == 0:
                    saved = [s for s in out.grad_fn.saved_tensors if s is not None]
                    looked += len(saved)
                loss = out.square().mean()
                loss.backward()
                t.note("loss", loss)
                fixed = shared_memory(t.model, x)
                for tensor in saved:  # after their backward, which may write over them, in stock too
                    if tensor.untyped_storage()._cdata not in fixed and not belongs_to_gradients(tensor, t.model):
                        t.watch("saved", tensor)
            t.state()
            optimizer.step()
        assert looked or not t.compiled

    same(loop, Mlp)


def hostile_15_retained_graphs_run_again_steps_later():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for number in range(5):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            graphs = []
            for step in range(5):
                out = f(t.x(8, 16))
                loss = out.square().mean()
                loss.backward(retain_graph=True)
                graphs.append((out, loss))
                t.note("loss", loss)
                if step > 1:
                    graphs[step - 2][1].backward(retain_graph=True)
                t.state()
            for out, loss in t.random.sample(graphs, 4):
                (row,) = torch.autograd.grad(out[0].sum(), [t.model.mid.weight], retain_graph=True)
                t.hold("row", row)
                loss.backward()
            t.state()
            optimizer.step()
            graphs.clear()

    same(loop, Mlp)


def hostile_16_a_second_thread_trains_another_model():
    def train(t, name, model, f, seed, steps, wait):
        generator = torch.Generator().manual_seed(seed)
        optimizer = sgd(model)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2):
                loss = f(torch.randn(8, 16, generator=generator).to(DEVICE)).square().mean()
                loss.backward()
                t.note(f"{name}'s loss", loss)
            t.state(model, f"{name}'s ")
            optimizer.step()
            time.sleep(wait)

    def loop(t):
        errors = []

        def other():
            try:
                train(t, "two", t.model["two"], two, t.seed + 2, 14, 0.01)
            except BaseException as error:
                errors.append(error)

        one, two = t.compile(t.model["one"]), t.compile(t.model["two"])
        train(t, "one", t.model["one"], one, t.seed, 4, 0)
        thread = threading.Thread(target=other)
        thread.start()
        train(t, "one", t.model["one"], one, t.seed + 1, 14, 0.007)
        thread.join()
        if errors:
            raise errors[0]
        train(t, "one", t.model["one"], one, t.seed + 3, 4, 0)
        train(t, "two", t.model["two"], two, t.seed + 4, 4, 0)

    same(loop, lambda: torch.nn.ModuleDict({"one": Mlp(), "two": Mlp(hidden=48)}))


def hostile_17_a_second_thread_evaluates_the_same_model():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)

        def evaluate(inputs, found):
            with torch.no_grad():
                found.extend(f(x) for x in inputs)

        for step in range(12):
            optimizer.zero_grad()
            inputs, found = [t.x(8, 16) for _ in range(3)], []
            thread = threading.Thread(target=evaluate, args=(inputs, found))
            if step % 4 != 3:
                thread.start()
            for _ in range(3):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            if step % 4 == 3:
                thread.start()
            thread.join()  # before the step: it reads the parameters
            assert len(found) == 3, step
            for result in found:
                t.hold("evaluation", result)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_18_zero_grad_at_odd_places():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(16):
            for micro in range(4):
                place = (step * 3 + micro) % 8
                if place == 0:
                    optimizer.zero_grad()
                out = f(t.x(8, 16))
                if place == 3:
                    t.model.zero_grad(set_to_none=False)
                loss = out.square().mean()
                if place == 5:
                    t.model.up.zero_grad()
                    t.model.mid.zero_grad(set_to_none=False)
                loss.backward()
                if place == 6:
                    t.model.down.weight.grad = None
                if place == 7:
                    optimizer.zero_grad()
                    optimizer.zero_grad(set_to_none=False)
                t.note("loss", loss)
                t.state()
            for parameter in t.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.5, 0.5)
            optimizer.step()

    same(loop, Mlp)


def hostile_19_step_marks_at_odd_places():
    mark = torch.compiler.cudagraph_mark_step_begin

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        t.model.mid.weight.register_hook(lambda gradient: mark() if marking else None)
        marking = []
        for step in range(16):
            optimizer.zero_grad()
            for micro in range(3):
                place = (step + micro) % 7
                if place == 0:
                    mark()
                out = f(t.x(8, 16))
                if place == 1:
                    mark()  # between a forward and its backward
                loss = out.square().mean()
                if place == 2:
                    second = f(t.x(8, 16)).square().mean()
                    mark()
                    second.backward()
                if place == 3:
                    marking.append(True)
                loss.backward()
                marking.clear()
                if place == 4:
                    mark()  # while gradients are accumulated
                    mark()
                t.hold("loss", loss.detach())
                if place == 5:
                    t.hold("output", out.detach())
            t.state()
            if step % 3 == 0:
                mark()
            optimizer.step()

    same(loop, Mlp)


def hostile_20_parameters_at_new_addresses():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(20):
            optimizer.zero_grad()
            for micro in range(2):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                if step > 3 and step % 3 == 0 and micro == 0:  # between two micro-batches
                    t.model.mid.weight.data = t.model.mid.weight.data * 0.9
            t.state()
            optimizer.step()
            if step % 2 == 1:
                for parameter in t.model.parameters():
                    parameter.data = parameter.data.clone()

    same(loop, Mlp)


def hostile_21_parameters_frozen_and_unfrozen_on_the_way():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(16):
            if step in (4, 7, 11):
                for parameter in (t.model.up.weight, t.model.norm.bias):
                    parameter.requires_grad_(step == 7)
                    parameter.grad = None
                if t.compiled and torch.__version__ < "2.13":
                    torch.compiler.reset()  # docs: on torch 2.11 Dynamo does not see it
            optimizer.zero_grad(set_to_none=step % 3 == 0)
            for _ in range(2):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_22_copies_and_state_dicts_between_steps():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        best = averaged = None
        for step in range(15):
            optimizer.zero_grad()
            for micro in range(2):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                if step == 6 and micro == 0:
                    averaged = copy.deepcopy(f)  # with gradients, as Module's deepcopy has them
                    t.note("copied gradients", *(p.grad for p in averaged.parameters()))
            if averaged is not None:
                with torch.no_grad():
                    for mean, now in zip(averaged.parameters(), t.model.parameters(), strict=True):
                        mean.lerp_(now, 0.3)
                    t.hold("average", averaged(t.x(8, 16)))
            t.state()
            if step == 3:
                best = copy.deepcopy((f.state_dict(), optimizer.state_dict()))
            optimizer.step()
            if step in (8, 11):
                f.load_state_dict(best[0])
                optimizer.load_state_dict(copy.deepcopy(best[1]))
            if step == 12:
                t.model.load_state_dict({k: v.clone() for k, v in t.model.state_dict().items()}, assign=True)
                optimizer = sgd(t.model)  # the parameters are other objects now
        t.note("left", *averaged.parameters())

    same(loop, Mlp)


def hostile_23_buffers_in_place_and_parts_without_gradient():
    class Counts(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            h = F.gelu(self.norm(self.up(x)))
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(h.mean(0), 0.1)
                    self.calls += 1
            with torch.no_grad():
                scale = 1 + h.std() * (self.calls % 3)
            return self.down(torch.tanh(self.mid(h - self.mean))) * scale

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model, 0.01)
        for step in range(12):
            optimizer.zero_grad()
            for micro in range(3):
                loss = f(t.x(8, 16)).square().mean()
                kept = t.model.mean.clone()
                if step % 3 == 1 and micro == 1:
                    t.model.eval()
                    with torch.no_grad():
                        t.note("evaluation", f(t.x(8, 16)))
                    t.model.train()
                    assert torch.equal(kept, t.model.mean)
                if not (step % 3 == 2 and micro == 1):
                    loss.backward()
                t.note("loss", loss)
            if step == 7:
                t.model.mean.zero_()
            t.state()
            optimizer.step()

    same(loop, Counts)


def hostile_24_checkpointed_layers_with_hooks_and_held_outputs():
    def loop(t):
        for layer in t.model:
            t.compile_in_place(layer)
        optimizer = sgd(t.model)
        for step in range(12):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                x = t.x(4, 16).requires_grad_()
                h, seen = x, []
                for number, layer in enumerate(t.model):
                    kind = (step + number) % 3 if step > 2 else 0
                    h = layer(h) if kind == 2 else checkpoint(layer, h, use_reentrant=kind == 1)
                    seen.append(h)
                if step % 4 == 3 and micro == 1:
                    seen[1].register_hook(lambda gradient: t.watch("gradient of a layer", gradient))
                loss = h.square().mean()
                loss.backward()
                t.note("loss", loss)
                t.note("gradient of the input", x.grad)
                if step % 3 == 0:
                    t.hold("hidden", seen[0].detach())
                    t.hold("hidden", seen[2].detach())
            t.state()
            optimizer.step()

    same(loop, layers)


def hostile_25_gradients_flow_through_another_model():
    def loop(t):
        maker, judge = t.model["maker"], t.model["judge"]
        make, judged = t.compile(maker), t.compile(judge)
        ours, theirs = sgd(maker, 0.02), sgd(judge, 0.02)
        for step in range(12):
            fakes = []
            theirs.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(1 + step % 3):
                fake = make(t.x(8, 16))
                fakes.append(fake)  # with its graph: the maker's backward comes later
                loss = F.relu(1 - judged(t.x(8, 16))).mean() + F.relu(1 + judged(fake.detach())).mean()
                loss.backward()
                t.note("judge's loss", loss)
            t.state(judge, "judge's ")
            theirs.step()
            ours.zero_grad()
            if step % 4 == 1:
                judge.requires_grad_(False)
            for fake in reversed(fakes):
                loss = -judged(fake).mean()
                loss.backward()  # into the judge's gradients too, unless it is frozen
                t.note("maker's loss", loss)
                if step % 5 == 3:
                    t.hold("fake", fake.detach())
            judge.requires_grad_(True)
            t.state()
            ours.step()

    def guarded(t):
        if t.compiled and torch.__version__ < "2.13":
            torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False  # docs: before the first call
        loop(t)

    same(guarded, lambda: torch.nn.ModuleDict({"maker": Mlp(), "judge": Mlp(out=1)}))


def hostile_26_rows_of_a_jacobian_between_backwards():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        rows = []
        for step in range(10):
            optimizer.zero_grad()
            for micro in range(2):
                x = t.x(4, 16).requires_grad_()
                out = f(x)
                if (step + micro) % 3 == 0:
                    for column in range(3):
                        rows.append(torch.autograd.grad(out[:, column].sum(), x, retain_graph=True)[0])
                        t.hold("row", rows[-1])
                elif (step + micro) % 3 == 1:
                    basis = torch.eye(3, 16, device=DEVICE)[:, None].expand(3, 4, 16)
                    for row in basis:
                        t.hold("row", torch.autograd.grad(out, x, row, retain_graph=True)[0])
                loss = out.square().mean() + x.sum() * 0.1
                loss.backward(inputs=[x, *t.model.parameters()])
                t.note("loss", loss)
                t.hold("gradient of the input", x.grad)
            t.state()
            optimizer.step()

    same(loop, Mlp)
    assert {"retained_backwards", "copied_backwards"} <= set(stats())


def hostile_27_a_storm():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model, 0.02)
        pending, kept = [], []
        for _ in range(40):
            for _ in range(t.random.choice((1, 1, 2, 3, 5))):
                x = t.x(t.random.choice((8, 8, 8, 8, 6, 13)), 16)
                what = t.random.randrange(10)
                if what == 0:
                    with torch.no_grad():
                        t.hold("evaluation", f(x))
                    continue
                save = torch.autograd.graph.save_on_cpu() if what == 1 else contextlib.nullcontext()
                with save:
                    out = f(x)
                loss = out.square().mean()
                t.note("loss", loss)
                if what == 2:
                    continue
                if what == 3:
                    pending.append(loss)
                    continue
                if what == 4:
                    loss.backward(retain_graph=True)
                if what == 5:
                    torch.compiler.cudagraph_mark_step_begin()
                if what == 6:
                    t.hold("gradient", torch.autograd.grad(loss, t.model.mid.weight, retain_graph=True)[0])
                loss.backward()
                if what == 7:
                    kept.append(out)
                if what == 8:
                    kept = kept[:1]
                if what == 9:
                    t.hold("output", out.detach())
            t.random.shuffle(pending)
            while pending:
                pending.pop().backward()
            t.state()
            if t.random.random() < 0.8:
                torch.nn.utils.clip_grad_norm_([p for p in t.model.parameters() if p.grad is not None], 1.0)
                optimizer.step()
            if t.random.random() < 0.8:
                if t.random.random() < 0.3:
                    for parameter in t.model.parameters():
                        if parameter.grad is not None:
                            t.hold("given up", parameter.grad)
                            break
                    optimizer.zero_grad()
                else:
                    optimizer.zero_grad(set_to_none=False)

    same(loop, Mlp, dynamic=True)


def hostile_28_views_of_gradients_and_their_addresses():
    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(12):
            optimizer.zero_grad(set_to_none=step % 4 != 3)
            views, addresses = {}, {}
            moved = stats()["moved_outputs"]
            for micro in range(4):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                for name, parameter in t.model.named_parameters():
                    if micro == 0:
                        views[name] = parameter.grad.view(-1)[1:7]
                        addresses[name] = parameter.grad.data_ptr()
                    # a view sees what is accumulated: gradients are added in place, also where they have moved
                    assert torch.equal(views[name], parameter.grad.view(-1)[1:7]), (step, micro, name)
                    t.note("view", views[name])
            if step > 4 and stats()["moved_outputs"] == moved:  # docs: accumulated gradients are not moved
                for name, parameter in t.model.named_parameters():
                    assert parameter.grad.data_ptr() == addresses[name], (step, name)
            t.state()
            optimizer.step()

    same(loop, Mlp)


def hostile_29_gradients_held_longer_do_not_lengthen_steps():
    counts = []

    def loop(t):
        f, optimizer = t.compile(t.model), sgd(t.model)
        for step in range(24):
            optimizer.zero_grad()
            for _ in range(2):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
                del loss
            for name, parameter in t.model.named_parameters():
                if "weight" in name:
                    t.hold(f"kept {name}", parameter.grad)
            t.state()
            optimizer.step()
            if t.compiled:
                counts.append((stats()["recordings"], stats()["moved_outputs"], step))

    same(loop, Mlp)
    assert counts[-1][0] == counts[-8][0], counts  # no longer path, no further recordings
    if GPU:
        assert stats()["moved_outputs"] > 0, counts  # docs: a third time behind one another, they are moved
        assert counts[-1][1] == counts[-8][1], counts  # and copied from then on, which needs no move
        assert "outputs moved" in str(multigraph_backend.explain()), str(multigraph_backend.explain())


def hostile_30_a_compiled_step_and_an_eager_one_in_turns():
    def loop(t):
        f = t.compile(t.model)
        one = torch.optim.SGD(t.model.parameters(), lr=0.05, momentum=0.5)
        two = torch.optim.Adam(
            t.model.parameters(), lr=torch.tensor(1e-2, device=DEVICE), eps=1e-3, foreach=GPU, capturable=GPU
        )
        steps = [t.compile(one.step), t.compile(two.step)]
        kept = []
        t.model.down.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        for step in range(16):
            one.zero_grad(set_to_none=step % 3 != 2)
            for _ in range(1 + step % 3):
                loss = f(t.x(8, 16)).square().mean()
                loss.backward()
                t.note("loss", loss)
            t.state()
            if step % 4 == 3:
                (one if step % 8 == 3 else two).step()
            else:
                steps[step % 2]()
            if step == 9:
                two.param_groups[0]["lr"].fill_(5e-3)
            del kept[:-2]
            t.note("kept", *kept)
            t.note("parameters", *t.model.parameters())

    same(loop, Mlp)


if __name__ == "__main__":
    torch.backends.cudnn.allow_tf32 = False  # eager and compiled are compared
    sys.exit(main(__file__, globals(), seconds=240))
