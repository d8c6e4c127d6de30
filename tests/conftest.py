"""Every test starts from nothing compiled and nothing counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER = ("allocator",)  # folders whose files share what takes long to make


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "multigraph_backend.trace" in sys.modules:
        sys.modules["multigraph_backend.trace"].reset_stats()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, each file goes to one, and folders in TOGETHER."""
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else str(item.path)))
