"""Every test starts from nothing compiled and nothing counted, and with nothing loaded ahead of its calls."""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("MULTIGRAPH_MANIFESTS", "")  # also in the processes that tests start

# selected by a variable that names unpacked wheels; see there
collect_ignore = [] if os.environ.get("MULTIGRAPH_VLLM") else ["processes/test_vllm_modules.py"]

#: files that take minutes: begun first, so that no process is left alone with one in the end
LONG = (
    "users/benchmarks/test_benchmarks.py",
    "compiled/variants/test_missing_symbols.py",
    "built/allocator/test_overlap_property.py",
    "compiled/random/test_fuzz.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        # torch 2.11 forgets to set it back where threads call code with dynamic=True at the same time
        sys.modules["torch._dynamo"].config.assume_static_by_default = True
    if "multigraph_backend.events" in sys.modules:
        sys.modules["multigraph_backend.events"].reset_stats()
