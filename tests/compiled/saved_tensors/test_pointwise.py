"""What is made pointwise of other saved tensors is not saved: found, computed again, from packed tensors too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import multigraph_backend
from multigraph_backend import Cast, Match, Recompute, Rule, Scaled, saved_hook
from multigraph_backend.saved_tensors.rules import rule_from_json, rule_to_json
from tests.support.saved_tensors.models import Block, accounts, compiled, step
from tests.support.saved_tensors.partitioned import Partitioned, gradients, partition, text
from tests.support.saved_tensors.random_programs import program


@saved_hook
def exactly(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@exactly.unpack
def exactly(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(torch.float32)


AGAIN = Rule(Match(pointwise=True, min_bytes=0), Recompute(from_packed=True))
EXACT = Rule(Match(min_bytes=0), exactly)


def ways(made: Partitioned) -> dict[str, str | None]:
    (said,) = made.accounts
    return {entry.name: entry.packed for entry in said.tensors}


def gated(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


ARGS = (torch.randn(8, 16), torch.randn(16, 32), torch.randn(16, 32), torch.randn(32, 16))


def test_graphs_in_which_a_product_is_computed_from_its_packed_factors() -> None:
    made = partition(gated, [AGAIN, Rule(Match(min_bytes=0), Cast("bf16"))])
    gradients(made.run, *ARGS)
    assert_expected_inline(text(made.forward[0]), """\
primals_1: input
primals_2: input
primals_3: input
primals_4: input
mm = mm(primals_1, primals_3)
silu = silu(mm)
mm_pack_convert_element_type = convert_element_type(mm, torch.bfloat16)
mm_1 = mm(primals_1, primals_2)
mul = mul(silu, mm_1)
mm_1_pack_convert_element_type = convert_element_type(mm_1, torch.bfloat16)
mm_2 = mm(mul, primals_4)
t_1 = t(primals_4)
t_2 = t(primals_1)
t_3 = t(primals_2)
t_5 = t(primals_3)
return mm_2, mm_pack_convert_element_type, mm_1_pack_convert_element_type, t_1, t_2, t_3, t_5
""")  # fmt: skip
    assert_expected_inline(text(made.backward[0]), """\
mm_pack_convert_element_type: input
mm_1_pack_convert_element_type: input
t_1: input
t_2: input
t_3: input
t_5: input
tangents_1: input
mm_unpack_convert_element_type = convert_element_type(mm_pack_convert_element_type, torch.float32)
mul_unpack_silu = silu(mm_unpack_convert_element_type)
mm_1_unpack_convert_element_type = convert_element_type(mm_1_pack_convert_element_type, torch.float32)
mul_unpack_mul = mul(mul_unpack_silu, mm_1_unpack_convert_element_type)
mul_unpack_t = t(mul_unpack_mul)
mm_3 = mm(mul_unpack_t, tangents_1)
mm_4 = mm(tangents_1, t_1)
silu = silu(mm_unpack_convert_element_type)
mul_1 = mul(mm_4, silu)
mul_2 = mul(mm_4, mm_1_unpack_convert_element_type)
mm_5 = mm(t_2, mul_1)
mm_6 = mm(mul_1, t_3)
silu_backward = silu_backward(mul_2, mm_unpack_convert_element_type)
mm_7 = mm(t_2, silu_backward)
mm_8 = mm(silu_backward, t_5)
add = add(mm_6, mm_8)
return add, mm_5, mm_7, mm_3
""")  # fmt: skip


def test_gradients_are_those_without_where_packs_are_exact() -> None:
    made = partition(gated, [AGAIN, EXACT])
    got, wanted = gradients(made.run, *ARGS), gradients(gated, *ARGS)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two)
    assert sorted(map(str, ways(made).values())) == ["None"] * 4 + ["hook exactly"] * 2 + [
        "recompute from what is packed"
    ]


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_with_exact_packs(seed: int) -> None:
    function = program(seed)
    torch.manual_seed(seed)
    args = (torch.randn(8, 16), *(torch.randn(16, 16) / 4 for _ in range(4)))
    made = partition(function, [AGAIN, EXACT], dynamic=seed % 2 == 1)
    got, wanted = gradients(made.run, *args), gradients(function, *args)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    (said,) = made.accounts
    assert said.failed is None
    assert "hook exactly" in ways(made).values()


def test_some_of_the_random_programs_compute_again() -> None:
    counts = []
    for seed in range(24):
        torch.manual_seed(seed)
        args = (torch.randn(8, 16), *(torch.randn(16, 16) / 4 for _ in range(4)))
        made = partition(program(seed), [AGAIN, EXACT])
        gradients(made.run, *args)
        counts.append(list(ways(made).values()).count("recompute from what is packed"))
    assert sum(count > 0 for count in counts) >= 4, counts


def test_without_from_packed_nothing_leans_on_what_is_packed() -> None:
    made = partition(gated, [Rule(AGAIN.match, Recompute()), EXACT])
    gradients(made.run, *ARGS)
    (said,) = made.accounts
    assert "recompute" not in ways(made).values()
    assert any("which the backward does not have" in str(entry.reason) for entry in said.tensors)


def test_a_sum_of_many_saved_tensors_is_not_read_again_for_each_of_its_terms() -> None:
    def sums(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        total = x
        for weight in weights:
            total = total + torch.sin((total @ weight).exp() * total)
        return total

    args = (torch.randn(8, 16) / 4, *(torch.randn(16, 16) / 8 for _ in range(5)))
    made = partition(sums, [AGAIN, EXACT])
    got, wanted = gradients(made.run, *args), gradients(sums, *args)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    copies = [node.name for node in made.backward[0].graph.nodes if "_unpack_" in node.name]
    again = [name for name, way in ways(made).items() if way == "recompute from what is packed"]
    assert again
    assert len(copies) <= 12 * len(again), copies


def test_what_draws_random_numbers_is_not_made_pointwise() -> None:
    def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y + torch.rand_like(y)).sin() * y

    made = partition(noisy, [AGAIN, EXACT])
    gradients(made.run, torch.randn(6, 6), torch.randn(6, 6))
    assert "recompute from what is packed" not in ways(made).values()


def test_a_rule_for_what_is_not_made_pointwise() -> None:
    made = partition(gated, [Rule(Match(pointwise=False, min_bytes=0), Cast("bf16"))])
    gradients(made.run, *ARGS)
    assert [name for name, way in ways(made).items() if way] == ["mm", "mm_1"]


@pytest.mark.slow
def test_compiled_a_block_saves_less_and_its_gradients_are_as_near() -> None:
    model = torch.nn.Sequential(*[Block(64) for _ in range(2)])
    x = torch.randn(4, 96, 64)
    plain = step(model, model, x)
    errors, saved = [], []
    int8 = Rule(Match(), Scaled("int8"))
    for packs in ([int8], [Rule(Match(pointwise=True), AGAIN.pack), int8]):
        torch._dynamo.reset()
        got = step(model, compiled(model, packs), x)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(got, plain, strict=True)))
        said = accounts()[-1]
        saved.append(said.bytes_saved)
        assert said.backward_peak <= 1.01 * said.stock_backward_peak
    assert saved[1] < 0.95 * saved[0]
    assert errors[1] < max(2 * errors[0], 0.05)
    assert "recompute from what is packed" in str(multigraph_backend.explain())
    assert multigraph_backend.stats()["unpacked_retries"] == 0


def test_as_json_and_what_cannot_be_meant() -> None:
    assert rule_from_json(rule_to_json(AGAIN)) == AGAIN
    assert rule_to_json(AGAIN)["pack"] == {"recompute": {"from_packed": True}}
    with pytest.raises(ValueError, match="pointwise must be True or False, got 'yes'"):
        Match(pointwise="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from_packed must be True or False, got 1"):
        Recompute(from_packed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"recompute has no 'from_pack' \(did you mean 'from_packed'"):
        rule_from_json({"pack": {"recompute": {"from_pack": True}}})
