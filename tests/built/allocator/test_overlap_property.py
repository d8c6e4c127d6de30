"""For any two allocations that overlap in address within one graph, every use of one precedes every use of the other.

All small programs, then long random ones; the stress programs are in `allocator_ext/stress` and say what they leave
out.  A rule that is broken on purpose has to be found by the same runs, else they prove nothing.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.allocator.extension import stress
from tests.support.allocator.mutants import MUTANTS

ODD = {4, 5}  # their programs need programmatic launches and replaced dependencies
ELSEWHERE = {29, 30}  # these need frees by another thread
# these need little memory, states of pools, blocks of several sizes, or streams that go
SEEDS = {28: 1000, 41: 11790, 42: 9020}  # near a program that shows it
RANDOM = {14, 16, 17, 18, 21, 24, 25, 27, 28, 33}
STITCHED = {19, 20, 22, 23}  # these need blocks that are made of pieces of pages
ASLEEP = set(range(34, 43))  # these need pools that sleep
FAILING = {42}  # and this one a driver that fails at the right call


# what is not what `install()` does by default takes as long again
OTHERS = [pytest.param(options, marks=pytest.mark.slow) for options in (("any",), ("any", "--expandable", "--stitch"))]


@pytest.mark.parametrize("options", [("own",), ("any", "--expandable"), *OTHERS], ids=" ".join)
def test_every_program_of_five_operations(simulated: Path, options: tuple[str, ...]) -> None:
    found = stress(simulated / "exhaustive", "--operations", "5", "--reuse", *options)
    assert found["wrong"] == ""
    assert found["programs"] > 200_000
    assert found["branches_run"] == found["branches"]
    # the allocator did reuse memory that several streams had used, and the runs checked that it did where it can
    assert found["reused_crossed"] > (5_000 if options == ("own",) else 40_000)
    assert (found["stitched"] > 100_000) == ("--stitch" in options)


@pytest.mark.parametrize("rule", ["strict", "graph"])
def test_every_program_of_four_operations(simulated: Path, rule: str) -> None:
    found = stress(simulated / "exhaustive", "--operations", "4", "--reuse", rule)
    assert found["wrong"] == ""
    assert found["reused"] > 1_000
    assert (found["reused_crossed"] == 0) == (rule == "strict")


@pytest.mark.parametrize(
    "options", [(), ("--empty-nodes",), ("--verify", "--reuse", "any", "--expandable", "--stitch")]
)
def test_every_program_with_early_kernels_and_replaced_dependencies(simulated: Path, options: tuple[str, ...]) -> None:
    found = stress(simulated / "exhaustive", "--operations", "4", "--odd", *options)
    assert found["wrong"] == ""
    assert found["programs"] > 40_000
    assert found["reused_crossed"] > 0


@pytest.mark.parametrize("rule", ["own", "any"])
def test_every_program_with_frees_by_another_thread(simulated: Path, rule: str) -> None:
    found = stress(simulated / "exhaustive", "--operations", "4", "--elsewhere", "--reuse", rule)
    assert found["wrong"] == ""
    assert found["programs"] > 30_000
    assert found["reused_crossed"] > 4_000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: MUTANTS[mutant].says)
def test_a_broken_rule_is_found(broken: Path, mutant: int) -> None:
    if mutant in ASLEEP:
        seed = SEEDS.get(mutant, 9000)
        more = ["--each-call", "--length", "150"] if mutant in FAILING else []
        arguments = ("--sleep", "--operations", "2000000", "--seed", str(seed), "--mutant", str(mutant), *more)
        found = stress(broken / "fuzz", *arguments)
    elif mutant in RANDOM:
        seed = SEEDS.get(mutant, 9000)
        found = stress(broken / "fuzz", "--operations", "1000000", "--seed", str(seed), "--mutant", str(mutant))
    else:
        more = (
            ["--odd"]
            if mutant in ODD
            else ["--expandable", "--stitch", "--start", "stitched"]
            if mutant in STITCHED
            else []
        )
        rule = "own" if mutant in ELSEWHERE else "any"
        operations = "4" if mutant in ELSEWHERE else "5"
        more += ["--elsewhere"] if mutant in ELSEWHERE else []
        arguments = ("--operations", operations, "--reuse", rule, "--mutant", str(mutant), *more)
        found = stress(broken / "exhaustive", *arguments)
    assert found["wrong"] != ""


def test_a_rule_is_broken_only_where_that_is_asked_for(simulated: Path, broken: Path) -> None:
    arguments = ("--operations", "3", "--reuse", "any")
    found = stress(broken / "exhaustive", *arguments)
    assert found["wrong"] == ""
    assert found["programs"] == stress(simulated / "exhaustive", *arguments)["programs"]
    # the sources themselves have no rule that could be
    refused = subprocess.run([simulated / "exhaustive", "--mutant", "1"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "unknown argument --mutant" in refused.stderr


@pytest.mark.slow
def test_left_out_orders_find_nothing_more(broken: Path) -> None:
    # of programs that differ in the order of steps alone one is run: it finds what all of them find
    found = set()
    for mutant in MUTANTS.keys() - RANDOM - ELSEWHERE - ASLEEP:
        start = ("--expandable", "--stitch", "--start", "stitched") if mutant in STITCHED else ()
        arguments = ("--operations", "4", "--odd", "--reuse", "any", "--mutant", str(mutant), *start)
        one = stress(broken / "exhaustive", *arguments)
        assert bool(one["wrong"]) == bool(stress(broken / "exhaustive", *arguments, "--every-order")["wrong"]), mutant
        if one["wrong"]:
            found.add(mutant)
    assert len(found) >= 10


def test_a_run_in_parts_is_the_whole(simulated: Path) -> None:
    arguments = (simulated / "exhaustive", "--operations", "4")
    whole = stress(*arguments)
    parts = [stress(*arguments, "--part", f"{part}/2") for part in range(2)]
    assert sum(part["programs"] for part in parts) == whole["programs"]
    # a run that its time limit ended says how far it came, and another goes on there
    begun = stress(*arguments, "--stop-after", "1000")
    rest = stress(*arguments, "--from", str(begun["next_branch"]))
    assert begun["branches_run"] == begun["next_branch"] == 1000
    assert begun["programs"] + rest["programs"] == whole["programs"]


def test_long_random_programs(simulated: Path) -> None:
    found = stress(simulated / "fuzz", "--operations", "1000000")
    assert found["wrong"] == ""
    assert found["reused_crossed"] > 100
    assert found["failed_calls"] > 1_000
    assert found["restored"] > 1_000
    assert found["stitched"] > 700
    assert found["out_of_memory"] > 1_000
    assert found["lent"] > 5
    assert found["again"] > 200


def test_pools_that_sleep(simulated: Path) -> None:
    """Contents, addresses and blocks are what they were after the wake; a wake that fails can be tried again."""
    found = stress(simulated / "fuzz", "--operations", "1000000", "--sleep")
    assert found["wrong"] == ""
    assert min(found["slept"], found["woken"], found["sleeps_refused"]) > 5_000
    assert found["wakes_refused"] > 1_000
    assert found["freed_asleep"] > 5_000
    assert found["kept_through"] > 10_000
    assert found["stitched"] > 100
    found = stress(simulated / "fuzz", "--operations", "500000", "--length", "60", "--each-call", "--sleep")
    assert found["wrong"] == ""
    assert found["failed_calls"] > 5_000
    assert min(found["slept"], found["woken"]) > 2_000


def test_each_call_of_the_driver_fails_once(simulated: Path) -> None:
    found = stress(simulated / "fuzz", "--operations", "1000000", "--length", "60", "--each-call")
    assert found["wrong"] == ""
    assert found["failed_calls"] > 10_000
    assert found["stitched"] > 500


def test_what_is_timed_is_right(simulated: Path) -> None:
    found = stress(simulated / "speed", "--rounds", "1000", "--expandable")
    assert set(found) == {"one", "sizes", "nested", "random", "wrong"}
    assert found["wrong"] == ""


def test_threads(simulated: Path) -> None:
    assert stress(simulated / "threads", "--operations", "20000")["wrong"] == ""
