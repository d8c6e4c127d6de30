"""Saved tensors on a GPU: packs within their bounds, offloading by real streams, both together with recordings."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._inductor.utils import run_and_get_code

import multigraph_backend
from multigraph_backend import Bits, Cast, Match, Offload, Rule, Scaled
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.partition import cuts
from multigraph_backend.saved_tensors import packs
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.offload import transfers
from multigraph_backend.saved_tensors.offload.transfers import CudaStream, Transfers
from multigraph_backend.saved_tensors.rules import Pack
from tests.support.gpu.programs import CUDA, compiled, fresh, tree_counts
from tests.support.saved_tensors.models import Block, Grouped

WIDTH, TOKENS, BATCH = 256, 128, 8
CYCLES = 20_000_000  # of a GPU: some 10 ms, longer than any step here


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    fresh()


def everything(pack: Pack) -> list[Rule]:
    return [Rule(Match(), pack)]


def block(dtype: torch.dtype = torch.bfloat16, blocks: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(WIDTH, 4) for _ in range(blocks)]).to(CUDA, dtype)


def batch(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, device=CUDA, dtype=dtype)


def gradients(model: torch.nn.Module, run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Of a step: the output, and the gradients of parameters and input, copied."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = run(x)
    out.float().square().mean().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), x.grad.clone()]


def error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative error of a gradient; the outputs are equal but for bfloat16's rounding."""
    torch.testing.assert_close(got[0], wanted[0], rtol=0.05, atol=0.05)
    pairs = zip(got[1:], wanted[1:], strict=True)
    return max(float((one.float() - two.float()).norm() / two.float().norm()) for one, two in pairs)


def accounts() -> list[SavedTensors]:
    return [said for region in multigraph_backend.explain().regions for said in region.generic.saved]


def copies() -> Transfers:
    return transfers.of(torch.device("cuda", 0))


# ---------------------------------------------------------------- packs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packs_are_within_their_bounds_by_element(dtype: torch.dtype) -> None:
    kinds = [Cast("e4m3"), Cast("e5m2"), Scaled("int8"), Scaled("int8", per=64), Scaled("e4m3"), Scaled("int4", per=64)]
    example = torch.empty(64, 512, device=CUDA, dtype=dtype)
    both: list[Any] = [packs.functions(kind, example) for kind in kinds]
    narrow: list[Any] = [packs.functions(Cast("bfloat16"), example)] if dtype == torch.float32 else []

    kinds_of_functions = [*both, *narrow]

    @torch.compile(fullgraph=True)
    def there(x: torch.Tensor) -> list[Any]:
        return [pack(x) for pack, _ in kinds_of_functions]

    @torch.compile(fullgraph=True)  # apart: inside of one kernel the compiler need not round
    def back(packed: list[Any]) -> list[torch.Tensor]:
        return [unpack(found) for (_, unpack), found in zip(kinds_of_functions, packed, strict=True)]

    x = torch.randn(64, 512, device=CUDA).mul_(4).to(dtype)
    results = [result.double() for result in back(there(x))]
    x = x.double()
    rounding = x.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-20)  # of the result to its type
    amax, blocks = x.abs().amax(-1, keepdim=True), x.view(64, 8, 64).abs().amax(-1, keepdim=True)
    bounds = [
        torch.maximum(x.abs() * 2.0**-4, torch.tensor(2.0**-10, device=CUDA)),  # below 2^-6: half a step
        torch.maximum(x.abs() * 2.0**-3, torch.tensor(2.0**-17, device=CUDA)),
        amax / 254 * (1 + 1e-3),
        (blocks / 254 * (1 + 1e-3)).expand(64, 8, 64).reshape(64, 512),
        torch.maximum(x.abs() * 2.0**-4, amax * 2.0**-10 / 448),
        (blocks / 14 * (1 + 1e-3)).expand(64, 8, 64).reshape(64, 512),
        x.abs() * 2.0**-8,
    ]
    for result, bound in zip(results, bounds, strict=False):
        assert ((result - x).abs() <= bound + rounding).all()
        assert (result != x).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "most"), [(Cast("e4m3"), 448.0), (Cast("e5m2"), 57344.0)], ids=str)
def test_casts_to_fp8_saturate_and_keep_what_is_not_finite(kind: Cast, most: float, dtype: torch.dtype) -> None:
    special = [float("inf"), float("-inf"), float("nan"), 1e6, -1e6, 460.0, -0.0, 1.0]
    x = torch.tensor(special, device=CUDA, dtype=dtype).repeat(512)
    both: Any = packs.functions(kind, x)
    (packed,) = torch.compile(both[0], fullgraph=True)(x)
    found = both[1]((packed,)).view(512, -1)
    assert found[:, :3].isnan().all()
    assert (found[:, 3] == most).all()
    assert (found[:, 4] == -most).all()
    assert (found[:, 5] == 448.0).all()
    assert (found[:, 6:] == torch.tensor([0.0, 1.0], device=CUDA)).all()


def test_a_mask_comes_back_from_its_bits() -> None:
    x = torch.rand(64, 4096, device=CUDA) > 0.5
    both: Any = packs.functions(Bits(), x)
    (packed,) = torch.compile(both[0], fullgraph=True)(x)
    assert packed.shape == (64, 512)
    assert torch.equal(torch.compile(both[1], fullgraph=True)((packed,)), x)


@pytest.mark.parametrize("pack", [Cast("e4m3"), Cast("e4m3", multiply=True), Scaled("int8", per=64)], ids=str)
def test_a_packed_step_is_recorded_and_replayed(pack: Pack) -> None:
    model = block()
    reference = copy.deepcopy(model)
    run, before = compiled(model, saved_tensors=everything(pack)), tree_counts("recordings")
    for _ in range(6):
        x = batch()
        off = error(gradients(model, run, x), gradients(reference, reference, x))
        assert 1e-3 < off < 0.15
    assert tree_counts("recordings") - before >= 2  # forward and backward
    (said,) = accounts()
    assert said.packed >= 5
    assert said.bytes_saved < 0.7 * said.bytes
    explained = str(multigraph_backend.explain())
    assert "recordings on device 0" in explained
    assert str(pack) in explained
    assert multigraph_backend.stats()["unpacked_retries"] == 0
    assert runtime.tree(0).poisons


# ---------------------------------------------------------------- offloading


def test_offloaded_gradients_are_bitwise_the_same_over_a_hundred_steps() -> None:
    model, made = block(blocks=2), copies()
    run = compiled(model, saved_tensors=everything(Offload()), cudagraphs=False)
    plain = compiled(model, cudagraphs=False)
    began, buffers, host = made.copies, 0, 0
    for number in range(100):
        x = batch()
        got, wanted = gradients(model, run, x), gradients(model, plain, x)
        assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True)), number
        buffers, host = buffers or made.copies - began, host or made.host_bytes
    assert buffers > 5
    assert made.copies - began == 100 * buffers
    assert made.host_bytes == host  # the buffers of the first step served all others
    assert made.prefetched > 100
    packed = [said for said in accounts() if said.packed]
    assert len(packed) == 1


def test_a_copy_stream_that_is_late_changes_nothing() -> None:
    """What is overwritten too early, or read too early, shows when copies start long after the step."""
    model, made = block(), copies()
    assert isinstance(made.stream, CudaStream)
    run, plain = (
        compiled(model, saved_tensors=everything(Offload()), cudagraphs=False),
        compiled(model, cudagraphs=False),
    )
    for late in (False, True, True, True):
        x = batch()
        wanted = gradients(model, plain, x)
        torch.cuda.synchronize()
        if late:
            with torch.cuda.stream(made.stream._stream):
                torch.cuda._sleep(CYCLES)
        assert all(torch.equal(one, two) for one, two in zip(gradients(model, run, x), wanted, strict=True))
    assert accounts()[0].packed > 0


def test_what_is_offloaded_is_not_on_the_gpu_between_forward_and_backward() -> None:
    model = block(blocks=2)
    x = batch()
    saved = {}
    for name, rules in (("plain", []), ("offloaded", everything(Offload()))):
        run = compiled(model, saved_tensors=rules, cudagraphs=False)
        gradients(model, run, x)
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run(x).float().square().mean()
        torch.cuda.synchronize()
        saved[name] = torch.cuda.memory_allocated() - before
        loss.backward()
        del loss
    said = [said for said in accounts() if said.packed][-1]  # of the graph that makes no gradient for x
    gone = sum(entry.bytes - entry.bytes_saved for entry in said.tensors if entry.with_ is None and entry.packed)
    assert gone > 0
    assert saved["plain"] - saved["offloaded"] > 0.8 * gone
    assert all(buffer.memory.is_pinned() for buffer in copies()._buffers.values())
    assert min(copies().stream.bytes_per_second()) > 1e9


def test_offloads_cut_recordings_and_both_are_at_work() -> None:
    model, made = block(), copies()
    reference = copy.deepcopy(model)
    run, before, began = compiled(model, saved_tensors=everything(Offload())), tree_counts("recordings"), made.copies
    for _ in range(8):
        x = batch()
        assert error(gradients(model, run, x), gradients(reference, reference, x)) < 0.05
    assert tree_counts("recordings") - before >= 4
    assert made.copies > began
    assert accounts()[0].packed > 3
    explained = multigraph_backend.explain()
    reasons = {cut.reason for graph in explained.graphs for cut in graph.cuts}
    assert cuts.TRANSFER in reasons
    assert cuts.TRANSFER in str(explained)
    assert "offload" in str(explained)
    assert sum(piece.replays for device in explained.recordings for piece in device.pieces) > 8


def test_the_first_layers_are_away_while_the_others_run() -> None:
    """Both peaks are lower by what is offloaded; copies back begin before they are needed, in recordings too."""
    model = torch.nn.Sequential(*[Block(1024, 8) for _ in range(8)]).to(CUDA, torch.bfloat16)
    x = torch.randn(BATCH, 512, 1024, device=CUDA, dtype=torch.bfloat16)
    first = [Rule(Match(module=name), Offload()) for name in ("0", "0.*")]
    made, peaks, results = copies(), {}, {}
    for name, rules in (("plain", []), ("offloaded", first)):
        for cudagraphs in (False, "auto"):
            run = compiled(model, saved_tensors=rules, cudagraphs=cudagraphs)
            began, begun = made.copies, made.prefetched
            for _ in range(4):
                results[name, cudagraphs] = gradients(model, run, x)
            count = (made.copies - began) // 4
            assert (count > 3) == bool(rules)  # a block's statistics are kept
            assert (made.prefetched - begun > 2 * count) == bool(rules)
            if not cudagraphs:
                peaks[name] = peaks_of(model, run, x)
    for key in (False, "auto"):  # cuDNN's backward of attention adds up in any order
        for one, other in zip(results["plain", key], results["offloaded", key], strict=True):
            assert (one - other).float().norm() <= 1e-2 * one.float().norm()
    said = next(said for said in accounts() if said.packed)
    gone = sum(entry.bytes for entry in said.tensors if entry.packed == "offload" and entry.with_ is None)
    for before, after in zip(peaks["plain"], peaks["offloaded"], strict=True):
        assert before - after > 0.8 * gone


def test_offloads_between_the_norms_of_many_rows() -> None:
    """Their backward reduces rows and columns: in one kernel where nothing is cut, and the end of it behind a cut."""
    model = torch.nn.Sequential(*[Block(1024, 8) for _ in range(3)]).to(CUDA, torch.bfloat16)
    before = tree_counts("recordings")
    results = []
    for rules in ([], [Rule(Match(module=name), Offload()) for name in ("0", "0.*")]):
        run = compiled(model, saved_tensors=rules)
        for seed in range(4):
            torch.manual_seed(seed)
            results.append(gradients(model, run, torch.randn(16, 512, 1024, device=CUDA, dtype=torch.bfloat16)))
    assert any(said.packed for said in accounts())
    assert tree_counts("recordings") > before
    for plain, offloaded in zip(results[:4], results[4:], strict=True):
        for one, other in zip(plain, offloaded, strict=True):
            assert (one - other).float().norm() <= 1e-2 * one.float().norm()


def test_keys_that_are_repeated_for_attention_stay_until_they_are_copied() -> None:
    model = torch.nn.Sequential(*[Grouped(1024, 16, 4) for _ in range(8)]).to(CUDA, torch.bfloat16)
    first = [Rule(Match(module=name), Offload()) for name in ("0", "0.*")]
    run, plain = (compiled(model, saved_tensors=rules, cudagraphs=False) for rules in (first, []))
    for _ in range(3):
        x = torch.randn(4, 2048, 1024, device=CUDA, dtype=torch.bfloat16)
        for one, other in zip(gradients(model, run, x), gradients(model, plain, x), strict=True):
            assert (one - other).float().norm() <= 1e-2 * other.float().norm()
    assert any(said.packed for said in accounts())


def peaks_of(model: torch.nn.Module, run: Callable[..., Any], x: torch.Tensor) -> tuple[int, int]:
    """Bytes allocated at most while the forward runs, and while the backward does, above those before: recordings of
    other code have some."""
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = run(x).float().square().mean()
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    return forward - before, torch.cuda.max_memory_allocated() - before


def test_inside_a_capture_of_the_user() -> None:
    model = block(torch.float32)
    run, plain = (
        compiled(model, saved_tensors=everything(Offload()), cudagraphs=False),
        compiled(model, cudagraphs=False),
    )
    x = batch(torch.float32)

    def step(function: Callable[..., Any]) -> None:
        model.zero_grad(set_to_none=True)
        function(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(run)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x).square().mean().backward()
    recorded = [p.grad for p in model.parameters()]
    for _ in range(3):
        x.normal_()
        graph.replay()
        got = [value.clone() for value in recorded]
        step(plain)
        torch.testing.assert_close(got, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-5)
    assert accounts()[0].packed > 0


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("pack", [Scaled("int8", per=64), Offload()], ids=str)
def test_backward_twice_and_checkpointing(pack: Pack) -> None:
    inner, outer = block(torch.float32), block(torch.float32)
    model = torch.nn.ModuleList([inner, outer])
    reference = copy.deepcopy(model)

    def program(parts: Any) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = torch.utils.checkpoint.checkpoint(parts[0], x, use_reentrant=False)
            result = parts[1](y)
            assert isinstance(result, torch.Tensor)
            return result

        return run

    run, eager, before = (
        compiled(program(model), saved_tensors=everything(pack)),
        program(reference),
        tree_counts("recordings"),
    )
    for _ in range(4):
        x = batch(torch.float32)
        found: list[list[torch.Tensor]] = []
        for function, of in ((run, model), (eager, reference)):
            of.zero_grad()
            loss = function(x).square().mean()
            loss.backward(retain_graph=True)
            first = [p.grad.clone() for p in of.parameters()]
            loss.backward()
            found.append(first)
            torch.testing.assert_close([p.grad for p in of.parameters()], [2 * value for value in first])
        bound = 1e-3 if isinstance(pack, Offload) else 0.1
        assert all((one - two).norm() <= bound * two.norm() for one, two in zip(*found, strict=True))
    assert tree_counts("recordings") > before
    assert accounts()[0].packed > 0


def test_a_budget_is_kept_in_memory() -> None:
    model = block(blocks=2)
    reference = copy.deepcopy(model)
    x = batch()
    saved = []
    for budget in (1.0, 0.5, 0.1):
        run = compiled(
            model, saved_tensors=everything(Offload()), saved_tensors_budget=budget, cudagraphs=False
        )  # fmt: skip
        assert error(gradients(model, run, x), gradients(reference, reference, x)) < 0.05
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run(x).float().square().mean()
        torch.cuda.synchronize()
        saved.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss
    assert saved[0] > saved[1] > saved[2]
    # each budget has a graph with a gradient for x, and one without
    assert sum("budget" in str(said.budget) for said in accounts()) == 2 * 3


# ---------------------------------------------------------------- a memory goal, and packs on their way to the host


@pytest.mark.parametrize("recorded", [False, "auto"], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("pack", [Scaled("int8"), Scaled("int4", per=64), Cast("e4m3")], ids=str)
def test_what_is_packed_for_the_host_comes_back_as_packed(pack: Pack, recorded: Any) -> None:
    model, x = block(blocks=3), batch()
    results, before = [], tree_counts("recordings")
    for asked in (pack, Offload(pack)):
        fresh()
        run = compiled(model, saved_tensors=everything(asked), cudagraphs=recorded)
        results.append([gradients(model, run, x) for _ in range(4)][-1])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert any(entry.bytes_on_host for said in accounts() for entry in said.tensors)
    assert (tree_counts("recordings") > before + 2) == bool(recorded)  # copies to the host lie between them


def test_a_step_within_a_memory_goal_takes_no_more_of_the_device() -> None:
    model, x = block(blocks=8), batch()

    def peak(run: Callable[..., Any]) -> int:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)  # the weights stay as they are
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            run(batch()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    plain, wanted = peak(compiled(model, cudagraphs=False)), gradients(model, model, x)
    for part in (0.98, 0.94):  # the reckoned peak is above the measured one: far below that, no plan meets a goal
        fresh()
        goal = int(part * plain)
        run = compiled(model, cudagraphs=False, memory_goal=goal)
        measured = peak(run)
        plans = [said.memory for said in accounts() if said.memory is not None]
        said = "\n".join(line for plan in plans for line in plan.lines())
        assert plans
        assert all(plan.missed == 0 for plan in plans), said
        assert measured <= goal, f"{measured} bytes\n{said}"
        assert error(gradients(model, run, x), wanted) < 0.1


# ---------------------------------------------------------------- kernels


def test_a_long_row_is_read_once_for_its_pack() -> None:
    rows, columns = 512, 3000

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ w).float().square().mean()

    x = torch.randn(rows, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64, columns, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.autograd.grad(program(x, w), [x, w])
    rule = Rule(Match(min_bytes=rows * columns * 2), Scaled("int8", per="row"))
    step = compiled(program, saved_tensors=[rule], cudagraphs=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: torch.autograd.grad(step(x, w), [x, w]))
    of_rows = [part for code in codes for part in code.split("@triton_heuristics.")[1:] if "*i8" in part]
    finding = [part for part in of_rows if "max2(" in part]
    assert [part.split("(")[0] for part in finding] == ["persistent_reduction"]
    for got, want in zip(torch.autograd.grad(step(x, w), [x, w]), wanted, strict=True):
        assert float((got.float() - want.float()).norm() / want.float().norm()) < 0.02


def test_scales_of_blocks_keep_the_peak_of_the_backward() -> None:
    def peak(pack: Pack) -> int:
        """Of a backward, above what is there before it."""
        model, x = block(blocks=6), batch()
        step = compiled(model, saved_tensors=[Rule(Match(min_bytes=x.numel() * 2), pack)], cudagraphs=False)
        for _ in range(2):
            model.zero_grad()
            loss = step(x).float().square().mean()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss.backward()
            torch.cuda.synchronize()
            found = torch.cuda.max_memory_allocated() - before
        fresh()
        return found

    assert peak(Scaled("int8", per=64)) < 1.1 * peak(Scaled("int8", per="row"))
