"""Random programs, padded: results are those of eager, and what is proven a trial with garbage does not contradict."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from multigraph_backend import stats
from multigraph_backend.padding import probing
from multigraph_backend.padding.padded import Padding
from multigraph_backend.region import registry
from multigraph_backend.region.region import Region
from tests.support import padding

ROWS = (5, 7, 3, 9, 8)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def calls(program: padding.Program, compiler: str = "eager") -> list[str]:
    """Calls of several sizes as eager's; the states of the graphs that were made."""
    function = program.function()
    options = {"pad": {"x[0]": [4, 8, 16, "..."]}, "compiler": compiler}
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="multigraph", options=options)
    for rows in ROWS:
        given = program.arguments(rows, rows)
        for tensor in given[:2]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch.testing.assert_close(compiled(*given), function(*given), rtol=1e-4, atol=1e-4, equal_nan=True)
    regions = [region for region in registry.living() if isinstance(region, Region)]
    return [region.padding.state for region in regions if region.padding is not None]


@pytest.mark.parametrize(
    ("first", "mixing"),
    [
        (0, 0.0),
        (100, 0.3),
        pytest.param(20, 0.0, marks=pytest.mark.slow),
        pytest.param(120, 1.0, marks=pytest.mark.slow),
    ],
)
def test_results_are_those_of_eager(first: int, mixing: float) -> None:
    states: Counter[str] = Counter()
    for seed in range(first, first + 12):
        program = padding.draw(random.Random(seed), mixing)
        try:
            states.update(calls(program))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, mixing {mixing}:\n{program.source}") from error
    if not mixing:
        assert states["proven"] >= 10
        assert stats()["padded_calls"] >= 30
    if mixing == 1.0:
        assert states["refused"] >= 8


def test_garbage_behind_the_real_rows_changes_nothing_where_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not-a-number and huge numbers, through the graph as Dynamo traced it, at every size that a call brings."""
    tried: Counter[str | None] = Counter()
    before = Padding._first_padded

    def first_padded(self: Padding, padded: Any, key: Any, to: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        if self.graph.repeatable:
            different = probing.difference(self.graph.module, padded, args, to, self._mild)
            tried[different] += 1
            assert different is None, self.graph.module.code
        return before(self, padded, key, to, args)

    monkeypatch.setattr(Padding, "_first_padded", first_padded)
    for seed in range(300, 316):
        calls(padding.draw(random.Random(seed), 0.15))
    assert set(tried) == {None}
    assert tried[None] >= 20
