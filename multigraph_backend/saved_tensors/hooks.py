"""Packs that users write: `saved_hook`, and torch's own `saved_tensors_hooks` where they are graph modules.

    @multigraph_backend.saved_hook
    def rotated(x):
        return (x @ R).to(torch.float8_e4m3fn), x.dtype

    @rotated.unpack
    def rotated(packed):
        narrow, dtype = packed
        return narrow.to(dtype) @ R.T

In: a pack function of one tensor and an unpack function of what it returns.  Out: a `SavedHook`, which stands where a
ready pack may stand in a rule.

Invariant: two hooks are equal exactly if they do the same: their code, what they close over and what they refer to.
One whose content cannot be read equals itself alone, and nothing that it is traced into comes from a cache.  One whose
content changed since it was first used equals itself alone too: code that was compiled of it has the old content.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import content

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class SavedHook:
    """A pack and an unpack function; see `saved_hook`."""

    def __init__(self, pack: Pack, unpack: Unpack | None = None, stock: bool = False) -> None:
        self._pack, self._unpack, self._stock = pack, unpack, stock
        self._own = uuid.uuid4().hex
        self._keys: set[str] = set()  # all that it has been
        self.__doc__ = getattr(pack, "__doc__", None)

    @property
    def stock(self) -> bool:
        """Whether it is torch's own `saved_tensors_hooks`."""
        return self._stock

    @property
    def name(self) -> str:
        return "saved_tensors_hooks" if self._stock else getattr(self._pack, "__qualname__", type(self._pack).__name__)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What is saved in place of `tensor`."""
        return self._pack(tensor)

    @property
    def unpack(self) -> Callable[[Any], Any]:
        """With a function: this hook with that as its unpack function (a decorator).  With what was packed: the tensor.

        Which of the two it is depends on the hook: the first as long as it has no unpack function, then the second.
        """
        return self._with if self._unpack is None else self._unpack

    @property
    def complete(self) -> bool:
        return self._unpack is not None

    def _with(self, unpack: Unpack) -> SavedHook:
        return SavedHook(self._pack, unpack, self._stock)

    @property
    def key(self) -> str:
        """What the hook does now, as text; its own where that cannot be read.  Read when code is compiled of it."""
        try:
            key = content.digest(self._pack, self._unpack, self._stock)
        except content.CannotHash:
            key = f"unreadable {self._own}"
        self._keys.add(key)
        return key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, SavedHook) and self.key == other.key and len(self._keys | other._keys) == 1

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"hook {self.name}"

    def __repr__(self) -> str:
        return f"<saved_hook {self.name}>"


def saved_hook(pack: Pack, unpack: Unpack | None = None) -> SavedHook:
    """A pack of your own, for rules: `Rule(Match(...), hook)`.

    `pack` takes a tensor, contiguous as it lies in memory, and returns what is saved in its place: tensors, numbers,
    None, tuples, lists, dicts or objects of them.  `unpack` takes that and returns a tensor of the same shape and type.
    Both are traced into the compiled graphs: tensors that they capture are constants there.  Use it as a decorator of
    the pack function, and its `.unpack` as one of the unpack function, or pass both.
    """
    if not callable(pack):
        raise TypeError(f"saved_hook takes a function that packs one tensor, not {pack!r}")
    return SavedHook(pack, unpack)


def stock_hooks() -> SavedHook | None:
    """The innermost `saved_tensors_hooks` in force, where both are graph modules; others run in eager anyway.

    This is asked at each compile, so it loads Inductor only where there are such hooks.
    """
    if _compat.without("top_saved_tensors_hooks"):
        return None
    found = _compat.top_saved_tensors_hooks(True)
    if not found or not all(isinstance(hook, torch.fx.GraphModule) for hook in found):
        return None
    if _compat.missing("saved tensors"):
        return None
    pack, unpack = found
    return SavedHook(pack, unpack, stock=True)


def without_hooks(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose graphs have the hooks in them: in eager they would run once more."""

    @functools.wraps(run, updated=())
    def call(*args: Any) -> Any:
        with _hooks_off():
            return run(*args)

    return call


@contextlib.contextmanager
def _hooks_off() -> Iterator[None]:
    message = "saved_tensors_hooks are part of the compiled graph that is running"
    before = _compat.hooks_disabled_because()
    _compat.disable_hooks(message, False)
    try:
        yield
    finally:
        if before is None:
            _compat.enable_hooks()
        else:
            _compat.disable_hooks(before, False)
