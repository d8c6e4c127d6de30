"""Every test starts from nothing compiled and nothing counted."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        # torch 2.11 forgets to set it back where threads call code with dynamic=True at the same time
        sys.modules["torch._dynamo"].config.assume_static_by_default = True
    if "multigraph_backend.events" in sys.modules:
        sys.modules["multigraph_backend.events"].reset_stats()
