"""For any two allocations that overlap in address within one graph, every use of one precedes every use of the other.

All small programs, then long random ones; the stress programs are in `allocator_ext/stress` and say what they leave
out.  A rule that is broken on purpose has to be found by the same runs, else they prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.allocator.extension import build, stress

# one file at a time would be compiled for most of the test's time
QUICK_BUILD = ("-DMULTIGRAPH_STRESS=ON", "-DCMAKE_BUILD_TYPE=", "-DCMAKE_UNITY_BUILD=ON")

MUTANTS = {
    1: "record_stream is not heard",
    2: "one marker that precedes is taken for all",
    3: "a stream outside of the capture is taken for one without terminals",
    4: "replaced dependencies are not noticed",
    5: "programmatic edges prove completion",
    6: "a block from before the capture counts as allocated in it",
    7: "what one capture freed is given to another beside it",
    8: "another stream takes what was freed after it last waited",
    9: "outside of captures other streams' uses are not waited for",
    10: "what cannot be proven is given back at once",
}
ODD = {4, 5}  # their programs need programmatic launches and replaced dependencies


@pytest.mark.parametrize("rule", ["own", "any"])
def test_every_program_of_five_operations(simulated: Path, rule: str) -> None:
    found = stress(simulated / "exhaustive", "--operations", "5", "--reuse", rule)
    assert found["wrong"] == ""
    assert found["programs"] > 500_000
    # the allocator did reuse memory that several streams had used, and the runs checked that it did where it can
    assert found["reused_crossed"] > (5_000 if rule == "own" else 40_000)


@pytest.mark.parametrize("rule", ["strict", "graph"])
def test_every_program_of_four_operations(simulated: Path, rule: str) -> None:
    found = stress(simulated / "exhaustive", "--operations", "4", "--reuse", rule)
    assert found["wrong"] == ""
    assert found["reused"] > 1_000
    assert (found["reused_crossed"] == 0) == (rule == "strict")


@pytest.mark.parametrize("options", [(), ("--empty-nodes",), ("--verify", "--reuse", "any")])
def test_every_program_with_early_kernels_and_replaced_dependencies(simulated: Path, options: tuple[str, ...]) -> None:
    found = stress(simulated / "exhaustive", "--operations", "4", "--odd", *options)
    assert found["wrong"] == ""
    assert found["programs"] > 100_000
    assert found["reused_crossed"] > 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=MUTANTS.__getitem__)
def test_a_broken_rule_is_found(simulated: Path, mutant: int) -> None:
    odd = ["--odd"] if mutant in ODD else []
    found = stress(simulated / "exhaustive", "--operations", "5", "--reuse", "any", "--mutant", str(mutant), *odd)
    assert found["wrong"] != ""


def test_long_random_programs(simulated: Path) -> None:
    found = stress(simulated / "fuzz", "--operations", "1000000")
    assert found["wrong"] == ""
    assert found["reused_crossed"] > 100
    assert found["failed_calls"] > 1_000
    assert found["out_of_memory"] > 1_000


def test_each_call_of_the_driver_fails_once(simulated: Path) -> None:
    found = stress(simulated / "fuzz", "--operations", "1000000", "--length", "60", "--each-call")
    assert found["wrong"] == ""
    assert found["failed_calls"] > 10_000


def test_threads(simulated: Path) -> None:
    assert stress(simulated / "threads", "--operations", "20000")["wrong"] == ""


def test_under_address_and_undefined_behaviour_sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    sanitizers = "-DMULTIGRAPH_SANITIZE=address,undefined"
    folder = build(tmp_path_factory.mktemp("address"), *QUICK_BUILD, sanitizers, targets=("fuzz",))
    assert stress(folder / "fuzz", "--operations", "200000")["wrong"] == ""
    assert stress(folder / "fuzz", "--operations", "200000", "--length", "60", "--each-call")["wrong"] == ""


def test_under_the_thread_sanitizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = build(
        tmp_path_factory.mktemp("thread"), *QUICK_BUILD, "-DMULTIGRAPH_SANITIZE=thread", targets=("threads",)
    )
    assert stress(folder / "threads", "--operations", "1000")["wrong"] == ""
