"""Sizes to pad to: which one a size goes to, how lists go on, and what is no list of sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from multigraph_backend.declare.buckets import Buckets


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ([4, 16], {1: 4, 4: 4, 5: 16, 16: 16, 17: None}),
        ([1, 2, 4, 8, "..."], {1: 1, 3: 4, 8: 8, 9: 16, 16: 16, 1000: 1024}),
        ([8, 16, 24, ...], {1: 8, 24: 24, 25: 32, 32: 32, 100: 104}),
        ([1, 2, 4, 8, 16, 24, "…"], {17: 24, 25: 32, 33: 40}),
        ([3, 9, 27, "..."], {28: 81, 82: 243}),
    ],
)
def test_a_size_goes_to_the_next_declared_one(declared: list[Any], expected: dict[int, int | None]) -> None:
    buckets = Buckets.of(declared)
    assert {size: buckets.fitting(size) for size in expected} == expected


def test_what_fits_is_the_least_of_those_that_are_listed() -> None:
    choose = random.Random(3)
    for _ in range(200):
        first, step = choose.randint(1, 9), choose.randint(1, 9)
        numbers: list[Any] = [first + step * at for at in range(3)]
        if choose.random() < 0.5:
            numbers = [first * (step + 1) ** at for at in range(3)]
        buckets = Buckets.of([*numbers, "..."])
        listed = list(buckets.up_to(5000))
        for size in (choose.randint(1, 4000) for _ in range(20)):
            above = [number for number in listed if number >= size]
            if above:
                assert buckets.fitting(size) == above[0]
            else:
                assert (buckets.fitting(size) or 0) > 5000


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ([], "at least one size"),
        (["..."], "at least one size"),
        ([0, 4], "at least 1, got 0"),
        ([4, 4], "must ascend, and 4 follows 4"),
        ([8, 4], "must ascend"),
        ([1.5], "integers, got 1.5 (float)"),
        ([True], "integers, got True (bool)"),
        ([1, "...", 8], "'...' stands at the end"),
        ([1, 2, "..."], "write three of them"),
        ([1, 2, 5, "..."], "neither by adding nor by multiplying"),
    ],
)
def test_what_is_no_list_of_sizes_is_refused(declared: list[Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Buckets.of(declared)
    assert said in str(caught.value)
