"""Compilers' code over the installed extension, and pools of it while torch's allocator stays."""

from __future__ import annotations

import torch

from multigraph_backend import allocator
from tests.support.gpu.allocator_process import (
    GIB,
    MIB,
    check,
    clean,
    cuda,
    expect,
    out_of_memory,
    room_for,
)

# ---------------------------------------------------------------- compiled: code of compilers over it


@check("compiled")
def inductor_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).cuda()
    run = torch.compile(model)
    for _ in range(3):
        x = cuda(32, 64)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    run(cuda(32, 64)).square().mean().backward()
    gradient = model[0].weight.grad
    expect(gradient is not None and bool(gradient.isfinite().all()))


@check("compiled")
def multigraph_runs_its_variants() -> None:
    import multigraph_backend

    multigraph_backend.reset_stats()

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, -1) * x.shape[0]

    options = {"specialize": [{"x[0]": 8}], "cudagraphs": False}
    run = torch.compile(program, backend="multigraph", dynamic=True, options=options)
    w = cuda(32, 32)
    with torch.no_grad():
        for rows in (8, 5, 8, 5, 8, 5):
            x = cuda(rows, 32)
            torch.testing.assert_close(run(x, w), program(x, w), rtol=1e-4, atol=1e-4)
    stats = multigraph_backend.stats()
    expect(stats["variant_calls"] == 3 and stats["generic_calls"] == 3, stats)
    expect(stats["recordings"] == 0 and stats["failed_recordings"] == 0 and stats["failures"] == 0, stats)


@check("compiled")
def multigraph_captured_by_the_user() -> None:
    run = torch.compile(lambda x: (x * 2).sin() + 1, backend="multigraph", options={"record_small": True})
    x = cuda(64, 64)
    with torch.no_grad():
        run(x)
        run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
    x.copy_(cuda(64, 64))
    graph.replay()
    torch.testing.assert_close(y, (x * 2).sin() + 1, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- pools: torch's allocator stays


@check("pools")
def it_is_too_late_to_install_and_said() -> None:
    torch.cuda.init()
    torch.empty(1, device="cuda")
    status = allocator.install()
    expect(not status and status.usable, status)
    expect(str(status.reason).startswith("too late: CUDA has started"), status.reason)
    expect(torch.cuda.get_allocator_backend() == "native")


@check("pools")
def torch_s_statistics_are_right() -> None:
    clean()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    pool = allocator.pool()
    expect(pool.reason is None, pool.reason)
    with pool:
        tensors = [torch.full((nbytes,), 9, dtype=torch.uint8, device="cuda") for nbytes in (1000, 3 * MIB, 30 * MIB)]
    expect(torch.cuda.memory_allocated() - allocated == 1024 + 33 * MIB)
    expect(pool.reserved_bytes == 2 * MIB + 20 * MIB + 30 * MIB, pool.reserved_bytes)
    expect(torch.cuda.memory_reserved() - reserved == pool.reserved_bytes)
    segments = [entry for entry in torch.cuda.memory_snapshot() if entry["segment_pool_id"] == pool.id]
    expect(sum(entry["total_size"] for entry in segments) == pool.reserved_bytes, segments)
    expect(allocator.memory_allocated() == torch.cuda.memory_allocated())
    outside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    expect(pool.reserved_bytes == 52 * MIB)
    expect(all(int(tensor.sum(dtype=torch.int64)) == 9 * tensor.numel() for tensor in tensors))
    del tensors, outside
    pool.close()
    clean()
    expect(torch.cuda.memory_allocated() == allocated)
    expect(torch.cuda.memory_reserved() == reserved, torch.cuda.memory_reserved() - reserved)
    expect(pool.reserved_bytes == 0, pool.reserved_bytes)


@check("pools")
def a_pool_has_a_limit() -> None:
    pool = allocator.pool(limit=256 * MIB)
    with pool:
        for _ in range(3):
            text = out_of_memory(lambda: torch.empty(GIB, dtype=torch.uint8, device="cuda"))
            expect("CUDA out of memory" in text, text)
            fits = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
            del fits
    outside = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    expect(pool.max_reserved_bytes == 200 * MIB, pool.max_reserved_bytes)
    del outside
    pool.close()


@check("pools")
def a_pool_serves_others_at_out_of_memory() -> None:
    pool = allocator.pool(use_on_oom=True)
    with pool:
        filled = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    address = filled.data_ptr()
    del filled
    with room_for(64 * MIB):
        served = torch.full((GIB // 2,), 5, dtype=torch.uint8, device="cuda")
        expect(served.data_ptr() == address, "not the pool's memory")
        expect(int(served[-1]) == 5)
        del served
    pool.close()


@check("pools")
def a_graph_is_captured_into_a_pool() -> None:
    pool = allocator.pool()
    assert pool.id is not None
    x = cuda(1024, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = torch.relu(x * 3) + 1
    expect(pool.reserved_bytes > 0)
    for _ in range(3):
        x.copy_(cuda(1024, 1024))
        graph.replay()
        torch.testing.assert_close(y, torch.relu(x * 3) + 1)
    del graph, y
    pool.close()
    clean()
    expect(pool.reserved_bytes == 0, pool.reserved_bytes)


@check("pools")
def a_memory_profile_as_servers_take_it() -> None:
    """Weights in a pool, then a run of the model: what is torch's, what is not, and what is left for a cache."""

    def taken() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.current"]
        return reserved, total - free - reserved

    with torch.no_grad():  # the kernels are loaded before anything is counted
        for rows in (16, 4096):
            torch.nn.Linear(2048, 2048, bias=False).cuda()(cuda(rows, 2048))
    clean()
    reserved, others = taken()
    pool = allocator.pool()
    with pool:
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    with torch.no_grad():
        model(cuda(16, 2048))
    torch.cuda.synchronize()
    clean()
    with_weights, others_then = taken()
    expect(weights <= with_weights - reserved <= weights + 64 * MIB, with_weights - reserved, weights)
    # cuBLAS and its kernels may come on top, but not the pool itself
    expect(others_then - others < weights, others_then - others, weights)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    with torch.no_grad():
        model(cuda(4096, 2048))
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before
    activation = 4096 * 2048 * 4
    expect(2 * activation <= peak <= 3 * activation + 64 * MIB, peak, activation)
    del model
    pool.close()
    clean()
    again, _ = taken()
    expect(again - reserved < 64 * MIB, again - reserved)


@check("pools")
def recordings_go_on_beside_a_pool() -> None:
    import multigraph_backend

    multigraph_backend.reset_stats()
    pool = allocator.pool()
    with pool:
        w = cuda(64, 64)
    options = {"record_small": True}
    run = torch.compile(lambda x, w: torch.relu(x @ w) + 1, backend="multigraph", options=options)
    with torch.no_grad():
        for _ in range(5):
            x = cuda(32, 64)
            torch.testing.assert_close(run(x, w), torch.relu(x @ w) + 1, rtol=1e-4, atol=1e-4)
    expect(multigraph_backend.stats()["recordings"] > 0, multigraph_backend.stats())


@check("pools")
def more_pools_than_there_are_slots() -> None:
    pools = [allocator.pool() for _ in range(70)]
    reasons = [pool.reason for pool in pools]
    expect(reasons[0] is None and reasons[-1] is not None, reasons)
    with pools[-1]:
        expect(float(torch.ones(1000, device="cuda").sum()) == 1000)
    for pool in pools:
        pool.close()
    del pool, pools
    clean()
    expect(allocator.pool().reason is None)
