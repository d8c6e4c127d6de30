"""Variants on a CUDA device: right, forward and backward, specialized where it shows, and safe where indices grow."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import multigraph_backend
from multigraph_backend.backend import multigraph

CUDA = torch.device("cuda")


class Block(torch.nn.Module):
    """A decoder block: norm, causal attention, gated MLP."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.gate = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def run_step(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    assert x.grad is not None
    return y.detach(), [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_nothing_fell_back() -> None:
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0, multigraph_backend.explain()


def calls_by_condition() -> dict[str, int]:
    totals: dict[str, int] = {}
    for region in multigraph_backend.explain().regions:
        for variant in (*region.variants, region.generic):
            totals[variant.condition] = totals.get(variant.condition, 0) + variant.calls
    return totals


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_decoder_block_is_right_for_every_size_and_runs_the_declared_variants(grad: bool) -> None:
    torch.manual_seed(0)
    eager = Block().to(CUDA)
    model = copy.deepcopy(eager)
    declared = [{"x[0]": 8, "x[1]": 16}, {"x[1]": {"multiple_of": 64}}, {"x[0]": {"min": 16, "max": 128}}]
    compiled = torch.compile(model, backend=multigraph, dynamic=True, options={"specialize": declared})
    # 128 and 8 are hidden sizes or head counts of the model too
    for batch, length in ((8, 16), (128, 10), (3, 64), (3, 128), (3, 11), (8, 16), (16, 33), (2, 7)):
        x = torch.randn(batch, length, 128, device=CUDA)
        if grad:
            (y, grads), (wanted, wanted_grads) = run_step(compiled, x), run_step(eager, x)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(grads, wanted_grads, rtol=1e-3, atol=1e-5)
        else:
            with torch.inference_mode():
                torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
    assert_nothing_fell_back()
    assert calls_by_condition() == {
        "x[0] == 8 and x[1] == 16": 2,
        "x[1] % 64 == 0": 2,
        "16 <= x[0] <= 128": 2,
        "generic": 2,
    }


def test_a_small_shape_then_more_than_2_to_the_31_elements() -> None:
    """Inductor indexes with 32 bits where it may; that becomes a condition, and beyond it another form is compiled."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    options = {"specialize": [{"x[0]": {"multiple_of": 16}}]}
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=options)
    for columns in (8, 2**27):
        for rows in (16, 17):
            x = torch.randint(0, 100, (rows, columns), dtype=torch.int8, device=CUDA)
            y = compiled(x)
            assert torch.equal(y, x + 1)
            assert int(y[-1, -1]) == int(x[-1, -1]) + 1
            del x, y
    assert_nothing_fell_back()
    assert calls_by_condition() == {"x[0] % 16 == 0": 2, "generic": 2}
    (region,) = multigraph_backend.explain().regions
    assert len(region.variants[0].forms) == len(region.generic.forms) == 2
    assert all("2147483647" in forms[0] for forms in (region.variants[0].forms, region.generic.forms))


def test_a_multiple_of_16_removes_the_mask_from_the_kernel() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def kernel(specialize: list[Any]) -> str:
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=multigraph, dynamic=True, options={"specialize": specialize})
        _, (code,) = run_and_get_code(compiled, torch.randn(4096, 33, device=CUDA)[:, 0].contiguous())
        return str(code)

    assert "xmask = xindex < xnumel" in kernel([])
    assert "xmask = xindex < xnumel" not in kernel([{"x[0]": 4096}])
    divisible = kernel([{"x[0]": {"multiple_of": 1024}}])
    assert "1024*" in divisible or "xmask = tl.full" in divisible


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_modes_of_torch_compile_keep_their_meaning(mode: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256, device=CUDA)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight)

    compiled = torch.compile(f, backend=multigraph, dynamic=True, mode=mode)
    for rows in (64, 64, 64, 96, 64):
        x = torch.randn(rows, 256, device=CUDA)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x), f(x), rtol=1e-3, atol=1e-3)
    assert_nothing_fell_back()
    assert calls_by_condition() == {"generic": 5}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=lambda make: make.__name__)
def test_compiled_optimizer_steps_move_the_weights(make: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    eager = torch.nn.Linear(32, 32, device=CUDA)
    model = copy.deepcopy(eager)
    pairs = [(eager, make(eager.parameters(), lr=0.1)), (model, make(model.parameters(), lr=0.1))]
    compiled = torch.compile(pairs[1][1].step, backend=multigraph)
    for _ in range(4):
        x = torch.randn(8, 32, device=CUDA)
        for module, optimizer in pairs:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            if module is model:
                compiled()
            else:
                optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(eager.parameters()), rtol=1e-3, atol=1e-4)
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["generic_calls"] == 4


def test_threads_on_their_own_streams_share_one_compile_per_variant() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).softmax(-1).sum(0)

    sizes = (16, 24, 32, 40)
    options = {"specialize": [{"x[0]": list(sizes)}]}
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=options)
    torch.testing.assert_close(compiled(x := torch.randn(9, 8, device=CUDA)), f(x), rtol=1e-4, atol=1e-4)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                generator = torch.Generator(CUDA).manual_seed(seed)
                for step in range(12):
                    x = torch.randn(sizes[(seed + step) % 4], 8, device=CUDA, generator=generator)
                    torch.testing.assert_close(compiled(x), f(x), rtol=1e-4, atol=1e-4)
            stream.synchronize()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert_nothing_fell_back()
    ran = multigraph_backend.stats()
    assert (ran["variants_compiled"], ran["variant_calls"]) == (4, 48)


def test_a_compile_out_of_memory_falls_back_and_the_process_goes_on() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not isinstance(inputs[0], torch.SymInt):
            torch.empty(2**50, device=CUDA)
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    options = {"specialize": [{"x[0]": 16}], "compiler": compiler}
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=options)
    x = torch.randn(16, 3, device=CUDA)
    torch.testing.assert_close(compiled(x), f(x))
    (region,) = multigraph_backend.explain().regions
    assert region.variants[0].state == "failed"
    assert "OutOfMemoryError" in (region.variants[0].reason or "")
    assert region.generic.calls == 1
    torch.testing.assert_close(compiled(x), f(x))


def test_eager_compilation_takes_no_memory_for_sizes_not_seen() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    options = {"specialize": [{"x[0]": 2**36}, {"x[0]": 64}], "compile": "eager"}
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=options)
    x = torch.randn(64, 4, device=CUDA)
    torch.testing.assert_close(compiled(x), f(x))
    assert_nothing_fell_back()
    (region,) = multigraph_backend.explain().regions
    assert [variant.state for variant in (*region.variants, region.generic)] == ["ready"] * 3


@pytest.mark.parametrize("repeat", ["always", "auto"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_equal_blocks_are_calls_of_one_body_in_one_recording(grad: bool, repeat: str) -> None:
    torch.manual_seed(0)
    eager = torch.nn.Sequential(*(Block() for _ in range(6))).to(CUDA)
    recordings = []
    for asked in (False, repeat):
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        model = copy.deepcopy(eager)
        compiled = torch.compile(model, backend=multigraph, options={"repeat": asked, "cudagraphs": "require"})
        kept = torch.empty(4, 32, 128, device=CUDA)
        for _ in range(5):
            x = kept.copy_(torch.randn(4, 32, 128))
            if grad:
                (y, grads), (wanted, wanted_grads) = run_step(compiled, x), run_step(eager, x)
                torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(grads, wanted_grads, rtol=1e-3, atol=1e-5)
            else:
                with torch.inference_mode():
                    torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
        assert_nothing_fell_back()
        assert (multigraph_backend.stats()["body_calls"] > 1) == bool(asked)
        recordings.append(multigraph_backend.stats()["recordings"])
    assert 0 < recordings[1] <= recordings[0]


class Attending(torch.nn.Module):
    """Attention in bfloat16, by kernels of libraries: they return lengths, seeds and offsets beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(128, eps=1e-6)
        self.qkv, self.out = torch.nn.Linear(128, 384, bias=False), torch.nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("repeat", ["always", "auto"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_attention_of_libraries_is_a_part_of_bodies_that_are_traced_once(
    grad: bool, dynamic: bool, repeat: str
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Attending() for _ in range(6))).to(CUDA, torch.bfloat16)
    options = {"repeat": repeat, "cudagraphs": "require"}
    compiled = torch.compile(model, backend=multigraph, dynamic=dynamic, options=options)
    for length in (64, 64, 64, 48 if dynamic else 64):
        x = torch.randn(4, length, 128, device=CUDA, dtype=torch.bfloat16)
        if grad:
            (y, grads), (wanted, wanted_grads) = run_step(compiled, x), run_step(model, x)
            torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(grads, wanted_grads, rtol=5e-2, atol=5e-2)
        else:
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    assert_nothing_fell_back()
    said = str([region.generic.repeated for region in multigraph_backend.explain().regions])
    assert "one by one" not in said, said
    assert "attention" not in said, said
    assert "traced once" in said, said
    assert multigraph_backend.stats()["body_calls"] >= (8 if grad else 4), said


class Dropping(torch.nn.Module):
    """Half of what it is given, doubled: its matrix is the identity."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.same = torch.nn.Linear(width, width, bias=False)
        torch.nn.init.eye_(self.same.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.same(x), 0.5, self.training)


@pytest.mark.parametrize("repeat", ["always", "auto"])
@pytest.mark.parametrize("cudagraphs", ["require", False], ids=["recorded", "unrecorded"])
def test_each_call_of_a_body_and_each_replay_draws_its_own_dropout(cudagraphs: Any, repeat: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Dropping() for _ in range(6))).to(CUDA)
    compiled = torch.compile(model, backend=multigraph, options={"repeat": repeat, "cudagraphs": cudagraphs})
    x = torch.ones(1024, 64, device=CUDA, requires_grad=True)
    seen: list[torch.Tensor] = []
    for _ in range(6):
        x.grad = None
        y = compiled(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y)  # the backward has the forward's masks, of all six calls
        left = y.detach().clone()
        assert set(left.unique().tolist()) == {0.0, 64.0}
        assert abs(float((left != 0).float().mean()) * 64 - 1) < 0.2  # 65,536 elements: six times the deviation
        assert all(not torch.equal(left, before) for before in seen)
        seen.append(left)
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["body_calls"] >= 6
    assert (multigraph_backend.stats()["recordings"] > 0) == bool(cudagraphs)
