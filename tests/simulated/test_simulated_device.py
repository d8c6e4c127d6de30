"""The simulated device does what eager does where the runtime is right, and shows garbage or fails where it is wrong.

Most tests here are a mistake of a runtime, made on purpose.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils._python_dispatch import _disable_current_modes

from multigraph_backend.cudagraphs.devices.device import Captured, CaptureFailed, DeviceFailed, Layout
from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.devices.simulated.memory import Memory, Outside


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


def capture(device: SimulatedDevice, function: Callable[[], Any]) -> Captured:
    """All that `function` returns is output."""
    return device.capture(function, lambda result: [result] if isinstance(result, torch.Tensor) else result)


def is_garbage(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


# ---------------------------------------------------------------- recordings compute what eager computes

X = torch.linspace(-2, 2, 32).reshape(4, 8)
W = torch.linspace(1, -1, 64).reshape(8, 8)
INDEX = torch.tensor([3, 0, 0, 2])


def views_of_views(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    y = (x + 1).t()[2:, ::2]
    return [y.reshape(-1), y.unsqueeze(0).expand(3, 6, 2) * 2, y.unflatten(0, (2, 3)).transpose(0, 1) + 0]


def in_place(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x.clone()
    row = y[1]
    row.mul_(3)
    y[:, 2:4] = 7
    y.t().add_(1)
    torch.mul(x, 2, out=y[:])
    torch._foreach_add_([y, row], 0.5)
    flipped = (x + 2).t_().unsqueeze_(0)
    return [y, row - 1, flipped]


def reductions(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    values, indices = x.max(dim=1)
    return [x.sum(), x.mean(0, keepdim=True), values, indices, x.argsort(1)[:, 0], x.cumsum(1), torch.var(x, 0)]


def networks(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    y = torch.nn.functional.linear(x, w, w[0])
    y = torch.nn.functional.layer_norm(torch.nn.functional.gelu(y), (8,))
    q = y.reshape(1, 2, 4, 4)
    y = torch.nn.functional.scaled_dot_product_attention(q, q * 0.5, q + 1, is_causal=True)
    return [torch.softmax(y, -1), torch.nn.functional.embedding(INDEX, w), w[INDEX], w.gather(0, INDEX[None])]


def with_constants(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    y = torch.where(x > 0, 1.0, torch.full_like(x, 2)) + torch.arange(8) + torch.eye(4, 8)
    return [y, torch.cat([x, torch.zeros(1, 8), y]), torch.stack([x, y], -1), x.to(torch.float64), x > y]


def several_types(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    bits = x.view(torch.int32)
    return [
        bits & 0xFF,
        x.bfloat16() @ w.bfloat16(),
        (x > 0).sum(1),
        torch.complex(x, x) * 2,
        x.to(torch.uint8)[1:, 3:],
    ]


def same_tensor_twice(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x + 1
    z = y.detach()
    z.mul_(y)
    return [y, z]


PROGRAMS = [
    views_of_views, in_place, reductions, networks, with_constants, several_types, same_tensor_twice,
    lambda x, w: [torch.empty(0), x[:0] @ w, x.sum()],
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("<>"))
def test_a_replay_computes_what_eager_computes(device: SimulatedDevice, program: Any, inference: bool) -> None:
    x = X.clone()
    with torch.inference_mode(inference):
        captured = capture(device, lambda: program(x, W))
    nothing_ran = [out for out in captured.result if out.is_floating_point() and out.numel()]
    assert all(map(is_garbage, nothing_ran))
    for scale in (1, -3):
        x.copy_(X * scale)
        captured.graph.replay()
        for out, expected in zip(captured.result, program(X * scale, W), strict=True):
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
            assert out.stride() == expected.stride()


class RandomProgram:
    """Operations drawn by a seed, on tensors of 4x4, some of them views of others; the same at every run."""

    def __init__(self, seed: int, length: int = 25) -> None:
        self.seed, self.length = seed, length

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rng = random.Random(self.seed)
        values = list(inputs)
        for _ in range(self.length):
            a, b = rng.choice(values), rng.choice(values)
            made = rng.choice(
                [
                    lambda a, b: torch.tanh(a),
                    lambda a, b: a + b,
                    lambda a, b: (a @ b).clamp(-2, 2),
                    lambda a, b: a.t(),
                    lambda a, b: a.flatten().view(4, 4) if a.is_contiguous() else a.contiguous(),
                    lambda a, b: torch.cat([a[:2], b[2:]]),
                    lambda a, b: torch.stack([a, b]).select(0, 1),
                    lambda a, b: a.sum(0, keepdim=True).expand(4, 4),
                    lambda a, b: a.clone(),
                    lambda a, b: torch.where(a > b, a, 0.25),
                    lambda a, b: a.softmax(-1),
                    lambda a, b: a.clone().t().mul_(0.5),
                    lambda a, b: a.add_(0.125) if 0 not in a.stride() else a.neg(),
                    lambda a, b: a[1:].sub_(0.5)[:1].expand(4, 4) if 0 not in a.stride() else a.neg(),
                ]
            )(a, b)
            values.append(made)
            if len(values) > 6:
                del values[rng.randrange(len(inputs), len(values))]
        return [values[-1] * 1, values[-2] - 1]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_computes_what_eager_computes(seed: int) -> None:
    device = SimulatedDevice(granularity=[16, 64][seed % 2])
    program = RandomProgram(seed)
    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed + n)) for n in range(2)]
    expected = [tensor.clone() for tensor in inputs]
    captured = capture(device, lambda: program(inputs))
    for _ in range(2):
        outputs = program(expected)
        captured.graph.replay()
        for ours, eager in zip([*inputs, *captured.result], [*expected, *outputs], strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_random_numbers_are_drawn_by_replays_and_not_by_the_capture(device: SimulatedDevice) -> None:
    def program() -> list[torch.Tensor]:
        y = torch.dropout(X, 0.5, True)
        return [y, torch.rand(3), torch.randint(5, (4,)), torch.empty(3).normal_()]

    torch.manual_seed(0)
    captured = capture(device, program)
    drawn = []
    for _ in range(2):
        captured.graph.replay()
        drawn += [tensor.clone() for tensor in captured.result]
    torch.manual_seed(0)
    for ours, eager in zip(drawn, program() + program(), strict=True):
        assert torch.equal(ours, eager)


def test_a_replay_is_not_changed_by_what_is_on_around_it(device: SimulatedDevice) -> None:
    weight = W.clone().requires_grad_()
    captured = device.capture(lambda: (X @ weight).detach(), lambda out: [out])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        captured.graph.replay()
    assert torch.equal(captured.result, (X @ W))


def test_an_operation_without_meta_kernel_is_recorded(device: SimulatedDevice) -> None:
    with torch.library._scoped_library("simulated_test", "FRAGMENT") as library:
        library.define("noisy_double(Tensor x) -> Tensor")
        library.impl("noisy_double", lambda x: torch.rand_like(x) * 0 + x * 2, "CPU")
        torch.manual_seed(0)
        captured = capture(device, lambda: torch.ops.simulated_test.noisy_double(X))
        assert torch.initial_seed() == 0
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(0)))
        captured.graph.replay()
        assert torch.equal(captured.result, X * 2)


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_collectives_run_at_the_replay(device: SimulatedDevice, group: str) -> None:
    captured = capture(device, lambda: functional.wait_tensor(functional.all_reduce(X * 2, "sum", group)) + 1)
    captured.graph.replay()
    assert torch.equal(captured.result, X * 2 + 1)


# ---------------------------------------------------------------- memory of the pool


def test_what_dies_in_a_capture_serves_again_in_it(device: SimulatedDevice) -> None:
    def chain() -> torch.Tensor:
        y = X
        for _ in range(10):
            y = y + 1
        return y

    captured = capture(device, chain)
    assert device.pool_bytes() == 2 * 128
    captured.graph.replay()
    torch.testing.assert_close(captured.result, X + 10)


def test_a_capture_reports_the_blocks_that_stay(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: [X * 1, (X * 2).sum(), X])
    first, second, given = captured.result
    assert captured.blocks == {device.address(first): 128, device.address(second): 64}
    assert captured.freed == frozenset()
    assert device.address(given) == X.data_ptr()
    assert all(address >= 1 << 48 for address in captured.blocks)


def test_a_second_capture_stays_out_of_the_way_of_the_first(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    second = capture(device, lambda: (X * 2) * (first.result * 3))
    assert not set(first.blocks) & set(second.blocks)
    first.graph.replay()
    second.graph.replay()
    assert torch.equal(first.result, X + 1)
    assert torch.equal(second.result, (X * 2) * ((X + 1) * 3))


def test_a_tensor_whose_memory_another_recording_overwrites_shows_it(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    first.graph.replay()
    device.restore(device.empty_state(), ())  # wrong: the user holds first.result
    assert is_garbage(first.result)
    second = capture(device, lambda: X * 5)
    assert set(second.blocks) == set(first.blocks)
    first.graph.replay()
    assert torch.equal(first.result, X + 1)
    second.graph.replay()
    assert torch.equal(first.result, X * 5)


def test_memory_that_a_capture_took_holds_garbage(device: SimulatedDevice) -> None:
    first = capture(device, lambda: (X + 1) * 2)
    first.graph.replay()  # leaves X + 1 in memory that is free
    assert is_garbage(capture(device, lambda: X + 3).result)


def test_a_tensor_that_dies_frees_nothing_after_the_capture(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    address = device.address(captured.result)
    captured.result = None
    again = capture(device, lambda: X + 1)
    assert device.address(again.result) != address
    captured.graph.replay()
    assert torch.equal(device.maker(Layout.of(X))(device.storage_at(address, 128)), X + 1)


def test_restore_is_exact_and_keeps_bytes(device: SimulatedDevice) -> None:
    first = capture(device, lambda: [X + 1, X + 2, X + 3])
    first.graph.replay()
    one, _, three = (device.address(tensor) for tensor in first.result)
    later = capture(device, lambda: X * 2)
    device.restore(first.state, [one, three])
    assert torch.equal(first.result[0], X + 1)
    assert is_garbage(first.result[1])
    assert torch.equal(first.result[2], X + 3)
    assert is_garbage(later.result)
    again = capture(device, lambda: [X * 2, X * 3])
    assert set(again.blocks) == {device.address(first.result[1]), device.address(later.result)}
    device.restore(again.state, [*first.blocks, *again.blocks][:1])
    assert capture(device, lambda: X * 2).blocks.keys() == {device.address(first.result[1])}


def test_restore_wants_blocks_of_the_state_and_a_state_of_the_pool(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    with pytest.raises(AssertionError, match="which the state lacks"):
        device.restore(device.empty_state(), captured.blocks)
    device.new_pool()
    with pytest.raises(AssertionError, match="another pool"):
        device.restore(captured.state, ())


def test_owners_free_their_blocks_in_the_next_capture(device: SimulatedDevice) -> None:
    first = capture(device, lambda: [X + 1, X + 2])
    first.graph.replay()
    kept, dying = map(device.address, first.result)
    device.log.clear()
    owners = device.restore(first.state, [kept, dying], [(kept, 128), (dying, 128)])
    inputs = [device.maker(Layout.of(X))(owner) for owner in owners]
    owners.clear()

    def piece() -> torch.Tensor:
        y = inputs[0] + inputs.pop()
        return y * y + y  # y * y lies where the second input lay

    second = capture(device, piece)
    assert second.freed == {dying}
    assert device.pool_bytes() == 128 * 4
    assert torch.equal(first.result[1], X + 2), "it must hold until the recording has read it"
    second.graph.replay()
    y = (X + 1) + (X + 2)
    assert torch.equal(second.result, y * y + y)
    assert torch.equal(first.result[0], X + 1)
    assert torch.equal(first.result[1], y * y)
    inputs.clear()
    third = capture(device, lambda: X * 2)  # who owned in the last capture does not own in this one
    assert device.address(third.result) != kept


def test_owners_must_be_over_blocks_that_stay(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    address = device.address(captured.result)
    with pytest.raises(AssertionError, match="owners"):
        device.restore(captured.state, (), [(address, 128)])


def test_a_new_pool_leaves_the_old_one_to_its_recordings(device: SimulatedDevice) -> None:
    old = capture(device, lambda: X + 1)
    device.new_pool()
    assert device.generation == 1
    assert device.pool_bytes() == 0
    new = capture(device, lambda: old.result * 2)
    assert not set(old.blocks) & set(new.blocks)
    old.graph.replay()
    new.graph.replay()
    assert torch.equal(old.result, X + 1)
    assert torch.equal(new.result, (X + 1) * 2)
    with pytest.raises(AssertionError, match="in use"):
        device.leave(1)
    device.leave(0)
    assert is_garbage(old.result)
    with pytest.raises(AssertionError, match="was left"):
        old.graph.replay()
    with pytest.raises(AssertionError, match="not in a pool"):
        device.storage_at(device.address(old.result), 128)


# ---------------------------------------------------------------- storages over the pool


def test_a_recording_reads_what_the_user_wrote_to_its_input(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    second = capture(device, lambda: first.result * 2)
    first.graph.replay()
    first.result[1:, 3] = 9
    second.graph.replay()
    expected = X + 1
    expected[1:, 3] = 9
    assert torch.equal(second.result, expected * 2)
    assert torch.equal(first.result, expected)


def test_it_reads_it_also_when_the_tensor_has_died(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    second = capture(device, lambda: first.result * 2)
    first.graph.replay()
    first.result.fill_(9)
    storage = first.result.untyped_storage()  # as the runtime keeps it
    first.result = None
    second.graph.replay()
    assert torch.equal(second.result, torch.full_like(X, 18))
    del storage


def test_what_the_user_did_not_write_is_not_written_back(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    captured = capture(device, lambda: first.result * 1)
    address = device.address(first.result)
    second = device.maker(Layout.of(X))(device.storage_at(address, 128))
    first.graph.replay()
    first.result[0].fill_(1)
    second[2].fill_(2)  # its row 0 is not what the pool holds
    expected = X + 1
    expected[0], expected[2] = 1, 2
    third = device.maker(Layout.of(X))(device.storage_at(address, 128))
    assert torch.equal(third, expected)
    captured.graph.replay()
    assert torch.equal(captured.result, expected)
    assert torch.equal(first.result, expected)
    assert torch.equal(second, expected)


def test_moved_out_memory_keeps_its_bytes(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    captured.graph.replay()
    view, address = captured.result[1], device.address(captured.result)
    captured.result[0] = 5
    storage = captured.result.untyped_storage()
    assert device.move_out(storage)
    assert device.address(view) == view.data_ptr() != address + 32
    assert not device.move_out(storage)
    there = device.maker(Layout.of(X))(device.storage_at(address, 128))
    assert torch.equal(there[0], torch.full((8,), 5.0)), "the old block stays as it is"
    captured.graph.replay()
    device.restore(device.empty_state(), ())
    expected = X + 1
    expected[0] = 5
    assert torch.equal(captured.result, expected)
    assert torch.equal(view, expected[1])
    captured.result.fill_(3)
    assert is_garbage(there)


@pytest.mark.parametrize("how", ["larger", "smaller", "empty", "empty and back"])
def test_a_storage_that_is_resized_stands_for_the_pool_no_more(device: SimulatedDevice, how: str) -> None:
    captured = capture(device, lambda: X + 1)
    captured.graph.replay()
    y, address = captured.result, device.address(captured.result)
    there = device.maker(Layout.of(X))(device.storage_at(address, 128))
    storage = y.untyped_storage()
    mapped = storage.data_ptr()
    if how == "larger":
        y.resize_(64)
    elif how == "smaller":
        storage.resize_(64)
    else:
        storage.resize_(0)
        if how == "empty and back":
            taken = []  # what malloc may give back at once, which nothing on a GPU would
            while storage.resize_(128).data_ptr() == mapped:
                storage.resize_(0)
                taken.append(torch.UntypedStorage(128))
            y.fill_(3)
    assert device.storage_address(storage) == storage.data_ptr() != address
    device.restore(device.empty_state(), ())
    assert is_garbage(there)
    if how in ("larger", "smaller"):
        assert torch.equal(y.flatten()[:16], (X + 1).flatten()[:16])
    elif how == "empty and back":
        assert torch.equal(y, torch.full_like(X, 3))
    captured.graph.replay()
    assert torch.equal(there, X + 1)
    assert not device.move_out(storage)


def test_a_storage_over_memory_of_the_pool_cannot_be_resized(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    with pytest.raises(RuntimeError, match="not resizable"):
        device.storage_at(device.address(captured.result), 128).resize_(256)


def test_a_storage_that_owns_nothing_cannot_be_moved_out(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    storage = device.storage_at(device.address(captured.result), 128)
    assert not device.move_out(storage)
    assert not device.move_out(torch.UntypedStorage(8))
    captured.graph.replay()
    assert torch.equal(device.maker(Layout.of(X))(storage), X + 1)


def test_copies_go_to_where_tensors_lie(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: [X + 1, X + 2])
    one, two = captured.result
    child = capture(device, lambda: one + two)
    outside = torch.zeros(4, 8)
    captured.graph.replay()
    two.fill_(4)
    device.copy([one[1:], outside, two.t()[0]], [X[1:], two, torch.arange(4)])
    child.graph.replay()
    assert torch.equal(one, torch.cat([(X + 1)[:1], X[1:]]))
    assert torch.equal(outside, torch.full((4, 8), 4.0))
    assert torch.equal(two[:, 0], torch.arange(4.0))
    assert torch.equal(child.result, one + two)


def test_addresses(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: (X + 1)[1:, 2:])
    out = captured.result
    [base] = captured.blocks
    assert device.address(out) == base + (8 + 2) * 4
    assert device.storage_address(out.untyped_storage()) == base
    assert device.same_addresses([out, 5, X], [device.address(out), None, X.data_ptr()], [0, 2])
    assert not device.same_addresses([out, X], [device.address(out), X.data_ptr() + 4], [0, 1])
    assert device.same_addresses([], [], [])


def test_the_device_does_not_count_as_a_user_of_pool_memory(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    child = capture(device, lambda: captured.result + 1)
    handle = captured.result.untyped_storage()._cdata
    before = device.use_count(handle)
    for graph in (captured.graph, child.graph):
        graph.replay()
    device.copy([captured.result], [X])
    device.restore(child.state, [*captured.blocks, *child.blocks])
    assert device.use_count(handle) == before
    view = captured.result[0]
    assert device.use_count(handle) == before + 1
    del view
    assert device.use_count(handle) == before


def test_a_made_tensor_is_nobodys_view(device: SimulatedDevice) -> None:
    layout = Layout((2, 3), (1, 2), 1, torch.int16)
    tensor = device.maker(layout)(device.fresh_storage(16))
    assert Layout.of(tensor) == layout
    assert tensor._base is None
    assert tensor.grad_fn is None
    assert (tensor == -1).all(), "fresh memory holds garbage"
    assert device.storage_at(0, 0).nbytes() == device.fresh_storage(0).nbytes() == 0


def test_what_is_on_the_device(device: SimulatedDevice) -> None:
    class Subclass(torch.Tensor):
        pass

    class Weight(torch.nn.Parameter):
        pass

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("a kernel does not see what this one is")

    assert device.is_on_device(torch.nn.Parameter(X))
    assert device.is_on_device(Weight(X))
    assert device.is_on_device(X.as_subclass(Subclass))
    assert not device.is_on_device(torch.Tensor._make_subclass(Wrapped, X))
    assert not device.is_on_device(X.to_sparse())
    assert not device.is_on_device(X.to("meta"))


# ---------------------------------------------------------------- memory outside of the pool


def test_memory_that_died_is_not_read(device: SimulatedDevice) -> None:
    x = X.clone()
    captured = capture(device, lambda: x[1:] + 1)
    captured.graph.replay()
    storage = x.untyped_storage()
    x = x.new_empty(0)
    captured.graph.replay()  # a storage object keeps it
    view = torch.empty(0).set_(storage)
    del storage
    captured.graph.replay()  # a tensor keeps it
    del view
    with pytest.raises(AssertionError, match="has died"):
        captured.graph.replay()


def test_two_recordings_do_not_keep_it_alive_for_each_other(device: SimulatedDevice) -> None:
    x = X.clone()
    graphs = [capture(device, lambda: x + 1).graph for _ in range(2)]
    for graph in graphs:
        graph.replay()
    x = x.new_empty(0)
    for graph in graphs:
        with pytest.raises(AssertionError, match="has died"):
            graph.replay()


# ---------------------------------------------------------------- captures that fail


def wants_a_value() -> Any:
    return (X + 1).sum().item()


def branches() -> Any:
    return X if (X + 1).sum() > 0 else X + 1


def wants_a_size() -> Any:
    return (X + 1).nonzero()


def masks() -> Any:
    return (X + 1)[X > 0]


def compares() -> Any:
    return X + 1 if torch.equal(X + 1, X) else X


def resizes() -> Any:
    return torch.add(X, 1, out=torch.empty(0))


def resizes_in_place() -> Any:
    return torch.empty(3).resize_(100)


def copies_from_the_host() -> Any:
    return X + torch.tensor([1.0] * 8)


def leaves_the_device() -> Any:
    return (X + 1).to("meta")


def raises() -> Any:
    y = X + 1
    raise ZeroDivisionError(f"my own error, {y.shape}")


def has_wrong_shapes() -> Any:
    return (X + 1) @ X


def runs_for_real() -> Any:
    y = X + 1
    with _disable_current_modes():
        y.fill_(1)
    return y


def wants_too_much() -> Any:
    return torch.cat([X + 1] * 10_000)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wants_a_value, r"not permitted when stream is capturing: aten\.(_local_scalar_dense|item)"),
        (branches, r"not permitted when stream is capturing: aten\.(_local_scalar_dense|item)"),
        (wants_a_size, r"not permitted when stream is capturing: aten\.nonzero"),
        (masks, r"not permitted when stream is capturing: aten\.index"),
        (compares, r"not permitted when stream is capturing: aten\.equal"),
        (resizes, "resizes its argument"),
        (resizes_in_place, "resizes its argument"),
        (copies_from_the_host, "outside of the pool that has already died"),
        (leaves_the_device, "on meta"),
        (raises, "my own error"),
        (has_wrong_shapes, "mat1 and mat2|size mismatch"),
        (runs_for_real, "wrote to memory of the pool while it was recorded"),
        (wants_too_much, "OutOfMemoryError: simulated device: no room for 1280000 bytes"),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_a_capture_fails_where_one_on_a_gpu_would(
    device: SimulatedDevice, function: Any, message: str, inference: bool
) -> None:
    with torch.inference_mode(inference), unchanged(device), pytest.raises(CaptureFailed, match=message) as failure:
        capture(device, function)
    assert failure.value.__cause__ is not None


@contextlib.contextmanager
def unchanged(device: SimulatedDevice) -> Iterator[None]:
    """A failed capture leaves no trace: what comes after is as if it had not been tried."""
    device.restore(device.empty_state(), ())
    first = capture(device, lambda: X + 1)
    first.graph.replay()
    after_first, high_water = set(capture(device, lambda: [X * 2, X * 3]).blocks), device.pool_bytes()
    device.restore(first.state, first.blocks)
    yield
    assert not device.capturing()
    assert torch.equal(first.result, X + 1)
    assert device.pool_bytes() == high_water
    second = capture(device, lambda: [X * 2, X * 3])
    assert set(second.blocks) == after_first
    second.graph.replay()
    assert torch.equal(second.result[1], X * 3)
    assert torch.equal(first.result, X + 1)


def test_memory_that_something_else_holds_is_a_leak(device: SimulatedDevice) -> None:
    held = []

    def leaks() -> torch.Tensor:
        y = X + 1
        held.append(y)
        return y * 2

    with unchanged(device), pytest.raises(CaptureFailed, match=r"still held .*: 128 bytes of aten\.add\.Tensor"):
        capture(device, leaks)
    with unchanged(device), pytest.raises(CaptureFailed, match=r"still held"):
        device.capture(lambda: [X + 1, X + 2], lambda result: result[:1])
    assert device.address(held[0]) == held[0].data_ptr(), "what is left is no memory of the pool"


def test_cyclic_garbage_is_no_leak(device: SimulatedDevice) -> None:
    def program() -> torch.Tensor:
        cycle: list[Any] = [X + 1]
        cycle.append(cycle)
        return X + 2

    assert len(capture(device, program).blocks) == 1


def test_a_failed_capture_gives_its_blocks_back_and_the_pool_keeps_the_memory(device: SimulatedDevice) -> None:
    with pytest.raises(CaptureFailed):
        capture(device, raises)
    assert device.calls("allocate") == [128]
    assert device._pool.arena.blocks == {}
    assert device.pool_bytes() == 128


def test_errors_in_the_choice_of_outputs_are_the_cause(device: SimulatedDevice) -> None:
    with unchanged(device), pytest.raises(CaptureFailed) as failure:
        device.capture(lambda: X + 1, lambda result: [][0])
    assert isinstance(failure.value.__cause__, IndexError)


def test_an_interrupt_passes_and_leaves_the_pool_as_it_was(device: SimulatedDevice) -> None:
    def interrupted() -> torch.Tensor:
        _ = X + 1
        raise KeyboardInterrupt

    with unchanged(device), pytest.raises(KeyboardInterrupt):
        capture(device, interrupted)


def test_what_owners_freed_is_back_after_a_failed_capture(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    first.graph.replay()
    owners = device.restore(first.state, first.blocks, [(device.address(first.result), 128)])

    def program() -> torch.Tensor:
        owners.clear()
        _ = X + 1
        raise RuntimeError("no")

    with pytest.raises(CaptureFailed):
        capture(device, program)
    assert torch.equal(first.result, X + 1)
    assert not set(capture(device, lambda: X + 2).blocks) & set(first.blocks)


def test_nothing_of_the_driver_runs_inside_a_capture(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    for call in (
        first.graph.replay,
        lambda: device.copy([first.result], [X]),
        lambda: device.restore(first.state, first.blocks),
        lambda: capture(device, lambda: X),
    ):
        with pytest.raises(CaptureFailed, match="not permitted when stream is capturing"):
            capture(device, call)


# ---------------------------------------------------------------- injected failures


@pytest.mark.parametrize("call", ["capture_begin", "allocate", "launch", "capture_end"])
def test_an_injected_failure_of_a_capture(device: SimulatedDevice, call: str) -> None:
    with unchanged(device):
        device.fail_at(call)
        with pytest.raises(CaptureFailed, match=f"injected failure of {call}") as failure:
            capture(device, lambda: (X + 1) * 2)
        assert isinstance(failure.value.__cause__, torch.OutOfMemoryError if call == "allocate" else DeviceFailed)


@pytest.mark.parametrize("call", ["allocate", "launch"])
def test_a_failure_can_come_later(device: SimulatedDevice, call: str) -> None:
    with unchanged(device):
        device.fail_at(call, after=2)
        device.log.clear()
        with pytest.raises(CaptureFailed):
            capture(device, lambda: (X + 1) * 2 - 3)
        assert len(device.calls(call)) == 3


@pytest.mark.parametrize("call", ["replay", "copy", "restore"])
def test_an_injected_failure_outside_of_a_capture_changes_nothing(device: SimulatedDevice, call: str) -> None:
    captured = capture(device, lambda: X + 1)
    captured.graph.replay()
    captured.result.fill_(8)
    calls: dict[str, Callable[[], object]] = {
        "replay": captured.graph.replay,
        "copy": lambda: device.copy([captured.result], [X]),
        "restore": lambda: device.restore(device.empty_state(), ()),
    }
    device.fail_at(call)
    with pytest.raises(DeviceFailed, match=f"injected failure of {call}"):
        calls[call]()
    assert torch.equal(captured.result, torch.full_like(X, 8))
    assert not set(capture(device, lambda: X * 2).blocks) & set(captured.blocks)
    calls[call]()
    assert not torch.equal(captured.result, torch.full_like(X, 8))


def test_there_is_nothing_else_to_fail(device: SimulatedDevice) -> None:
    with pytest.raises(ValueError, match="no driver call 'replays'"):
        device.fail_at("replays")


def test_a_failed_capture_may_cost_the_pool(device: SimulatedDevice) -> None:
    first = capture(device, lambda: X + 1)
    device.failures_spoil_the_pool = True
    with pytest.raises(CaptureFailed):
        capture(device, raises)
    assert device.generation == 1
    second = capture(device, lambda: first.result + X)
    first.graph.replay()
    second.graph.replay()
    assert torch.equal(second.result, X + 1 + X)


def test_the_log_tells_what_was_asked_of_the_driver(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: (X + 1).t() * 2)
    captured.graph.replay()
    assert [call for call, _ in device.log] == [
        "capture_begin", "allocate", "launch", "allocate", "launch", "capture_end", "replay",
    ]  # fmt: skip
    assert device.calls("launch") == ["aten.add.Tensor", "aten.mul.Tensor"]


# ---------------------------------------------------------------- streams


def test_work_on_the_pool_waits_for_the_last_work_on_it(device: SimulatedDevice) -> None:
    captured = capture(device, lambda: X + 1)
    captured.graph.replay()
    device.set_stream(7)
    assert device.stream() == 7
    for work in (
        captured.graph.replay,
        lambda: device.copy([captured.result], [X]),
        lambda: device.move_out(captured.result.untyped_storage()),
        lambda: capture(device, lambda: X + 1),
    ):
        with pytest.raises(AssertionError, match=r"race on the pool: .* on stream 7 .* replay on stream 0"):
            work()
    device.wait_for(0)
    captured.graph.replay()
    device.set_stream(0)
    with pytest.raises(AssertionError, match="race"):
        captured.graph.replay()


def test_each_thread_has_its_stream(device: SimulatedDevice) -> None:
    device.set_stream(3)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(device.stream).result() == 0


def test_capturing_is_of_the_thread_that_captures(device: SimulatedDevice) -> None:
    seen = []

    def program() -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            seen.extend([device.capturing(), pool.submit(device.capturing).result()])
        return X + 1

    capture(device, program)
    assert seen == [True, False]
    assert not device.capturing()
    device.user_captures = True
    assert device.capturing()


def test_a_recording_uses_what_lies_where_memory_outside_lay_that_was_resized() -> None:
    memory = Memory()
    outside = torch.randn(16)
    first = memory.reference(outside)
    assert first.tensor().data_ptr() == outside.data_ptr()
    at = outside.data_ptr()
    outside.untyped_storage().resize_(1 << 22)  # too large for where it lay
    assert outside.data_ptr() != at
    assert first.tensor().data_ptr() == at
    assert isinstance(first.memory, Outside)
    assert not first.memory.dead()
    assert memory.reference(outside).tensor().data_ptr() == outside.data_ptr()
