"""Tests that need a CUDA device, some of them two; where these are not there they are not collected, so that no run is
full of skips.

Recordings are made under poison: what nobody may read of their memory holds NaN.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

os.environ.setdefault("MULTIGRAPH_DEBUG", "poison")

collect_ignore = []
if not torch.cuda.is_available():
    collect_ignore_glob = ["*"]
if torch.cuda.device_count() < 2:
    collect_ignore += ["test_distributed_on_gpu.py", "test_two_devices_on_gpu.py"]
if importlib.util.find_spec("multigraph_allocator") is None:  # `scripts/gpu --allocator` builds it
    collect_ignore.append("test_allocator_on_gpu.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
