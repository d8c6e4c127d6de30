"""The examples that open modules are true."""

from __future__ import annotations

import doctest
import textwrap
from types import ModuleType

import pytest

from multigraph_backend.capture import declared
from multigraph_backend.declare import facts, predicates, probing
from multigraph_backend.declare.facts import Facts
from multigraph_backend.region import dispatch
from multigraph_backend.region.dispatch import Rule


@pytest.mark.parametrize("module", [facts, predicates, probing, declared], ids=lambda module: module.__name__)
def test_examples_print_what_they_say(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


def test_the_dispatcher_shown_is_the_one_that_is_generated() -> None:
    rules = [
        Rule(0, ((0, Facts(values=(1,))),)),
        Rule(1, ((0, Facts(min=2, max=64)),)),
        Rule(2, ((0, Facts(multiple_of=128)),)),
    ]
    planned = dispatch.plan(["a[0]"], rules, 3)
    text = textwrap.indent(dispatch.find_source(planned) + dispatch.source(planned), "    ")
    assert dispatch.__doc__ is not None
    assert f"\n\n{text}\n" in dispatch.__doc__


def test_the_calls_with_a_probe_are_those_shown() -> None:
    answers = []

    def check(n: int) -> bool:
        answers.append([])
        positive = bool(n > 0)
        answers[-1].append(positive)
        if positive:
            answers[-1].append(bool(n % 64 == 0))
        return all(answers[-1])

    probing.understand(check)  # type: ignore[arg-type]
    assert answers[:3] == [[True, True], [True, False], [False]]
