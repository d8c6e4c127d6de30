"""torch's own tools see multigraph: counters, structured trace, compile times, profiler.  And its off switch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics, counters

import multigraph_backend
from multigraph_backend.backend import multigraph

OPTIONS = {"specialize": [{"x[0]": 8}], "compiler": "aot_eager"}


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def run_both() -> None:
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=OPTIONS)
    for rows in (8, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), f(x))


def test_counters_count_what_stats_counts() -> None:
    counters["multigraph"].clear()
    run_both()
    assert counters["multigraph"] == {"regions": 1, "variants_compiled": 1, "generic_compiled": 1}


def test_each_compile_is_a_phase_of_torch_s_compile_times() -> None:
    before = len(compilation_time_metrics.get("multigraph_compile", []))
    run_both()
    assert len(compilation_time_metrics["multigraph_compile"]) == before + 2


def test_the_structured_trace_has_an_artifact_for_each_compile(tmp_path: Path) -> None:
    program = (
        "import torch; from multigraph_backend.backend import multigraph\n"
        f"c = torch.compile(lambda x: x.sin() * 2, backend=multigraph, dynamic=True, options={OPTIONS!r})\n"
        "c(torch.randn(8, 3)), c(torch.randn(5, 3))"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    found: dict[str, list[str]] = {"multigraph_variant": [], "multigraph_variant_graph": []}
    for index, line in enumerate(lines):
        if line.startswith("\t") or "{" not in line:
            continue
        name = json.loads(line[line.index("{") :]).get("artifact", {}).get("name")
        if name in found:
            payload = []
            for following in lines[index + 1 :]:
                if not following.startswith("\t"):
                    break
                payload.append(following[1:])
            found[name].append("\n".join(payload))
    told = [json.loads(payload) for payload in found["multigraph_variant"]]
    assert [entry["condition"] for entry in told] == ["x[0] == 8", "generic"]
    assert all("sin" in graph for graph in found["multigraph_variant_graph"])
    assert len(found["multigraph_variant_graph"]) == 2


def test_the_profiler_shows_which_variant_ran() -> None:
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=OPTIONS)
    x, y = torch.randn(8, 3), torch.randn(5, 3)
    compiled(x), compiled(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.testing.assert_close((compiled(x), compiled(x), compiled(y)), (f(x), f(x), f(y)))
    names = {event.key: event.count for event in profile.key_averages() if event.key.startswith("multigraph")}
    assert names == {"multigraph: f: x[0] == 8": 2, "multigraph: f: generic": 1}
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"]) == (3, 2)


def test_variants_can_be_turned_off_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "variants")
    run_both()
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"]) == (0, 2)


def test_everything_can_be_turned_off_from_outside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "all")
    with caplog.at_level(logging.DEBUG, "multigraph_backend"):
        run_both()
    (region,) = multigraph_backend.explain().regions
    assert region.notes == ("compiled at once, without variants: MULTIGRAPH_DISABLE=all",)
    assert region.generic.calls == 2


def test_a_switch_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "variant")
    with pytest.raises(Exception, match=r"unknown piece 'variant' .*did you mean 'variants'"):
        run_both()
