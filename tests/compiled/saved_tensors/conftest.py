"""For tests of what is packed, of what is said of it, and of gradients that are right by whatever code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.no_code import no_code


@pytest.fixture
def by_operator() -> Iterator[None]:
    """Graphs run operator by operator; tests without it have Inductor's code."""
    with no_code():
        yield
