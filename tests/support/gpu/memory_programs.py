# ruff: noqa: E501, PT018
"""60 programs by a user who has read only multigraph's docs, about what they promise of memory.

python tests/support/gpu/memory_programs.py [--jobs N] [name ...]
"""

import contextlib
import copy
import gc
import math
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import weakref

import torch
from apart import Skip, main

import multigraph_backend
from multigraph_backend import allocator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
MIB = 1 << 20
GIB = 1 << 30
ALONE = set()  # programs that fill the device or ask the driver what is free: never beside others


# ---------------------------------------------------------------------------------------------------------------- helpers


def alone(program):
    ALONE.add(program.__name__)
    return program


def needs_gpu():
    if not GPU:
        raise Skip("needs a GPU")


def installed(**arguments):
    """The extension for the whole process, or Skip with the reason that the docs promise."""
    status = allocator.install(**arguments)
    if not status:
        assert isinstance(status.reason, str) and status.reason, status
        raise Skip(f"allocator.install: {status.reason}")
    return status


def own_pool(**arguments):
    """A pool whose memory is the extension's, or Skip."""
    try:
        pool = allocator.pool(**arguments)
    except RuntimeError as error:  # docs: `sleeps`, and the driver maps no memory
        raise Skip(f"allocator.pool: {error}") from None
    if pool.reason is not None:
        reason = pool.reason
        pool.close()
        raise Skip(f"allocator.pool: {reason}")
    return pool


def compiled_of(function, dynamic=None, **options):
    if not GPU:
        options.setdefault("compiler", "aot_eager")
        if options.get("cudagraphs") == "require":  # docs: an error beside another compiler
            del options["cudagraphs"]
    else:
        options.setdefault("record_small", True)  # docs: keeps recordings that cost more than they save
    return torch.compile(function, backend="multigraph", dynamic=dynamic, options=options)


def close(actual, expected, **tolerances):
    tolerances = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True} | tolerances
    torch.testing.assert_close(actual, expected, **tolerances)


@contextlib.contextmanager
def raises(*types):
    caught = []
    try:
        yield caught
    except types as error:
        caught.append(error.with_traceback(None))  # else it and this frame keep each other, and all that frames held
        return
    raise AssertionError(f"nothing was raised, where the docs promise {[kind.__name__ for kind in types]}")


def randn(*shape, **arguments):
    return torch.randn(*shape, device=DEVICE, **arguments)


def stats():
    return multigraph_backend.stats()


def books():
    """held = live + lent + dead, in each account."""
    found = stats()
    held, live, lent, dead = (found[f"pool_{name}_bytes"] for name in ("held", "live", "lent", "dead"))
    assert held == live + lent + dead, (held, live, lent, dead)
    assert min(held, live, lent, dead) >= 0, (held, live, lent, dead)
    return found


def recordings_now():
    """How many recordings the account says that there are."""
    found = re.findall(r"^recordings on device \d+: ([\d,]+) in", str(multigraph_backend.explain()), re.MULTILINE)
    return sum(int(number.replace(",", "")) for number in found)


def recorded(at_least=1):
    if GPU:
        assert stats()["recordings"] >= at_least, (stats()["recordings"], str(multigraph_backend.explain()))


def synchronize():
    if GPU:
        torch.cuda.synchronize()


def settle():
    gc.collect()
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reserved():
    """Bytes that this process has reserved: torch's, or the extension's (same names in the docs)."""
    return allocator.memory_reserved()


@contextlib.contextmanager
def at_most(more):
    """This process may reserve `more` bytes than it has now."""
    settle()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved() + more) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Mlp(torch.nn.Module):
    def __init__(self, width=32, hidden=64, out=None):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.norm = torch.nn.LayerNorm(hidden)
        self.down = torch.nn.Linear(hidden, out or width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.norm(self.up(x))))


class Wide(torch.nn.Module):
    """Two matrix products with a large tensor between them: rows x hidden x 4 bytes."""

    def __init__(self, width=256, hidden=4096):
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(width, hidden) / width**0.5)
        self.b = torch.nn.Parameter(torch.randn(hidden, width) / hidden**0.5)

    def forward(self, x):
        return torch.relu(x @ self.a) @ self.b


class OtherWide(Wide):
    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b + x


class RmsNorm(torch.nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def pair(model):
    model = model.to(DEVICE)
    return model, copy.deepcopy(model)


def check(compiled, eager, *shape):
    with torch.no_grad():
        x = randn(*shape)
        y = compiled(x)
        close(y, eager(x))
    return y


def warm(compiled, eager, sizes, width):
    """serve: "Warm up with two tensors", so that inputs are copied and no later address is a new recording."""
    for _ in range(3):
        for rows in sizes:
            with torch.no_grad():
                inputs = [randn(rows, width) for _ in range(2)]
                for x in inputs:
                    close(compiled(x), eager(x))


def gradients(run, module, inputs, scale=1.0):
    """One step with accumulation over `inputs`: the losses and all gradients."""
    module.zero_grad()
    losses = []
    for x in inputs:
        loss = run(x).square().mean() * scale
        loss.backward()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in module.parameters()]


def same_step(compiled, model, reference, inputs):
    close(gradients(compiled, model, inputs), gradients(reference, reference, inputs))


def step_both(model, reference, rate=0.05):
    with torch.no_grad():
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            if one.grad is not None:
                one.sub_(one.grad, alpha=rate)
            if other.grad is not None:
                other.sub_(other.grad, alpha=rate)


ARMED = {"action": None}


@torch.library.custom_op("outside::gate", mutates_args=())
def gate(x: torch.Tensor) -> torch.Tensor:
    """A custom operator in Python: runs between recordings, and does what is armed."""
    action, ARMED["action"] = ARMED["action"], None
    if action is not None:
        action()
    return x.clone()


@gate.register_fake
def _(x):
    return torch.empty_like(x)


gate.register_autograd(lambda ctx, grad: grad * 1.0)


class Gated(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.second(gate(torch.relu(self.first(x)))))


# --------------------------------------------------------------------------------------------------------------- ordinary


def ordinary_01_sizes_any_order():
    """concepts, the memory pool: "N sizes take what the largest takes alone, in whatever order they come"."""
    model = Wide(256, 4096).to(DEVICE).eval()
    sizes = [16384, 12288, 8192, 5000, 3000, 1000] if GPU else [64, 48, 32, 20, 10, 5]
    compiled = compiled_of(model, dynamic=True)
    for _ in range(4):
        check(compiled, model, sizes[0], 256)
    recorded()
    alone_held = books()["pool_held_bytes"]
    multigraph_backend.release()
    settle()
    order = sorted(sizes)
    for turn in range(6):
        for size in order:
            check(compiled, model, size, 256)
        random.Random(turn).shuffle(order)
    held = books()["pool_held_bytes"]
    assert held <= 1.5 * alone_held + 64 * MIB, (held, alone_held, str(multigraph_backend.explain()))


def ordinary_02_account_adds_up():
    """debug-recordings, memory: "in each account, held = live + lent + dead"."""
    models = [Mlp().to(DEVICE).eval() for _ in range(2)]
    compiled = [compiled_of(model, dynamic=True) for model in models]
    held = []
    for turn in range(20):
        which = turn % 2
        rows = (5, 9, 17, 3)[turn % 4]
        held.append(check(compiled[which], models[which], rows, 32))
        books()
        if turn % 5 == 4:
            held.clear()
            found = books()
            assert found["pool_lent_bytes"] == 0
    text = str(multigraph_backend.explain())
    if GPU:
        assert "pool:" in text and " live, " in text and " lent, " in text and " dead" in text, text
    else:
        assert "recordings on device" not in text, text


def ordinary_03_held_output_is_live():
    """debug-recordings: `live` is what something alive lies in: "outputs that somebody has"."""
    model = Mlp(256, 512).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for _ in range(4):
        check(compiled, model, 4096, 256)
    y = check(compiled, model, 4096, 256)
    live = books()["pool_live_bytes"]
    if GPU:
        assert live >= y.nbytes, (live, y.nbytes)
    kept = y.nbytes
    del y
    assert books()["pool_live_bytes"] <= max(0, live - kept), (live, stats()["pool_live_bytes"])


def ordinary_04_release_returns_bytes():
    """use-the-allocator: release() returns "bytes by which the recordings' pools are smaller"; next calls record again."""
    model = Wide().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    rows = 8192 if GPU else 16
    for _ in range(2):
        for _ in range(4):
            check(compiled, model, rows, 256)
        settle()
        before, made = books()["pool_held_bytes"], stats()["recordings"]
        freed = multigraph_backend.release()
        after = books()["pool_held_bytes"]
        assert freed == before - after, (freed, before, after)
        assert after == 0, after
        if GPU:
            assert freed > 0
            assert recordings_now() == 0, str(multigraph_backend.explain())
        for _ in range(3):
            check(compiled, model, rows, 256)
        if GPU:
            assert stats()["recordings"] > made


def ordinary_05_release_keeps_outputs():
    """use-the-allocator: release(): "Outputs that are alive are moved to memory of their own"."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            compiled(randn(64, 32))
        x = randn(64, 32)
        y = compiled(x)
        view, expected = y[3:7].t(), model(x)
        synchronize()
        multigraph_backend.release()
        close(y, expected)
        close(view, expected[3:7].t())
        assert books()["pool_held_bytes"] == 0, stats()
        y.add_(1)
        close(view, expected[3:7].t() + 1)
        for _ in range(3):
            check(compiled, model, 64, 32)
        close(y, expected + 1)


def ordinary_06_limit_count():
    """serve, limits: "Beyond `count` the least recently used are given up, and recorded again when they are needed"."""
    multigraph_backend.limit_recordings(count=3)
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for _ in range(3):
        for rows in (11, 10, 9, 8, 7, 6, 5):
            for _ in range(2):
                check(compiled, model, rows, 32)
            assert recordings_now() <= 3, str(multigraph_backend.explain())
    recorded(4)
    if GPU:
        assert stats()["evicted_recordings"] > 0, stats()
    multigraph_backend.limit_recordings()


def ordinary_07_pool_bytes():
    """serve, limits: a recording that "needs more than the limit by itself runs unrecorded"; pools stay within it."""
    limit = 96 * MIB
    multigraph_backend.limit_recordings(pool_bytes=limit)
    model = Wide(256, 4096).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    small, large = (512, 16384) if GPU else (8, 32)  # 8 MiB and 256 MiB between the products
    for _ in range(6):
        check(compiled, model, small, 256)
    recorded()
    for _ in range(6):
        check(compiled, model, large, 256)
        check(compiled, model, small, 256)
    found = books()
    assert found["pool_held_bytes"] <= limit, (found["pool_held_bytes"], str(multigraph_backend.explain()))
    if GPU:
        before = stats()["unrecorded_pieces"]
        check(compiled, model, large, 256)
        assert stats()["unrecorded_pieces"] > before
    multigraph_backend.limit_recordings()


def ordinary_08_limits_are_checked():
    """serve, limits: the column `least`; "A wrong value is a ValueError, of an option at the model's first call"."""
    wrong = [
        {"count": 0}, {"pool_bytes": 0}, {"pool_bytes": 0.0}, {"pool_bytes": 1.5}, {"keep_free": 1.0}, {"keep_free": -0.1},
        {"keep_free": -1}, {"depth": 0}, {"failures": 0}, {"copied_bytes": -1}, {"unreplayed": 0}, {"idle": -1}, {"patience": -1},
    ]  # fmt: skip
    for limits in wrong:
        with raises(ValueError):
            multigraph_backend.limit_recordings(**limits)
    for limits in (
        {"count": 1}, {"pool_bytes": 1 << 30}, {"pool_bytes": 1.0}, {"pool_bytes": 0.25}, {"keep_free": 0}, {"keep_free": 0.0},
        {"keep_free": 0.99}, {"depth": 1}, {"failures": 1}, {"copied_bytes": 0}, {"unreplayed": 1}, {"idle": 0}, {"patience": 0}, {},
    ):  # fmt: skip
        multigraph_backend.limit_recordings(**limits)
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, limits={"count": 0})
    with raises(ValueError, torch._dynamo.exc.BackendCompilerFailed) as caught, torch.no_grad():
        compiled(randn(4, 32))
    error = caught[0]
    assert isinstance(getattr(error, "inner_exception", error), ValueError), error
    torch._dynamo.reset()
    compiled = compiled_of(model, limits={"count": 2, "patience": 0.1, "pool_bytes": 0.5})
    for _ in range(4):
        check(compiled, model, 4, 32)


def ordinary_09_limits_default_again():
    """serve, limits: "what is not named has its default, also where an earlier call had set it"."""
    multigraph_backend.limit_recordings(count=1)
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    sizes = (12, 10, 8, 6)
    for _ in range(2):
        for rows in sizes:
            for _ in range(2):
                check(compiled, model, rows, 32)
    assert recordings_now() <= 1
    multigraph_backend.limit_recordings(pool_bytes=4 << 30)  # count is 1024 again
    for _ in range(2):
        for rows in sizes:
            check(compiled, model, rows, 32)
    evicted, made = stats()["evicted_recordings"], stats()["recordings"]
    for _ in range(2):
        for rows in sizes:
            check(compiled, model, rows, 32)
    assert stats()["evicted_recordings"] == evicted, stats()
    if GPU:
        assert recordings_now() >= 2, (made, str(multigraph_backend.explain()))
    multigraph_backend.limit_recordings()


@alone
def ordinary_10_keep_free():
    """serve, limits, keep_free: "where a recording would leave less to others, its call runs unrecorded", tried again later."""
    ballast = torch.empty(2 * GIB if GPU else 1, dtype=torch.uint8, device=DEVICE)
    multigraph_backend.limit_recordings(keep_free=0.99)
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for _ in range(6):
        check(compiled, model, 64, 32)
    if GPU:
        assert stats()["recordings"] == 0, str(multigraph_backend.explain())
        assert stats()["unrecorded_pieces"] >= 6
        assert "too little of the device's memory" in str(multigraph_backend.explain()), str(
            multigraph_backend.explain()
        )
    multigraph_backend.limit_recordings(keep_free=0)
    end = time.monotonic() + 12
    while GPU and not stats()["recordings"] and time.monotonic() < end:
        check(compiled, model, 64, 32)
        time.sleep(0.2)
    recorded()
    del ballast
    multigraph_backend.limit_recordings()


def ordinary_11_models_share_a_pool():
    """concepts: "Recordings of a device share one pool": models that take turns do not add up their peaks."""
    rows = 8192 if GPU else 16
    models = [Wide(256, 4096).to(DEVICE).eval() for _ in range(4)]
    for number, model in enumerate(models):
        model.multigraph_name = f"model {number}"
    compiled = [compiled_of(model) for model in models]
    for _ in range(4):
        check(compiled[0], models[0], rows, 256)
    recorded()
    one = books()["pool_held_bytes"]
    for _ in range(4):
        for run, model in zip(compiled, models, strict=True):
            check(run, model, rows, 256)
    recorded(4)
    held = books()["pool_held_bytes"]
    assert held <= 2 * one + 64 * MIB, (held, one, str(multigraph_backend.explain()))


def ordinary_12_end_of_models():
    """concepts: "when the last one is gone and no output is alive, all of it goes back"."""
    for _ in range(2):
        models = [Mlp(64, 256).to(DEVICE).eval() for _ in range(3)]
        compiled = [compiled_of(model, dynamic=True) for model in models]
        for rows in (500, 100, 500, 100):
            for run, model in zip(compiled, models, strict=True):
                check(run, model, rows, 64)
        recorded()
        del run, model, compiled, models
        torch._dynamo.reset()
        gc.collect()
        synchronize()
        assert books()["pool_held_bytes"] == 0, str(multigraph_backend.explain())
        assert recordings_now() == 0


def ordinary_13_gradient_accumulation():
    """train: gradients accumulated over several backward passes of changing lengths "work as they are"."""
    model, reference = pair(Mlp())
    compiled = compiled_of(model, dynamic=True)
    lengths = random.Random(0)
    for _ in range(8):
        inputs = [randn(2, lengths.choice((5, 9, 17, 24)), 32) for _ in range(4)]
        same_step(compiled, model, reference, inputs)
        step_both(model, reference)
        books()
    recorded()
    assert stats()["failures"] == 0 and stats()["eager_calls"] == 0, stats()


def ordinary_14_training_memory():
    """README, limits: recordings with accumulation reserve little more than no graphs (21 % there; here: at most half as much again)."""
    needs_gpu()
    lengths = [6144, 2048, 4096, 6144, 1024, 3072]

    def train(cudagraphs):
        torch._dynamo.reset()
        settle()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        model, reference = pair(torch.nn.Sequential(Mlp(512, 2048), Mlp(512, 2048)))
        compiled = compiled_of(model, dynamic=True, cudagraphs=cudagraphs)
        for turn in range(8):
            inputs = [randn(lengths[(turn + k) % len(lengths)], 512) for k in range(2)]
            found = gradients(compiled, model, inputs)
            if turn in (0, 7):
                kept = [x.cpu() for x in (*found[0], *found[1])]
        del found
        peak = torch.cuda.max_memory_reserved()
        found = gradients(reference, reference, inputs)
        close(kept, [x.cpu() for x in (*found[0], *found[1])])
        return peak

    plain = train(False)
    with_recordings = train("auto")
    recorded()
    assert with_recordings <= 1.5 * plain + 256 * MIB, (with_recordings, plain, str(multigraph_backend.explain()))


def ordinary_15_losses_in_a_list():
    """train: "losses kept in a list" work as they are, kept with detach() they hold up nothing."""
    model, reference = pair(Mlp())
    compiled = compiled_of(model)
    kept, expected = [], []
    for _ in range(60):
        x = randn(16, 32)
        for run, trained, losses in ((compiled, model, kept), (reference, reference, expected)):
            trained.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        step_both(model, reference)
    close(kept, expected)
    recorded()
    if GPU:
        made = stats()["recordings"]
        assert made <= 40, (made, str(multigraph_backend.explain()))


def ordinary_16_outputs_for_100_calls():
    """serve: "Outputs are yours as long as you like", and "No output is ever written over" (concepts)."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    kept = []
    with torch.no_grad():
        for turn in range(100):
            x = randn((8, 5, 13)[turn % 3], 32)
            kept.append((compiled(x), model(x)))
            if turn % 20 == 0:
                books()
    for actual, expected in kept:
        close(actual, expected)
    assert len({actual.data_ptr() for actual, _ in kept}) == 100
    recorded()
    if GPU:
        assert stats()["moved_outputs"] > 0, stats()


def ordinary_17_memory_stands_still():
    """concepts: "A step ends by itself": calls whose outputs are dropped take no more memory with time."""
    model, reference = pair(Mlp(128, 512))
    compiled = compiled_of(model, dynamic=True)
    for _ in range(6):
        for rows in (900, 300):
            same_step(compiled, model, reference, [randn(rows, 128)])
    settle()
    before, made = books()["pool_held_bytes"], stats()["recordings"]
    total = reserved()
    for _ in range(30):
        for rows in (900, 300):
            same_step(compiled, model, reference, [randn(rows, 128)])
    settle()
    assert books()["pool_held_bytes"] <= before + 2 * MIB, (before, stats()["pool_held_bytes"])
    assert reserved() <= total + 32 * MIB, (total, reserved())
    assert stats()["recordings"] - made <= 8, (made, stats()["recordings"])


def ordinary_18_memory_snapshot():
    """debug-recordings: memory_snapshot() pickles; blocks of recordings have "the name of their recording on top of their stack"."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model)
    for _ in range(4):
        y = check(compiled, model, 128, 32)
    snapshot = multigraph_backend.memory_snapshot()
    assert {"device_traces", "multigraph", "segments"} <= snapshot.keys(), sorted(snapshot)  # and what torch adds
    assert sorted(pickle.loads(pickle.dumps(snapshot))) == sorted(snapshot)
    if GPU:
        tops = [
            str(block["frames"][0].get("name"))
            for segment in snapshot["segments"]
            for block in segment["blocks"]
            if block.get("frames")
        ]
        assert any("Mlp.forward" in name for name in tops), tops
        assert snapshot["multigraph"]
    del y


def ordinary_19_dropout_and_generators():
    """train: "each replay draws anew from the device's generator", and manual_seed "repeats what was drawn"."""

    class Drop(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.dropout(x * 2, 0.5, True)

    module = Drop().to(DEVICE)
    compiled = compiled_of(module)
    ones = torch.ones(64, 64, device=DEVICE)
    with torch.no_grad():
        for _ in range(4):
            compiled(ones)
        draws = [compiled(ones).clone() for _ in range(3)]
        assert not torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[1], draws[2])
        for turn in range(3):
            torch.manual_seed(7)
            first = [compiled(ones).clone() for _ in range(3)]
            if turn == 1:
                multigraph_backend.release()
            torch.manual_seed(7)
            second = [compiled(ones).clone() for _ in range(3)]
            close(first, second, rtol=0, atol=0)
        x = randn(64, 64)
        y = compiled(x)
        close(torch.where(y == 0, y, x * 4), y)
        assert 0.2 < (y == 0).float().mean().item() < 0.8
    recorded()


def ordinary_20_graph_breaks():
    """README: "graph breaks ... work as they do in torch", with outputs that go from one part to the next."""

    def function(x, w):
        h = torch.relu(x @ w)
        torch._dynamo.graph_break()
        h = torch.softmax(h @ w.t(), -1)
        if h.sum().item() < -1:
            return h
        return (h @ w).sin(), h

    compiled = compiled_of(function, dynamic=True)
    w = randn(32, 48)
    held = []
    with torch.no_grad():
        for turn in range(18):
            x = randn((7, 12, 20)[turn % 3], 32)
            held.append((compiled(x, w), function(x, w)))
            books()
    for actual, expected in held:
        close(actual, expected)
    recorded()


def ordinary_21_epsilons():
    """sharp-edges, Python floats: a float that a module holds, changed between calls of dynamic=True, is never stale."""
    model, reference = pair(torch.nn.Sequential(RmsNorm(32, 1e-5), torch.nn.Linear(32, 32), RmsNorm(32, 1e-2)))
    compiled = compiled_of(model, dynamic=True)
    for turn, eps in enumerate((1e-5, 1e-5, 1e-3, 0.1, 1.0, 2.5, 1e-5, 1.0, 1e-3)):
        for module in (model, reference):
            module[0].eps, module[2].eps = eps, eps * 2
        check(compiled, reference, 6 + turn % 3, 32)
        same_step(compiled, model, reference, [randn(6 + turn % 3, 32)])
    assert stats()["failures"] == 0, stats()


def ordinary_22_cache_in_a_buffer():
    """serve: "A cache that the model changes in place must be a buffer": release() between steps loses nothing of it."""

    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(16, 16)
            self.register_buffer("keys", torch.zeros(32, 16))

        def forward(self, x, position):
            self.keys.index_copy_(0, position, self.proj(x))
            return torch.softmax(x @ self.keys.t(), -1) @ self.keys

    model, reference = pair(Cache())
    compiled = compiled_of(model)
    with torch.no_grad():
        for position in range(24):
            x, where = randn(1, 16), torch.tensor([position], device=DEVICE)
            close(compiled(x, where), reference(x, where))
            close(model.keys, reference.keys)
            if position in (8, 15):
                multigraph_backend.release()
    recorded()


def ordinary_23_pool_for_one_model():
    """use-the-allocator: a pool for one model, with `limit`: past it comes torch.OutOfMemoryError."""
    pool = allocator.pool(limit=256 * MIB)
    with pool:
        model = Mlp(64, 256).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for rows in (40, 20, 40, 20):
        check(compiled, model, rows, 64)
    assert pool.reserved_bytes <= 256 * MIB
    reason = pool.reason
    if reason is not None:
        assert isinstance(reason, str)
        pool.close()
        raise Skip(f"allocator.pool: {reason}")
    assert 0 < pool.reserved_bytes <= pool.max_reserved_bytes <= 256 * MIB
    with pool, raises(torch.OutOfMemoryError):
        torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
    check(compiled, model, 40, 64)
    with pool:
        more = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    assert pool.reserved_bytes >= 64 * MIB
    del more
    freed = pool.empty_cache()
    assert freed >= 0 and pool.reserved_bytes <= 256 * MIB, (freed, pool.reserved_bytes)
    pool.close()
    check(compiled, model, 20, 64)


@alone
def ordinary_24_sleep_with_contents():
    """use-the-allocator, sleep(keep="host"): contents as before, memory is the device's meanwhile, recordings go on."""
    needs_gpu()
    pool = own_pool(sleeps=True)
    with pool:
        model = Wide(1024, 32768).to(DEVICE).eval()  # 256 MiB
    reference = copy.deepcopy(model)
    compiled = compiled_of(model, dynamic=True)
    warm(compiled, reference, (64, 32), 1024)
    recorded()
    for _ in range(2):
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        made = stats()["recordings"]
        settle()
        free = torch.cuda.mem_get_info()[0]
        given = pool.sleep()
        assert pool.asleep
        assert given >= 256 * MIB, given
        gained = torch.cuda.mem_get_info()[0] - free
        assert gained >= given - 32 * MIB, (gained, given)
        mapped = pool.wake()
        assert not pool.asleep
        assert mapped == given, (mapped, given)
        assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
        close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=0)
        for rows in (64, 32):
            check(compiled, reference, rows, 1024)
        assert stats()["recordings"] == made, (made, stats()["recordings"])
    del compiled, model
    pool.close()


def ordinary_25_sleep_without_contents():
    """use-the-allocator, sleep(keep="nothing"): contents undefined, for weights that are written anew; recordings go on."""
    needs_gpu()
    pool = own_pool(sleeps=True)
    with pool:
        model = Mlp(256, 1024).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for turn in range(3):
        sent = Mlp(256, 1024).to(DEVICE).eval()
        with torch.no_grad():
            for mine, new in zip(model.parameters(), sent.parameters(), strict=True):
                mine.copy_(new)
        warm(compiled, sent, (20, 10), 256)
        given = pool.sleep(keep="nothing")
        assert given > 0
        assert pool.asleep
        assert pool.wake() == given
        made = stats()["recordings"]
        if turn:
            with torch.no_grad():
                model.load_state_dict(sent.state_dict())
            for rows in (20, 10):
                check(compiled, sent, rows, 256)
            assert stats()["recordings"] == made
    recorded()
    assert pool.empty_cache() >= 0


def ordinary_26_statistics_of_the_extension():
    """use-the-allocator: memory_stats() and others have torch's names and answer "where the extension is not installed", too."""
    status = allocator.install(history=1000)
    if not status:
        assert isinstance(status.reason, str)
        assert not allocator.status()
        assert allocator.status().reason is not None
        x = torch.ones(MIB, device=DEVICE)
        if GPU:
            assert allocator.memory_allocated() == torch.cuda.memory_allocated()
            assert allocator.memory_reserved() == torch.cuda.memory_reserved()
        else:
            assert (allocator.memory_allocated(), allocator.memory_reserved(), allocator.memory_stats()) == (0, 0, {})
        assert isinstance(allocator.memory_summary(), str)
        with raises(RuntimeError):
            allocator.sleep()
        with raises(RuntimeError):
            allocator.wake()
        del x
        raise Skip(f"allocator.install: {status.reason}")
    x = torch.ones(16 * MIB, device=DEVICE)
    assert allocator.memory_allocated() >= x.nbytes
    assert allocator.memory_reserved() >= allocator.memory_allocated()
    assert allocator.memory_stats()["allocated_bytes.all.peak"] >= x.nbytes
    del x
    assert allocator.max_memory_allocated() >= 64 * MIB
    allocator.reset_peak_memory_stats()
    assert allocator.max_memory_allocated() < 64 * MIB
    before = allocator.memory_reserved()
    allocator.empty_cache()
    assert allocator.memory_reserved() <= before - 64 * MIB, (before, allocator.memory_reserved())
    again = allocator.install(reuse="strict", lend=False)  # docs: changes nothing, and says what is in force
    assert again and again.reuse == status.reuse == "any_stream", again
    with raises(Exception), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        torch.empty(MIB, device=DEVICE)
    allocator.record_memory_history("all", context="all", max_entries=10_000)
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for rows in (9, 5, 9, 5):
        check(compiled, model, rows, 32)
    snapshot = allocator.memory_snapshot()
    allocator.record_memory_history(None)
    assert sorted(snapshot) == ["device_traces", "segments"], sorted(snapshot)
    pickle.dumps(snapshot)
    assert isinstance(allocator.memory_summary(), str)
    recorded()
    books()


@alone
def ordinary_27_all_sleeps():
    """use-the-allocator: allocator.sleep() and wake() "are for all of the process, recordings too"."""
    needs_gpu()
    installed()
    model, reference = pair(Wide(512, 8192))
    compiled = compiled_of(model, dynamic=True)
    for rows in (256, 100, 256, 100):
        check(compiled, reference, rows, 512)
        same_step(compiled, model, reference, [randn(rows, 512)])
    recorded()
    model.zero_grad()
    reference.zero_grad()
    settle()
    free = torch.cuda.mem_get_info()[0]
    given = allocator.sleep(keep="host")
    assert given > 32 * MIB, given
    assert torch.cuda.mem_get_info()[0] - free >= given - 32 * MIB
    with raises(RuntimeError):  # docs: while all sleeps nothing can be allocated
        torch.empty(MIB, device=DEVICE)
    with raises(allocator.Asleep):
        allocator.sleep()
    with raises(allocator.Asleep):
        multigraph_backend.release()
    assert allocator.wake() == given
    with raises(allocator.Asleep):
        allocator.wake()
    for rows in (256, 100, 77):
        check(compiled, reference, rows, 512)
        same_step(compiled, model, reference, [randn(rows, 512)])
    books()


def ordinary_28_copy_outputs():
    """serve: "copy_outputs": outputs are copies from the first recording on: "they never move"."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True, copy_outputs=True)
    kept = []
    with torch.no_grad():
        for turn in range(12):
            x = randn((8, 5)[turn % 2], 32)
            y = compiled(x)
            kept.append((torch.from_dlpack(y), y, y.data_ptr(), model(x)))
        multigraph_backend.release()
        compiled(randn(8, 32))
    for shared, y, address, expected in kept:
        assert y.data_ptr() == address
        close(shared, expected)
    assert stats()["moved_outputs"] == 0, stats()
    recorded()


def ordinary_29_warm_up_and_seal():
    """serve: after warmup() and seal("raise") declared sizes record nothing more and the pool does not grow."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True, specialize=[{"x[0]": [4, 8, 16]}])
    with torch.no_grad():
        account = multigraph_backend.warmup(compiled, randn(5, 32))
    assert account.ready, str(account)
    before = books()
    multigraph_backend.seal("raise")
    for _ in range(5):
        for rows in (8, 16, 4):
            check(compiled, model, rows, 32)
    multigraph_backend.unseal()
    after = books()
    assert after["after_seal"] == 0, after
    assert after["recordings"] == before["recordings"], (before, after)
    assert after["pool_held_bytes"] <= before["pool_held_bytes"] + 2 * MIB, (before, after)
    assert after["variant_calls"] - before["variant_calls"] == 15
    recorded()


def ordinary_30_compiled_optimizer():
    """train: "A compiled step is recorded: parameters and the optimizer's state stay where they are", over release(), too."""
    model, reference = pair(Mlp())
    compiled = compiled_of(model, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, capturable=GPU)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-4, capturable=GPU)
    step = compiled_of(optimizer.step)
    for turn in range(12):
        same_step(compiled, model, reference, [randn((8, 5)[turn % 2], 32)])
        step()
        expected.step()
        close(list(model.parameters()), list(reference.parameters()))
        if turn == 7:
            multigraph_backend.release()
    books()
    assert stats()["failures"] == 0, stats()
    recorded()


# ---------------------------------------------------------------------------------------------------------------- hostile


def hostile_01_call_while_asleep():
    """use-the-allocator: compiled code whose parameters lie in a pool that sleeps raises `Asleep`; after the wake all go on."""
    needs_gpu()
    pool = own_pool(sleeps=True)
    with pool:
        model = Mlp().to(DEVICE).eval()
    other = Mlp(32, 128).to(DEVICE).eval()
    reference = copy.deepcopy(model)
    compiled, awake = compiled_of(model, dynamic=True), compiled_of(other, dynamic=True)
    for keep in ("host", "nothing", "host"):
        for rows in (9, 5, 9, 5):
            check(compiled, reference, rows, 32)
            check(awake, other, rows, 32)
        pool.sleep(keep)
        for rows in (9, 5, 6, 9):  # a recorded size, a size that never came
            with raises(allocator.Asleep), torch.no_grad():
                compiled(randn(rows, 32))
            check(awake, other, rows, 32)
        with raises(allocator.Asleep):
            pool.id  # noqa: B018
        with raises(allocator.Asleep), pool:
            pass
        pool.wake()
        if keep == "nothing":
            model.load_state_dict(reference.state_dict())
    for rows in (9, 5, 6):
        check(compiled, reference, rows, 32)
    assert stats()["failures"] == 0, stats()


def hostile_02_sleep_twice():
    """use-the-allocator: sleep() of what sleeps, wake() of what does not: refused with Asleep, "and changes nothing"."""
    needs_gpu()
    pool = own_pool(sleeps=True)
    with pool:
        model = Mlp().to(DEVICE).eval()
    reference = copy.deepcopy(model)
    compiled = compiled_of(model)
    for _ in range(3):
        check(compiled, reference, 8, 32)
        with raises(allocator.Asleep):
            pool.wake()
        pool.sleep()
        for keep in ("host", "nothing"):
            with raises(allocator.Asleep):
                pool.sleep(keep)
            assert pool.asleep
        with raises(ValueError, allocator.Asleep):
            pool.sleep(keep="disk")
        pool.wake()
        with raises(ValueError):
            pool.sleep("disk")
        assert not pool.asleep
        close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=0)
    check(compiled, reference, 8, 32)


def hostile_03_close_while_asleep():
    """use-the-allocator: "A pool that is closed while it sleeps never wakes, wake() is a RuntimeError"."""
    needs_gpu()
    pools, models, compiled = [], [], []
    for number in range(3):
        pool = own_pool(sleeps=True)
        with pool:
            model = Mlp(32, 64 + 32 * number).to(DEVICE).eval()
        pools.append(pool)
        models.append(model)
        compiled.append(compiled_of(model, dynamic=True))
    del model, pool
    for _ in range(3):
        for run, eager in zip(compiled, models, strict=True):
            check(run, eager, 8, 32)
    del run, eager
    pools[0].sleep()
    pools[0].close()
    with raises(RuntimeError):
        pools[0].wake()
    with raises(allocator.Asleep), torch.no_grad():
        compiled[0](randn(8, 32))
    check(compiled[1], models[1], 8, 32)
    compiled[0] = models[0] = None  # what is in it may only die
    gc.collect()
    pools[0].close()
    pools[1].sleep()
    check(compiled[2], models[2], 8, 32)
    pools[1].wake()
    pools[2].close()  # open models in a closed pool go on
    for _ in range(2):
        check(compiled[1], models[1], 8, 32)
        check(compiled[2], models[2], 8, 32)
    pools[0] = pools[2] = None
    gc.collect()
    check(compiled[2], models[2], 9, 32)


def hostile_04_backward_while_asleep():
    """use-the-allocator: a backward that raised Asleep: "after the wake, set them to None and run the step from its forward on"."""
    needs_gpu()
    pool = own_pool(sleeps=True)
    with pool:
        model = Mlp().to(DEVICE)
    reference = copy.deepcopy(model)
    compiled = compiled_of(model, dynamic=True)
    for _ in range(3):
        same_step(compiled, model, reference, [randn(8, 32)])
    for _ in range(2):
        x = randn(8, 32)
        loss = compiled(x).square().mean()
        pool.sleep()
        with raises(allocator.Asleep):
            loss.backward()
        del loss
        pool.wake()
        for parameter in model.parameters():
            parameter.grad = None
        same_step(compiled, model, reference, [x, randn(5, 32)])
        step_both(model, reference)
    books()


def hostile_05_sleep_while_open_or_capturing():
    """use-the-allocator: sleep() is refused with Asleep "while the pool is open" and "during a capture"."""
    needs_gpu()
    pool = own_pool(sleeps=True)
    with pool:
        model = Mlp().to(DEVICE).eval()
        with raises(allocator.Asleep):
            pool.sleep()
        with pool, raises(allocator.Asleep):
            pool.sleep("nothing")
    compiled = compiled_of(model)
    for _ in range(3):
        check(compiled, model, 8, 32)
    x = torch.ones(64, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    synchronize()
    with torch.cuda.graph(graph):
        y = x * 2
        with raises(allocator.Asleep):
            pool.sleep()
    x.fill_(3)
    graph.replay()
    close(y, torch.full_like(y, 6))
    assert not pool.asleep
    check(compiled, model, 8, 32)
    into = torch.cuda.CUDAGraph()
    with torch.cuda.graph(into, pool=pool.id):  # docs: captures into it
        z = x * 5
    pool.sleep()
    pool.wake()
    x.fill_(2)
    into.replay()
    close(z, torch.full_like(z, 10))
    check(compiled, model, 8, 32)


def hostile_06_sleep_and_release_beside_a_call():
    """use-the-allocator: sleep() is refused "while a call of compiled code is under way in any thread"; release() is safe there."""
    pool = None
    if GPU:
        with contextlib.suppress(RuntimeError):  # docs: the driver maps no memory
            pool = allocator.pool(sleeps=True)
    with contextlib.nullcontext() if pool is None else pool:
        model = Gated().to(DEVICE).eval()
    reference = copy.deepcopy(model)
    compiled = compiled_of(model, dynamic=True)
    for _ in range(3):
        check(compiled, reference, 8, 32)
    entered, leave, found = threading.Event(), threading.Event(), []

    def wait():
        entered.set()
        leave.wait(20)

    def call():
        with torch.no_grad():
            x = randn(8, 32)
            expected = reference(x)
            ARMED["action"] = wait
            found.append((compiled(x), expected))

    for action in ("sleep", "release"):
        entered.clear()
        leave.clear()
        thread = threading.Thread(target=call)
        thread.start()
        assert entered.wait(20)
        try:
            if action == "release":
                assert multigraph_backend.release() >= 0
            elif pool is not None and pool.reason is None:
                with raises(allocator.Asleep):
                    pool.sleep()
                assert not pool.asleep
        finally:
            leave.set()
            thread.join(30)
        assert not thread.is_alive()
    for actual, expected in found:
        close(actual, expected)
    assert len(found) == 2
    for _ in range(3):
        check(compiled, reference, 8, 32)
    if pool is not None and pool.reason is None:
        pool.sleep()
        pool.wake()
        check(compiled, reference, 8, 32)


def hostile_07_resized_storages():
    """sharp-edges: outputs that you resized "are handed out as copies from then on", and `resized_outputs` counts them."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    kept = []
    with torch.no_grad():
        for turn in range(24):
            x = randn((16, 7)[turn % 2], 32)
            y, expected = compiled(x), model(x)
            close(y, expected)
            if turn % 6 == 2:
                y.resize_(64, 64)
                y.fill_(float("nan"))
            elif turn % 6 == 3:
                y.untyped_storage().resize_(0)
            elif turn % 6 == 4:
                torch.add(torch.ones(70, 32, device=DEVICE), 1, out=y.resize_(0))
                close(y, torch.full_like(y, 2))
            elif turn % 6 == 5:
                y.untyped_storage().resize_(2 * y.untyped_storage().nbytes())
                close(y, expected)
                kept.append((y, expected))
            del y
            books()
    for actual, expected in kept:
        close(actual, expected)
    recorded()
    if GPU:
        assert stats()["resized_outputs"] > 0, stats()


def hostile_08_outputs_changed_in_place():
    """concepts: "No output is ever written over": one that the program changes in place keeps the change, and hurts no later call."""
    model, reference = pair(Mlp())
    compiled = compiled_of(model, dynamic=True)
    kept = []
    with torch.no_grad():
        for turn in range(20):
            x = randn((9, 4)[turn % 2], 32)
            y, expected = compiled(x), reference(x)
            view = y.view(-1)[::2]
            if turn % 3 == 0:
                y.mul_(2).add_(1)
                expected = expected * 2 + 1
            elif turn % 3 == 1:
                view.zero_()
                expected.view(-1)[::2] = 0
            else:
                y.copy_(randn(*y.shape))
                expected = y.clone()
            kept.append((view, y, expected))
            if turn == 11:
                multigraph_backend.release()
    for view, y, expected in kept:
        close(y, expected)
        close(view, expected.view(-1)[::2])
    for turn in range(6):  # gradients, changed in place and held
        same_step(compiled, model, reference, [randn(9, 32), randn(4, 32)])
        for module in (model, reference):
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
                parameter.grad = parameter.grad if turn % 2 else parameter.grad.t().clone().t()
        step_both(model, reference)
    recorded()


def hostile_09_deleted_in_odd_orders():
    """concepts: outputs outlive models: after `del`, reset() and gc their values stay and backward runs; then the pool is empty."""
    for order in ("model", "reset", "release"):
        model, reference = pair(Mlp())
        compiled = compiled_of(model, dynamic=True)
        for _ in range(3):
            same_step(compiled, model, reference, [randn(8, 32)])
        x = randn(8, 32, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        y, expected = compiled(x), reference(x2)
        parameters = list(model.parameters())
        for parameter in (*parameters, *reference.parameters()):
            parameter.grad = None
        gone = weakref.ref(model)
        if order == "model":
            del compiled, model
        elif order == "reset":
            torch._dynamo.reset()
            del compiled
        else:
            multigraph_backend.release()
        gc.collect()
        close(y.detach(), expected.detach())
        other = Mlp(32, 96).to(DEVICE).eval()
        run = compiled_of(other, dynamic=True)
        for _ in range(3):
            check(run, other, 8, 32)
        y.square().mean().backward()
        expected.square().mean().backward()
        close([x.grad, *(p.grad for p in parameters)], [x2.grad, *(p.grad for p in reference.parameters())])
        del y, expected, x, x2, run, other, parameters, parameter, reference
        model = compiled = None
        torch._dynamo.reset()
        gc.collect()
        assert gone() is None
        synchronize()
        assert books()["pool_held_bytes"] == 0, str(multigraph_backend.explain())


def hostile_10_threads_over_two_models():
    """serve: "Threads share one set of recordings": outputs are copies then, and every number is right."""
    models = [Mlp().to(DEVICE).eval(), Mlp(32, 96).to(DEVICE).eval()]
    compiled = [compiled_of(model, dynamic=True) for model in models]
    for rows in (12, 9, 6):
        for run, model in zip(compiled, models, strict=True):
            check(run, model, rows, 32)
            check(run, model, rows, 32)
    errors = []
    ready = {(seed, rows): [randn(rows, 32) for _ in range(30)] for seed in range(4) for rows in (12, 9, 6)}
    synchronize()  # docs: other threads cannot draw random numbers in the moment in which a capture begins

    def work(seed):
        try:
            choice, kept = random.Random(seed), []
            with torch.no_grad():
                for turn in range(30):
                    which = choice.randrange(2)
                    x = ready[seed, choice.choice((12, 9, 6))][turn]
                    kept.append((compiled[which](x), models[which](x)))
                    if turn % 10 == 9 and seed == 0:
                        multigraph_backend.release()
                    if turn % 7 == 6:
                        if GPU:  # sharp-edges: nobody waits for the whole device while a thread records
                            torch.cuda.current_stream().synchronize()
                        for actual, expected in kept:
                            close(actual, expected)
                        kept = kept[:2]
                for actual, expected in kept:
                    close(actual, expected)
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors[0]
    if GPU:
        assert stats()["shared_by_threads"] >= 1, stats()
    for run, model in zip(compiled, models, strict=True):
        check(run, model, 9, 32)
    books()


def hostile_11_exceptions_in_the_middle():
    """sharp-edges, first calls: a graph with a custom operator is not run twice: "the error is raised, as the caller's"."""

    def fail():
        raise ZeroDivisionError("in the middle")

    model, reference = pair(Gated())
    compiled = compiled_of(model, dynamic=True)
    for turn in range(8):
        ARMED["action"] = fail
        with raises(ZeroDivisionError), torch.no_grad():
            compiled(randn((8, 5)[turn % 2], 32))
        assert ARMED["action"] is None
        check(compiled, reference, (8, 5)[turn % 2], 32)
        ARMED["action"] = fail
        with raises(ZeroDivisionError):
            compiled(randn(8, 32)).sum().backward()
        same_step(compiled, model, reference, [randn(8, 32), randn(5, 32)])
        books()
    recorded()


def hostile_12_keyboard_interrupt():
    """sharp-edges: a signal's handler that raises while a call waits ends the wait, "counts as no failure, and the next call" is right."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch._dynamo.config.recompile_limit = 64  # a guard that a handler has interrupted counts as one that does not hold
    model, reference = pair(Gated())
    compiled = compiled_of(model, dynamic=True)
    for turn in range(5):  # the first of them in the first call of new code
        ARMED["action"] = lambda: signal.raise_signal(signal.SIGINT)
        with raises(KeyboardInterrupt), torch.no_grad():
            compiled(randn((8, 5)[turn % 2], 32))
        check(compiled, reference, 8, 32)
        books()
    plain = Mlp().to(DEVICE).eval()
    run = compiled_of(plain, dynamic=True)
    choice, interrupted = random.Random(5), 0
    for turn in range(20):  # at any moment: in compiles, captures and replays
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, choice.uniform(0.0005, 0.05 if turn > 5 else 1.0))
            began = time.monotonic()  # torch's guards swallow what a handler raises inside of them, with any backend
            with torch.no_grad():
                while time.monotonic() < began + 1.5:
                    run(randn(choice.choice((12, 9, 6)), 32))
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if turn % 5 == 4:
            check(run, plain, choice.choice((12, 9, 6)), 32)
    assert interrupted >= 10, interrupted
    for rows in (12, 9, 6, 7):
        check(run, plain, rows, 32)
        check(compiled, reference, rows, 32)
    books()
    assert stats()["failures"] == 0, (stats(), str(multigraph_backend.explain()))


def hostile_13_out_of_memory_gives_way():
    """sharp-edges: a piece that runs unrecorded and runs out of memory "lets recordings give way", and is run again."""
    needs_gpu()
    first, second = Wide(256, 8192).to(DEVICE).eval(), OtherWide(256, 8192).to(DEVICE).eval()
    one, two = compiled_of(first), compiled_of(second)
    rows = 16384  # 512 MiB between the products
    with torch.no_grad():
        for _ in range(4):
            check(one, first, rows, 256)
        recorded()
        for small in (rows // 64, rows // 32):  # compiled for any size, and tuned, which takes memory of its own
            check(two, second, small, 256)
        held = books()["pool_held_bytes"]
        assert held >= 256 * MIB, held
        x = randn(rows // 2, 256)
        expected = second(x).cpu()
        with at_most(128 * MIB):
            y = two(x)  # needs 256 to 512 MiB: there is only the recordings' memory
            close(y.cpu(), expected)
            del y
            y = two(x)
            close(y.cpu(), expected)
            del y
        for _ in range(3):
            check(one, first, rows, 256)
            check(two, second, rows // 2, 256)
    books()
    assert stats()["failures"] == 0, stats()


def hostile_14_out_of_memory_of_my_own():
    """sharp-edges: allocations of your own code "fail while recordings hold memory"; release() gives it back."""
    needs_gpu()
    model = Wide(256, 8192).to(DEVICE).eval()
    compiled = compiled_of(model)
    for _ in range(4):
        check(compiled, model, 16384, 256)
    recorded()
    held = books()["pool_held_bytes"]
    with at_most(128 * MIB):
        wanted = held // 2 + 192 * MIB
        assert held > wanted - 128 * MIB
        with raises(torch.OutOfMemoryError):
            torch.empty(wanted, dtype=torch.uint8, device=DEVICE)
        with torch.no_grad():
            compiled(randn(16384, 256))  # replays: its memory is there
        settle()
        freed = multigraph_backend.release()
        assert freed >= held // 2 + 64 * MIB, (freed, held)
        mine = torch.empty(wanted, dtype=torch.uint8, device=DEVICE)
        del mine
    for _ in range(3):
        check(compiled, model, 16384, 256)


def hostile_15_out_of_memory_in_training():
    """sharp-edges: a backward "is not run twice": the error is raised, "and the next attempt finds their memory"."""
    needs_gpu()
    model, reference = pair(torch.nn.Sequential(Wide(256, 4096), OtherWide(256, 4096)))
    compiled = compiled_of(model, dynamic=True)
    for rows in (8192, 2048, 8192, 2048):
        same_step(compiled, model, reference, [randn(rows, 256)])
    recorded()
    failed = 0
    for turn in range(6):
        model.zero_grad()
        reference.zero_grad()
        try:
            with at_most((16, 64, 160)[turn % 3] * MIB):
                for rows in (8192, 9000 + turn, 2048):
                    compiled(randn(rows, 256)).square().mean().backward()
        except torch.OutOfMemoryError:
            failed += 1
        model.zero_grad()
        gc.collect()
        same_step(compiled, model, reference, [randn(8192, 256), randn(2048, 256)])
        books()
    print(f"{failed} of 6 steps ran out of memory")
    assert stats()["failures"] == 0, stats()


def hostile_16_tiny_sizes():
    """sharp-edges, sizes 0 and 1: sizes 0 to 2 of both dimensions in any order, in inference and training, are right."""
    torch._dynamo.config.recompile_limit = 64
    model, reference = pair(Mlp())
    compiled = compiled_of(model, dynamic=True, specialize=[{"x[0]": [0, 1, 2]}, {"x[1]": {"max": 2}}])
    sizes = [(2, 2), (0, 2), (1, 2), (2, 0), (0, 0), (2, 1)]
    if not GPU:  # each is a graph of its own, and a compile
        sizes += [(1, 1), (1, 0), (0, 1)]
    random.Random(3).shuffle(sizes)
    for _ in range(2):
        for a, b in sizes:
            check(compiled, reference, a, b, 32)
            books()
    for a, b in sizes[: 2 if GPU else 5]:
        same_step(compiled, model, reference, [randn(a, b, 32)])
    for a, b in ((3, 5), (2, 5), (5, 3)):
        check(compiled, reference, a, b, 32)
    assert stats()["failures"] == 0, str(multigraph_backend.explain())


def hostile_17_none_inputs():
    """README: "Never a wrong number": arguments that are None at some calls, and outputs that are None."""

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(32, 32)

        def forward(self, x, mask=None, bias=None, *, scale=None):
            h = self.proj(x)
            if mask is not None:
                h = h.masked_fill(mask, 0.0)
            if bias is not None:
                h = h + bias
            return torch.relu(h) * (scale if scale is not None else 1.0), mask, None

    model, reference = pair(Masked())
    compiled = compiled_of(model, dynamic=True)
    kept = []
    for turn in range(24):
        rows = (9, 4)[turn % 2]
        x = randn(rows, 32)
        masked, biased, scale = ((False, False, None), (True, False, None), (True, True, 2.0), (False, True, 0.5))[
            turn // 2 % 4
        ]
        mask, bias = randn(rows, 32) > 0 if masked else None, randn(32) if biased else None
        with torch.no_grad():
            kept.append((compiled(x, mask, bias, scale=scale), reference(x, mask, bias, scale=scale), mask))
    for actual, expected, mask in kept:
        close(actual[0], expected[0])
        assert actual[2] is None
        assert actual[1] is mask
    books()
    recorded()


def hostile_18_strides():
    """concepts, where a recording reads its inputs: transposed, strided, expanded and overlapping inputs are read right."""
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    torch._dynamo.config.recompile_limit = 64
    makers = [
        lambda: randn(32, 12).t(),
        lambda: randn(12, 64)[:, ::2],
        lambda: randn(1, 32).expand(12, 32),
        lambda: randn(24, 32)[5:17],
        lambda: randn(43).unfold(0, 32, 1),
        lambda: randn(12, 33)[:, 1:],
        lambda: randn(2, 12, 32)[1],
        lambda: torch.as_strided(randn(500), (12, 32), (3, 2)),
        lambda: randn(12, 32),
    ]
    with torch.no_grad():
        for _ in range(4):
            for make in makers:
                x = make()
                before = x.clone()
                close(compiled(x), model(x))
                close(x, before, rtol=0, atol=0)
    books()
    recorded()


def hostile_19_two_streams():
    """sharp-edges, other streams: "What you hold is yours on any stream for as long as you hold it"."""
    needs_gpu()
    model = Mlp(128, 512).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()  # the parameters are there for all streams
    kept = []
    with torch.no_grad():
        for turn in range(40):
            main, other = streams[turn % 2], streams[(turn + 1) % 2]
            with torch.cuda.stream(main):
                x = randn((512, 200)[turn % 2 if turn < 20 else 0], 128)
                y = compiled(x)
            other.wait_stream(main)
            with torch.cuda.stream(other):
                twice = y * 2
                expected = model(x) * 2
            main.wait_stream(other)
            kept.append((x, y, twice, expected))
            if turn % 8 == 7:
                torch.cuda.synchronize()
                for _, y, twice, expected in kept:
                    close(twice, expected)
                    close(y * 2, expected)
                kept = kept[-1:]
    torch.cuda.synchronize()
    books()
    recorded()


def hostile_20_nested_compiles():
    """README: stock torch.compile around and inside of it: nested compiles of the same and of other backends are right."""
    inner_model = Mlp().to(DEVICE).eval()
    inner = compiled_of(inner_model, dynamic=True)
    other = torch.compile(torch.nn.Linear(32, 32).to(DEVICE).eval(), backend="aot_eager")

    def function(x):
        return other(inner(x).sin()) + inner(x * 2)

    def eager(x):
        return other._orig_mod(inner_model(x).sin()) + inner_model(x * 2)

    twice = compiled_of(compiled_of(function, dynamic=True), dynamic=True)
    disabled = compiled_of(lambda x: torch.compiler.disable(inner)(x) + 1, dynamic=True)
    with torch.no_grad():
        held = []
        for turn in range(12):
            x = randn((9, 4, 6)[turn % 3], 32)
            held.append((twice(x), eager(x)))
            held.append((disabled(x), inner_model(x) + 1))
            held.append((inner(x), inner_model(x)))
            if turn == 6:
                multigraph_backend.release()
        for actual, expected in held:
            close(actual, expected)
    books()


def hostile_21_inside_my_capture():
    """serve: a compiled call inside torch.cuda.graph "runs unrecorded and becomes part of your graph", over release(), too."""
    needs_gpu()
    model = Mlp(64, 256).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    static = randn(64, 64)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                compiled(static)
        torch.cuda.current_stream().wait_stream(side)
        held = compiled(static)
        expected_held = model(static)
        made = stats()["recordings"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(static)
            out2 = compiled(out)
        assert stats()["recordings"] == made
        for turn in range(6):
            static.copy_(randn(64, 64))
            graph.replay()
            close(out, model(static))
            close(out2, model(model(static)))
            check(compiled, model, (64, 20)[turn % 2], 64)
            if turn == 2:
                multigraph_backend.release()
            if turn == 3:
                multigraph_backend.limit_recordings(count=1)
        close(held, expected_held)
    multigraph_backend.limit_recordings()
    books()


def hostile_22_limits_between_calls():
    """serve: limit_recordings "sets them for the process from the next recording on": any limits, any time, right numbers."""
    every = [
        {}, {"count": 1}, {"count": 2, "pool_bytes": 1}, {"pool_bytes": 8 * MIB}, {"keep_free": 0.99}, {"keep_free": 0},
        {"depth": 1}, {"failures": 1, "unreplayed": 1}, {"copied_bytes": 0}, {"idle": 0, "patience": 0}, {"pool_bytes": 0.001},
    ]  # fmt: skip
    models = [pair(Mlp()), pair(Mlp(32, 512))]
    compiled = [
        compiled_of(models[0][0], dynamic=True),
        compiled_of(models[1][0], dynamic=True, limits={"count": 3, "patience": 0.1}),
    ]
    choice, kept = random.Random(11), []
    for turn in range(60):
        multigraph_backend.limit_recordings(**choice.choice(every))
        which = choice.randrange(2)
        rows = choice.choice((64, 33, 7))
        if choice.random() < 0.3:
            same_step(compiled[which], *models[which], [randn(rows, 32), randn(rows, 32)])
        else:
            with torch.no_grad():
                x = randn(rows, 32)
                kept.append((compiled[which](x), models[which][1](x)))
        if turn % 10 == 9:
            for actual, expected in kept:
                close(actual, expected)
            kept = kept[:3]
        books()
    multigraph_backend.limit_recordings()
    for run, (_, reference) in zip(compiled, models, strict=True):
        for _ in range(3):
            check(run, reference, 64, 32)


def hostile_23_fork():
    """use-the-allocator: a forked child "gets an error when it allocates"; the account can be asked there, and the parent goes on."""
    torch.set_num_threads(1)
    model = Mlp().to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for rows in (9, 5, 9, 5):
        y = check(compiled, model, rows, 32)
    expected = y.clone()
    pool = allocator.pool()
    for _ in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                multigraph_backend.stats()
                if GPU:
                    try:
                        torch.ones(MIB, device=DEVICE)
                    except RuntimeError:
                        status = 0
                else:
                    check(compiled, model, 5, 32)
                    check(compiled, model, 7, 32)
                    str(multigraph_backend.explain())
                    status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        end = time.monotonic() + 30
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("the child hangs")
            time.sleep(0.02)
        assert os.waitstatus_to_exitcode(status) == 0, status
        for rows in (9, 5, 6):
            check(compiled, model, rows, 32)
    close(y, expected)
    pool.close()
    books()


def hostile_24_deepcopy():
    """README: stock torch.compile: a deepcopy of a compiled model is another model, with parameters of its own."""
    model, reference = pair(Mlp())
    compiled = compiled_of(model, dynamic=True)
    for _ in range(3):
        same_step(compiled, model, reference, [randn(8, 32)])
    other, other_reference = copy.deepcopy(compiled), copy.deepcopy(reference)
    for turn in range(6):
        x = [randn((8, 5)[turn % 2], 32)]
        same_step(other, other, other_reference, x)
        step_both(other, other_reference)
        same_step(compiled, model, reference, x)
        if turn == 3:
            multigraph_backend.release()
    differs = max((a - b).abs().max().item() for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert differs > 0
    del compiled, model
    gc.collect()
    third = copy.deepcopy(other)
    del other
    gc.collect()
    for _ in range(3):
        check(third, other_reference, 8, 32)
    same_step(third, third, other_reference, [randn(5, 32)])
    books()


def hostile_25_epsilons():
    """sharp-edges, Python floats: "0.0 and -0.0 are two values", not-a-number and infinities, changing between calls."""
    torch._dynamo.config.recompile_limit = 64

    class Eps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.eps, self.slope = 1.0, 0.1
            self.weight = torch.nn.Parameter(torch.randn(8))

        def forward(self, x):
            scaled = x.abs() * self.eps  # 0.0 or -0.0
            leaky = torch.nn.functional.leaky_relu(x, self.slope)
            return (
                1.0 / scaled,
                torch.rsqrt(x.square().sum(-1) * 0 + self.eps),
                (leaky * self.weight).sum(),
                x * self.weight / self.eps,
            )

    model, reference = pair(Eps())
    compiled = compiled_of(model, dynamic=True, specialize=[{"x[0]": 8}])
    values = [
        1.0,
        0.0,
        -0.0,
        float("nan"),
        1e-5,
        float("inf"),
        -float("inf"),
        -0.0,
        0.0,
        1.0,
        -1.0,
        1e-30,
        2.0,
        float("nan"),
        0.0,
    ]
    slopes = (0.1,) if GPU else (0.1, 0.0, -0.0, 1.0, 0.3)  # each value that code depends on is a compile
    for rows in (8,) if GPU else (8, 5):
        for number, eps in enumerate(values * 2):
            for module in (model, reference):
                module.eps, module.slope = eps, slopes[number % len(slopes)]
            x = randn(rows, 8)
            with torch.no_grad():
                actual, expected = compiled(x), reference(x)
                close(actual, expected)
                for one, other in zip(actual, expected, strict=True):  # signs of zeros and infinities, too
                    zeros = (one == 0) & (other == 0)
                    assert torch.equal(torch.signbit(one)[zeros], torch.signbit(other)[zeros]), (eps, one, other)

    def argument(x, eps):
        return x / eps, torch.nn.functional.leaky_relu(x, eps) * x.shape[0]

    run = compiled_of(argument, dynamic=True)
    for eps in [
        0.0,
        -0.0,
        1.0,
        float("nan"),
        *(k / 7 for k in range(1, 3 if GPU else 12)),
        -0.0,
        0.0,
        float("nan"),
        1.0,
        math.pi,
    ]:
        x = randn(6, 8)
        close(run(x, eps), argument(x, eps))
    books()


def hostile_26_lent_memory():
    """use-the-allocator, lend: "before an allocation fails ... it is served by memory that recordings use in replays alone"."""
    needs_gpu()
    installed(lend=True)
    model = Wide(256, 8192).to(DEVICE).eval()
    compiled = compiled_of(model, dynamic=True)
    for rows in (16384, 64, 16384, 64):
        check(compiled, model, rows, 256)
        check(compiled, model, rows, 256)
    recorded(2)
    held = books()["pool_held_bytes"]
    assert held >= 256 * MIB, held
    x, small = randn(16384, 256), randn(64, 256)
    with torch.no_grad():
        expected, expected_small = model(x).cpu(), model(small).cpu()
    for _ in range(2):
        with at_most(64 * MIB):
            lent = torch.full((192 * MIB,), 7, dtype=torch.uint8, device=DEVICE)
            found = books()
            assert found["pool_loans"] >= 1, (found, str(multigraph_backend.explain()))
            for _ in range(4):
                with torch.no_grad():
                    close(compiled(small).cpu(), expected_small)
            assert int(lent[::1021].min()) == 7 == int(lent[::1021].max())  # nobody has written over it
            del lent
            with torch.no_grad():
                close(compiled(x).cpu(), expected)
            found = books()
            assert found["pool_lent_bytes"] == 0, found
        for _ in range(3):
            check(compiled, model, 16384, 256)
            check(compiled, model, 64, 256)
    assert stats()["failures"] == 0


@alone
def hostile_27_use_on_oom():
    """use-the-allocator: "With use_on_oom the pool's free blocks serve other allocations when the device is full"."""
    needs_gpu()
    pool = own_pool(use_on_oom=True)
    with pool:
        model = Mlp(64, 256).to(DEVICE).eval()
        spare = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    compiled = compiled_of(model, dynamic=True)
    for _ in range(4):
        check(compiled, model, 64, 64)
    del spare
    settle()
    assert pool.reserved_bytes >= GIB, pool.reserved_bytes
    assert pool.lent_bytes == 0
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 256 * MIB, dtype=torch.uint8, device=DEVICE)
    mine = torch.full((512 * MIB,), 3, dtype=torch.uint8, device=DEVICE)
    if allocator.status():  # docs: torch's own allocator does not tell
        assert pool.lent_bytes >= 512 * MIB, pool.lent_bytes
    for rows in (64, 20):
        check(compiled, model, rows, 64)
    assert int(mine[::4099].min()) == 3 == int(mine[::4099].max())
    with raises(torch.OutOfMemoryError):
        torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE)
    del mine
    settle()
    assert pool.lent_bytes == 0, pool.lent_bytes
    del ballast
    settle()
    check(compiled, model, 64, 64)
    pool.close()
    check(compiled, model, 64, 64)


def hostile_28_pools_misused():
    """use-the-allocator: ValueError, RuntimeError as the table says; no copies, no pickles; 64 pools at a time, others torch's."""
    with raises(ValueError):
        allocator.pool(sleeps=True, use_on_oom=True)
    with raises(ValueError):
        allocator.pool(limit=-1)
    with raises(ValueError, TypeError):
        allocator.install(reuse="everything")
    pools = [allocator.pool() for _ in range(70)]
    model = Mlp().to(DEVICE).eval()
    assert sum(pool.reason is None for pool in pools) <= 64
    for pool in pools[:3]:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with raises(Exception):
                copied(pool)
        with raises(RuntimeError):  # was not made with sleeps=True: it can never sleep
            pool.sleep()
        assert not pool.asleep
    made = []
    with pools[0], pools[69]:
        with pools[1]:
            made.append(torch.ones(1000, device=DEVICE))
        with pools[0]:
            made.append(torch.ones(1000, device=DEVICE))
        inner = Mlp().to(DEVICE).eval()
        compiled = compiled_of(inner, dynamic=True)
        for rows in (9, 5, 9, 5):  # compiled, warmed up and recorded while pools are open
            check(compiled, inner, rows, 32)
    for pool in reversed(pools):
        pool.close()
        pool.close()
    close(made, [torch.ones(1000, device=DEVICE)] * 2)
    del pools, pool
    gc.collect()
    for rows in (9, 5, 7):
        check(compiled, inner, rows, 32)
    run = compiled_of(model, dynamic=True)
    check(run, model, 9, 32)
    if not allocator.status():
        with raises(RuntimeError):
            allocator.sleep()


def hostile_29_forwards_without_backwards():
    """train: "each further forward is recorded behind the last, until 64 follow one another; those after run unrecorded"."""
    model, reference = pair(Mlp())
    compiled = compiled_of(model, dynamic=True)
    for _ in range(3):
        same_step(compiled, model, reference, [randn(8, 32)])
    inputs = [randn(8 if turn % 2 else 5, 32) for turn in range(100)]
    outputs = [compiled(x) for x in inputs]
    expected = [reference(x) for x in inputs]
    close([y.detach() for y in outputs], [y.detach() for y in expected])
    model.zero_grad()
    reference.zero_grad()
    order = list(range(100))
    random.Random(2).shuffle(order)
    for number in order[:60]:  # some never run backward
        outputs[number].square().mean().backward()
        expected[number].square().mean().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    books()
    if GPU:
        multigraph_backend.release()
    del outputs[::2]
    outputs[3].square().mean().backward() if 7 not in order[:60] else None
    del outputs, expected
    gc.collect()
    for _ in range(4):
        same_step(compiled, model, reference, [randn(8, 32), randn(5, 32)])
    multigraph_backend.release()
    model.zero_grad()
    synchronize()
    assert multigraph_backend.release() >= 0
    assert books()["pool_held_bytes"] == 0, str(multigraph_backend.explain())


def hostile_30_release_everywhere():
    """use-the-allocator: release() drops all recordings, "and the next calls record again": between forward and backward, in hooks."""
    model, reference = pair(torch.nn.Sequential(Mlp(), Mlp(32, 128)))
    compiled = compiled_of(model, dynamic=True)
    first, second = compiled_of(model[0], dynamic=True), compiled_of(model[1], dynamic=True)
    kept = []
    handle = model[0].up.weight.register_hook(lambda grad: (multigraph_backend.release(), kept.append(grad))[1])
    for turn in range(8):
        x = randn((9, 4)[turn % 2], 32)
        for whole in (True, False):
            model.zero_grad()
            reference.zero_grad()
            if whole:
                y = compiled(x)
            else:
                hidden = first(x)
                multigraph_backend.release()
                y = second(hidden)
            assert multigraph_backend.release() >= 0
            loss = y.square().mean()
            loss.backward(retain_graph=turn % 3 == 0)
            if turn % 3 == 0:
                multigraph_backend.release()
                loss.backward()
            expected = reference(x).square().mean()
            expected.backward(retain_graph=turn % 3 == 0)
            if turn % 3 == 0:
                expected.backward()
            close(loss.detach(), expected.detach())
            close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
            books()
        step_both(model, reference)
    handle.remove()
    assert len(kept) >= 16
    del y, loss, expected, hidden
    kept.clear()
    for rows in (9, 4):
        same_step(compiled, model, reference, [randn(rows, 32)])
    recorded()


if __name__ == "__main__":
    sys.exit(main(__file__, globals(), ALONE))
