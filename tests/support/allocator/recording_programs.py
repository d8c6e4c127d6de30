"""Random recordings in a pool of the installed extension, over the simulated driver, as the runtime makes them.

Each step goes back to a state that some recording has left, with what is alive there, and captures: it allocates, drops
what it has allocated and what it owns of the state, and keeps some of it.  Ranges that are in use are known here, apart
from the allocator, and may never overlap.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from multigraph_backend.allocator.library import Library
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from multigraph_backend.cudagraphs.devices.memory_pool import State

SIZES = (1, 512, 5000, 1 << 19, 1 << 20, 3 << 20, 7 << 20, 20 << 20)


class Captures:
    """Captures of one stream of the simulated driver, to which torch allocates as in a graph's."""

    def __init__(self, simulated: ctypes.CDLL, driver: int) -> None:
        for name in ("sim_begin_capture", "sim_end_capture", "sim_invalidate_capture", "sim_kernel"):
            getattr(simulated, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        simulated.sim_stream.restype, simulated.sim_stream.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._simulated, self._driver = simulated, driver
        self._handle = simulated.sim_stream(driver)
        self._stream = torch.cuda.ExternalStream(self._handle, device=0)

    def kernel(self) -> None:
        self._simulated.sim_kernel(self._driver, self._handle)

    @contextlib.contextmanager
    def into(self, pool: tuple[int, int]) -> Iterator[None]:
        """Holds the pool afterwards, as the graph would."""
        with torch.cuda.stream(self._stream):
            torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
            assert self._simulated.sim_begin_capture(self._driver, self._handle) == 0
            try:
                yield
            finally:
                ended = self._simulated.sim_end_capture(self._driver, self._handle)
                torch._C._cuda_endAllocateToPool(0, pool)
            assert ended == 0

    def begin_and_break(self, pool: tuple[int, int]) -> None:
        """A capture that torch begins and cannot end."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        assert self._simulated.sim_begin_capture(self._driver, self._handle) == 0
        self._simulated.sim_invalidate_capture(self._driver, self._handle)
        self._simulated.sim_end_capture(self._driver, self._handle)


@dataclass
class Node:
    """The pool after a recording; address and bytes of what may be alive then."""

    state: State
    blocks: dict[int, int] = field(default_factory=dict)


def storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device="cuda:0")


def apart(ranges: dict[int, int]) -> None:
    """No two of them share a byte."""
    end = 0
    for address, nbytes in sorted(ranges.items()):
        assert address >= end, f"{address:#x} lies in what ends at {end:#x}"
        end = address + nbytes


class Program:
    """One pool, and the recordings in it.  `counts` tells what has happened."""

    def __init__(self, loaded: Library, captures: Captures, seed: int) -> None:
        self.loaded, self.captures, self.random = loaded, captures, random.Random(seed)
        self.pool = ExtensionPool(loaded, 0, lambda pool: pool.id)
        self.nodes = [Node(self.pool.empty)]
        self.counts = dict.fromkeys(("recordings", "failed", "owners", "survivors", "died", "used again"), 0)

    def some(self, blocks: dict[int, int], part: float) -> dict[int, int]:
        return {address: nbytes for address, nbytes in blocks.items() if self.random.random() < part}

    def step(self) -> None:
        parent = self.random.choice(self.nodes[-6:])
        alive = self.some(parent.blocks, 0.7)
        owned = self.some(alive, 0.4)
        owners = dict(zip(owned, self.pool.restore(parent.state, alive, list(owned.items())), strict=True))
        assert self.pool.holds_only(alive)
        assert all(owner.data_ptr() == address for address, owner in owners.items())
        self.counts["owners"] += len(owners)
        made: dict[int, torch.UntypedStorage] = {}
        in_use, died = dict(alive), dict[int, int]()
        with self.captures.into(self.pool.id):
            for _ in range(self.random.randrange(3, 15)):
                kind = self.random.random()
                if kind < 0.5:
                    new = storage(self.random.choice(SIZES))
                    assert new.data_ptr() not in in_use
                    in_use[new.data_ptr()] = new.nbytes()
                    apart(in_use)
                    made[new.data_ptr()] = new
                    self.counts["used again"] += any(at <= new.data_ptr() < at + died[at] for at in died)
                    del new
                elif kind < 0.7 and made:
                    address = self.random.choice(list(made))
                    del made[address], in_use[address]
                elif kind < 0.9 and owners:
                    address = self.random.choice(list(owners))
                    del owners[address]
                    died[address] = in_use.pop(address)
                else:
                    self.captures.kernel()
            for address in [address for address in made if self.random.random() < 0.5]:
                del made[address], in_use[address]
        self.counts["died"] += len(died)
        assert self.pool.freed() == set(died)
        assert self.pool.holds_only(self.pool.adopted | set(made))
        if self.random.random() < 0.2:
            self.fail(made)
        else:
            self.keep(alive, died, owners, made)
        self.loaded.call("mg_verify", self.loaded.call("mg_torch_device", 0))

    def fail(self, made: dict[int, torch.UntypedStorage]) -> None:
        """The recording is given up; what it made dies, and owners that live free nothing."""
        self.counts["failed"] += 1
        made.clear()
        self.pool.disown()
        assert self.pool.holds_only(self.pool.adopted)

    def keep(
        self, alive: dict[int, int], died: dict[int, int], owners: dict[int, torch.UntypedStorage],
        made: dict[int, torch.UntypedStorage],
    ) -> None:  # fmt: skip
        self.counts["recordings"] += 1
        self.counts["survivors"] += len(owners)
        passed_on = [owner for owner in owners.values() if self.random.random() < 0.5]  # outputs that are inputs
        outputs = {address: each.nbytes() for address, each in made.items()}
        state = self.pool.adopt([*made.values(), *passed_on])
        made.clear()
        owners.clear()
        passed_on.clear()
        blocks = {address: nbytes for address, nbytes in alive.items() if address not in died} | outputs
        assert self.pool.adopted == set(blocks)
        assert self.pool.holds_only(blocks), "a storage has freed what was adopted"
        self.nodes.append(Node(state, blocks))

    def end(self) -> None:
        for _ in range(sum(self.counts[name] for name in ("recordings", "failed"))):
            torch._C._cuda_releasePool(0, self.pool.id)
        assert self.pool.uses() == 1
        self.pool.leave()
        assert self.pool.uses() == 0
        self.nodes.clear()


def run(loaded: Library, captures: Captures, seed: int, steps: int) -> dict[str, int]:
    program = Program(loaded, captures, seed)
    for _ in range(steps):
        program.step()
    program.end()
    return program.counts


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("it was not refused")
