"""Calls of recordings are native here, where the machine has a compiler; with `MULTIGRAPH_DISABLE=native_calls` they
go by way of Python."""

from __future__ import annotations

import pytest

from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime


@pytest.fixture(scope="session", autouse=True)
def _native_calls() -> None:
    runtime.begin_native_calls()
    native.wait()
