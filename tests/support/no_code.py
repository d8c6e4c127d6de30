"""Graphs that run operator by operator where Inductor would have generated code; all else is as a user has it.

For tests of what is decided before there is code, and of gradients of what was decided: a kernel is what takes a test
of that its seconds.  What Inductor makes of such graphs is for other tests, beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config

from multigraph_backend import _compat
from multigraph_backend.lower import one_body


@contextlib.contextmanager
def no_code() -> Iterator[None]:
    """For compiles inside; nothing comes from caches, and random numbers are eager's."""
    with (
        mock.patch.object(_compat, "compile_fx_inner", not_compiled, create=True),
        mock.patch.object(one_body, "wrong", return_value=None),
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_config.patch(fallback_random=True),  # else Inductor draws other numbers than eager
    ):
        yield


def not_compiled(gm: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """In place of Inductor's compile of one graph."""

    def run(args: list[Any]) -> Any:
        taken, args[:] = list(args), []
        return gm(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
