"""Stacks in the snapshots of the installed extension, under a torch built for CUDA, over the simulated driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.allocator.under_torch import run

SCRIPT = """
import sys, threading, time
from multigraph_backend.allocator import stacks
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from tests.support.allocator import recording_programs as programs
from tests.support.allocator.recording_programs import storage
from torch.cuda import _memory_viz

def live():
    return {
        block["address"]: [frame["name"] for frame in block["frames"]]
        for segment in allocator.memory_snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }

def trace():
    return [
        (entry["action"], entry["frames"][0]["name"] if entry["frames"] else "")
        for entry in allocator.memory_snapshot()["device_traces"][0]
    ]

def makes(nbytes):
    return allocate(nbytes, 0)

def frees(address):
    free(address)

allocator.install(reuse="any_stream")
torch.cuda.init()
unseen = makes(MIB)
facts["off"] = [live()[unseen], trace(), len(stacks._numbers)]

for context in ("all", "alloc", "state"):
    allocator.record_memory_history(context=context, max_entries=100)
    kept, short = makes(30 * MIB), makes(3 * MIB)
    frees(short)
    if context == "all":
        out_of_memory(1 << 31)
        frames = allocator.memory_snapshot()["device_traces"][0][1]["frames"]
        facts["frame"] = [frames[0], frames[1]["name"]]
        snapshot = allocator.memory_snapshot()
        lines = _memory_viz.memory(snapshot, lambda lines: lines)
        facts["drawn"] = ["makes" in lines, len(_memory_viz.trace_plot(snapshot)) > 1000]
    facts[context] = [live()[kept][:2], live()[unseen], trace()]
    frees(kept)
allocator.record_memory_history("state")
kept = makes(30 * MIB)
facts["no history"] = [live()[kept][0], trace()]
frees(kept)

# blocks of recordings: what comes back has the stack of its own life
allocator.record_memory_history(max_entries=1000)
captures = programs.Captures(simulated, driver)
pool = ExtensionPool(loaded, 0, lambda pool: pool.id)

def first_recording():
    return storage(3 * MIB)

def second_recording():
    return storage(3 * MIB)

def recorded(make):
    with captures.into(pool.id):
        output = make()
    return output.data_ptr(), pool.adopt([output])

def whose(address):
    return live().get(address, ["", "nobody"])[1]

first, after_first = recorded(first_recording)
facts["recorded"] = [whose(first)]
pool.restore(pool.empty, ())
facts["recorded"].append(whose(first))
second, after_second = recorded(second_recording)
facts["same place"] = first == second
facts["recorded"].append(whose(first))
for state in (after_first, after_second, after_first):
    pool.restore(state, [first])
    facts["recorded"].append(whose(first))
allocator.record_memory_history(max_entries=1000)
pool.restore(after_second, [first])
facts["recorded"].append(live()[first])  # stacks of before are gone
pool.restore(pool.empty, ())
third, after_third = recorded(first_recording)
pool.restore(after_second, [first])
facts["recorded"].append(live()[first])
pool.restore(after_third, [third])
facts["recorded"].append(whose(third))

# threads, with and without Python's lock, while stacks go on and off
problems = []
stop = threading.Event()

def work():
    try:
        while not stop.is_set():
            held = [storage(4096) for _ in range(20)]
            more = [allocate(1 << 20, 0) for _ in range(5)]
            del held
            for address in more:
                free(address)
    except BaseException as error:
        problems.append(repr(error))

def in_thread():  # whose simulated driver is a thread's own
    simulated.sim_enter(driver)
    work()

threads = [threading.Thread(target=in_thread) for _ in range(4)]
sys.setswitchinterval(1e-4)
for thread in threads:
    thread.start()
seen = set()
for turn in range(30):
    allocator.record_memory_history("all" if turn % 3 else None, max_entries=500)
    time.sleep(0.005)  # the threads' turn
    seen |= {name for action, name in trace() if action == "alloc"}
stop.set()
for thread in threads:
    thread.join()
sys.setswitchinterval(5e-3)
facts["threads"] = [problems, sorted(seen)]
allocator.record_memory_history(None)
facts["stopped"] = [trace(), len(stacks._numbers), live()[unseen]]
loaded.call("mg_verify", loaded.call("mg_torch_device", 0))

# the interpreter ends with tensors that are freed after all of Python's exit handlers
allocator.record_memory_history()
at_the_end = [storage(4096) for _ in range(10)]
asked = len(stacks._numbers)
stacks._end()
storage(4096)
facts["after the end"] = [asked > 0, len(stacks._numbers)]
allocator.record_memory_history()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(SCRIPT, simulated, tmp_path_factory.mktemp("stacks"))


def test_off_nothing_is_asked(facts: dict[str, Any]) -> None:
    assert facts["off"] == [[], [], 0]


def test_live_blocks_and_the_history_have_frames_as_torch_names_them(facts: dict[str, Any]) -> None:
    live, unseen, trace = facts["all"]
    assert live == ["makes", "<module>"]
    assert unseen == []  # it was there before
    whose = {"free_requested": "frees", "segment_unmap": "", "oom": "out_of_memory"}
    assert [name for _, name in trace] == [whose.get(action, "makes") for action, _ in trace]
    assert {"segment_map", "alloc", "free_requested", "free_completed", "oom"} <= {action for action, _ in trace}
    frame, caller = facts["frame"]
    assert frame == {"filename": "<string>", "line": frame["line"], "name": "makes"}
    assert frame["line"] > 0
    assert caller == "<module>"
    assert facts["drawn"] == [True, True]


def test_less_is_kept_where_less_is_asked_for(facts: dict[str, Any]) -> None:
    live, _, trace = facts["alloc"]
    assert live == ["makes", "<module>"]
    assert {name for _, name in trace} == {"makes"}  # a free has the stack of what it frees
    live, _, trace = facts["state"]
    assert live == ["makes", "<module>"]
    assert len(trace) >= 4
    assert {name for _, name in trace} == {""}
    assert facts["no history"] == ["makes", []]


def test_what_a_restore_brings_back_has_the_stack_of_its_own_life(facts: dict[str, Any]) -> None:
    assert facts["same place"]
    assert facts["recorded"] == [
        "first_recording", "nobody", "second_recording", "first_recording", "second_recording", "first_recording",
        [], [], "first_recording",
    ]  # fmt: skip


def test_threads_and_python_s_lock(facts: dict[str, Any]) -> None:
    problems, seen = facts["threads"]
    assert problems == []
    assert "storage" in seen
    assert facts["stopped"] == [[], 0, []]


def test_nothing_is_asked_when_the_interpreter_ends(facts: dict[str, Any]) -> None:
    assert facts["after the end"] == [True, 0]  # and the process ended with status 0, which `run` asks for
