"""What the tests of the allocator share: its builds, made once per session, and a fresh allocator for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.allocator.extension import Allocator, build
from tests.support.allocator.mutants import copied

if torch.version.cuda is None:
    collect_ignore = [
        f"test_{name}.py" for name in ("forks", "recording_pool", "stacks_through_torch", "through_torch")
    ]


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the simulated driver, the library over it, and the stress programs."""
    return build(tmp_path_factory.mktemp("simulated"), "-DMULTIGRAPH_STRESS=ON", "-DCMAKE_UNITY_BUILD=ON")


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stress programs over a core in which every rule can be broken."""
    folder = tmp_path_factory.mktemp("broken")
    options = ("-DMULTIGRAPH_STRESS=ON", "-DCMAKE_UNITY_BUILD=ON")
    return build(folder / "build", *options, targets=("exhaustive", "fuzz"), source=copied(folder))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as it is delivered, but that its files are compiled together, in half the time."""
    return build(tmp_path_factory.mktemp("library"), "-DCMAKE_UNITY_BUILD=ON") / "libmultigraph_allocator.so"


@pytest.fixture
def make(simulated: Path) -> Iterator[Callable[..., Allocator]]:
    """Makes an allocator; in the end its books are looked at."""
    made: list[Allocator] = []

    def one(**settings: Any) -> Allocator:
        made.append(Allocator(simulated / "libmultigraph_allocator_sim.so", **settings))
        return made[-1]

    yield one
    for allocator in made:
        allocator.verify()
        assert allocator.stats.verify_failures == 0
        allocator.close()
