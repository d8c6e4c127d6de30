"""Past AOTAutograd's runtime wrappers, where they do nothing.

Around an inference graph they reorder, rebuild and check what most graphs do not have: changed inputs, outputs that
alias something, subclasses, effects, random states.  Of a recorded graph they take as long as the replay.

In:  what AOTAutograd compiled, and the code that it calls in the end, which keeps what its metadata said.
Out: a function that calls that code at once, if the metadata names nothing for the wrappers to do, and if they were
seen, at the first call, to hand the very objects through that they were given, both ways; of a tensor subclass
(a quantized weight) what it is made of, which is read by the names that it has there, and which Dynamo guards.  Inputs
that the code itself changes (a cache of keys and values) count as changed for autograd as they do behind the wrappers.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.capture.structure import is_wrapper, plain_parts
from multigraph_backend.cudagraphs.output_code import RecordedCode

_TRIES = 3  # calls that are watched; the first may be unlike others


class DirectCall:
    """`first` runs a call through the wrappers and watches; `function` is the way past them once that is proven, and
    the way through them where several calls have not proven it.  `boxed`: the code, where `function` does nothing but
    hand it a list of the arguments."""

    def __init__(
        self, wrapped: Callable[..., Any], code: RecordedCode, grad: bool, changed: tuple[int, ...] = ()
    ) -> None:
        """`changed`: positions of arguments that the code changes, and autograd is to know of."""
        self._wrapped, self._code, self._grad, self._changed = wrapped, code, grad, changed
        self._lock = Lock()  # one call at a time is watched; others need not wait
        self._tries = _TRIES
        self.function: Callable[..., Any] | None = None
        self.boxed: RecordedCode | None = None

    def first(self, *args: Any) -> Any:
        """Raises what the code raises."""
        if self.function is not None:
            return self.function(*args)
        if not self._lock.acquire(blocking=False):
            return self._wrapped(*args)
        wrappers = [arg for arg in args if is_wrapper(arg)]
        try:
            open_up = _opening(args) if wrappers else list
            inputs = open_up(args)
            before = _versions([*inputs, *wrappers]) if wrappers else None
            with _watched(self._code) as seen:
                outputs = self._wrapped(*args)
        finally:
            self._lock.release()
        same = len(seen) == 1 and _same(seen[0][0], inputs) and _same(seen[0][1], outputs)
        if same and (before is None or self._changes_only_these(before, _versions([*inputs, *wrappers]))):
            self.function = _calling(self._code, self._grad, self._changed, open_up)
            self.boxed = self._code if open_up is list and not self._grad and not self._changed else None
        elif (left := self._tries - 1) > 0:
            self._tries = left
        else:
            self.function = self._wrapped
        return outputs

    def _changes_only_these(self, before: list[int | None], after: list[int | None]) -> bool:
        """Whether the positions of what changes are those among what the code is given, not among the arguments."""
        return {index for index, version in enumerate(before) if version != after[index]} == set(self._changed)


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
        if code.run is watching:  # else calls have become native meanwhile
            code.run = run


def _same(ones: Any, others: Any) -> bool:
    if not isinstance(ones, list | tuple) or len(ones) != len(others):
        return False
    numbers = (int, float, bool)
    return all(
        one is other or (type(one) is type(other) and isinstance(one, numbers) and one == other)
        for one, other in zip(ones, others, strict=True)
    )


def _opening(args: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """What makes the list that code is given of arguments like these: in place of each subclass its plain tensors."""
    texts: list[str] = []
    for index, arg in enumerate(args):
        if is_wrapper(arg):
            texts += [_read(f"args[{index}]", path) for path in plain_parts(arg)]
        else:
            texts.append(f"args[{index}]")
    opening: Callable[[Sequence[Any]], list[Any]] = eval(f"lambda args: [{', '.join(texts)}]", {})
    return opening


def _read(text: str, path: str) -> str:
    """Text that reads what lies at `path`; names of parts need be no names of Python's."""
    for name in path.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        text = f"{text}.{name}" if plain else f"getattr({text}, {name!r})"
    return text


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [
        value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None for value in values
    ]


def _calling(
    code: RecordedCode,
    grad: bool,
    changed: Sequence[int] = (),
    open_up: Callable[[Sequence[Any]], list[Any]] = list,
) -> Callable[..., Any]:
    """`open_up`: makes the list that the code is given of a call's arguments."""
    set_grad, increment_version = _compat.set_grad_enabled, torch.autograd.graph.increment_version

    def direct(*args: Any) -> Any:
        return code.run(open_up(args))  # which becomes another when calls become native

    def changing(*args: Any) -> Any:
        inputs = open_up(args)
        increment_version([inputs[index] for index in changed])
        return code.run(inputs)

    called = changing if changed else direct

    def without_grad(*args: Any) -> Any:
        set_grad(False)
        try:
            return called(*args)
        finally:
            set_grad(True)

    return without_grad if grad else called
