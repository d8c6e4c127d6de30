"""Offloaded tensors: copies in the right order, buffers that serve again, gradients that are bitwise the same.

The copy stream is `LateStream`: a copy that nobody waits for has not happened.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

import multigraph_backend
from multigraph_backend import Offload, Scaled
from multigraph_backend.capture import from_dynamo, user_code
from multigraph_backend.cudagraphs.partition import cuts
from multigraph_backend.lower import lowering
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.options import Options
from multigraph_backend.saved_tensors import links, output_code
from multigraph_backend.saved_tensors.offload import operators, transfers
from multigraph_backend.saved_tensors.offload.transfers import Transfers
from multigraph_backend.saved_tensors.rules import Match, Rule, rule_from_json, rule_to_json
from tests.support.saved_tensors.late_stream import CPU, LateStream, late_stream
from tests.support.saved_tensors.models import Block, Grouped, Mlp, accounts, compiled, rules, step
from tests.support.saved_tensors.partitioned import everything, gradients, partition, text


@pytest.fixture
def late() -> Iterator[Transfers]:
    with late_stream() as made:
        yield made


def stream(made: Transfers) -> LateStream:
    assert isinstance(made.stream, LateStream)
    return made.stream


# ---------------------------------------------------------------- copies and buffers


def test_a_copy_has_arrived_when_it_is_waited_for_and_not_before(late: Transfers) -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    first, second = late.offload(x), late.offload(y)
    assert first.shape == (4, 32)
    assert stream(late).waiting == 2
    late.wait([first])
    assert stream(late).waiting == 1
    assert torch.equal(first.view(torch.float32), x)
    late.wait([second])
    assert torch.equal(late.reload(first, torch.float32, CPU), x)
    assert late.prefetched == 0
    late.prefetch([second], CPU)
    assert torch.equal(late.reload(second, torch.float32, CPU), y)
    assert late.prefetched == 1


def test_a_buffer_serves_again_when_nobody_has_it_any_more(late: Transfers) -> None:
    held = [late.offload(torch.randn(64)) for _ in range(3)]
    assert stream(late).host == 3
    view = held[1][:4]
    del held
    gc.collect()
    again = [late.offload(torch.randn(64)) for _ in range(2)]
    assert stream(late).host == 3
    assert all(entry.data_ptr() != view.data_ptr() for entry in again)
    late.offload(torch.randn(65))
    assert stream(late).host == 4
    assert late.host_bytes == 3 * 256 + 260


def test_what_was_begun_for_an_earlier_use_of_a_buffer_is_never_handed_out(late: Transfers) -> None:
    """A backward that ends in an error leaves a copy that nobody takes."""
    x, y = torch.randn(8), torch.randn(8)
    held = [late.offload(x), late.offload(y)]
    late.prefetch(held, CPU)  # the second one is never asked for
    late.reload(held[0], torch.float32, CPU)
    del held
    fresh = [torch.randn(8), torch.randn(8)]
    held = [late.offload(entry) for entry in fresh]
    assert stream(late).host == 2
    late.wait(held)
    for entry, host in zip(fresh, held, strict=True):
        assert torch.equal(late.reload(host, torch.float32, CPU), entry)


def test_what_was_begun_at_another_place_is_begun_anew(late: Transfers) -> None:
    x, y = torch.randn(8), torch.randn(8)
    held = [late.offload(x), late.offload(y)]
    late.prefetch(held[1:], CPU)
    stream(late).place = "elsewhere"
    assert torch.equal(late.reload(held[1], torch.float32, CPU), y)


def test_a_tensor_that_is_not_contiguous_and_one_from_elsewhere(late: Transfers) -> None:
    x = torch.randn(8, 4).t()
    host = late.offload(x)
    assert torch.equal(late.reload(host, torch.float32, CPU), x)
    other = torch.randn(4, 4)
    assert torch.equal(late.reload(other.view(torch.uint8), torch.float32, CPU), other)


def test_inside_a_capture_a_buffer_is_given_away_for_good_and_none_is_made(late: Transfers) -> None:
    host = late.offload(torch.randn(8))
    del host
    stream(late).recording = True
    late.offload(torch.randn(8))
    with pytest.raises(RuntimeError, match="run the step once before it is captured"):
        late.offload(torch.randn(8))
    stream(late).recording = False
    late.offload(torch.randn(8))
    assert stream(late).host == 2  # the recording writes into the first one at each replay


def test_hooks_of_the_user_see_copies_that_have_arrived(late: Transfers) -> None:
    x = torch.randn(8)
    host = late.offload(x)
    late.wait([])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        late.wait([host])
    assert stream(late).finished == 1


# ---------------------------------------------------------------- graphs


def sines(x: torch.Tensor) -> torch.Tensor:
    y = x * 3  # none of it is computed again: it is what comes out of a matmul
    for _ in range(4):
        y = (y @ y).sin()
    return y


def test_the_links_of_both_graphs(late: Transfers) -> None:
    stream(late).speed = (1e12, 1e12)
    parted = partition(sines, everything(Offload(waiting=1, ahead=1)))
    x = torch.randn(6, 6)
    got, wanted = gradients(parted.run, x), gradients(sines, x)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    forward, backward = parted.forward[0].graph, parted.backward[0].graph
    offloads = forward.find_nodes(op="call_function", target=operators.OFFLOAD)
    reloads = backward.find_nodes(op="call_function", target=operators.RELOAD)
    assert len(offloads) == len(reloads) > 3
    *earlier, last = forward.find_nodes(op="call_function", target=operators.SETTLE)
    order = {node: index for index, node in enumerate(forward.nodes)}
    let_go = [copy for node in (*earlier, last) for copy in node.args[1]]
    assert let_go == offloads
    for node in (*earlier, last):
        assert node.args[0] == [copy.args[0] for copy in node.args[1]]
        assert all(order[copy] < order[node] for copy in node.args[1])
    assert last.args[2] == earlier != []
    assert last in forward.output_node().args[0]
    begins = backward.find_nodes(op="call_function", target=operators.BEGIN)
    first = min((*begins, *reloads), key=list(backward.nodes).index)
    assert first.args[2 if first in begins else 4][-1].name == last.name
    begun = [copy for node in begins for copy in node.args[0]]
    assert begun == [node.args[0] for node in reloads if node.args[3]] != []
    for node in begins:
        assert all(node in reload.args[3] for reload in reloads if reload.args[0] in node.args[0])
    assert "offload" in text(parted.forward[0])
    (said,) = parted.accounts
    assert said.bytes_saved < said.bytes
    assert {entry.packed for entry in said.tensors if entry.packed} == {"offload"}


@pytest.mark.slow
def test_copies_stay_where_they_were_placed_in_the_code_of_inductor(late: Transfers) -> None:
    """They depend on nothing around them, and Inductor puts what it cannot record first, or last."""
    stream(late).speed = (3e9, 3e9)
    model = torch.nn.Sequential(*[Block() for _ in range(4)])
    first = [Rule(Match(module=name, min_bytes=1024), Offload()) for name in ("0", "0.*")]
    knobs = {"triton.cudagraphs": True, "graph_partition": True, "reorder_for_peak_memory": True}
    run = compiled(model, first, inductor=knobs)
    x = torch.randn(4, 16, 32)
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(force_disable_caches=True):
        got, (forward, backward) = run_and_get_code(step, model, run, x)
    wanted = step(model, compiled(model, []), x)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    count = late.copies
    assert count > 3
    assert late.prefetched > 0

    layers = r"_flash_attention_for_cpu(_backward)?\.default\("
    attention = [found.start() for found in re.finditer(layers, backward)]
    reloads = [found.start() for found in re.finditer(r"multigraph\.reload\.default\(", backward)]
    begins = [found.start() for found in re.finditer(r"multigraph\.begin\.default\(", backward)]
    assert len(attention) == 4
    assert len(reloads) == count
    assert min(reloads) > attention[2]
    assert begins
    assert attention[0] < min(begins)
    assert max(begins) < min(reloads)

    attention = [found.start() for found in re.finditer(layers, forward)]
    offloads = [found.start() for found in re.finditer(r"multigraph\.offload\.default\(", forward)]
    settles = [found.start() for found in re.finditer(r"multigraph\.settle\.default\(\[\w", forward)]
    assert len(offloads) == count
    assert max(offloads) < attention[1]
    assert settles
    assert min(settles) < attention[3]
    assert attention[1] < max(settles)


def test_the_stand_in_sees_a_missing_link(late: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor uses the memory of a tensor again after its last reader: without links that is too early."""
    whole = links.link_forward

    def without(graph: torch.fx.Graph, *arguments: Any) -> torch.fx.Node:
        settled = whole(graph, *arguments)
        for node in graph.find_nodes(op="call_function", target=operators.SETTLE):
            node.update_arg(0, [])
        return settled

    monkeypatch.setattr(links, "link_forward", without)
    monkeypatch.setattr(output_code, "check_offloads", lambda source: None)
    model = torch.nn.Sequential(*[Block() for _ in range(2)])
    x = torch.randn(4, 16, 32)
    run = compiled(model, rules(Offload()))
    with functorch_config.patch(enable_autograd_cache=False):  # this code is for nobody else
        got = [step(model, run, x) for _ in range(2)][-1]
    wanted = step(model, compiled(model, []), x)
    assert accounts()[0].packed > 0
    assert any(not torch.allclose(one, other, equal_nan=False) for one, other in zip(got[1:], wanted[1:], strict=True))


@pytest.mark.slow
def test_what_no_operator_has_given_memory_is_offloaded_and_kept_in_one_buffer(late: Transfers) -> None:
    """Keys that are repeated for attention: views of them, until somebody asks for memory."""
    stream(late).speed = (1e7, 1e7)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Grouped() for _ in range(4)])
    run, plain = compiled(model, rules(Offload(waiting=8))), compiled(model, [])
    for _ in range(3):
        x = torch.randn(4, 16, 32)
        got, wanted = step(model, run, x), step(model, plain, x)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    (said, *_) = accounts()
    assert said.failed is None
    assert said.packed > 20


def test_code_that_keeps_another_buffer_is_compiled_again_without_packs(
    late: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = links.link_forward

    def of_others(graph: torch.fx.Graph, *arguments: Any) -> torch.fx.Node:
        settled = whole(graph, *arguments)
        for node in graph.find_nodes(op="call_function", target=operators.SETTLE):
            with graph.inserting_before(node):
                others = [graph.call_function(torch.ops.aten.neg.default, (entry,)) for entry in node.args[0]]
            for made, entry in zip(others, node.args[0], strict=True):
                made.meta.update(entry.meta)
            node.update_arg(0, others)
        return settled

    monkeypatch.setattr(links, "link_forward", of_others)
    model = Mlp()
    x = torch.randn(8, 16)
    with functorch_config.patch(enable_autograd_cache=False):  # this code is for nobody else
        got = step(model, compiled(model, rules(Offload())), x)
    wanted = step(model, compiled(model, []), x)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert late.copies == 0
    assert re.search(r"the compiled code offloads \w+ and keeps \w+", str(accounts()[0].failed))


def test_a_graph_that_is_only_traced_has_no_code_to_read(late: Transfers) -> None:
    traced = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graph = from_dynamo.capture(gm, example_inputs, user_code.current())
        options, state = Options.build({"saved_tensors": rules(Offload())}), CompileState.take()

        def run(*args: Any) -> Any:
            traced.append(lowering.only_traced(graph, {}, args, options, state))
            return gm.forward(*args)

        return run

    torch.compile(Mlp(), backend=backend)(torch.randn(8, 16))
    assert len(traced) == 1
    assert late.copies == 0


def test_gradients_are_bitwise_the_same_over_a_hundred_steps(late: Transfers) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block() for _ in range(2)])
    offloading_run, plain = compiled(model, rules(Offload())), compiled(model, [])
    buffers = 0
    for number in range(100):
        x = torch.randn(4, 16, 32)
        got, wanted = step(model, offloading_run, x), step(model, plain, x)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        buffers = buffers or stream(late).host
        assert stream(late).host == buffers, number
    assert late.copies == 100 * buffers
    assert late.prefetched > 50 * buffers
    assert stream(late).waiting == 0
    assert accounts()[0].packed > 10


def test_two_steps_at_once_backward_twice_and_one_that_is_never_made(late: Transfers) -> None:
    model = Mlp()
    run, plain = compiled(model, rules(Offload())), compiled(model, [])
    for _ in range(3):
        xs = [torch.randn(8, 16) for _ in range(3)]
        outs, wanted = [run(x) for x in xs], [plain(x) for x in xs]
        del outs[2], wanted[2]
        for out, other in zip(outs, wanted, strict=True):
            for again in (True, False):
                pairs = []
                for value in (out, other):
                    model.zero_grad()
                    value.backward(torch.ones_like(value), retain_graph=again)
                    pairs.append([p.grad.clone() for p in model.parameters()])
                assert all(torch.equal(one, two) for one, two in zip(*pairs, strict=True))
    assert accounts()[0].packed == 3


def test_under_hooks_of_the_user_that_move_what_is_saved(late: Transfers) -> None:
    model = Mlp()
    run, plain = compiled(model, rules(Offload())), compiled(model, [])
    x = torch.randn(8, 16)
    hooks: Any = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with hooks:
        got = step(model, run, x)
    wanted = step(model, plain, x)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert accounts()[0].packed == 3


def test_sizes_may_change(late: Transfers) -> None:
    model = Mlp()
    run, plain = compiled(model, rules(Offload()), dynamic=True), compiled(model, [], dynamic=True)
    for size in (8, 12, 8, 20):
        x = torch.randn(size, 16)
        got, wanted = step(model, run, x), step(model, plain, x)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert accounts()[0].packed == 3


def test_beside_other_packs(late: Transfers) -> None:
    model = Mlp()
    packs = [Rule(Match(op="aten::gelu", min_bytes=0), Offload()), *rules(Scaled("int8"))]
    run = compiled(model, packs)
    for _ in range(3):
        x = torch.randn(8, 16)
        eager = copy.deepcopy(model)
        got, wanted = step(model, run, x), step(eager, eager, x)
        assert all((one - two).norm() < 0.05 * two.norm() for one, two in zip(got[1:], wanted[1:], strict=True))
    assert sorted({entry.packed for entry in accounts()[0].tensors if entry.packed}) == [
        "int8, scaled per row",
        "offload",
    ]
    assert late.copies == 3


def test_where_there_is_nowhere_to_offload_to() -> None:
    model = Mlp()
    run = compiled(model, rules(Offload()))
    x = torch.randn(8, 16)
    eager = copy.deepcopy(model)
    got, wanted = step(model, run, x), step(eager, eager, x)
    torch.testing.assert_close(got, wanted)
    reasons = {entry.reason for entry in accounts()[0].tensors}
    assert "it is on the cpu, which has no other memory to offload to" in reasons


def test_a_backward_that_computes_bytes_on_the_host_keeps_its_tensors(late: Transfers) -> None:
    class Bytes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            return gradient * (y * 10).to(torch.uint8).flip(0)

    parted = partition(lambda x: Bytes.apply(x @ x).sin(), everything(Offload()))
    gradients(parted.run, torch.rand(6, 6))
    (said,) = parted.accounts
    assert said.packed == 0
    assert any("computes bytes on the CPU" in (entry.reason or "") for entry in said.tensors)


def test_no_recording_holds_a_transfer(late: Transfers) -> None:
    parted = partition(sines, everything(Offload()))
    gradients(parted.run, torch.randn(6, 6))
    for gm in (*parted.forward, *parted.backward):
        never = cuts.operators_never_recorded(gm, cuts.CutRules(device_type="cpu"))
        assert set(never.values()) == {cuts.TRANSFER}
        assert never.keys() <= {operators.OFFLOAD, operators.RELOAD, operators.SETTLE, operators.BEGIN}


def test_the_rule_as_json() -> None:
    rule = Rule(Match(min_bytes=0), Offload(waiting=3, ahead=1))
    assert rule_from_json(rule_to_json(rule)) == rule
    assert rule_from_json({"pack": "offload"}) == Rule(Match(), Offload())
    with pytest.raises(ValueError, match="waiting must be a number of tensors"):
        Offload(waiting=-1)
    with pytest.raises(ValueError, match="offload has no 'wait'"):
        rule_from_json({"pack": {"offload": {"wait": 1}}})


def test_nothing_is_left_of_the_stand_in() -> None:
    with late_stream():
        assert "cpu" in transfers.STREAMS
    assert set(transfers.STREAMS) == {"cuda"}
    assert multigraph_backend.Offload is Offload
