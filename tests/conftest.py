"""Every test starts from nothing compiled and nothing counted, and with nothing loaded ahead of its calls."""

from __future__ import annotations

import gc
import logging
import os
import sys

import pytest

# also in the processes that tests start
os.environ.setdefault("MULTIGRAPH_MANIFESTS", "")
# Inductor compiles a program for each instruction set of the machine, to see whether the C++ compiler knows it: ten
# seconds for each new folder of caches.  Empty, it does so
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# kernels without tables of lines, which profilers read; and no processes that wait for Triton's kernels, which stock's
# backend starts
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
os.environ.setdefault("TORCH_WARM_POOL", "0")

# selected by a variable that names unpacked wheels; see there
collect_ignore = [] if os.environ.get("MULTIGRAPH_VLLM") else ["processes/test_vllm_modules.py"]

#: files that take a minute or more: begun first, so that no process is left alone with one in the end
LONG = (
    "users/benchmarks/test_benchmarks.py",
    "compiled/random/test_fuzz.py",
    "built/allocator/test_overlap_property.py",
    "built/allocator/test_sanitizers.py",
    "simulated/test_random_programs.py",
    "compiled/variants/test_missing_symbols.py",
    "processes/test_background.py",
    "compiled/saved_tensors/test_memory_goal.py",
    "users/examples/test_finetune.py",
    "processes/test_warm_start.py",
    "users/docs/test_code_blocks.py",
    "users/examples/test_serve_lm.py",
    "users/examples/test_server.py",
    "processes/test_saved_functions.py",
    "processes/distributed/test_ranks.py",
    "simulated/test_every_order.py",
    "compiled/variants/test_repeated_blocks.py",
    "compiled/variants/test_inductors_numbers.py",
    "compiled/variants/test_traced_once.py",
    "compiled/saved_tensors/test_training.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((number for number, name in enumerate(LONG) if path.endswith(name)), len(LONG))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """A compile makes so much that is no garbage that a tenth of its time goes by looking for some: here what has been
    imported is not looked through again, and the rest less often.  Tests of what is let go collect by themselves."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    # pytest listens to loggers that do not propagate, and where anybody listens torch writes a trace of each compile
    logging.getLogger("torch.__trace").propagate = True
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        # torch 2.11 forgets to set it back where threads call code with dynamic=True at the same time
        sys.modules["torch._dynamo"].config.assume_static_by_default = True
    if "multigraph_backend.events" in sys.modules:
        sys.modules["multigraph_backend.events"].reset_stats()
