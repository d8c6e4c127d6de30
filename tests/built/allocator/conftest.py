"""What the tests of the allocator share: builds, made once for all processes, and a fresh allocator for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.allocator.extension import Allocator, build, build_once
from tests.support.allocator.mutants import copied

if torch.version.cuda is None:
    collect_ignore = [
        f"test_{name}.py" for name in ("forks", "recording_pool", "stacks_through_torch", "through_torch")
    ]


# runs as fast as with all optimizations, and is built in two thirds of the time
SIMULATED = ("-DMULTIGRAPH_STRESS=ON", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this run of pytest, also where several processes share it."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def simulated(root: Path) -> Path:
    """The folder of the simulated driver, the library over it, and the stress programs."""
    return build_once(root, "simulated", lambda folder: build(folder, *SIMULATED))


@pytest.fixture(scope="session")
def broken(root: Path) -> Path:
    """The folder of the stress programs over a core in which every rule can be broken."""

    def make(folder: Path) -> None:
        folder.mkdir()
        build(folder / "build", *SIMULATED, targets=("exhaustive", "fuzz"), source=copied(folder))

    return build_once(root, "broken", make) / "build"


@pytest.fixture(scope="session")
def library(root: Path) -> Path:
    """The library as it is delivered, but that its files are compiled together, in half the time."""
    folder = build_once(root, "library", lambda folder: build(folder, "-DCMAKE_UNITY_BUILD=ON"))
    return folder / "libmultigraph_allocator.so"


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
