"""Forks of a process whose allocator is the extension."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tests.support.gpu.allocator_process import MIB, check, cuda, expect, verified


@check("installed")
def a_forked_process_is_told_to_spawn() -> None:
    tensor = cuda(1000)
    copied = tensor.clone()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            torch.empty(10, device="cuda")
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        del tensor  # frees nothing of the parent's
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    said = b"".join(iter(lambda: os.read(read, 4096), b"")).decode()
    clear = said.startswith("RuntimeError") and "fork" in said and "spawn" in said
    expect(status == 0 and clear, status, said)
    torch.testing.assert_close(tensor, copied)
    torch.testing.assert_close(cuda(MIB).mul_(0) + tensor.sum(), copied.sum().expand(MIB))  # and the parent goes on
    verified()


@check("installed")
def a_process_that_is_forked_before_cuda_starts_has_an_allocator_of_its_own() -> None:
    program = """
import os, torch
from multigraph_backend import allocator
assert allocator.status() or allocator.install(), allocator.status()
for number in range(3):
    child = os.fork()
    if child == 0:
        x = torch.full((1000,), number, device="cuda")
        assert int(x.sum()) == 1000 * number and allocator.memory_allocated() > 0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert int(torch.ones(1000, device="cuda").sum()) == 1000
print("right")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    expect(done.stdout.strip() == "right", done.stdout, done.stderr[-2000:])
