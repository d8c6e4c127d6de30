"""Past AOTAutograd's runtime wrappers, where they do nothing.

Around an inference graph they reorder, rebuild and check what most graphs do not have: changed inputs, outputs that
alias something, subclasses, effects, random states.  Of a recorded graph they take as long as the replay.

In:  what AOTAutograd compiled, and the code that it calls in the end, which keeps what its metadata said.
Out: a function that calls that code at once, if the metadata names nothing for the wrappers to do, and if they were
seen, at the first call, to hand the very objects through that they were given, both ways.  Inputs that the code itself
changes (a cache of keys and values) count as changed for autograd as they do behind the wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.output_code import RecordedCode


class DirectCall:
    """`first` runs a call through the wrappers and watches; `function` is the way past them once that is proven."""

    def __init__(
        self, wrapped: Callable[..., Any], code: RecordedCode, grad: bool, changed: tuple[int, ...] = ()
    ) -> None:
        """`changed`: positions of arguments that the code changes, and autograd is to know of."""
        self._wrapped, self._code, self._grad, self._changed = wrapped, code, grad, changed
        self._lock = Lock()  # one call at a time is watched; others need not wait
        self.function: Callable[..., Any] | None = None

    def first(self, *args: Any) -> Any:
        """Raises what the code raises."""
        if self.function is not None:
            return self.function(*args)
        if not self._lock.acquire(blocking=False):
            return self._wrapped(*args)
        try:
            with _watched(self._code) as seen:
                outputs = self._wrapped(*args)
        finally:
            self._lock.release()
        if len(seen) == 1 and _same(seen[0][0], args) and _same(seen[0][1], outputs):
            self.function = _calling(self._code, self._grad, self._changed)
        return outputs


def find(wrapped: Callable[..., Any], codes: Sequence[RecordedCode]) -> DirectCall | None:
    """The direct call of what was just compiled, or taken from a cache, if it may have one; under the modes that calls
    will have."""
    if len(codes) != 1 or not codes[0].inference or not codes[0].pieces or codes[0].only_changes is None:
        return None
    if any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")):
        return None
    return DirectCall(wrapped, codes[0], torch.is_grad_enabled(), codes[0].only_changes)


@contextmanager
def _watched(code: RecordedCode) -> Iterator[list[tuple[list[Any], Any]]]:
    """What this thread's calls of `code` are given and return."""
    seen: list[tuple[list[Any], Any]] = []
    thread, run = get_ident(), code.run

    def watching(inputs: list[Any]) -> Any:
        if get_ident() != thread:
            return run(inputs)
        given = list(inputs)
        outputs = run(inputs)
        seen.append((given, outputs))
        return outputs

    code.run = watching
    try:
        yield seen
    finally:
        code.run = run


def _same(ones: Any, others: Any) -> bool:
    if not isinstance(ones, list | tuple) or len(ones) != len(others):
        return False
    numbers = (int, float, bool)
    return all(
        one is other or (type(one) is type(other) and isinstance(one, numbers) and one == other)
        for one, other in zip(ones, others, strict=True)
    )


def _calling(code: RecordedCode, grad: bool, changed: Sequence[int] = ()) -> Callable[..., Any]:
    run, set_grad, increment_version = code.run, _compat.set_grad_enabled, torch.autograd.graph.increment_version

    def direct(*args: Any) -> Any:
        return run(list(args))

    def changing(*args: Any) -> Any:
        increment_version([args[index] for index in changed])
        return run(list(args))

    called = changing if changed else direct

    def without_grad(*args: Any) -> Any:
        set_grad(False)
        try:
            return called(*args)
        finally:
            set_grad(True)

    return without_grad if grad else called
