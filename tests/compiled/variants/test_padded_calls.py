"""Calls padded up to declared sizes: which graphs are, that results are those of eager, and what is refused and why."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import OptionsError, explain, metrics, stats
from multigraph_backend.padding import calls, probing
from multigraph_backend.region import registry

F = torch.nn.functional
SIZES = [4, 8, 16, "..."]
ROWS = (5, 7, 3, 8, 9, 17)
OF_X = {"pad": {"x[0]": SIZES}, "compiler": "eager"}
WEIGHT, TABLE = torch.randn(6, 6), torch.randn(50, 6)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def padding() -> list[dict[str, Any]]:
    return [region["padding"] for region in explain().to_dict()["regions"] if region["padding"] is not None]


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats [count, 6] of which dimension 0 is dynamic, and integers [count]."""
    x, n = torch.randn(count, 6), torch.randint(0, 6, (count,))
    if count > 1:
        for tensor in (x, n):
            torch._dynamo.mark_dynamic(tensor, 0)
    return x, n


def compiled(function: Callable[..., Any], compiler: str = "eager", **more: Any) -> Any:
    options = {**OF_X, "compiler": compiler, **more}
    return torch.compile(function, backend="multigraph", options=options)


def run(function: Callable[..., Any], rows: Sequence[int] = ROWS, **more: Any) -> dict[str, Any]:
    """Calls as eager's, and the account of the one graph whose size is dynamic."""
    call = compiled(function, **more)
    for count in rows:
        x, n = rows_of(count)
        torch.testing.assert_close(call(x, n), function(x.clone(), n.clone()))
    (account,) = padding()
    return account


PROVEN: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x, n: torch.tanh(x) * 2 + n[:, None],
    "matrix product": lambda x, n: x @ WEIGHT,
    "linear": lambda x, n: F.linear(x, WEIGHT, WEIGHT[0]),
    "norm": lambda x, n: F.layer_norm(x, (6,)),
    "rms norm": lambda x, n: F.rms_norm(x, (6,)),
    "softmax": lambda x, n: x.softmax(-1),
    "sum over the other": lambda x, n: x.sum(1),
    "lookup": lambda x, n: TABLE[n] + F.embedding(n, TABLE) + x,
    "views": lambda x, n: x.view(-1, 2, 3).transpose(1, 2).reshape(x.shape[0], 6),
    "flat": lambda x, n: (x * 2).view(-1),
    "columns": lambda x, n: torch.cat([x[:, 3:], x[:, :3]], 1),
    "behind a token": lambda x, n: torch.cat([WEIGHT, x]),
    "without the first": lambda x, n: x[1:] * 2,
    "without the last": lambda x, n: x[:-1] * 2,
    "every row with every other": lambda x, n: x @ x.t(),
    "the transposed": lambda x, n: (x + 1).t(),
    "positions": lambda x, n: x + torch.arange(x.shape[0])[:, None],
    "one of each row": lambda x, n: x[torch.arange(x.shape[0]), n],
    "some of each row": lambda x, n: x[torch.arange(x.shape[0])[:, None], torch.arange(6)[None, 2:]],  # masks
    "batch of products": lambda x, n: torch.bmm(x.view(-1, 2, 3), x.view(-1, 3, 2)),
    "attention within rows": lambda x, n: F.scaled_dot_product_attention(*(x.view(-1, 1, 3, 2),) * 3),
    "sorted rows": lambda x, n: x.sort(1).values,
    "picked": lambda x, n: x.gather(1, n[:, None]),
    "emptied": lambda x, n: x.clone().zero_() + n[:, None],
    "a constant": lambda x, n: (x * 2, WEIGHT.sum()),
    "the first row": lambda x, n: x[0] * 2,
    "written parts": lambda x, n: x.clone().index_fill_(1, torch.tensor([1, 3]), 2.0),
    "several": lambda x, n: (x + 1, n * 2, x.sum(1), (x * 2).t()),
}  # fmt: skip

MIXING: dict[str, tuple[Callable[..., Any], str]] = {
    "mean": (lambda x, n: x - x.mean(0), "aten::mean works along the padded dimension"),
    "sum": (lambda x, n: x * x.sum(), "aten::sum"),
    "softmax": (lambda x, n: x.softmax(0), "aten::_softmax works along the padded dimension"),
    "cumsum": (lambda x, n: x.cumsum(0), "aten::cumsum works along the padded dimension"),
    "sort": (lambda x, n: x.sort(0).values, "aten::sort"),
    "flip": (lambda x, n: x.flip(0), "aten::flip"),
    "roll": (lambda x, n: x.roll(1, 0), "aten::roll"),
    "product over rows": (lambda x, n: x.t() @ x, "aten::mm adds up along the padded dimension"),
    "attention over rows": (lambda x, n: F.scaled_dot_product_attention(x[None], x[None], x[None]), "padded dimension"),
    "the size as a number": (lambda x, n: x / x.shape[0], "takes the padded size as a number"),
    "the size as a tensor": (lambda x, n: x * torch.full((), x.shape[0]), "takes the padded size as a number"),
    "positions from the end": (lambda x, n: x[:, 0] + torch.arange(x.shape[0], 0, -1), "the padded size as a number"),
    "the last row": (lambda x, n: x[-1] * 2, "aten::select reads a row counted from the end"),
    "rows by number": (lambda x, n: x[n.clamp(0, 1)], "reads rows of the padded dimension by numbers"),
    "rows by numbers of fewer": (lambda x, n: x[torch.arange(x.shape[0])[:-1, None], n[None, :1]], "reads rows"),
    "rows behind rows": (lambda x, n: torch.cat([x, WEIGHT]), "aten::cat puts rows behind padded ones"),
    "transposed and flat": (lambda x, n: x.t().reshape(-1), "padded rows lie between real ones"),
    "halves": (lambda x, n: torch.cat([x, x]).view(2, -1)[1], "aten::cat"),
    "scattered rows": (lambda x, n: x.index_add(0, n.clamp(0, 1), x), "writes by numbers along"),
    "random numbers": (lambda x, n: x + torch.rand_like(x), "draws random numbers"),
    "dropout": (lambda x, n: F.dropout(x, 0.5, True), "dropout"),
    "batch norm in training": (lambda x, n: F.batch_norm(x, None, None, training=True), "batch_norm"),
    "a table by position": (lambda x, n: x + TABLE[torch.arange(x.shape[0])], "takes positions as indices"),
    "every second row": (lambda x, n: x[::2] * 2, "makes a dimension of size"),
    "a cache that is written": (lambda x, n: TABLE.index_put_((n,), x * 0 + TABLE[n]), "index_put"),
    "memory by its place": (lambda x, n: torch.as_strided(x, (x.shape[0],), (6,)) * 2, "reads memory by its place"),
    "a changed row of another": (lambda x, n: (WEIGHT.clone().index_put_((n,), x), x)[0], "aten::index_put"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_rows_that_are_apart_are_padded(name: str) -> None:
    account = run(PROVEN[name])
    assert account["state"] == "proven", account
    assert account["calls"] == 5  # all sizes but the declared one
    assert account["operators"] == []


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_others_are_refused_with_the_operator_and_the_line(name: str) -> None:
    function, said = MIXING[name]
    if "random" in name or name == "dropout":
        call = compiled(function)
        for rows in ROWS:
            call(*rows_of(rows))
        (account,) = padding()
    else:
        account = run(function)
    assert (account["state"], account["calls"]) == ("refused", 0)
    assert said in account["reason"]
    assert "test_padded_calls.py:" in account["reason"]


def test_convolutions_over_a_batch() -> None:
    """torch chooses kernels by the batch size, so that there are several graphs, each with guards of its own."""
    function = compiled(lambda x, n: F.conv1d(x[:, None], WEIGHT[None, :1, :3]))
    for count in ROWS:
        x, n = rows_of(count)
        torch.testing.assert_close(function(x, n), F.conv1d(x[:, None], WEIGHT[None, :1, :3]))
    assert {account["state"] for account in padding()} == {"proven"}
    assert stats()["padded_calls"] >= 3


def test_the_report_names_the_operator_and_the_line_of_the_user() -> None:
    def model(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = x @ WEIGHT
        return y / y.amax(0)

    run(model)
    line = model.__code__.co_firstlineno + 2
    said = f"x[0]: aten::amax works along the padded dimension: `return y / y.amax(0)` (test_padded_calls.py:{line})"
    assert said in str(explain())
    assert stats()["refused_padding"] == 1


class Block(torch.nn.Module):
    """A small decoder step: embedding, attention within each row, norms, a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.project = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 50)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(self.embed(ids) + torch.sin(positions.float())[..., None])
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(-2)
        return {"logits": self.out(F.gelu(h)), "last": h[:, -1]}


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_model_at_random_batch_sizes_runs_at_declared_sizes_alone(compiler: str) -> None:
    model = Block().eval()
    seen: set[int] = set()

    def call(batch: int) -> None:
        ids = torch.randint(0, 50, (batch, 5))
        mask = torch.rand(batch, 5) > 0.3
        mask[:, 0] = True
        given = (ids, torch.arange(5).expand(batch, 5).clone(), mask)
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(run_(*given), model(*given), rtol=1e-4, atol=1e-5)

    options = {"pad": {"ids[0]": [2, 4, 8, "..."]}, "specialize": [{"ids[0]": [2, 4, 8, 16, 32]}], "compiler": compiler}
    run_ = torch.compile(model, backend="multigraph", options=options)
    for batch in torch.randint(2, 33, (40,), generator=torch.Generator().manual_seed(0)).tolist():
        call(batch)
        seen.add(batch)
    (account,) = padding()
    assert (account["state"], account["sizes"]) == ("proven", {"ids[0]": "2, 4, 8, ..."})
    assert account["calls"] >= 30
    assert len(seen) > 15
    counts = stats()
    assert counts["generic_calls"] == counts["generic_compiled"] == 0  # every call had a declared size
    assert counts["variant_calls"] == 40
    assert counts["variants_compiled"] <= 5


def test_declared_pads_to_the_sizes_of_variants() -> None:
    call = compiled(PROVEN["linear"], pad="declared", specialize=[{"x[0]": [4, 8]}, {"x[0]": {"min": 100}}])
    for rows in (3, 6, 8, 9):
        x, n = rows_of(rows)
        torch.testing.assert_close(call(x, n), PROVEN["linear"](x, n))
    (account,) = padding()
    assert (account["sizes"], account["calls"]) == ({"x[0]": "4, 8"}, 2)
    assert (stats()["variant_calls"], stats()["generic_calls"]) == (3, 1)


# ---------------------------------------------------------------- what a call gets


@pytest.mark.parametrize("windows", [(), ROWS[:1], ROWS[1:], ROWS])
def test_outputs_are_as_without_padding(windows: Sequence[int]) -> None:
    """Sizes, strides, types, and which of them are one memory; also where inputs are windows into other memory,
    at some calls or all."""

    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.t(), y[:, 1], (x + 1).t().contiguous(), n.clone(), x.view(-1), x, y.view(-1), x[1:, 2:4]

    call = compiled(function)
    for rows in ROWS:
        x, n = rows_of(rows)
        if rows in windows:
            x = torch.cat([x, x, x])[rows - 1 : 2 * rows - 1]
            torch._dynamo.mark_dynamic(x, 0)
        got, wanted = call(x, n), function(x, n)
        torch.testing.assert_close(got, wanted)
        assert [out.stride() for out in got] == [out.stride() for out in wanted]
        assert [out.storage_offset() for out in got] == [out.storage_offset() for out in wanted]
        assert [out.is_contiguous() for out in got] == [out.is_contiguous() for out in wanted]
        got[5][0] = 77.0  # a view of the input is the input's memory
        assert x[0, 0] == 77.0
        assert got[6] is x
        got[0][1, 1] = -5.0  # views of one result share it
        assert (got[1][1, 1], got[2][1], got[7][7]) == (-5.0, -5.0, -5.0)
    assert sum(account["calls"] for account in padding()) == 5


def test_outputs_that_share_memory_and_cannot_be_cut_are_refused() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).t().contiguous()
        return y, y[0]

    assert "shares memory with another" in run(function)["reason"]


def test_numbers_made_of_the_size_are_those_of_the_call() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[Any, ...]:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1, y.shape[0], 2 * x.shape[0] + 1

    call = compiled(function)
    for rows in ROWS:
        x, n = rows_of(rows)
        got, wanted = call(x, n), function(x, n)
        assert got[1:] == wanted[1:]
        torch.testing.assert_close(got[0], wanted[0])
    assert stats()["padded_calls"] > 0


def test_inputs_of_every_layout() -> None:
    call = compiled(lambda x, n: x * 2 + n[:, None], "aot_eager")
    for rows in ROWS:
        n = torch.randint(0, 6, (rows,))
        layouts = (
            torch.randn(rows, 6), torch.randn(6, rows).t(), torch.randn(rows, 12)[:, :6], torch.randn(rows, 12)[:, ::2],
            torch.randn(2 * rows, 6)[::2], torch.randn(rows + 3, 6)[3:], torch.randn(1, 6).expand(rows, 6),
        )  # fmt: skip
        for x in layouts:
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch._dynamo.maybe_mark_dynamic(n, 0)
            torch.testing.assert_close(call(x, n), x * 2 + n[:, None])
    assert stats()["padded_calls"] > 20


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool]
)
def test_types_of_inputs(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        return x.clone(), x == x[0]

    call = compiled(function)
    for rows in ROWS:
        x, n = rows_of(rows)
        x = (x * 3).to(dtype)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(call(x, n), function(x, n))
    assert padding()[0]["calls"] == 5


def test_sizes_beyond_the_largest_and_zero_and_one_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    call = compiled(PROVEN["linear"], pad={"x[0]": [4, 8]})
    for rows in (5, 9, 20, 1, 0):
        x, n = rows_of(rows)
        torch.testing.assert_close(call(x, n), PROVEN["linear"](x, n))
    assert stats()["padded_calls"] == 1
    notes = [note for region in explain().to_dict()["regions"] for note in region["notes"]]
    assert any("x[0] is 1 in this graph, and such calls are not padded" in note for note in notes)
    warned = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert not [text for text in warned if "in this graph" in text]


def test_a_guard_of_the_program_that_does_not_hold_for_the_padded_size_is_kept() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] <= 6 else x * 3

    call = compiled(function)
    for rows in (5, 6, 3, 7, 9, 10, 5):
        x, n = rows_of(rows)
        torch.testing.assert_close(call(x, n), function(x, n))
    assert {entry["calls"] for entry in padding()} == {1, 3}  # 3 to 4; 7, 9 and 10


def test_a_bound_of_a_mark_is_kept() -> None:
    call = compiled(PROVEN["linear"])
    for rows in (5, 9, 3):
        x, n = torch.randn(rows, 6), torch.zeros(rows)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=12)
        torch._dynamo.mark_dynamic(n, 0)
        torch.testing.assert_close(call(x, n), PROVEN["linear"](x, n))
    assert stats()["padded_calls"] == 2  # 9 would be 16


def test_numbers_that_only_padded_rows_would_have_are_no_indices_and_no_divisors() -> None:
    """A row and the one before it: behind the real ones both are the same row, which no call needs have."""
    steps = {
        "differences": (lambda x, n: TABLE[n[1:] - n[:-1] - 1], "takes positions as indices"),
        "quotients": (lambda x, n: 7 // (n[1:] - n[:-1]), "divides integers by positions"),
        "behind a token": (lambda x, n: TABLE[torch.cat([n[:1], n])[1:] - n], "takes positions as indices"),
        "positions": (lambda x, n: n % (torch.arange(n.shape[0]) - 20), "divides integers by positions"),
    }
    for name, (function, said) in steps.items():
        torch._dynamo.reset()
        call = compiled(function, pad={"n[0]": SIZES})
        for rows in (5, 7, 9):
            x, n = rows_of(rows)
            n = torch.arange(rows) * 2
            torch._dynamo.mark_dynamic(n, 0)
            torch.testing.assert_close(call(x, n), function(x, n))
        assert said in padding()[0]["reason"], name
    assert stats()["padded_calls"] == 0


def test_a_size_that_only_strides_have() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        return x * 2, n + 1

    call = compiled(function, "aot_eager")
    for rows in ROWS:
        whole = torch.randn(6, rows)
        torch._dynamo.maybe_mark_dynamic(whole, 1)
        x, n = whole.t(), whole.clone()[:, 0]
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(call(x, n), function(x, n))
    assert stats()["padded_calls"] > 0


def test_under_inference_mode_and_autocast() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        account = run(PROVEN["matrix product"], compiler="aot_eager")
    assert (account["state"], account["calls"]) == ("proven", 5)


# ---------------------------------------------------------------- what is changed in place


def test_inputs_that_are_changed_in_place_get_their_real_rows_back() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        x.mul_(2)
        n[:] = n + 1
        return x @ WEIGHT, x[:, 0]

    call = compiled(function, "aot_eager")
    for rows in ROWS:
        x, n = rows_of(rows)
        mine, theirs = [x, n], [x.clone(), n.clone()]
        versions = x._version
        got, wanted = call(*mine), function(*theirs)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(mine, theirs)
        assert x._version > versions
        got[1].fill_(3.0)
        assert (x[:, 0] == 3.0).all()
    (account,) = padding()
    assert (account["state"], account["calls"]) == ("proven", 5)


def test_changed_inputs_that_share_memory_run_as_they_are() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + n

    call = compiled(function, "aot_eager")
    for rows in ROWS:
        both = torch.randn(rows, 12)
        mine, theirs = both[:, :6], both[:, 6:]
        other = both.clone()
        for tensor in (mine, theirs):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch.testing.assert_close(call(mine, theirs), function(other[:, :6], other[:, 6:]))
        torch.testing.assert_close(both, other)
    assert stats()["padded_calls"] == 0


def test_a_buffer_that_counts_calls_is_changed_once_a_call() -> None:
    count = torch.zeros(())

    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count

    call = compiled(function, "aot_eager")
    for number, rows in enumerate(ROWS, 1):
        x, n = rows_of(rows)
        torch.testing.assert_close(call(x, n), x * number)
    assert padding()[0]["calls"] == 5


def test_a_buffer_that_rows_flow_into_is_refused() -> None:
    total = torch.zeros(6)

    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        return x * 2

    call = compiled(function, "aot_eager")
    expected = torch.zeros(6)
    for rows in ROWS:
        x, n = rows_of(rows)
        call(x, n)
        expected += x.sum(0)
    torch.testing.assert_close(total, expected)
    assert "aten::sum" in padding()[0]["reason"]


def test_with_gradients_nothing_is_padded() -> None:
    weight = torch.randn(6, 6, requires_grad=True)
    with torch.enable_grad():
        call = compiled(lambda x, n: x @ weight, "aot_eager")
        for rows in ROWS:
            x, n = rows_of(rows)
            call(x, n).sum().backward()
    assert "gradients are recorded" in padding()[0]["reason"]
    assert stats()["padded_calls"] == 0


# ---------------------------------------------------------------- operators without a rule


@torch.library.custom_op("padding_tests::apart", mutates_args=())
def apart(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


@torch.library.custom_op("padding_tests::mixing", mutates_args=())
def mixing(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(0, keepdim=True)


apart.register_fake(torch.empty_like)
mixing.register_fake(torch.empty_like)


def test_an_operator_without_a_rule_is_tried_out_where_it_is_said_to_be_safe() -> None:
    account = run(lambda x, n: torch.ops.padding_tests.apart(x) + 1, safe=["padding_tests::*"])
    assert (account["state"], account["operators"]) == ("tried", ["padding_tests::apart"])
    assert account["calls"] == 5
    assert "tried, padding_tests::apart by trial" in str(explain())


def test_a_trial_finds_rows_that_depend_on_others() -> None:
    account = run(lambda x, n: torch.ops.padding_tests.mixing(x), safe=["padding_tests::mixing"])
    assert (account["state"], account["calls"]) == ("refused", 0)
    assert "padding_tests::mixing, tried with 5 to 8" in account["reason"]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_outputs_that_cannot_be_compared_are_a_difference() -> None:
    """A graph may end at a quantized tensor, where Dynamo breaks behind it."""

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),)

    padded: Any = SimpleNamespace(inputs=lambda args, size: args, cut=lambda outputs, args: outputs)
    different = probing.difference(quantized, padded, (torch.randn(5, 6),), (5,))
    assert different is not None
    assert different.startswith("output 0 cannot be compared: NotImplementedError: Could not run 'aten::isnan'")


def test_an_operator_that_may_have_side_effects_is_not_tried_out() -> None:
    account = run(lambda x, n: torch.ops.padding_tests.apart(x))
    assert account["state"] == "refused"
    assert 'name it in the option "safe"' in account["reason"]


def test_a_trial_leaves_the_programs_random_numbers_and_inputs_alone() -> None:
    call = compiled(lambda x, n: torch.fft.fft(x).real, "eager")
    for rows in ROWS:
        x, n = rows_of(rows)
        kept, state = x.clone(), torch.get_rng_state()
        torch.testing.assert_close(call(x, n), torch.fft.fft(x).real)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(x, kept)
    assert padding()[0]["state"] == "tried"


# ---------------------------------------------------------------- options, names, lives


def test_names_that_are_not_there_are_said() -> None:
    call = compiled(PROVEN["linear"], pad={"y[0]": [4], "x[1]": [8]})
    call(*rows_of(5))
    notes = explain().to_dict()["regions"][0]["notes"]
    assert any("'y[0]' is no size or integer input" in note for note in notes)
    assert any("x[1] is 6 in this graph" in note for note in notes)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"is no size or integer input"):
        compiled(PROVEN["linear"], pad={"y[0]": [4]}, on_failure="raise")(*rows_of(5))


NO_PADS = ["declard", [4, 8], {"x[0]": 8}, {"x[0]": "8"}, {"x[0]": [8, 4]}, {"x[0]": [1 << 63]}, {3: [4]}, 7]


@pytest.mark.parametrize("pad", NO_PADS)
def test_values_that_are_not_accepted(pad: Any) -> None:
    with pytest.raises(OptionsError, match="pad"):
        multigraph_backend.Options.build({"pad": pad})


def test_two_sizes_are_padded_each_by_itself() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, None] * y[None])

    call = compiled(function, pad={"x[0]": [4, 8], "y[0]": [6, 12]})
    for rows, columns in ((3, 5), (4, 5), (3, 6), (8, 12), (9, 3), (2, 20)):
        x, y = torch.randn(rows), torch.randn(columns)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        got = call(x, y)
        torch.testing.assert_close(got, function(x, y))
        assert got.stride() == function(x, y).stride()
    assert padding()[0]["calls"] == 5


def test_of_two_sizes_the_one_that_mixes_is_not_padded() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[:, None] * y.softmax(0)

    call = compiled(function, pad={"x[0]": [4, 8], "y[0]": [6, 12]})
    for rows, columns in ((3, 5), (4, 5), (7, 6)):
        x, y = torch.randn(rows), torch.randn(columns)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(call(x, y), function(x, y))
    (account,) = padding()
    assert list(account["refused"]) == ["y[0]"]
    assert account["calls"] == 2


def test_a_stance_that_forbids_compiles_judges_nothing() -> None:
    call = compiled(PROVEN["linear"])
    x, n = rows_of(5)
    with torch.compiler.set_stance("default"):
        call(x, n)
    assert padding()[0]["state"] == "proven"


def test_a_region_ends_with_its_code() -> None:
    call = compiled(PROVEN["linear"])
    for rows in ROWS:
        call(*rows_of(rows))
    regions = [weakref.ref(region) for region in registry.living()]
    gc.collect()
    gc.disable()
    try:
        torch._dynamo.reset()
        del call
        assert [ref() for ref in regions if ref() is not None] == []
    finally:
        gc.enable()


def test_without_the_option_nothing_stands_before_the_dispatcher() -> None:
    call = torch.compile(PROVEN["linear"], backend="multigraph", options={"compiler": "eager"})
    call(*rows_of(5))
    (region,) = registry.living()
    assert region.padding is None  # type: ignore[attr-defined]
    assert region.dispatcher().__code__.co_filename == "<multigraph dispatcher>"  # type: ignore[attr-defined]
    assert padding() == []


# ---------------------------------------------------------------- servers


@pytest.fixture
def _unsealed() -> Any:
    yield
    multigraph_backend.unseal()


@pytest.mark.usefixtures("_unsealed")
def test_after_a_warm_up_padded_calls_compile_nothing() -> None:
    options = {"pad": {"x[0]": [2, 4, 8]}, "specialize": [{"x[0]": [2, 4, 8]}], "compiler": "aot_eager"}
    call = torch.compile(PROVEN["linear"], backend="multigraph", dynamic=True, options=options)
    x, n = rows_of(5)
    done = multigraph_backend.warmup(call, (x, n))
    assert done.ready, done
    assert {row.sizes.get("x[0]") for row in done.calls} >= {2, 4, 8}
    before = stats()
    multigraph_backend.seal("raise")
    for rows in (2, 3, 4, 5, 6, 7, 8):
        x, n = torch.randn(rows, 6), torch.zeros(rows)
        torch.testing.assert_close(call(x, n), PROVEN["linear"](x, n))
    after = stats()
    assert after["padded_calls"] - before["padded_calls"] == 4
    assert [after[key] for key in ("variants_compiled", "generic_compiled", "regions")] == [
        before[key] for key in ("variants_compiled", "generic_compiled", "regions")
    ]


def test_threads_that_come_at_once_are_judged_once_and_are_all_right() -> None:
    call = compiled(PROVEN["every row with every other"], "aot_eager")
    x, n = rows_of(6)
    call(x, n)  # Dynamo's own compiles of several threads are not the matter here
    torch._dynamo.reset()
    wrong: list[str] = []

    def work(seed: int) -> None:
        choose = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(30):
                rows = int(torch.randint(2, 40, (), generator=choose))
                x = torch.randn(rows, 6, generator=choose)
                torch._dynamo.mark_dynamic(x, 0)
                if not torch.allclose(call(x, n), x @ x.t(), atol=1e-5):
                    wrong.append(f"{rows} rows")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {account["state"] for account in padding()} == {"proven"}
    assert sum(account["calls"] for account in padding()) > 100


def test_a_padded_call_that_raises_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in a longer call alone costs the padding of that size, and no request."""
    call = compiled(PROVEN["linear"])
    x, n = rows_of(8)
    call(x, n)
    real = calls.appended

    def appended(tensor: torch.Tensor, dim: int, size: int, longer: int) -> torch.Tensor:
        if longer == 16:
            raise RuntimeError("no room for sixteen")
        return real(tensor, dim, size, longer)

    monkeypatch.setattr(calls, "appended", appended)
    torch._dynamo.reset()
    for rows in (9, 5, 9, 12):
        x, n = rows_of(rows)
        torch.testing.assert_close(call(x, n), PROVEN["linear"](x, n))
    assert padding()[0]["calls"] == 1


def test_metrics_and_the_page_show_it() -> None:
    run(PROVEN["linear"])
    assert any(family.name.endswith("padded_calls") for family in metrics.Reader().read())
    assert "5 calls were padded (x[0] to 4, 8, 16, ...; proven)" in explain().to_html()


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "padding")
    call = compiled(PROVEN["linear"])
    for rows in ROWS:
        x, n = rows_of(rows)
        torch.testing.assert_close(call(x, n), PROVEN["linear"](x, n))
    assert padding() == []
