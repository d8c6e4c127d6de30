"""Memory that sleeps: which it is, for whoever launches what reads it, and sleep and wake of the whole process.

In:  pools that fall asleep and wake (`pools.Pool.sleep`); `sleep()` and `wake()` for all of the installed extension.
Out: what sleeps on each device.  `listeners` hear of it before pages go and after they are back; the recordings' trees
are among them, so that a call whose recording would read memory that is not there raises `Asleep`.  What the backend
itself keeps on the device (`survives`: the tables by which recordings copy their inputs, constants of compiled code)
has its contents after a wake even where contents were not kept, for nobody else could write them again.

A kernel that is launched all the same, by eager code or a graph of the user's own, ends with the driver's "illegal
memory access": nothing is mapped at those addresses, and nothing else ever is.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from multigraph_backend import _compat
from multigraph_backend.allocator import installing
from multigraph_backend.allocator.library import Refused
from multigraph_backend.spelling import did_you_mean

Keep = Literal["host", "nothing"]
KEEPS: tuple[Keep, ...] = get_args(Keep)

Range = tuple[int, int]  # an address, and how many bytes


class Asleep(RuntimeError):
    """What was asked for needs memory that sleeps, or memory cannot fall asleep or wake now; nothing has changed."""


@dataclass(frozen=True)
class Sleeper:
    """`ranges` of a device that sleep; None: all that the process has there."""

    device: int
    ranges: tuple[Range, ...] | None
    kept: bool = True  # whether the contents come back by themselves

    def has(self, address: int) -> bool:
        return self.ranges is None or any(start <= address < start + nbytes for start, nbytes in self.ranges)


Listener = Callable[[int, Sequence[Sleeper]], None]

#: called with a device and all that sleeps there, when that is about to be more, or is less. One that raises keeps what
#: was about to sleep awake
listeners: list[Listener] = []

_lock = threading.RLock()
_asleep: dict[object, Sleeper] = {}
_ended: dict[object, Callable[[], Sequence[Range]]] = {}  # which never wake, and what of each is still there
#: tensors of the backend's own, and what is in them; of those that were made since something here could sleep
_survivors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_possible = False


def will_be_possible() -> None:
    """From now on memory of this process may sleep."""
    global _possible
    _possible = True


def survives(tensor: torch.Tensor, contents: torch.Tensor | None = None) -> None:
    """`tensor`, which never changes, has its contents after every wake.  contents: a copy of them on the host; None:
    it is taken now, which waits for the device."""
    if _possible or installing.installed() is not None:
        with _lock, _compat.disable_current_modes():
            _survivors[tensor] = tensor.detach().to("cpu", copy=True) if contents is None else contents


def asleep(device: int) -> tuple[Sleeper, ...]:
    """What sleeps on a device."""
    return tuple(sleeper for key, sleeper in list(_asleep.items()) if sleeper.device == device and _is_there(key))


def _is_there(key: object) -> bool:
    """Whether what was told of under `key` has memory: what is in an ended pool dies some time, and others get its
    addresses then."""
    left = _ended.get(key)
    if left is None or left():
        return True
    _asleep.pop(key, None)
    _ended.pop(key, None)
    return False


def fall_asleep(key: object, sleeper: Sleeper, give_up: Callable[[], int]) -> int:
    """Tell of `sleeper`, and then let `give_up` give its pages up; what that returns.  Where either raises, nothing
    sleeps."""
    with _lock:
        _asleep[key] = sleeper
        try:
            _tell(sleeper.device)
            return give_up()
        except BaseException:
            _tell_of_end(key)
            raise


def woken(key: object) -> None:
    """What was told of under `key` is there again."""
    with _lock:
        sleeper = _asleep.get(key)
        if sleeper is not None and not sleeper.kept:
            _write_survivors(key, sleeper)
        _tell_of_end(key)


def _tell_of_end(key: object) -> None:
    sleeper = _asleep.pop(key, None)
    if sleeper is not None:
        _tell(sleeper.device)


def _write_survivors(key: object, woken: Sleeper) -> None:
    others = [sleeper for each, sleeper in list(_asleep.items()) if each != key and sleeper.device == woken.device]
    written = False
    for tensor, contents in list(_survivors.items()):
        address = tensor.data_ptr()
        if (tensor.device.index or 0) != woken.device or not woken.has(address):
            continue
        if not any(other.has(address) for other in others):
            tensor.copy_(contents)
            written = True
    if written and torch.cuda.is_initialized():
        torch.cuda.synchronize(woken.device)  # recordings read them on whichever stream


def ended(key: object, left: Callable[[], Sequence[Range]]) -> None:
    """What was told of under `key` is over, and never wakes; `left`: what of it is still there, for tensors are in it.
    Tells nobody: it is said when objects end."""
    if key in _asleep:
        _ended[key] = left


def _tell(device: int) -> None:
    now = asleep(device)
    for listener in listeners:
        listener(device, now)


def checked(keep: str) -> bool:
    """Whether contents are kept.  Raises ValueError for a word that is neither."""
    if keep not in KEEPS:
        raise ValueError(f"sleep: keep is 'host' or 'nothing', got {keep!r}{did_you_mean(str(keep), KEEPS)}")
    return keep == "host"


def fill() -> int:
    """The byte for contents that were not kept: with MULTIGRAPH_DEBUG=poison NaN in every floating-point type; else -1,
    which leaves what the pages come with."""
    aids = [aid.strip() for aid in os.environ.get("MULTIGRAPH_DEBUG", "").split(",")]
    return 0xFF if "poison" in aids else -1


# ---------------------------------------------------------------- the whole process


def sleep(keep: Keep = "host", device: torch.device | int | None = None) -> int:
    """Give all memory of the installed extension back to the device, and keep its addresses; bytes.

    Parameters, recordings, CUDA graphs and views are what they were once `wake()` has returned.  keep: "host" copies
    the contents to pinned memory of the host before, and back after; with "nothing" they are undefined afterwards.
    device: all on which something was allocated.  Until then nothing can be allocated there, and nothing that lies
    there may be used; tensors may die.  Segments that are plain stay.

    The device is waited for.  Raises `Asleep` where that cannot be done (a capture is under way), where it sleeps
    already, or where the host has no memory for the contents; that device is as it was then, and those before it sleep.
    Raises RuntimeError where the extension is not installed.
    """
    keeps = checked(keep)
    total = 0
    loaded, handles = _installed(device)
    for index, handle in handles:
        given = ctypes.c_size_t()

        def give_up(handle: int = handle, given: ctypes.c_size_t = given) -> int:
            called(loaded.call, "mg_sleep", handle, int(keeps), ctypes.byref(given))
            return given.value

        if any(sleeper.ranges is None for sleeper in asleep(index)):
            raise Asleep("the allocator sleeps already")
        total += fall_asleep(("process", index), Sleeper(index, None, keeps), give_up)
    return total


def wake(device: torch.device | int | None = None) -> int:
    """Bring back what `sleep()` has given up, at the same addresses; bytes.

    Pools that were put to sleep by themselves sleep on.  Raises `Asleep` where nothing sleeps, or where the device has
    not enough memory free: what was kept is kept, and another try goes on.
    """
    total = 0
    loaded, handles = _installed(device)
    for index, handle in handles:
        brought = ctypes.c_size_t()
        called(loaded.call, "mg_wake", handle, fill(), ctypes.byref(brought))
        total += brought.value
        woken(("process", index))
    return total


def _installed(device: torch.device | int | None) -> tuple[Any, list[tuple[int, int]]]:
    installed = installing.installed()
    if installed is None:
        raise RuntimeError("sleep() and wake() are of the installed extension; here a pool(sleeps=True) can sleep")
    index = device if isinstance(device, int) or device is None else device.index
    indices = range(installing._gpus()) if index is None else (index,)
    handles = [(each, installed.library.call("mg_torch_device", each)) for each in indices]
    return installed.library, [(each, handle) for each, handle in handles if handle is not None]


def called(call: Callable[..., Any], *arguments: Any) -> None:
    """A call of the library that may refuse."""
    try:
        call(*arguments)
    except Refused as refused:
        raise Asleep(str(refused)) from None
