"""What a call is given dies with the caller's last name for it, whatever the call has compiled, and without garbage
being collected: a batch that lives a step longer is memory that a training run has not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import multigraph_backend
from multigraph_backend import Match, Rule, Scaled

SIZES = (32, 16, 1, 24, 32, 8)


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    torch._dynamo.reset()


def broken(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no code today")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a variant": {"specialize": [{"input[1]": 16}, {"input[1]": {"multiple_of": 8}}]},
    "all compiled at once": {"specialize": [{"input[1]": 16}], "compile": "eager"},
    "padded": {"pad": {"input[1]": [16, 32]}, "compiler": "aot_eager"},
    "packed": {"saved_tensors": [Rule(Match(min_bytes=0), Scaled("int8"))]},
    "within a goal": {"memory_goal": 1 << 20},
    "repeated blocks": {"repeat": "always", "compiler": "inductor"},
    "another compiler": {"compiler": "aot_eager"},
    "a compile that fails": {"compiler": broken},
    "a variant that fails": {"compiler": broken, "specialize": [{"input[1]": 16}]},
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", OPTIONS)
def test_no_input_or_result_outlives_its_names(case: str, training: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)))
    run = torch.compile(model, backend="multigraph", dynamic=True, options=OPTIONS[case])
    seen: list[tuple[int, str, weakref.ref[torch.Tensor]]] = []
    for size in SIZES:
        x = torch.randn(4, size, 64, requires_grad=training)
        with torch.set_grad_enabled(training):
            y = run(x)
        seen += [(size, "input", weakref.ref(x)), (size, "result", weakref.ref(y))]
        if training:
            y.square().mean().backward()
            seen.append((size, "gradient", weakref.ref(x.grad)))
        del x, y
        assert [(size, what) for size, what, one in seen if one() is not None] == []


def test_no_call_of_a_warmup_outlives_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    options = {"specialize": [{"x[0]": [4, 16, 64]}], "compiler": "aot_eager"}
    run: Any = torch.compile(forward, backend="multigraph", dynamic=True, options=options)

    def called(x: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(x))
        return run(x)  # type: ignore[no-any-return]

    x = torch.randn(8, 64)
    multigraph_backend.warmup(run, inputs=(x,))
    for _ in range(2):
        called(torch.randn(16, 64))
    assert [one() for one in seen] == [None, None]
    assert [entry for entry in gc.get_objects() if type(entry) is torch.Tensor and entry.shape == (64, 64)] == []
