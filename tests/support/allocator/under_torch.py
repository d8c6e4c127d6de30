"""A process in which torch calls the library over the simulated driver, without a GPU.

A small library in front of the CUDA runtime (`no_gpu.c`) answers torch's own questions; memory comes from the simulated
driver.  It needs a torch that is built for CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

COMMON = """
import ctypes, json, os, pickle
import torch
from multigraph_backend import allocator
from multigraph_backend.allocator import installing, library

installing._gpus = lambda: 1  # the simulated driver's
loaded = library.load().library
simulated = ctypes.CDLL(str(loaded.path))
simulated.sim_new.restype, simulated.sim_new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
simulated.sim_enter.argtypes = [ctypes.c_void_p]
simulated.sim_used.restype, simulated.sim_used.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
driver = simulated.sim_new(1 << 30)
simulated.sim_enter(driver)
allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
MIB = 1 << 20
facts = {}

def out_of_memory(nbytes):
    try:
        free(allocate(nbytes, 0))
    except torch.OutOfMemoryError as error:
        return str(error)
"""


def run(script: str, simulated: Path, folder: Path) -> dict[str, Any]:
    """What `script` printed as its last line, JSON.  It begins with the names of `COMMON`."""
    for name in ("libruntime.so", "libcuda.so.1"):
        build = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(HERE / "no_gpu.c")]
        subprocess.run(build, check=True, timeout=60)
    environ = os.environ | {
        "LD_PRELOAD": str(folder / "libruntime.so"),
        "LD_LIBRARY_PATH": str(folder),
        "MULTIGRAPH_ALLOCATOR_LIBRARY": str(simulated / "libmultigraph_allocator_sim.so"),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", "-c", COMMON + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
