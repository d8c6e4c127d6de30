"""What is packed goes to the host: fewer bytes on the link, the same numbers as packed alone, nothing on the device.

The copy stream is `LateStream`: a copy that nobody waits for has not happened.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from multigraph_backend import Bits, Cast, Keep, Match, Offload, Recompute, Rule, Scaled, saved_hook
from multigraph_backend.options import Options, OptionsError
from multigraph_backend.saved_tensors import packs
from multigraph_backend.saved_tensors.budget import Budget
from multigraph_backend.saved_tensors.offload import operators
from multigraph_backend.saved_tensors.offload.transfers import Transfers
from multigraph_backend.saved_tensors.rules import Pack, rule_from_json, rule_to_json
from tests.support.saved_tensors.late_stream import LateStream, late_stream
from tests.support.saved_tensors.models import Block, Mlp, accounts, compiled, rules, step
from tests.support.saved_tensors.partitioned import everything, gradients, partition
from tests.support.saved_tensors.random_programs import program


@pytest.fixture
def late() -> Iterator[Transfers]:
    with late_stream() as made:
        yield made


@saved_hook
def halves(x: torch.Tensor) -> Any:
    narrow = x.to(torch.bfloat16)
    return {"turned": narrow.t() if x.dim() == 2 else narrow, "again": (narrow, 3), "sum": x.sum(), "nothing": None}


@halves.unpack
def halves(packed: Any) -> torch.Tensor:
    again, three = packed["again"]
    assert three == 3
    turned = packed["turned"]
    assert turned.dim() != 2 or turned.stride(0) == 1  # it lies as it was packed
    return (again + 0 * (turned.t() if turned.dim() == 2 else turned)).to(torch.float32)


PACKS = [Scaled("int8", per=8)]
OTHERS = [
    pytest.param(pack, marks=pytest.mark.slow)
    for pack in (halves, Scaled("int4", per=16), Cast("bf16"), Scaled("e4m3"))
]


@pytest.mark.parametrize("pack", [*PACKS, *OTHERS], ids=str)
def test_gradients_are_bitwise_those_of_the_pack_alone(late: Transfers, pack: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block())
    alone, run = compiled(model, rules(pack)), compiled(model, rules(Offload(pack)))
    for _ in range(3):  # from the second on, buffers serve again
        x = torch.randn(4, 16, 32)
        got, wanted, plain = step(model, run, x), step(model, alone, x), step(model, model, x)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert any(not torch.equal(one, other) for one, other in zip(got[1:], plain[1:], strict=True))
    (one, other) = accounts()
    said, before = (one, other) if any("offload" in str(entry.packed) for entry in one.tensors) else (other, one)
    assert {entry.packed for entry in said.tensors if entry.packed} == {f"offload as {pack}"}
    ours = [entry for entry in said.tensors if entry.packed]
    assert len(ours) > 4
    assert late.copies >= 3 * len({entry.with_ or entry.name for entry in ours})
    assert late.prefetched > 0
    there = sum(entry.bytes_on_host for entry in ours)
    assert 0 < there <= sum(entry.bytes_saved for entry in before.tensors if entry.packed)
    assert sum(entry.bytes_saved for entry in ours) < there / 8
    assert late.host_bytes == there
    assert "on the host, offload as" in "\n".join(said.lines())


def test_each_packed_tensor_is_waited_for_and_comes_back_once(late: Transfers) -> None:
    def sines(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x @ x).sin()
        return x

    parted = partition(sines, everything(Offload(Scaled("int8", per=8), waiting=1, ahead=1)))
    got, wanted = gradients(parted.run, torch.randn(16, 16)), gradients(sines, torch.randn(16, 16))
    assert len(got) == len(wanted)
    forward, backward = parted.forward[0].graph, parted.backward[0].graph
    offloads = forward.find_nodes(op="call_function", target=operators.OFFLOAD)
    reloads = backward.find_nodes(op="call_function", target=operators.RELOAD)
    assert {str(node.args[0].meta["val"].dtype) for node in offloads} == {"torch.int8", "torch.float32"}
    assert len(offloads) == len(reloads) == 2 * sum(entry.packed is not None for entry in parted.accounts[0].tensors)
    settles = forward.find_nodes(op="call_function", target=operators.SETTLE)
    assert [copy for node in settles for copy in node.args[1]] == offloads
    assert all([copy.args[0] for copy in node.args[1]] == node.args[0] for node in settles)
    order = {node: index for index, node in enumerate(forward.nodes)}
    assert all(order[copy] < order[node] for node in settles for copy in node.args[1])
    begins = backward.find_nodes(op="call_function", target=operators.BEGIN)
    begun = [copy for node in begins for copy in node.args[0]]
    assert begun == [node.args[0] for node in reloads if node.args[3]]


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_have_the_gradients_of_the_pack_alone(late: Transfers, seed: int) -> None:
    rng = random.Random(seed)
    function, inner = program(seed), rng.choice([Scaled("int4", per=rng.choice(["row", 3, 8])), Scaled("int8", per=4)])
    matches = [Match(min_bytes=0), Match(min_bytes=0, role="input")][: rng.randint(1, 2)]
    assert isinstance(late.stream, LateStream)
    late.stream.speed = (10.0 ** rng.choice([4, 7, 9]),) * 2
    sent = Offload(inner, waiting=rng.randrange(4), ahead=rng.randrange(4))
    alone, there = (partition(function, [Rule(match, pack) for match in matches]) for pack in (inner, sent))
    x = [torch.randn(8, 16), *(torch.randn(16, 16) / 4 for _ in range(4))]
    got, wanted = gradients(there.run, *x), gradients(alone.run, *x)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    packed, offloaded = ({entry.name for entry in made.accounts[0].tensors if entry.packed} for made in (alone, there))
    assert packed <= offloaded  # what is too small to be packed goes as it is
    assert late.copies >= len(packed) > 0
    assert late.stream.waiting == 0


def test_scales_of_long_rows_stay_on_the_device(late: Transfers) -> None:
    parted = partition(lambda x: (x @ x).sin(), everything(Offload(Scaled("int8"))))
    gradients(parted.run, torch.randn(300, 300))
    (said,) = parted.accounts
    (entry,) = [entry for entry in said.tensors if entry.packed]
    assert (entry.bytes_saved, entry.bytes_on_host) == (4 * 300, 300 * 300)


def test_masks_go_as_bits_and_what_cannot_be_packed_as_it_is(late: Transfers) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x @ x > 0.5, x, x * 0.1)
        return (y @ x).tanh() @ x

    packed = [
        Rule(Match(dtype="bool", min_bytes=0), Offload(Bits())),
        Rule(Match(op="aten::tanh", min_bytes=0), Offload(Bits())),
        *everything(Offload(Cast("float32"))),
    ]
    parted = partition(function, packed)
    x = torch.randn(16, 16)
    got, wanted = gradients(parted.run, x), gradients(function, x)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    (said,) = parted.accounts
    found = {(entry.dtype, entry.packed) for entry in said.tensors if entry.packed}
    assert found == {
        ("bool", "offload as bits"),
        ("float32", "offload as it is, for float32 cannot be packed as bits"),
        ("float32", "offload as it is, for it is float32 already, no wider than float32"),
    }
    masks = [entry for entry in said.tensors if entry.dtype == "bool"]
    assert [(entry.bytes, entry.bytes_saved, entry.bytes_on_host) for entry in masks] == [(256, 0, 32)]


def test_sizes_may_change_and_steps_overlap(late: Transfers) -> None:
    model = Mlp()
    run, alone = (compiled(model, rules(pack), dynamic=True) for pack in (Offload(Scaled("int8")), Scaled("int8")))
    for size in (8, 12, 2, 20):
        xs = [torch.randn(size, 16), torch.randn(size, 16)]
        both = [[call(x) for x in xs] for call in (run, alone)]
        found = []
        for outs in both:
            model.zero_grad()
            for out in reversed(outs):
                out.backward(torch.ones_like(out))
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert late.copies > 0
    assert isinstance(late.stream, LateStream)
    assert late.stream.waiting == 0


def test_within_a_budget_it_is_priced_by_its_packed_bytes(late: Transfers) -> None:
    assert isinstance(late.stream, LateStream)
    late.stream.speed = (1e7, 1e7)
    model = [Rule(Match(min_bytes=0, role="intermediate"), pack) for pack in (Offload(Bits()), Offload(Scaled("int4")))]
    parted = partition(lambda x: (x @ x).sin().exp() @ x, model, wanted=Budget(bytes=0))
    x = torch.randn(64, 64) / 8
    got, wanted = gradients(parted.run, x), gradients(lambda x: (x @ x).sin().exp() @ x, x)
    assert all((one - other).norm() < 0.5 * other.norm() for one, other in zip(got, wanted, strict=True))
    (said,) = parted.accounts
    assert said.budget
    assert said.packed


def test_where_there_is_nowhere_to_offload_to_it_packs_and_stays() -> None:
    torch.manual_seed(0)
    model = Mlp()
    run, alone = compiled(model, rules(Offload(Scaled("int8", per=32)))), compiled(model, rules(Scaled("int8", per=32)))
    x = torch.randn(8, 16)
    got, wanted = step(model, run, x), step(model, alone, x)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    texts = {entry.packed for said in accounts() for entry in said.tensors if entry.packed}
    rows = "int8, scaled per row, for its rows are of 16 elements, no multiple of 32"
    assert texts == {rows, f"{rows}; not offloaded, for it is on the cpu, which has no other memory to offload to"}
    assert all(entry.bytes_on_host == 0 for said in accounts() for entry in said.tensors)


@pytest.mark.parametrize("budget", [None, 0.2])
def test_there_a_budget_counts_it_as_a_pack(budget: float | None) -> None:
    model = Mlp()
    options = {} if budget is None else {"saved_tensors_budget": budget}
    run = compiled(model, [*rules(Offload(halves)), *rules(Offload(Scaled("int8")))], **options)
    step(model, run, torch.randn(8, 16))
    assert any(entry.packed for entry in accounts()[0].tensors)
    assert accounts()[0].failed is None


def test_the_rule_as_json() -> None:
    given = {"match": {"min_bytes": 0}, "pack": {"offload": {"pack": {"scale": "int8", "per": 64}, "waiting": 4}}}
    rule = Rule(Match(min_bytes=0), Offload(Scaled("int8", per=64), waiting=4))
    assert rule_from_json(given) == rule
    assert rule_from_json(json.loads(json.dumps(rule_to_json(rule)))) == rule
    assert rule_from_json({"pack": {"offload": {"pack": "bits"}}}).pack == Offload(Bits())
    assert rule_to_json(Rule(pack=Offload(halves)))["pack"]["offload"]["pack"]["key"] == halves.key
    other = Rule(pack=Offload(Scaled("int8", per=32), waiting=4))
    assert len({json.dumps(rule_to_json(entry)) for entry in (rule, other, Rule(pack=Offload(waiting=4)))}) == 3
    options = Options.build({"saved_tensors": [given]}, environ={})
    assert options.saved_tensors == (rule,)
    assert hash(options) == hash(Options.build({"saved_tensors": [rule]}, environ={}))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Offload(4), r"not 4 \(int\); did you mean waiting=4"),  # type: ignore[arg-type]
        (lambda: Offload(Keep()), "packs with Cast, Scaled, Bits or a saved_hook, not Keep"),  # type: ignore[arg-type]
        (lambda: Offload(Recompute()), "not Recompute"),  # type: ignore[arg-type]
        (lambda: Offload(Offload()), "not Offload"),  # type: ignore[arg-type]
        (lambda: Offload(saved_hook(lambda x: x)), "has no unpack function"),
        (lambda: rule_from_json({"pack": {"offload": {"pack": "keep"}}}), "not Keep"),
        (lambda: rule_from_json({"pack": {"offload": {"pack": {"scale": "int9"}}}}), "did you mean 'int8'"),
        (lambda: rule_from_json({"pack": {"offload": {"pac": "bits"}}}), "did you mean 'pack'"),
    ],
)
def test_errors_name_the_cause_and_the_remedy(made: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made()
    with pytest.raises(OptionsError):
        Options.build({"saved_tensors": [{"pack": {"offload": {"pack": "recompute"}}}]}, environ={})


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (1, 1), (3, 300)], ids=str)
@pytest.mark.parametrize("pack", [Scaled("int8"), Scaled("int4", per=3), Bits(), Cast("bf16"), halves], ids=str)
def test_any_size_comes_back_as_from_the_pack_alone(late: Transfers, shape: tuple[int, ...], pack: Pack) -> None:
    x = torch.randn(shape)
    assert not isinstance(pack, Keep | Offload | Recompute)
    alone, found = packs.functions(pack, x), packs.functions(Offload(pack), x)
    if isinstance(found, str):
        assert isinstance(alone, str)
        assert shape == ()
        return
    copies = found[0](x)
    late.wait([copy for copy in copies if copy.dtype == torch.uint8])
    back = found[1](copies)
    wanted = x if isinstance(alone, str) else alone[1](alone[0](x))
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert torch.equal(back, wanted)
