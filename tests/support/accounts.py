"""Accounts of `explain()`, for tests of what is made of them: one has something of everything, one hostile names."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from multigraph_backend.cudagraphs import account
from multigraph_backend.cudagraphs.account import DeviceReport, GraphReport
from multigraph_backend.cudagraphs.partition.graph_spec import Cut
from multigraph_backend.report import Explanation, RegionReport, VariantReport
from multigraph_backend.saved_tensors.account import SavedTensor, SavedTensors
from tests.support.simulated.pieces import Bench, values

#: what must stay text: markup, attributes, entities, templates, ends of scripts, control characters, half a pair
HOSTILE = (
    "</code></details><script>document.title='taken'</script><img src=http://example.org/x onerror=alert(1)>"
    "\"' onmouseover='alert(2)' &amp; {{ 7*7 }} {% raw %} </style></script><!-- \x00\x1b[31m \u202e \ud800 end"
)


def tree() -> DeviceReport:
    """Four pieces on the simulated device: two paths, outputs that die on the way, copies, a piece that fails."""
    bench = Bench()

    def hidden(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2, x.repeat(4))

    def attended(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (h.repeat(6),)

    def logits(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (h.sum(0, keepdim=True).repeat(48),)

    def scored(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sum(0, keepdim=True).repeat(160),)

    def fetched(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * x.sum().item(),)

    first = bench.piece(hidden, 1, 2, label="Decoder.forward: generic, piece 0", visible=(False, True))
    second = bench.piece(attended, 1, 1, label="Decoder.forward: generic, piece 1")
    third = bench.piece(logits, 1, 1, label="Head.forward: x[0] == 8")
    fourth = bench.piece(scored, 1, 1, label="Scorer.forward: x[0] == 64")
    last = bench.piece(fetched, 1, 1, label="Sampler.forward: generic")
    for number in range(9):
        x = values(64)
        h, kept = first([x])
        (a,) = second([h])
        if number % 3:
            del h
            (out,) = third([a])
            del a, kept
        else:
            (out,) = fourth([x])
            del h, a, kept
        last([values(64)])
        del out
    return account.of(bench.tree)


def _variant(condition: str, state: str, calls: int, seconds: float, reason: str | None = None, **more: Any) -> Any:
    forms = ("True",) if state == "ready" else ()
    return VariantReport(condition, state, calls, seconds, reason, more.pop("forms", forms), **more)


def _tensor(name: str, size: int, saved: int, packed: str | None, **more: Any) -> SavedTensor:
    return SavedTensor(
        name, more.pop("op", "aten.relu"), "layers.3.mlp", "float32", "[8, s0, 4096]", size, saved, packed, **more
    )


SAVED = SavedTensors(
    tensors=(
        _tensor("relu_3", 64 << 20, 2 << 20, "bits", pack_before="mm_7", unpack_before=("threshold_backward_3",)),
        _tensor("gelu_1", 32 << 20, 8 << 20, "float8_e4m3fn, scaled by rows", op="aten.gelu", pack_before="mm_8",
                unpack_before=("mul_4", "mul_9")),
        _tensor("view_2", 32 << 20, 0, "float8_e4m3fn, scaled by rows", with_="gelu_1", pack_before="mm_8",
                unpack_before=("mul_4",)),
        _tensor("primals_9", 1 << 19, 0, "offload as int8, scaled per row", op="placeholder", bytes_on_host=1 << 17,
                held="an input: its memory is free once nobody else holds it"),
        _tensor("logsumexp", 1 << 18, 1 << 18, None, op="aten._scaled_dot_product_flash_attention",
                reason="a statistic of attention, which only a rule that names it packs"),
    ),
    order=("placed", "stock"), forward_peak=90 << 20, backward_peak=120 << 20, stock_forward_peak=140 << 20,
    stock_backward_peak=120 << 20, unpacked_forward_peak=180 << 20, unpacked_backward_peak=190 << 20,
    budget="asked for 64 MiB: 10.2 MiB are left", unmatched=("2: Match(op='aten.tanh')",),
)  # fmt: skip


def rich() -> Explanation:
    """Something of everything that an account may have."""
    long = " and ".join(f"batch['input_ids'][{dim}] % {64 << dim} == 0" for dim in range(5))
    decoder = RegionReport(
        id=0, linked=(1,), name=None, function="Decoder.forward", file="/srv/models/decoder.py", line=117,
        sizes={"input_ids[0]": "s0", "input_ids[1]": "s1", "positions[0]": "s1"},
        variants=(
            _variant("input_ids[0] == 1", "inactive", 0, 0.0,
                     "where torch traced it as a graph of its own, that graph serves it (graph 1)"),
            _variant("input_ids[0] == 8", "ready", 18210, 21.4, gain=1.43, gain_calls=256, saved=(SAVED,)),
            _variant("input_ids[0] == 16", "ready", 5120, 24.9, gain=0.94, gain_calls=256,
                     forms=("input_ids[1] <= 4096", "input_ids[1] * 4 <= 2147483647 and shared(input_ids, positions)")),
            _variant(long, "declared", 0, 0.0),
            _variant("input_ids[0] == 64", "failed", 0, 0.0,
                     "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
                     user_stack='File "/srv/models/decoder.py", line 131, in forward\n    h = self.up(h)'),
            _variant("marked at server.py:41: <lambda>", "ready", 40, 11.0,
                     opaque="it asks for the truth of a comparison; compiled for 24 alone"),
        ),
        generic=_variant("generic", "ready", 2190, 30.2, collectives=("all_reduce(sum, tp, float32, 4096)",),
                         collective_bytes=16384),
        unreachable=(), notes=("mask is a tensor subclass: compiled at once, without variants",),
    )  # fmt: skip
    sampler = RegionReport(
        id=1, linked=(0,), name="sampler", function="Decoder.forward", file="/srv/models/decoder.py", line=117,
        sizes={"input_ids[0]": "1"},
        variants=(_variant("input_ids[0] == 1", "ready", 90, 4.0, "this graph was traced for it"),),
        generic=_variant("generic", "declared", 0, 0.0), unreachable=(), notes=(),
    )  # fmt: skip
    return Explanation(
        regions=(decoder, sampler),
        stance="eager_on_recompile",
        disabled=("saved_tensors",),
        unmet_marks=("/srv/server.py:88",),
        recordings=(tree(),),
        graphs=(
            GraphReport("Decoder.forward: generic", 2, (Cut("device copy", ("aten.copy_", "aten._to_copy"),
                        'File "/srv/models/decoder.py", line 140, in forward\n    n = lengths.cpu()'),), None),
            GraphReport("Sampler.forward: generic", 0, (), "it spans 2 devices"),
        ),
        rank=0,
        world_size=4,
    )  # fmt: skip


def hostile() -> Explanation:
    """`rich`, with every text of it followed by what must stay text."""

    def spoil(value: Any) -> Any:
        if isinstance(value, str):
            return value + HOSTILE
        if isinstance(value, dict):
            return {spoil(key): spoil(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return tuple(map(spoil, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kept = {"state", "kind"}
            names = [entry.name for entry in dataclasses.fields(value)]
            return dataclasses.replace(
                value, **{name: spoil(getattr(value, name)) for name in names if name not in kept}
            )
        return value

    spoiled: Explanation = spoil(rich())
    return spoiled
