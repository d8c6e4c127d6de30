"""The allocator over the simulated driver, from Python: built once per session, called through its C ABI."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[3] / "allocator_ext"
MIB = 1 << 20
FILTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
OOM_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)

STRICT, OWN_STREAM, GRAPH_WIDE, ANY_STREAM = range(4)
OK, OUT_OF_MEMORY, INVALID = range(3)


def build(folder: Path, *options: str, targets: tuple[str, ...] = (), source: Path = SOURCE) -> Path:
    """CMake with Ninja into `folder`; warnings of the compiler are errors."""
    commands = [
        ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", *options],
        ["cmake", "--build", str(folder), "--parallel", "2", *(["--target", *targets] if targets else [])],
    ]
    # both may be installed beside this interpreter only
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for command in commands:
        # the system's linker (see scripts/test): gold exports statics of inline functions, which nothing asks for
        environ = ["env", "-u", "COMPILER_PATH", f"PATH={path}"]
        done = subprocess.run([*environ, *command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return folder


def build_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` in `root`, in which `make` has built: once for all the processes that run tests."""
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / f"{name}.built").exists():
            make(folder)
            (root / f"{name}.built").touch()
    return folder


def stress(program: Path, *arguments: str) -> dict[str, Any]:
    """What a stress program found: its line of JSON."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.stdout, f"{program.name} {arguments}: {done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == bool(found["wrong"]), done.stderr
    return found


LEVELS = ("allocated", "requested", "reserved", "active", "allocations", "segments")
COUNTS = ("ooms", "retries", "freed_in_captures", "proven", "parked", "moved", "verified", "verify_failures")


class Stats(ctypes.Structure):
    _fields_ = [
        *((name + end, ctypes.c_int64) for name in LEVELS for end in ("", "_peak")),
        *((name, ctypes.c_uint64) for name in COUNTS),
        *((name + end, ctypes.c_int64) for name in LEVELS for end in ("_up", "_down")),
        ("stitched", ctypes.c_uint64),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("reuse", ctypes.c_int),
        ("empty_nodes", ctypes.c_int),
        ("verify", ctypes.c_int),
        ("expandable", ctypes.c_int),
        ("garbage_threshold", ctypes.c_double),
        ("history", ctypes.c_size_t),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("requested", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    ]


class Refused(Exception):
    """A call returned a status: (status, the sentence)."""


class Allocator:
    """A device's allocator over a simulated driver of its own."""

    def __init__(
        self,
        library: Path,
        *,
        capacity: int = 1 << 40,
        reuse: int = OWN_STREAM,
        empty_nodes: bool = False,
        verify: bool = True,
        garbage_threshold: float = 0.0,
        history: int = 0,
        expandable: bool = False,
        stitch: bool = False,
        index: int = 0,
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.mg_message.restype = ctypes.c_char_p
        for name in ("sim_new", "sim_stream", "sim_device"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.sim_calls.restype = ctypes.c_uint64
        self._library.sim_used.restype = ctypes.c_size_t
        self._sim = ctypes.c_void_p(self._library.sim_new(ctypes.c_size_t(capacity)))
        self._library.sim_enter(self._sim)
        options = Options(
            reuse, empty_nodes, verify, (2 if stitch else 1) if expandable else 0, garbage_threshold, history
        )
        if self._library.mg_set_options(ctypes.byref(options)) != OK:
            raise Refused(INVALID, self._library.mg_message().decode())
        self._device = ctypes.c_void_p(self._library.sim_device(index))
        self._library.mg_set_options(None)
        self._callbacks: list[Any] = []

    def close(self) -> None:
        self._library.sim_enter(self._sim)
        self._library.sim_device_delete(self._device)
        self._library.sim_enter(None)
        self._library.sim_delete(self._sim)

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.sim_enter(self._sim)  # another allocator may have been called since
        status = getattr(self._library, name)(self._device, *arguments)
        if status != OK:
            raise Refused(status, self._library.mg_message().decode())

    # the driver's side

    def stream(self) -> int:
        return int(self._library.sim_stream(self._sim))

    def _sim_call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, name)(self._sim, *arguments)

    def kernel(self, stream: int) -> int:
        """The number of its node."""
        return int(self._sim_call("sim_kernel", ctypes.c_void_p(stream)))

    def early_kernel(self, stream: int) -> int:
        """One that may begin when the kernel before it on the stream has begun."""
        return int(self._sim_call("sim_early_kernel", ctypes.c_void_p(stream)))

    def set_terminal(self, stream: int, node: int) -> None:
        assert self._sim_call("sim_set_terminal", ctypes.c_void_p(stream), node) == 0

    def begin_body(self, stream: int, on: int) -> None:
        """`stream` captures the body of a conditional node that `on` launches."""
        assert self._sim_call("sim_begin_body", ctypes.c_void_p(stream), ctypes.c_void_p(on)) == 0

    def begin_capture(self, stream: int) -> None:
        assert self._sim_call("sim_begin_capture", ctypes.c_void_p(stream)) == 0

    def end_capture(self, stream: int) -> None:
        assert self._sim_call("sim_end_capture", ctypes.c_void_p(stream)) == 0

    def graph(self, stream: int) -> int:
        """The graph that `stream` captures into."""
        self._library.sim_graph.restype = ctypes.c_void_p
        return int(self._sim_call("sim_graph", ctypes.c_void_p(stream)))

    def begin_capture_to(self, stream: int, graph: int) -> None:
        """Into the graph of an earlier capture, behind nothing of it."""
        assert self._sim_call("sim_begin_capture_to", ctypes.c_void_p(stream), ctypes.c_void_p(graph)) == 0

    def destroy_stream(self, stream: int) -> None:
        self._sim_call("sim_destroy_stream", ctypes.c_void_p(stream))

    def as_the_driver_was_asked(self) -> tuple[int, int]:
        """For the last memory to map: the type of its handle, and whether network cards are to reach it."""
        return self._sim_call("sim_handle_types"), self._sim_call("sim_remote_access")

    def cannot_share(self) -> None:
        """The driver has no such handles, and no such cards."""
        self._sim_call("sim_cannot_share")

    def granularity(self, nbytes: int) -> None:
        self._sim_call("sim_granularity", ctypes.c_size_t(nbytes))

    def faults(self) -> bool:
        """Whether the allocator has called the driver wrongly, or broken a capture."""
        return bool(self._sim_call("sim_faults"))

    def invalidate_capture(self, stream: int) -> None:
        self._sim_call("sim_invalidate_capture", ctypes.c_void_p(stream))

    def is_capturing(self, stream: int) -> bool:
        return bool(self._sim_call("sim_is_capturing", ctypes.c_void_p(stream)))

    def join(self, waiting: int, awaited: int) -> None:
        event = self._sim_call("sim_record", ctypes.c_void_p(awaited))
        assert self._sim_call("sim_wait", ctypes.c_void_p(waiting), event) == 0

    def run_all(self) -> None:
        self._sim_call("sim_run_all")

    def fail_at(self, call: int) -> None:
        self._sim_call("sim_fail_at", ctypes.c_uint64(call))

    def mapped_for(self, device: int, address: int) -> bool:
        return bool(self._sim_call("sim_mapped_for", device, ctypes.c_uint64(address)))

    def cannot_map(self) -> None:
        """The driver has no addresses and memory apart from each other."""
        self._sim_call("sim_cannot_map")

    @property
    def driver_calls(self) -> int:
        return int(self._sim_call("sim_calls"))

    @property
    def driver_bytes(self) -> int:
        return int(self._sim_call("sim_used"))

    def write(self, address: int, value: int) -> None:
        """Put a value at an address, into the memory that lies behind it now."""
        self._sim_call("sim_write", ctypes.c_uint64(address), ctypes.c_uint64(value))

    def read(self, address: int) -> int:
        """The value that was put into the memory behind an address last, 0 where there is none."""
        self._library.sim_read.restype = ctypes.c_uint64
        return int(self._sim_call("sim_read", ctypes.c_uint64(address)))

    def backed(self, address: int, nbytes: int) -> bool:
        return bool(self._sim_call("sim_backed", ctypes.c_uint64(address), ctypes.c_size_t(nbytes)))

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory of the host."""
        self._library.sim_pinned.restype = ctypes.c_size_t
        return int(self._sim_call("sim_pinned"))

    def relieved_by_torch_s_side(self) -> None:
        """Ask as torch's allocators ask, before an allocation fails."""
        self._library.sim_relieve(self._device)

    # the allocator's side

    def allocate(self, nbytes: int, stream: int) -> int:
        address = ctypes.c_uint64()
        self._call("mg_allocate", ctypes.c_size_t(nbytes), ctypes.c_void_p(stream), ctypes.byref(address))
        return address.value

    def free(self, address: int) -> None:
        self._call("mg_free", ctypes.c_uint64(address))

    def record_stream(self, address: int, stream: int) -> None:
        self._call("mg_record_stream", ctypes.c_uint64(address), ctypes.c_void_p(stream))

    def base(self, address: int) -> tuple[int, int]:
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("mg_base", ctypes.c_uint64(address), ctypes.byref(start), ctypes.byref(size))
        return start.value, size.value

    def begin_pool(self, pool: int, takes: Callable[[int], bool]) -> None:
        filter_ = FILTER(lambda _, stream: int(takes(stream or 0)))
        self._callbacks.append(filter_)
        self._call("mg_begin_pool", ctypes.c_uint64(0), ctypes.c_uint64(pool), filter_, None)

    def _pool_call(self, name: str, pool: int, *arguments: Any) -> None:
        self._call(name, ctypes.c_uint64(0), ctypes.c_uint64(pool), *arguments)

    def end_pool(self, pool: int) -> None:
        self._pool_call("mg_end_pool", pool)

    def release_pool(self, pool: int) -> None:
        self._pool_call("mg_release_pool", pool)

    def users(self, pool: int) -> int:
        users = ctypes.c_int()
        self._pool_call("mg_pool_users", pool, ctypes.byref(users))
        return users.value

    def save(self, pool: int) -> int:
        state = ctypes.c_uint64()
        self._pool_call("mg_pool_save", pool, ctypes.byref(state))
        return state.value

    def restore(self, state: int) -> None:
        self._call("mg_pool_restore", ctypes.c_uint64(state))

    def forget(self, state: int) -> None:
        self._call("mg_pool_forget", ctypes.c_uint64(state))

    def adopt(self, *addresses: int) -> None:
        self._call("mg_adopt", (ctypes.c_uint64 * len(addresses))(*addresses), ctypes.c_size_t(len(addresses)))

    def drop(self, address: int) -> None:
        self._call("mg_drop", ctypes.c_uint64(address))

    def _blocks(self, name: str, pool: int) -> list[tuple[int, int]]:
        count = ctypes.c_size_t()
        self._pool_call(name, pool, None, ctypes.c_size_t(0), ctypes.byref(count))
        blocks = (Block * count.value)()
        self._pool_call(name, pool, blocks, count, ctypes.byref(count))
        return [(block.address, block.bytes) for block in blocks]

    def blocks(self, pool: int) -> list[tuple[int, int]]:
        return self._blocks("mg_pool_blocks", pool)

    def segments(self, pool: int) -> list[tuple[int, int]]:
        return self._blocks("mg_pool_segments", pool)

    def use_on_oom(self, pool: int, on: bool = True) -> None:
        self._pool_call("mg_use_on_oom", pool, int(on))

    def lent(self, pool: int) -> int:
        nbytes = ctypes.c_size_t()
        self._pool_call("mg_pool_lent", pool, ctypes.byref(nbytes))
        return nbytes.value

    def pool_limit(self, pool: int, nbytes: int) -> None:
        self._pool_call("mg_pool_limit", pool, ctypes.c_size_t(nbytes))

    def limit(self, nbytes: int) -> None:
        self._call("mg_limit", ctypes.c_size_t(nbytes))

    def fraction(self, part: float) -> None:
        self._call("mg_fraction", ctypes.c_double(part))

    def on_oom(self, callback: Callable[[int], bool]) -> None:
        kept = OOM_CALLBACK(lambda _, nbytes: int(callback(nbytes)))
        self._callbacks.append(kept)
        self._call("mg_oom_callback", kept, None)

    def empty_cache(self) -> int:
        nbytes = ctypes.c_size_t()
        self._call("mg_empty_cache", ctypes.byref(nbytes))
        return nbytes.value

    def empty_pool(self, pool: int) -> int:
        nbytes = ctypes.c_size_t()
        self._pool_call("mg_empty_pool", pool, ctypes.byref(nbytes))
        return nbytes.value

    def _bytes(self, name: str, *arguments: Any) -> int:
        nbytes = ctypes.c_size_t()
        self._call(name, *arguments, ctypes.byref(nbytes))
        return nbytes.value

    def sleep(self, pool: int, keep: bool = True) -> int:
        return self._bytes("mg_pool_sleep", ctypes.c_uint64(0), ctypes.c_uint64(pool), int(keep))

    def wake(self, pool: int, fill: int = -1) -> int:
        return self._bytes("mg_pool_wake", ctypes.c_uint64(0), ctypes.c_uint64(pool), fill)

    def asleep(self, pool: int) -> tuple[bool, int]:
        """Whether a pool sleeps, and how many of its bytes the device has meanwhile."""
        asleep = ctypes.c_int()
        away = self._bytes("mg_pool_asleep", ctypes.c_uint64(0), ctypes.c_uint64(pool), ctypes.byref(asleep))
        return bool(asleep.value), away

    def sleep_all(self, keep: bool = True) -> int:
        return self._bytes("mg_sleep", int(keep))

    def wake_of_all(self, fill: int = -1) -> int:
        return self._bytes("mg_wake", fill)

    def empty_host(self) -> int:
        return self._bytes("mg_empty_host")

    def peer_access(self, other: int) -> None:
        self._call("mg_peer_access", other)

    @property
    def stats(self) -> Stats:
        stats = Stats()
        self._call("mg_read_stats", ctypes.byref(stats))
        return stats

    def snapshot(self) -> dict[str, Any]:
        length = ctypes.c_size_t()
        self._call("mg_snapshot", None, ctypes.c_size_t(0), ctypes.byref(length))
        text = ctypes.create_string_buffer(length.value)
        self._call("mg_snapshot", text, length, ctypes.byref(length))
        found: dict[str, Any] = json.loads(text.value)
        return found

    def record_history(self, entries: int) -> None:
        self._call("mg_record_history", ctypes.c_size_t(entries))

    def snapshot_at_oom(self, path: Path | None) -> None:
        self._call("mg_snapshot_at_oom", None if path is None else str(path).encode())

    def verify(self) -> None:
        self._call("mg_verify")


HEADER = SOURCE / "multigraph_allocator.h"  # all that is exported


@functools.cache
def declarations() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of each function that the public header declares: the type of what it returns, and its parameters as written."""
    found = {}
    for declared in re.findall(r"^MG_EXPORT ([^;]*?)(?: MG_NOEXCEPT)?;", HEADER.read_text(), re.MULTILINE):
        parted = re.fullmatch(r"(.*?[ *])(mg_\w+)\((.*)\)", " ".join(declared.split()))
        assert parted is not None, declared
        result, name, parameters = parted.groups()
        # a comma within the parameters of a function that is a parameter parts nothing
        parts = () if parameters == "MG_NOTHING" else re.split(r", (?![^(]*\))", parameters)
        found[name] = (result.strip(), tuple(parts))
    return found


def declared_exports() -> frozenset[str]:
    """The functions that the public header declares."""
    return frozenset(declarations())


def capture(allocator: Allocator, streams: int) -> list[int]:
    """`streams` streams in one capture, under a pool for all of them."""
    made = [allocator.stream() for _ in range(streams)]
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(made[0])
    for other in made[1:]:
        allocator.join(other, made[0])
    return made
