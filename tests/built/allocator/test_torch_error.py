"""Out-of-memory in the library is a real `torch.OutOfMemoryError` behind torch's own translation of exceptions.

The library's function that torch calls is called over the simulated driver, from a module that is compiled against the
headers of the torch at hand and translates as torch's bindings do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__path__[0])

SCRIPT = """
import ctypes, json, os, sys
import torch
sys.path.insert(0, sys.argv[2])
import boundary

library = ctypes.CDLL(sys.argv[1])
library.sim_new.restype, library.sim_new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.sim_enter.argtypes = [ctypes.c_void_p]
library.mg_message.restype = ctypes.c_char_p
library.sim_enter(library.sim_new(64 << 20))
allocate = ctypes.cast(library.mg_torch_alloc, ctypes.c_void_p).value

def outcome(nbytes, device=0):
    try:
        return "address" if boundary.call(allocate, nbytes, device) else "null"
    except Exception as error:
        return [type(error).__name__, isinstance(error, torch.OutOfMemoryError), str(error)]

facts = {"before": outcome(1 << 30)}
assert library.mg_torch_errors() == 0, library.mg_message()
facts["after"] = outcome(1 << 30)
facts["fits"] = outcome(1 << 20)
facts["nothing"] = outcome(0)
facts["no such device"] = outcome(1 << 20, 99)
for _ in range(2000):  # each is made and destroyed by torch's own code
    assert outcome(1 << 30)[1]
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps(outcome(1 << 20)).encode())
    os._exit(0)
os.wait()
facts["forked"] = json.loads(os.read(read, 4096))
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("boundary")
    headers = [sysconfig.get_path("include"), TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *(f"-I{path}" for path in headers)]
    command += [str(HERE / "boundary.cc"), "-o", str(folder / "boundary.so"), f"-L{TORCH / 'lib'}"]
    command += ["-ltorch_python", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    library = simulated / "libmultigraph_allocator_sim.so"
    arguments = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(library), str(folder)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MULTIGRAPH_")}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_out_of_memory_is_torch_s_own_error(facts: dict[str, Any]) -> None:
    kind, is_torch_s, text = facts["after"]
    assert (kind, is_torch_s) == ("OutOfMemoryError", True)
    assert text.startswith("CUDA out of memory. Tried to allocate 1.00 GiB on device 0; the driver has no segment of")


def test_before_torch_s_types_are_asked_for_it_is_a_runtime_error_that_reads_alike(facts: dict[str, Any]) -> None:
    kind, is_torch_s, text = facts["before"]
    assert (kind, is_torch_s) == ("RuntimeError", False)
    assert text.startswith("CUDA out of memory. Tried to allocate 1.00 GiB on device 0; the driver has no segment of")


def test_what_fits_is_given_and_nothing_is_null(facts: dict[str, Any]) -> None:
    assert (facts["fits"], facts["nothing"]) == ("address", "null")


def test_what_is_not_out_of_memory_is_a_runtime_error(facts: dict[str, Any]) -> None:
    assert facts["no such device"] == [
        "RuntimeError", False, "multigraph's allocator cannot serve this: there is no device 99",
    ]  # fmt: skip


def test_a_forked_process_is_told_that_it_cannot(facts: dict[str, Any]) -> None:
    assert facts["forked"][:2] == ["RuntimeError", False]
    assert "forked process" in facts["forked"][2]
    assert "'spawn'" in facts["forked"][2]
