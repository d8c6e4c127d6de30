"""The few things that every replayed call does, compiled: `calls.cc`, and how a process comes by it.

Python says the same and stays the reference (`cudagraphs/recordings`, `capture/aliasing.py`): native calls decide
nothing, they look at the counts, compare the addresses, launch and make the tensors, without an interpreter between
these steps.  `building` compiles them with the machine's own C++ compiler, in the background, once a machine;
`cudagraphs/recordings/native_calls.py` holds them against Python before anything uses them.  Without a compiler, or
with MULTIGRAPH_DISABLE=native_calls, calls go by way of Python, as they do until the module is there.

In:  `begin`, from what makes trees of recordings.  Out: `ready`, or who asked to be told, with `Calls`; `state` says
what became of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from multigraph_backend.native import building

log = logging.getLogger(__name__)

PIECE = "native_calls"  # of those that MULTIGRAPH_DISABLE names
PATCHES = "patched_inputs"  # likewise: what is done natively or not at all
DISABLED = f"MULTIGRAPH_DISABLE={PIECE}"
NOT_ASKED = "not asked for"


class Calls(Protocol):
    """The module, as far as others call it; `recordings/replay.py` makes the objects."""

    def shorten(self, path: list[Any]) -> None:
        """Take off a path of nodes what has nothing alive at its end."""

    def drive(self, library: str, exchange: object) -> None:
        """Look up what launches in a library, and the current stream in torch's capsule of DLPack's functions.  Raises
        OSError, TypeError or ValueError where one of them is not what is expected."""

    def sets_parameters(self) -> bool:
        """Whether the driver, which was found, can be told later where the sources of a captured kernel lie."""

    def last_node(self, device: int) -> int:
        """The driver's handle of the node that was captured last on the current stream; 0 where there is none, or where
        its parameters could not be set later."""

    def reads_nodes(self) -> bool:
        """Whether the driver tells all of a captured graph's nodes, and sets parameters of its kernels later."""

    def nodes(self, graph: int) -> list[tuple[int, int, tuple[int, ...], tuple[bytes, ...]]]:
        """The nodes of a captured graph, by the driver's handle of that; see `devices/patches.py`.  Raises ValueError
        where the driver does not tell, or not all of a kernel's parameters."""

    def Alone(
        self,
        written: Sequence[int],
        others: Sequence[int],
        written_held: Sequence[torch.Tensor],
        other_held: Sequence[torch.Tensor],
    ) -> Callable[[Sequence[Any]], bool]: ...
    def Holds(self, **state: object) -> Callable[[list[Any]], bool]: ...
    def Maker(self, like: torch.Tensor, storage: torch.UntypedStorage | None) -> Callable[..., torch.Tensor]: ...
    def Launch(
        self,
        graph: int,
        device: int,
        otherwise: Callable[[list[Any]], object],
        copies: tuple[int, int, int, int, int, int, int, Sequence[int], int] | None,
        replay: Callable[[], object],
        by_torch: bool,
        hooks: tuple[object, ...],
        keeps: object,
        patches: tuple[tuple[object, ...], tuple[object, ...], tuple[tuple[int, int], ...], bool] | None = None,
    ) -> Callable[[list[Any]], object]: ...
    def Entry(
        self,
        piece: object,
        tree: object,
        turns: object,
        path: list[Any],
        marks: object,
        capturing: Callable[[], bool],
        stream: Callable[[], int],
        lock: object,
        any_thread: bool,
        otherwise: Callable[[list[Any]], Sequence[Any]],
    ) -> Callable[[list[Any]], Sequence[Any]]: ...


_lock = threading.Lock()
_thread: threading.Thread | None = None
_done = threading.Event()
_calls: Calls | None = None
_why = NOT_ASKED
_listeners: list[Callable[[Calls], object]] = []


def wanted(piece: str = PIECE) -> bool:
    """Whether the environment lets calls be native, or a part of them."""
    return piece not in [name.strip() for name in os.environ.get("MULTIGRAPH_DISABLE", "").split(",")]


def begin(check: Callable[[ModuleType], Calls]) -> None:
    """Have the module built, and checked with `check`, in a thread of its own, where that was not begun.  Returns at
    once.  `check` raises `building.NotBuilt` for what is not as it should be."""
    global _thread, _why
    with _lock:
        if _calls is not None or _thread is not None or not wanted():
            _why = _why if wanted() else DISABLED
            return
        _why = "being compiled"
        _thread = threading.Thread(target=_build, args=(check,), name="multigraph-native", daemon=True)
        try:
            _thread.start()
        except RuntimeError as error:  # no more threads can be had
            _why = str(error)
            _done.set()


def ready() -> Calls | None:
    """The module, where it is there."""
    return _calls


def state() -> str:
    """One line: whether calls are native, and if not, why."""
    return "native" if _calls is not None else _why


def wait(seconds: float | None = None) -> bool:
    """Wait until a build that was begun is done, for so long at most; whether calls are native."""
    if _thread is not None:
        _done.wait(seconds)
    return _calls is not None


def when_ready(listener: Callable[[Calls], object]) -> None:
    """Call `listener` with the module once it is there, now or in the thread that has built it; an error of its is
    logged."""
    with _lock:
        _listeners.append(listener)
        calls = _calls
    if calls is not None:
        _tell(listener, calls)


def _build(check: Callable[[ModuleType], Calls]) -> None:
    global _calls, _why
    listeners: list[Callable[[Calls], object]] = []
    try:
        found = check(building.build())
        with _lock:
            _calls = found
            listeners += _listeners
    except Exception as error:
        _why = str(error) if isinstance(error, building.NotBuilt) else f"{type(error).__name__}: {error}"
        log.info("recorded calls go by way of Python: %s", _why, exc_info=not isinstance(error, building.NotBuilt))
    finally:
        _done.set()  # before anybody is told, who may have to wait
    for listener in listeners:
        _tell(listener, found)


def _forked() -> None:
    """In a child that was forked: the thread is not there, and what it had built is."""
    global _lock, _thread, _done
    _lock, _thread, _done = threading.Lock(), None, threading.Event()
    _listeners.clear()


os.register_at_fork(after_in_child=_forked)


def _tell(listener: Callable[[Calls], object], calls: Calls) -> None:
    try:
        listener(calls)
    except Exception:
        log.warning("native calls are not used by %s", listener, exc_info=True)
