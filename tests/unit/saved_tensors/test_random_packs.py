"""A short slice of the random packs, and what once went wrong with them, which they must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from multigraph_backend.saved_tensors import choosing, packs, partitioner, rules, statistics
from multigraph_backend.saved_tensors.rules import Cast, Described, Rule, Scaled
from tests.support.saved_tensors.random_packs import Wrong, play

SLICE = (*range(8), 13, 16, 19)


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_what_is_packed_is_what_rules_name() -> None:
    counts: Counter[str] = Counter()
    for seed in SLICE:
        counts += play(seed)
    least = {"packed": 20, "statistics": 5, "statistics packed": 1, "idle rules": 2, "blocks": 1, "rows for blocks": 1}
    assert {name: counts[name] for name, count in least.items() if counts[name] < count} == {}


# ---------------------------------------------------------------- what that is worth


def _statistics_are_like_the_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(statistics, "of", lambda graph: set())


def _statistics_by_size(patch: pytest.MonkeyPatch) -> None:
    """As it was: small ones are kept as all that is small, and large ones are packed."""
    decide = rules.decide

    def by_size(given: Sequence[Rule], tensor: Described) -> Rule | str:
        large = tensor.role == "statistic" and tensor.bytes >= rules.SMALL_BYTES
        return decide(given, replace(tensor, role="intermediate") if large else tensor)

    patch.setattr(choosing, "decide", by_size)


def _what_is_taken_apart_has_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(statistics, "_spread", lambda node, known: False)


def _operators_have_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(statistics, "_by_operator", lambda node: False)


def _all_that_is_small_is_one(patch: pytest.MonkeyPatch) -> None:
    decide = rules.decide

    def smaller(given: Sequence[Rule], tensor: Described) -> Rule | str:
        small = tensor.role == "intermediate" and tensor.bytes < 2000
        return decide(given, replace(tensor, role="statistic") if small else tensor)

    patch.setattr(choosing, "decide", smaller)


def _masks_need_rows_of_eight(patch: pytest.MonkeyPatch) -> None:
    bits = packs._bits

    def eights(value: torch.Tensor) -> object:
        return bits(value) if value.shape[-1] % 8 == 0 else "its rows are no multiple of 8"

    patch.setattr(packs, "_bits", eights)


def _blocks_become_rows_in_silence(patch: pytest.MonkeyPatch) -> None:
    def said(pack: Cast | Scaled, value: torch.Tensor) -> str:
        return str(pack)

    patch.setattr(packs, "said", said)


def _idle_rules_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partitioner, "_deciding_nothing", lambda *args: ())


# each with programs that show it
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[int, int]] = {
    _statistics_are_like_the_rest: (1, 4),
    _statistics_by_size: (16, 19),
    _what_is_taken_apart_has_none: (1, 4),
    _operators_have_none: (13, 16),
    _all_that_is_small_is_one: (0, 2),
    _masks_need_rows_of_eight: (2, 16),
    _blocks_become_rows_in_silence: (0, 13),
    _idle_rules_are_not_told: (0, 1),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_what_went_wrong_once_is_found(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(Wrong):
            _play(MUTANTS[mutant])


def _play(seeds: Sequence[int]) -> None:
    for seed in seeds:
        play(seed)
