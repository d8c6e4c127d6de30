"""A feature's test says two things: the numbers are eager's, and the feature ran. Both are said here, once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import multigraph_backend


@contextlib.contextmanager
def ran(*, variants: int = 0, generic: int = 0, eager: int = 0, failures: int = 0) -> Iterator[None]:
    """The body makes exactly these calls; by default nothing falls back."""
    before = multigraph_backend.stats()
    yield
    after = multigraph_backend.stats()
    made = {name: after[name] - before[name] for name in after}
    seen = (made["variant_calls"], made["generic_calls"], made["eager_calls"], made["failures"])
    account = str(multigraph_backend.explain())
    assert seen == (variants, generic, eager, failures), f"(variant, generic, eager, failed) = {seen}\n{account}"


def compiles() -> tuple[int, int]:
    """Variants and generic graphs compiled so far."""
    stats = multigraph_backend.stats()
    return stats["variants_compiled"], stats["generic_compiled"]


def variants() -> list[dict[str, Any]]:
    """What `explain()` says of the declared conditions of the first region."""
    found: list[dict[str, Any]] = multigraph_backend.explain().to_dict()["regions"][0]["variants"]
    return found


def assert_right(compiled: Callable[..., Any], function: Callable[..., Any], *args: Any, exact: bool = False) -> None:
    """Outputs and mutated inputs are those of eager, which takes `args` as they are; the compiled one takes copies."""
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    for copy, arg in zip(copies, args, strict=True):
        if isinstance(arg, torch.Tensor):  # marks do not survive a clone
            vars(copy).update(
                {name: value for name, value in vars(arg).items() if "dynamo" in name or "special" in name}
            )
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    expected = function(*args)
    torch.testing.assert_close(compiled(*copies), expected, **tolerance)
    torch.testing.assert_close(copies, list(args), **tolerance)
