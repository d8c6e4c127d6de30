"""Options and marks as users write them: a slice of random ones, and checks left out, which it must notice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from multigraph_backend import option_values, options
from multigraph_backend.backend import multigraph
from multigraph_backend.capture import declared, size_names
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.declare import marks, predicates
from multigraph_backend.declare.facts import Facts
from multigraph_backend.region import registry
from tests.support.fuzz.spellings import NAMES, Silent, play


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    """One that has the sizes that are declared."""

    def function(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        return x.sum() * n + y.sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=multigraph, dynamic=True, options={"compiler": "eager"})
    compiled(torch.randn(5, 3), torch.randn(7, 6), 9)
    (found,) = (region._graph for region in registry.living() if set(region.sizes) == set(NAMES))
    return found


def test_what_is_written_is_understood_or_an_error_says_how(graph: CapturedGraph) -> None:
    written = {play(seed, graph) for seed in range(1000)}
    assert len(written) > 700


# ---------------------------------------------------------------- what that is worth


@contextlib.contextmanager
def any_compiler() -> Iterator[None]:
    """Whatever is named lowers graphs: all of them ran eagerly, after a warning."""
    with mock.patch.dict(options.READERS, compiler=lambda given: given.value):
        yield


@contextlib.contextmanager
def any_option() -> Iterator[None]:
    """What is no option is dropped."""
    named = options._named

    def known(given: Any, *where: Any) -> dict[str, Any]:
        return named({name: value for name, value in given.items() if name in options.READERS}, *where)

    with mock.patch.object(options, "_named", known):
        yield


@contextlib.contextmanager
def options_are_models() -> Iterator[None]:
    """An option in the environment without the name of a model is taken for one of a model of that name."""
    read = options._from_environment

    def of_models(environ: Any, *names: Any) -> Any:
        entries = json.loads(environ.get(options.VARIABLE, "{}"))
        kept = {name: entry for name, entry in entries.items() if name not in options.READERS}
        return read({options.VARIABLE: json.dumps(kept)}, *names)

    with mock.patch.object(options, "_from_environment", of_models):
        yield


@contextlib.contextmanager
def names_are_not_guessed() -> Iterator[None]:
    """`x[-1]`, `x.shape[0]` and `x` are names that the graph does not have, and that is all."""
    with mock.patch.object(size_names, "meant", return_value=None):
        yield


@contextlib.contextmanager
def negative_sizes() -> Iterator[None]:
    """A condition on a negative size is one of which no call is heard again."""

    def unbounded(min: int | None = None, **known: Any) -> Facts:
        return Facts(min=min or None, **known)

    with mock.patch.object(declared, "Facts", unbounded):
        yield


@contextlib.contextmanager
def values_are_not_guessed() -> Iterator[None]:
    """Ranges, sets and numbers in another type are refused without the right spelling."""
    with mock.patch.object(predicates, "_spelled", return_value=""):
        yield


@contextlib.contextmanager
def words_are_not_guessed() -> Iterator[None]:
    """No error names what is near."""
    with mock.patch.object(option_values, "did_you_mean", return_value=""):
        yield


@contextlib.contextmanager
def empty_conditions() -> Iterator[None]:
    """A condition that holds for every size is one like another."""
    with mock.patch.object(Facts, "unconstrained", property(lambda facts: False)):
        yield


@contextlib.contextmanager
def marks_of_any_type() -> Iterator[None]:
    """What `mark` is given goes on to torch as it is."""
    with mock.patch.object(marks, "_check_types"):
        yield


MUTANTS = [
    any_compiler,
    any_option,
    options_are_models,
    names_are_not_guessed,
    negative_sizes,
    values_are_not_guessed,
    words_are_not_guessed,
    empty_conditions,
    marks_of_any_type,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_check_that_is_left_out_is_noticed(
    mutant: Callable[[], contextlib.AbstractContextManager[None]], graph: CapturedGraph
) -> None:
    with mutant(), pytest.raises(Silent):
        _play_until_silent(graph)


def _play_until_silent(graph: CapturedGraph) -> None:
    for seed in range(300):
        play(seed, graph)
