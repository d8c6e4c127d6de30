"""Two ranks over gloo, each on its own decisions, are right and do not wait; training is as eager training is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from multigraph_backend.distributed import compiling
from tests.support.distributed import processes

LOCAL = ("another_variant_on_each_rank_with_ragged_sizes", "one_rank_compiles_late_and_the_other_goes_on",
         "a_compile_that_hangs_on_one_rank", "a_compile_that_fails_on_one_rank",  # the process goes on after the hang
         "a_variant_that_is_given_up_and_comes_back_on_one_rank",
         "the_same_variant_is_compiled_once_for_all_ranks")  # fmt: skip
TRAINING = ("functional_tensor_parallel_training", "ddp", "dtensor_tensor_parallel", "fsdp2_block_by_block",
            "checkpointed", "compiled_autograd")  # fmt: skip
RECIPES = (
    "dtensor_weights_and_another_variant_on_each_rank",
    "tensor_parallel_blocks_that_fsdp2_shards",
    "fsdp2_whole",
    "tensor_parallel",
)
DIVIDED = ("context_parallel", "pipeline_stages", "the_allocator_is_asked_for")


SLICE = (*LOCAL[:2], "ddp")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SLICE, id="a slice"),
        pytest.param(LOCAL, id="local decisions", marks=pytest.mark.slow),
        pytest.param(TRAINING, id="training", marks=pytest.mark.slow),
        pytest.param(RECIPES, id="torch's recipes", marks=pytest.mark.slow),
        pytest.param(DIVIDED, id="divided", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_right(names: tuple[str, ...], tmp_path: Path) -> None:
    port = str(processes.free_port())
    words = [[str(rank), "2", port, *names] for rank in range(2)]
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "NONCE": str(time.time()), "MULTIGRAPH_ALLOCATOR": "1"}
    for ended in processes.run(processes.HERE / "ranks.py", words, 500, environ):
        assert ended.status == 0, ended.said
        assert [name for name in names if f"{name}: ok" not in ended.said] == []


@pytest.mark.slow
def test_random_programs_are_right_where_one_rank_has_a_variant_and_the_other_none(tmp_path: Path) -> None:
    port = str(processes.free_port())
    words = [[str(rank), "2", port, "--programs", "2"] for rank in range(2)]
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    told = []
    for ended in processes.run(processes.HERE / "collectives_on_ranks.py", words, 400, environ):
        assert ended.status == 0, ended.said
        told.append(json.loads(ended.said.splitlines()[-1]))
    assert [entry["programs"] for entry in told] == [2, 2]
    assert sum(entry["variants"] + entry["refused"] for entry in told) == 2
    assert told[0]["collectives"] == told[1]["collectives"] >= 4


HOLDER = """
import sys
from pathlib import Path
from multigraph_backend.distributed import compiling
with compiling._locked(Path(sys.argv[1]), 1.0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of `tmp_path / "lock"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=processes.CHECKOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_rank_that_hangs_with_the_lock_is_waited_for_and_no_longer(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(TimeoutError, match="another process"), compiling._locked(tmp_path / "lock", 0.2):
        pass
    holder.communicate("")
    with compiling._locked(tmp_path / "lock", 0.0):
        pass


def test_a_rank_that_dies_with_the_lock_blocks_nobody(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    with compiling._locked(tmp_path / "lock", 30.0):
        pass
    holder.communicate()


def test_alone_there_is_no_lock_and_inductors_knobs_are_the_users(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    with compiling.once_a_host("something", 0.0):
        pass
    assert compiling.quiet((("shape_padding", True),)) == (("shape_padding", True),)
    assert compiling.patience(None) == compiling.PATIENCE
    assert compiling.patience(10.0) == 5.0


def test_under_a_process_group_nothing_is_measured_on_the_device_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling.rank, "live", lambda: True)
    knobs = dict(compiling.quiet((("benchmark_fusion", True), ("epilogue_fusion", False))))
    assert knobs["shape_padding"] is False
    assert knobs["autotune_in_subproc"] is True
    assert knobs["benchmark_fusion"] is True
    assert knobs["epilogue_fusion"] is False
