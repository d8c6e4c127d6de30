"""What the benchmarks are made of, and each as scripts/gpu runs it: a process of its own that writes JSON.

How fast anything is, is not asked. What records runs on a GPU alone: here its forms run unrecorded.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigraph_backend.lower import parcel
from tests.support.quick_runs import positive, run
from tests.support.simulated.pieces import Bench, values

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_dispatch(tmp_path: Path) -> None:
    rows = run("dispatch", tmp_path)
    kinds = ("Eq", "Range", "MultipleOf", "mixed")
    ours = [("multigraph", kind, 16, calls) for calls in ("missed", "hit", "first seen") for kind in kinds]
    stock = [("stock", "Eq", 16, calls) for calls in ("missed", "first seen")]
    assert [(row["backend"], row["kind"], row["count"], row["calls"]) for row in rows] == [*ours, *stock]
    assert positive(rows, "us", "generic_us")
    assert all(isinstance(row["over_us"], float) for row in rows)


@pytest.mark.slow
def test_variants(tmp_path: Path) -> None:
    rows = run("variants", tmp_path)
    assert Counter((row["workload"], row["shape"]) for row in rows) == {
        ("softmax x std", "8x1008"): 3,
        ("matmul chain", "32"): 3,
    }
    assert {row["condition"] for row in rows} == {"Eq", "MultipleOf", "Range"}
    assert positive(rows, "us", "generic_us", "static_us", "dynamic_us", "over_static", "over_generic", "over_dynamic")


@pytest.mark.slow
def test_compile_time(tmp_path: Path) -> None:
    rows = run("compile_time", tmp_path)
    assert [(row["model"], row["passes"], row["condition"]) for row in rows] == [
        ("mlp", "forward", "generic"),
        ("mlp", "forward", "Eq"),
    ]
    assert positive(rows, "seconds", "stock_seconds", "over_stock", "compile_seconds", "stock_compile_seconds")


@pytest.mark.slow
def test_depth(tmp_path: Path) -> None:
    rows = run("depth", tmp_path)
    forms = ("multigraph", "multigraph, repeat", "multigraph, auto", "inductor", "trace alone")
    assert [(row["passes"], row["layers"], row["form"]) for row in rows] == [
        ("inference", layers, form) for layers in (2, 3) for form in forms
    ]
    assert positive(rows, "seconds", "cpu_seconds", "us", "over_whole")
    assert all(row["spared"] > 0 for row in rows if row["form"] == "multigraph, repeat")


@pytest.mark.slow
def test_products(tmp_path: Path) -> None:
    rows = run("products", tmp_path)
    forms = {"fp8": ("unpacked", "buffer", "scaled"), "int8": ("unpacked", "buffer")}
    assert [(row["pack"], row["form"]) for row in rows] == [(pack, form) for pack in forms for form in forms[pack]]
    assert positive(rows, "us", "over_unpacked", "off")


@pytest.mark.slow
def test_slopes(tmp_path: Path) -> None:
    rows = run("slopes", tmp_path)
    assert [(row["of"], row["form"]) for row in rows] == [
        (kind, form)
        for kind in ("copied inputs", "static inputs", "outputs", "saved tensors", "pieces")
        for form in ("stock", "multigraph")
    ]
    assert all(len(row["points"].split()) == len(row["sizes"].split()) for row in rows)


@pytest.mark.slow
def test_call_parts(tmp_path: Path) -> None:
    rows = run("call_parts", tmp_path)
    assert [(row["of"], row["part"]) for row in rows] == [
        (kind, part)
        for kind in ("copied inputs", "static inputs", "outputs")
        for part in ("Dynamo", "guards", "code", "sum", "whole")
    ]
    assert positive([row for row in rows if row["part"] != "guards"], "share")  # that is a difference


@pytest.mark.slow
def test_waited(tmp_path: Path) -> None:
    rows = run("waited", tmp_path)
    forms = ("multigraph", "multigraph, sealed", "multigraph, ahead")
    assert [(row["program"], row["form"]) for row in rows] == [("tiny function", form) for form in forms]
    assert positive(rows, "waiting_us", "whole_us")


@pytest.mark.slow
def test_step_kernels(tmp_path: Path) -> None:
    rows = run("step_kernels", tmp_path)
    whole = {row["form"]: row for row in rows if row["kind"] == "all"}
    assert list(whole) == ["multigraph", "multigraph, int8"]
    assert positive(list(whole.values()), "kernels", "us")
    of = {form: {(row["phase"], row["kind"]) for row in rows if row["form"] == form} for form in whole}
    assert {("forward", "products"), ("backward", "products"), ("backward", "pointwise")} <= of["multigraph"]
    packed = [row for row in rows if row["form"] == "multigraph, int8" and row["kind"] != "all"]
    assert sum(row["kernels"] for row in packed) > sum(
        row["kernels"] for row in rows if row["form"] == "multigraph" and row["kind"] != "all"
    )


@pytest.mark.slow
def test_first_calls(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = run("first_calls", tmp_path)
    forms = ("inductor", "inductor, by blocks", "multigraph, repeat")
    assert [(row["model"], row["passes"], row["form"]) for row in rows] == [
        ("gpt2", "inference", form) for form in forms
    ]
    assert positive(rows, "seconds", "cpu_seconds", "over_inductor", "us", "call_over_inductor", "peak_mib")
    assert all(row["error_to_eager"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_replay(tmp_path: Path) -> None:
    rows = run("replay", tmp_path)
    forms, parts = ("eager", "inductor", "stock", "multigraph"), ("guards + wrappers", "input copy")
    named = [(row["program"], row["form"]) for row in rows]
    ours = ("multigraph", "multigraph, sealed", "multigraph, ahead")
    order = (*forms[:3], *parts, *ours)  # what a GPU records by hand is not there
    assert named == [(program, form) for program in ("tiny function", "32 copied inputs") for form in order]
    assert positive(rows, "host_us")
    whole = [row for row in rows if row["form"] in forms]
    assert positive(whole, "end_us", "record_ms", "first_call_s", "over_stock", "end_over_stock")
    assert all(row["counts"]["generic_calls"] > 0 for row in whole if row["form"] == "multigraph")


@pytest.mark.slow
def test_distributed(tmp_path: Path) -> None:
    rows = run("distributed", tmp_path)
    assert [(row["work"], row["ranks"], row["form"]) for row in rows] == [
        ("decoder", 2, form) for form in ("eager", "inductor", "multigraph")
    ]
    assert positive(rows, "us")


@pytest.mark.slow
def test_capture_sizes(tmp_path: Path) -> None:
    rows = run("capture_sizes", tmp_path)
    assert [(row["form"], row["order"], row["sizes"]) for row in rows] == [
        ("stock", "descending", 3),
        ("multigraph", "descending", 3),
    ]
    assert positive(rows, "ms", "median_ms", "all_ms", "first_ms", "second_ms", "third_ms", "over_stock")
    assert [list(row["each_size_ms"]) for row in rows] == [["4", "3", "2"]] * 2


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    rows = run("memory", tmp_path)
    assert Counter(row["program"] for row in rows) == {"two lengths": 4}
    # each form computes what eager does, on the same inputs: else its row would have failed
    assert all(len(row["numbers"]) >= 3 for row in rows)


@pytest.mark.slow
def test_step_times_beside_another_checkout(tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "multigraph_backend", tmp_path / "before" / "multigraph_backend")
    words = ("--before", str(tmp_path / "before"), "--before-commit", "abc", "--program", "three models", "small")
    rows = run("step_times", tmp_path, *words, nested=False)  # a fork has imported this checkout's
    assert [(row["program"], row["before"]) for row in rows] == [("three models", "abc"), ("small", "abc")]
    assert positive(rows, "ms", "before_ms", "stock_ms", "ratio", "over_stock")


def test_memory_of_a_series_of_processes(load: Callable[[str], Any]) -> None:
    memory = load("memory")

    def taken(*used: float) -> tuple[dict[str, Any], str | None]:
        runs = iter(used)
        return memory.series(lambda _: ({"used_mib": next(runs), "reserved_mib": 10, "numbers": [1.0]}, None), 3)  # type: ignore[no-any-return]

    assert taken(100.0, 101.0) == ({"used_mib": 101.0, "reserved_mib": 10, "numbers": [1.0], "runs": 2}, None)
    assert taken(100.0, 120.0, 110.0)[0]["used_mib"] == 110.0
    assert memory.series(lambda _: (None, "it broke"), 3) == ({}, "it broke")
    largest: dict[str, dict[str, Any]] = {}
    memory.compare("sizes, largest", {"multigraph": {"used_mib": 100.0, "reserved_mib": 50.0}}, largest)
    rows = {form: {"used_mib": 102.0, "reserved_mib": 52.0} for form in ("inductor", "stock", "multigraph")}
    memory.compare("sizes, ascending", rows, largest)
    row = rows["multigraph"]
    assert (row["over_stock"], row["reserved_over_inductor"]) == (1.0, 1.0)
    assert (row["over_largest"], row["reserved_over_largest"]) == (1.02, 1.04)
    assert "over_largest" not in rows["stock"]
    assert [memory.goals_text(memory.GOALS["sizes, ascending"], row).count(said) for said in ("met", "MISSED")] == [
        2,
        1,
    ]


def test_two_gpus_are_needed_where_it_is_sharded(load: Callable[[str], Any], tmp_path: Path) -> None:
    memory, rows = load("memory"), []
    results = SimpleNamespace(device="cuda", add=lambda about, values, *more, **named: rows.append((about, values)))
    runner = memory.Runner(["0"], {"quick": True}, tmp_path, memory.Kept(tmp_path, {}))
    memory.measure_all(runner, ["fsdp2"], [], 1, results)
    said = "skipped: 2 GPUs are needed, and there is 1 GPU"
    assert rows == [({"program": "fsdp2", "form": "-"}, {"goals": said})]


def test_memory_goes_on_where_it_was_cut_off(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, ran = load("memory"), list[tuple[str, str]]()

    def process(runner: Any, name: str, form: str) -> tuple[dict[str, Any] | None, str | None]:
        ran.append((name, form))
        return (None, "out of time") if len(ran) == 3 else ({"used_mib": 7.0, "reserved_mib": 5.0}, None)

    monkeypatch.setattr(memory.Runner, "run_alone", process)

    def measured(commit: str) -> list[str | None]:
        rows = list[str | None]()
        results = SimpleNamespace(device="cpu", add=lambda about, values, error, **named: rows.append(error))
        runner = memory.Runner(["0"], {"quick": True}, tmp_path, memory.Kept(tmp_path, {"commit": commit}))
        memory.measure_all(runner, ["two lengths"], ["inductor", "multigraph"], 3, results)
        return rows

    assert measured("a") == [None, "out of time"]  # two that agree, and one that fails
    assert measured("a") == [None, None]
    assert ran == [("two lengths", "inductor")] * 2 + [("two lengths", "multigraph")] * 3
    measured("b")
    assert len(ran) == 9


@pytest.mark.slow
def test_starts(tmp_path: Path) -> None:
    rows = run("starts", tmp_path, "--processes", "1", nested=False)  # how a process starts, not how one is forked
    assert [row["form"] for row in rows] == ["eager", "inductor dynamic", "multigraph", "multigraph, saved"]
    assert positive(rows, "cold_first_s", "cold_ready_s", "first_s", "ready_s", "warm_over_cold")
    assert positive(rows[1:], "over_eager")


def test_staging(tmp_path: Path) -> None:
    rows = run("staging", tmp_path)
    assert [(row["inputs"], row["kib"], row["kernel"]) for row in rows] == [(2, 16, "no"), (4, 16, "no")]
    assert positive(rows, "ours_host", "stock_host", "host_ratio")


def test_moving_inputs(tmp_path: Path) -> None:
    rows = run("moving_inputs", tmp_path)
    assert [(row["form"], row["told"]) for row in rows] == [("patched", 0), ("copied", 0), ("inductor", 0)]
    assert positive(rows, "host", "host_over_copied")


def test_padding(tmp_path: Path) -> None:
    rows = run("padding", tmp_path)
    forms = ["sizes given", "multigraph, pad", "padded by hand", "inductor dynamic", "as they come"]
    assert [row["form"] for row in rows] == forms
    assert [row["padded_calls"] > 0 for row in rows] == [form == "multigraph, pad" for form in forms]
    assert positive(rows, "p50_us", "p99_us", "p99_ratio")


def test_sleep(tmp_path: Path) -> None:
    rows = run("sleep", tmp_path)
    forms = ["stock", "stock, to()", "pool, host", "pool, nothing", "process, host"]
    assert [(row["form"], row["cycles"], row["equal"]) for row in rows] == [(form, 3, "yes") for form in forms]
    assert positive(rows, "gib", "sleep_s", "wake_s", "first_s", "over_stock")


@pytest.mark.slow
def test_models(tmp_path: Path) -> None:
    rows = run("models", tmp_path)
    assert [(row["model"], row["mode"]) for row in rows] == [("decoder", "inference"), ("decoder", "checkpointed")]
    for row in rows:
        assert (row["steps"], row["raised"], row["wrong"]) == (3, 0, 0)
        assert not [line for line in row["warned"] if line.startswith("multigraph_backend")]
        assert (row["stock_steps"], row["stock_raised"], row["stock_wrong"], row["stock_said"]) == (3, 0, 0, None)
        assert float(row["worst"]) < 1e-4
        assert row["counts"]["generic_calls"] > 0


@pytest.mark.slow
def test_beside_loads(tmp_path: Path) -> None:
    (row,) = run("beside_loads", tmp_path)
    assert row["loaded"] == 3
    assert positive([row], "alone_p50_ms", "p99_ms", "worst_ms", "ratio", "hold_ms", "loads_s")


@pytest.mark.slow
def test_serving(tmp_path: Path) -> None:
    rows = run("serving", tmp_path)
    assert [row["form"] for row in rows] == ["multigraph", "static loop"]
    assert positive(rows, "warm_first_s", "warm_ready_s", "tokens_per_s", "p50_s", "p99_s", "decode_1_us", "stall_s")
    assert [row["wrong"] for row in rows] == [0, 0]  # answers that are not eager's


@pytest.mark.slow
def test_decode(tmp_path: Path) -> None:
    rows = run("decode", tmp_path)
    ours = ["multigraph", "multigraph, sealed", "multigraph, ahead"]
    forms = [*ours, "inductor dynamic", "reduce-overhead", "static loop"]
    assert [(row["rows"], row["form"]) for row in rows] == [(count, form) for count in (8, 1) for form in forms]
    assert positive(rows, "us", "host_us", "tokens_per_s", "over_static", "over_dynamic")
    assert all(row["worst"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_saved_tensors(tmp_path: Path) -> None:
    rows = run("saved_tensors", tmp_path)
    by_form = {row["form"]: row for row in rows}
    inductor, stock, ours = (by_form[form] for form in ("inductor", "inductor, int8", "multigraph, int8"))
    forms = ["eager", "eager, save_on_cpu", "inductor", "inductor, int8", "multigraph", "multigraph, int8"]
    assert list(by_form) == forms
    assert [by_form[form]["over_unpacked"] for form in ("eager", "inductor", "multigraph")] == [1.0, 1.0, 1.0]
    assert positive(
        rows, "step_ms", "over_unpacked", "first_step_s", "over_inductor", "forward_mib", "saved_mib", "backward_mib"
    )
    assert positive([ours], "packed", "forward_over_stock", "backward_over_stock")
    assert set(stock["hook_calls"]) == {"traced"}
    for row in (stock, ours):
        assert row["saved_mib"] < inductor["saved_mib"] / 2
        assert inductor["gradient_error"] < 1e-4 < row["gradient_error"] < 0.05


def test_allocator(tmp_path: Path) -> None:
    rows = run("allocator", tmp_path)
    names = ["ping-pong", "late frees", "random, 2 streams", "random, 4 streams", "no use"]
    assert [(row["program"], row["form"]) for row in rows] == [(name, "bound") for name in names]
    assert [row["bound_mib"] for row in rows if "random" not in row["program"]] == [4, 10, 3]
    assert positive(rows, "live_mib", "bound_mib", "bound_any_mib")


@pytest.mark.slow
def test_stitching(tmp_path: Path) -> None:
    rows = run("stitching", tmp_path)
    forms = ["multigraph, stitched", "multigraph", "stock", "stock, expandable"]
    names = ["whole steps", "experts, two streams", "large blocks", "no captures"]
    assert [(row["program"], row["form"]) for row in rows] == [(name, form) for name in names for form in forms]
    assert all(row["over_bound"] >= 1 for row in rows)
    found = {(row["program"], row["form"]): row for row in rows}
    # one stream: nothing but the rules of stock's blocks in plain segments
    ours, stitched = found["large blocks", "multigraph"], found["large blocks", "multigraph, stitched"]
    assert ours["reserved_mib"] == stitched["reserved_mib"] == 160
    assert (ours["handles"], stitched["handles"]) == (0, 80)
    assert stitched["calls"] > 4 * ours["calls"]
    outside = found["no captures", "multigraph"], found["no captures", "multigraph, stitched"]
    assert outside[0]["calls"] == outside[1]["calls"]  # what is outside of captures knows no stitching


# ---------------------------------------------------------------- what they are made of


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    return importlib.import_module


def test_a_slope_is_that_of_the_line_through_the_points(load: Callable[[str], Any]) -> None:
    line = load("slopes").line
    assert line([1, 2, 4], [12.0, 14.0, 18.0]) == pytest.approx({"each_us": 2, "fixed_us": 10, "off_us": 0})
    assert line([0, 1, 2], [0.0, 3.0, 0.0]) == pytest.approx({"each_us": 0, "fixed_us": 1, "off_us": 2})


def test_the_parts_of_a_recorded_call_are_those_that_it_runs(load: Callable[[str], Any]) -> None:
    for native_calls in (False, True):
        bench = Bench(native_calls=native_calls)
        piece = bench.piece(lambda x, w: (x * w, x + w), 2, 2, static=[1])
        w = values()
        with pytest.raises(RuntimeError, match="no recording answers"):
            load("call_parts").inside(piece, [values(), w])
        for _ in range(3):
            piece([values(), w])
        replays = bench.replays()
        parts = load("call_parts").inside(piece, [values(), w])
        assert bench.replays() == replays + 1
        assert parts["checks"]() is True
        for part, launches in (("checks", 0), ("launch", 1), ("run", 1), ("piece", 1)):
            before = bench.replays()
            parts[part]()
            assert (part, bench.replays() - before) == (part, launches)
        assert bench.unrecorded(piece) == {}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("triton_poi_fused__to_copy_clamp_3", "pointwise"),
        ("triton_red_fused_native_layer_norm_0", "reductions"),
        ("triton_per_fused_native_layer_norm_native_layer_norm_backward_5", "reductions"),
        ("triton_tem_fused_mm_t_1", "templates"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("aten::addmm", "products"),
        ("aten::add", "others"),
        ("void at::native::vectorized_elementwise_kernel", "others"),
    ],
)
def test_kernels_are_told_by_their_names(load: Callable[[str], Any], name: str, kind: str) -> None:
    assert load("step_kernels").kind_of(name) == kind


@pytest.fixture
def quantized(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """That benchmark as one that is called with --quick on the CPU."""
    module = load("quantized")
    monkeypatch.setattr(module.sys, "argv", ["quantized.py", "--quick", "--device", "cpu"])
    return module


def test_quantized_says_what_it_needs(quantized: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r'needs torchao: pip install "multigraph\[clients\]"'):
        quantized.main()


def test_weights_that_cannot_be_made_are_a_row_with_the_error(
    quantized: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(failing: str) -> tuple[int, str]:
        def in_turns(names: Any, *more: Any) -> Iterator[tuple[str, Any, str | None]]:
            for name in names:
                made = [{"call": "decode, 1", "form": "multigraph", "error": None, "us": 7.0}]
                yield (name, None, "ImportError: no kernels") if name == failing else (name, made, None)

        monkeypatch.setattr(quantized, "in_turns", in_turns)
        return quantized.main(), capsys.readouterr().out

    threads = str(torch.get_num_threads())
    monkeypatch.setattr(quantized.sys, "argv", [*quantized.sys.argv, "--threads", threads])
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: object())
    everywhere = {name: dataclasses.replace(each, devices=("cpu",)) for name, each in quantized.WEIGHTS.items()}
    monkeypatch.setattr(quantized, "WEIGHTS", everywhere)
    ended, said = status("Int4WeightOnly")
    assert (ended, said.count("FAILED: ImportError: no kernels"), said.count("multigraph ")) == (0, 1, 3)
    assert "4 rows, 1 failed" in said
    assert status("Int8WeightOnly")[0] == 1  # it needs none


def test_what_answered_quantized_calls(quantized: Any) -> None:
    answered = quantized.Answered
    before = answered(variants=5, replays=4, unrecorded=3, recordings=2)
    assert before.since(before, 8, "cpu") == {"in_variants": 0.0}
    whole = answered(variants=13, replays=20, unrecorded=3, recordings=2)  # two pieces
    assert whole.since(before, 8, "cuda") == {"in_variants": 1.0, "replayed": 1.0, "recorded": 0}
    again = answered(variants=9, replays=10, unrecorded=4, recordings=3)
    assert again.since(before, 8, "cuda") == {"in_variants": 0.5, "replayed": 0.75, "recorded": 1}
    given_up = answered(variants=5, replays=0, unrecorded=11, recordings=2)
    assert given_up.since(before, 8, "cuda") == {"in_variants": 0.0, "replayed": 0.0, "recorded": 0}
    found: dict[str, dict[str, Any]] = {"eager": {}, "inductor": {}, "multigraph": {}}
    quantized.add_ratios(found, {"eager": [4.0, 9.0], "inductor": [2.0, 3.0], "multigraph": [1.0, 3.0]}, "ratio")
    assert found == {"eager": {"ratio": 2.5}, "inductor": {"ratio": 1.0}, "multigraph": {"ratio": 0.75}}


def test_a_difference_is_relative_to_what_is_usual(load: Callable[[str], Any]) -> None:
    worst = load("measure").worst_difference
    large, small = torch.ones(100), torch.full((100,), 1e-8)
    assert worst([large, small], [large, small]) == 0
    assert worst([large * 1.01, small], [large, small]) == pytest.approx(0.01, rel=1e-3)
    assert worst([large, small * 3], [large, small]) < 1e-6  # noise about zero
    assert worst([large, large * 0], [large, large]) == pytest.approx(1)
    assert math.isnan(worst([large, large * math.nan, large], [large] * 3))
    assert worst([torch.ones(10, 10)], [large]) == worst([large.double()], [large]) == math.inf
    assert worst([torch.ones(3)], [torch.zeros(3)]) > 1


def test_goals_say_whether_they_are_met(load: Callable[[str], Any]) -> None:
    measure = load("measure")
    few = measure.Goal("host/floor", "over_floor", 1.35)
    many = measure.Goal("in graphs", "share", 95, at_least=True)
    named = measure.Goal("pool", "pool_mib", "stock_pool_mib")
    row = {"over_floor": 1.4, "share": 97.5, "pool_mib": 200.0, "stock_pool_mib": 228.0}
    said = "host/floor <= 1.35 MISSED, in graphs >= 95 met, pool <= 228 met"
    assert measure.goals_text((few, many, named), row) == said
    assert measure.goals_text((few, named), {"pool_mib": 1.0}) == "host/floor <= 1.35 ?, pool <= stock_pool_mib ?"


def test_the_exit_status_is_about_our_rows(load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    measure = load("measure")
    args = argparse.Namespace(device="cpu", json=None, threads=torch.get_num_threads(), quick=True)

    def ours(row: dict[str, Any]) -> bool:
        return bool(row["form"] == "multigraph")

    results = measure.Results("some", "Some", (measure.Column("form", "form"),), args)
    assert (results.finish(ours), results.finish()) == (1, 1)  # nothing was measured
    results.add({"form": "stock"}, {}, "RuntimeError: overwritten\nand more")
    results.add({"form": "multigraph"}, {})
    assert (results.finish(ours), results.finish()) == (0, 1)
    results.add({"form": "multigraph"}, {}, "RuntimeError: wrong")
    assert results.finish(ours) == 1
    assert "FAILED: RuntimeError: overwritten\n" in capsys.readouterr().out


def test_a_process_of_its_own_answers_or_says_how_it_ended(load: Callable[[str], Any], tmp_path: Path) -> None:
    measure = load("measure")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, pathlib\nsys.path[:0] = [{str(CHECKOUT)!r}, {str(CHECKOUT / 'benchmarks')!r}]\n"
        "if sys.argv[1] == 'dies':\n    print('about to', file=sys.stderr, flush=True)\n    os.abort()\n"
        "from measure import answer\n"
        "path = pathlib.Path(sys.argv[-1])\n"
        "sys.exit(answer(path, lambda: {'words': sys.argv[1:-2], 'ratio': 1 / int(sys.argv[1])}))\n"
    )
    value, error = measure.in_own_process(str(script), ["2", "a b"], 120)
    assert (value, error) == ({"words": ["2", "a b"], "ratio": 0.5}, None)
    value, error = measure.in_own_process(str(script), ["0"], 120)
    assert value is None
    assert error.startswith("ZeroDivisionError: ")
    value, error = measure.in_own_process(str(script), ["dies"], 120)
    assert value is None
    assert error.startswith("ended with status -6: about to")


def test_pools_are_the_segments_of_private_ones(load: Callable[[str], Any]) -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1 << 30},
        {"segment_pool_id": (0, 1), "total_size": 3},
        {"segment_pool_id": [7, 0], "total_size": 4},
    ]
    assert load("measure").pool_bytes(segments) == 7


@pytest.mark.parametrize("name", ["tiny", "many_inputs", "many_parameters", "decoder", "training"])
def test_what_a_program_gives_depends_on_each_input_and_parameter(load: Callable[[str], Any], name: str) -> None:
    replay, measure = load("replay"), load("measure")
    torch.manual_seed(1)
    program = getattr(replay, name)("cpu")
    call = replay.step(program, program.function)

    def results(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        with torch.set_grad_enabled(program.training):
            given = [call(*inputs).detach()]
        return given + ([each.grad for each in program.parameters] if program.training else [])

    inputs = program.inputs()
    wanted = results(inputs)
    assert all(result is not None and result.isfinite().all() for result in wanted)
    assert measure.worst_difference(results(inputs), wanted) < program.bound / 10
    for number in range(len(inputs)):
        other = tuple(torch.randn_like(x) if i == number else x for i, x in enumerate(inputs))
        assert measure.worst_difference(results(other), wanted) > 10 * program.bound
    for parameter in program.parameters[:: max(1, len(program.parameters) // 20)]:
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter))
        assert measure.worst_difference(results(inputs), wanted) > 10 * program.bound
        with torch.no_grad():
            parameter.copy_(kept)


@pytest.mark.parametrize("name", ["tiny", "training"])
def test_the_floor_does_nothing_behind_the_wrappers(load: Callable[[str], Any], name: str) -> None:
    replay = load("replay")
    torch._dynamo.reset()
    program = getattr(replay, name)("cpu")
    call = replay.step(program, torch.compile(replay.own_code(program.function), backend=replay.does_nothing()))
    seen: list[list[int]] = []
    for _ in range(4):
        with torch.set_grad_enabled(program.training):
            output = call(*program.inputs())
            assert output.shape == program.function(*program.inputs()).shape
            seen.append([output.data_ptr(), *(each.grad.data_ptr() for each in program.parameters if program.training)])
        assert output.count_nonzero() == 0
    assert seen[1:] == seen[:1] * 3  # the same memory: nothing is computed, allocated or accumulated


def test_ratios_of_replay_are_over_passes_of_one_round(load: Callable[[str], Any]) -> None:
    replay = load("replay")
    host = {
        "multigraph": [12.0, 24.0, 36.0],
        "stock": [24.0, 48.0, 72.0],
        "guards + wrappers": [5.0, 10.0, 15.0],
        "input copy": [3.0, 6.0, 9.0],
        "bare replay": [2.0, 4.0, 6.0],
        "address comparison": [1.0, 2.0, 3.0],
    }
    taken = replay.Taken(host, {"multigraph": [20.0, 20.0, 40.0], "hand-made": [10.0, 20.0, 20.0]})
    row = replay.values("multigraph", taken)
    assert (row["host_us"], row["end_us"], row["floor_us"]) == (24, 20, 20)
    assert row["over_floor"] == pytest.approx(1.2)
    assert (row["over_floor_us"], row["addresses_us"]) == (4, 2)
    assert (row["over_stock"], row["end_over_hand"]) == (0.5, 2)
    assert "end_over_stock" not in row
    assert "gpu_us" not in row
    assert replay.values("bare replay", taken) == {"host_us": 4}
    assert replay.floor(replay.Taken({"input copy": [1.0]})) is None


def test_a_replayed_form_that_is_wrong_is_found(load: Callable[[str], Any]) -> None:
    replay = load("replay")
    program = replay.tiny("cpu")
    comparison = replay.Comparison(program, "cpu", {})
    kept: list[torch.Tensor] = []

    def stale(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept.append(program.function(a, b))
        return kept[max(0, len(kept) - 3)]

    comparison._add("stock", lambda: stale)
    assert "stock" not in comparison.forms
    assert comparison.errors["stock"].startswith("WrongNumbers: differs from eager")


def test_bytes_are_those_that_are_allocated(load: Callable[[str], Any]) -> None:
    saved = load("saved_tensors")

    class Twice(torch.autograd.Function):
        """Saves two tensors of the size of its input, and frees both before it makes the gradient."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.cat((x, x, x))[: 2 * len(x)].clone())
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            size = len(ctx.saved_tensors[0]) // 2
            ctx.maybe_clear_saved_tensors()
            return torch.ones(3 * size)[:size].clone()

    x = torch.nn.Parameter(torch.ones(1 << 12))
    step = saved.Step(lambda x: Twice.apply(x), contextlib.nullcontext, (x,))
    step(x)
    found = saved.bytes_of(step, (x,), "cpu")
    one, scalar = 4 << 12, 4
    assert (found.forward, found.saved, found.backward) == (5 * one, 2 * one + scalar, 4 * one + 2 * scalar)


def test_least_memory_of_programs(load: Callable[[str], Any]) -> None:
    programs, mib = load("allocator_programs"), 1 << 20
    bounds = lambda *operations: programs.bounds(programs.Program("", 3, operations))  # noqa: E731
    Make, Use, Free, Wait = programs.Make, programs.Use, programs.Free, programs.Wait
    one = (Make(1, 0, mib - 100), Wait(1, 0), Use(1, 1), Free(1))
    assert bounds(*one, Make(2, 0, mib)) == programs.Bounds(mib, 2 * mib, mib)  # stream 1 is behind its own use
    assert bounds(*one, Wait(0, 1), Make(2, 0, mib)) == programs.Bounds(mib, mib, mib)
    # behind one of two users is behind none
    two = (Make(1, 0, mib), Wait(1, 0), Wait(2, 0), Use(1, 1), Use(1, 2), Free(1), Wait(0, 1))
    assert bounds(*two, Make(2, 0, mib)) == programs.Bounds(mib, 2 * mib, 2 * mib)
    assert bounds(*two, Wait(0, 2), Make(2, 0, mib)) == programs.Bounds(mib, mib, mib)
    # a record without a kernel is nothing to wait for
    recorded = (Make(1, 0, mib, kernel=False), programs.Record(1, 1), Free(1), Make(2, 0, mib))
    assert bounds(*recorded) == programs.Bounds(mib, mib, mib)
    assert programs.bounds(programs.ping_pong()) == programs.Bounds(*[256 * mib] * 3)
    late = programs.bounds(programs.ping_pong(kept=4))
    assert late == programs.Bounds(*[640 * mib] * 3)
    assert programs.random_program(2) == programs.random_program(2)
    made = [op for op in programs.random_program(4).operations if isinstance(op, Make)]
    freed = [op for op in programs.random_program(4).operations if isinstance(op, Free)]
    assert len(made) == len(freed) > 4_000
    assert {op.stream for op in made} == {0, 1, 2, 3}


def test_what_torch_would_reserve_for_a_trace(load: Callable[[str], Any]) -> None:
    rules, mib = load("stock_rules").StockRules, 1 << 20

    def peak(events: list[tuple[Any, ...]], expandable: bool = False) -> float:
        return float(rules(expandable).play(events) / mib)

    one = [("allocate", 1, mib + 1, 0)]
    assert peak([("allocate", 1, 100, 0)]) == 2
    assert peak(one) == 20
    assert peak([("allocate", 1, 10 * mib, 0)]) == 10
    # what is left is cut off, and is one with its neighbours again
    assert peak([*one, ("allocate", 2, 12 * mib, 0), ("free", 1), ("free", 2), ("allocate", 3, 20 * mib, 0)]) == 20
    assert peak([*one, ("allocate", 2, 19 * mib, 0)]) == 40
    # of a large block 1 MiB is not, where segments do not grow
    near = [("allocate", 1, 9 * mib, 0), ("allocate", 2, 10 * mib, 0), ("free", 2), ("allocate", 3, 10 * mib, 0)]
    assert peak([*near, ("allocate", 4, mib + 512, 0)]) == 40
    assert peak([("allocate", 1, 30 * mib, 0), ("free", 1), *near[:2], ("allocate", 3, 11 * mib, 0)]) == 30
    # streams have their own, and so have pools
    assert peak([*one, ("free", 1), ("allocate", 2, 2 * mib, 1)]) == 40
    assert peak([*one, ("free", 1), ("begin", 1, 0), ("allocate", 2, 2 * mib, 0), ("end", 1)]) == 40
    # what another stream used comes back when a capture has ended, outside when all has run
    used = [("begin", 1, 0), ("capture", 0), *one, ("record", 1, 1), ("free", 1)]
    assert peak([*used, ("allocate", 2, 19 * mib, 0)]) == 40
    ended = [*used, ("captured", 0), ("capture", 0), ("allocate", 2, 19 * mib, 0)]
    assert peak(ended) == 20
    assert peak([*one, ("record", 1, 1), ("free", 1), ("run",), ("allocate", 2, 19 * mib, 0)]) == 20
    # segments that grow are mapped behind what is free at their end
    assert peak([("allocate", 1, 30 * mib, 0)], expandable=True) == 40
    assert peak([("allocate", 1, 30 * mib, 0), ("free", 1), ("allocate", 2, 60 * mib, 0)], expandable=True) == 60
    with pytest.raises(ValueError, match="a trace has no 'alocate'"):
        peak([("alocate", 1, 512, 0)])


def test_traces_are_what_programs_allocate(load: Callable[[str], Any]) -> None:
    traces, stitching = load("allocation_traces"), load("stitching")
    with traces._fake(), traces.Trace() as trace:
        x = torch.empty(1024, dtype=torch.uint8)
        y = x + 1  # x lives on
        view = y[:512]
        del y
        with trace.pool():
            z = view * 2
            del view
        trace.moved()
        del z, x
    words = [event for event in trace.events if event[0] != "kernel"]
    assert words == [
        ("allocate", 1, 1024, 0), ("allocate", 2, 1024, 0), ("begin", 1, 1), ("capture", 1), ("allocate", 3, 512, 1),
        ("free", 2), ("captured", 1), ("end", 1), ("free", 3), ("allocate", 4, 512, 0), ("free", 4),
        ("free", 1),
    ]  # fmt: skip
    assert stitching.bound(trace.events) == 2048 + 512
    made = traces.programs(True)
    whole = made["whole steps"]().events
    assert whole == made["whole steps"]().events  # the same whenever it is taken
    blocks = [event[1] for event in whole if event[0] == "allocate"]
    assert sorted(event[1] for event in whole if event[0] == "free") == blocks
    assert {event[3] for event in whole if event[0] == "allocate"} == {traces.CAPTURES}
    assert {event[3] for event in made["experts, two streams"]().events if event[0] == "allocate"} == {1, 2}


def test_allocators_are_compared_with_stock_and_the_bound(load: Callable[[str], Any]) -> None:
    allocator, measure = load("allocator"), load("measure")
    rows: dict[str, dict[str, Any]] = {"stock": {"reserved_mib": 4226.0}, "multigraph": {"reserved_mib": 264.0}}
    allocator.compare("ping-pong", rows, {"live_mib": 256.0, "bound_mib": 240.0})
    assert rows["multigraph"]["over_bound"] == pytest.approx(1.1)
    assert rows["multigraph"]["over_stock"] == pytest.approx(264 / 4226)
    assert measure.goals_text(allocator.goals_of("ping-pong", "multigraph"), rows["multigraph"]) == (
        "reserved <= 258 MISSED"
    )
    late = {"multigraph": {"reserved_mib": 640.0}}  # an allocator goes by frees
    allocator.compare("late frees", late, {"live_mib": 640.0, "bound_mib": 640.0})
    said = measure.goals_text(allocator.goals_of("late frees", "multigraph"), late["multigraph"])
    assert said == "reserved <= 640 met"
    rows = {"stock": {"ns": 400.0, "ns_8": 90.0}, "multigraph": {"ns": 420.0}}
    allocator.compare("alloc+free", rows, {})
    assert rows["multigraph"] == {"ns": 420, "over_stock": 1.05}
    captures = {"multigraph": {"ms": 12.0}, "multigraph, strict": {"ms": 10.0}}
    allocator.compare("random, 2 streams", captures, {})
    assert captures["multigraph"]["ms_over_strict"] == pytest.approx(1.2)
    training: dict[str, dict[str, Any]] = {
        form: {"reserved_mib": mib} for form, mib in (("stock", 100), ("stock, expandable", 90), ("multigraph", 91))
    }
    allocator.compare("training", training, {})
    assert measure.goals_text(allocator.goals_of("training", "multigraph"), training["multigraph"]) == (
        "over stock <= 0.95 met, over expandable <= 1.02 met"
    )
    assert [form for form in allocator.FORMS if not allocator.skipped(form, "ping-pong")] == [
        "stock", "stock, reuse", "multigraph", "multigraph, own stream", "multigraph, plain",
    ]  # fmt: skip


def test_variables_are_those_of_one_process(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "mine")
    variables = load("allocator").variables
    with variables({}):
        assert name not in os.environ
    with variables({name: "theirs"}):
        assert os.environ[name] == "theirs"
    assert os.environ[name] == "mine"


@pytest.mark.parametrize("wrong", ["gradients", "not packed", "not inlined"])
def test_a_form_that_does_not_do_what_its_row_says_is_found(load: Callable[[str], Any], wrong: str) -> None:
    saved = load("saved_tensors")
    stack = saved.Stack("cpu", 1, quick=True)

    def form(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = stack.program()(x)
        return loss * 1.2 - loss.detach() * 0.2 if wrong == "gradients" else loss

    hooks = saved.inlined("int8", stack) if wrong == "not inlined" else contextlib.nullcontext
    name = "inductor, int8" if wrong == "not inlined" else "multigraph, int8"
    comparison = saved.Comparison(
        stack, [saved.Form(name, lambda: form, "int8", hooks), saved.Form("eager", stack.program)]
    )
    comparison.make(lambda form: False)
    assert list(comparison.steps) == ["eager"]
    said = {"gradients": "differs from eager", "not packed": "0 tensors are packed", "not inlined": "the hooks are not"}
    assert said[wrong] in comparison.errors.pop(name)
    assert not comparison.errors


def test_a_form_of_others_that_is_wrong_keeps_its_row_and_says_so(load: Callable[[str], Any]) -> None:
    saved = load("saved_tensors")
    stack = saved.Stack("cpu", 1, quick=True)

    def form(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = stack.program()(x)
        return loss * 1.2 - loss.detach() * 0.2

    comparison = saved.Comparison(
        stack, [saved.Form("inductor, budget 0.5", lambda: form), saved.Form("eager", stack.program)]
    )
    comparison.make(lambda form: True)
    assert not comparison.errors
    wrong, right = comparison.rows["inductor, budget 0.5"], comparison.rows["eager"]
    assert (wrong["numbers"], right["numbers"]) == ("WRONG", "right")
    assert wrong["gradient_error"] > 0.1
    assert "differs from eager" in wrong["wrong"]
    assert wrong["forward_mib"] > 0
    rows: dict[str, dict[str, Any]] = {
        "inductor": {"forward_mib": 100.0, "over_inductor": 1.0},
        "inductor, fp8": {"forward_mib": 50.0, "over_unpacked": 1.1, "numbers": "WRONG"},
        "multigraph, fp8": {"forward_mib": 40.0, "over_unpacked": 1.04},
    }
    saved.compare(rows)
    assert rows["multigraph, fp8"]["forward_over_stock"] == 0.8
    rows["inductor, fp8, alone"] = {"forward_mib": 80.0, "over_unpacked": 1.2, "numbers": "right"}
    saved.compare(rows)
    assert rows["multigraph, fp8"]["forward_over_stock"] == 0.5
    assert rows["multigraph, fp8"]["half_of_stock"] == pytest.approx(1.1)


def test_forms_are_chosen_by_name_or_by_a_part_of_it(load: Callable[[str], Any]) -> None:
    saved = load("saved_tensors")
    forms = [saved.Form(name, lambda: None) for name in ("inductor", "inductor, fp8", "multigraph, fp8", "multigraph")]

    def names(*only: str) -> list[str]:
        return [form.name for form in saved.chosen(forms, list(only))]

    assert names("inductor", "multigraph,fp8") == ["inductor", "multigraph, fp8", "multigraph"]  # it is divided by that
    assert names("inductor,fp8") == ["inductor", "inductor, fp8"]
    assert names("fp8") == ["inductor", "inductor, fp8", "multigraph, fp8", "multigraph"]


@pytest.mark.slow
def test_a_form_is_measured_in_a_process_of_its_own(load: Callable[[str], Any]) -> None:
    saved = load("saved_tensors")
    args = saved.parser().parse_args(["--quick", "--device", "cpu", "--layers", "1"])
    row, error = saved.alone(args, "inductor, int8")
    assert error is None
    assert row["numbers"] == "right"
    assert positive([row], "step_ms", "over_inductor", "forward_mib", "saved_mib", "backward_mib")


def test_peaks_are_compared_with_stock_that_packs_alike(load: Callable[[str], Any]) -> None:
    saved, measure = load("saved_tensors"), load("measure")
    rows: dict[str, dict[str, Any]] = {
        "inductor": {"forward_mib": 100.0, "backward_mib": 110.0, "over_inductor": 1.0},
        "inductor, fp8": {"forward_mib": 50.0, "backward_mib": 60.0, "over_unpacked": 1.1},
        "multigraph, fp8": {"forward_mib": 40.0, "backward_mib": 61.2, "over_unpacked": 1.04, "over_inductor": 0.9},
        "multigraph, int8": {"forward_mib": 40.0, "backward_mib": 60.0, "over_unpacked": 1.04},  # stock's failed
    }
    saved.compare(rows)

    def said(name: str, layers: int, reordering: bool = True) -> str:
        form = saved.Form(name, lambda: None, name.partition(", ")[2])
        return str(measure.goals_text(saved.goals_of(form, layers, reordering), rows[name]))

    assert said("multigraph, fp8", 12) == (
        "forward/stock <= 1.01 met, backward/stock <= 1.01 MISSED, "
        "step/unpacked <= 1.03 MISSED, half of stock's <= 1.05 met"
    )
    assert said("multigraph, fp8", 12, False).startswith("forward/stock <= 0.5 MISSED, backward/stock <= 1.01 MISSED")
    assert said("multigraph, int8", 12) == "forward/stock <= 1.01 ?, backward/stock <= 0.8 ?, step/unpacked <= 1.04 met"
    assert said("multigraph, int8", 4) == "forward/stock <= 1.01 ?, backward/stock <= 1.01 ?, step/unpacked <= 1.04 met"
    assert said("inductor", 12) == ""


def test_sizes_come_in_the_order_asked_for(load: Callable[[str], Any]) -> None:
    sizes = load("capture_sizes")
    assert len(set(sizes.sizes_of(False))) == 32
    assert min(sizes.sizes_of(False)) == 2
    assert sizes.ordered([4, 2, 8], "ascending") == [2, 4, 8]
    assert sizes.ordered([4, 2, 8], "descending") == [8, 4, 2]
    assert sizes.ordered([4, 2, 8], "largest") == [8]


def test_sizes_are_summed_without_the_first(load: Callable[[str], Any]) -> None:
    sizes = load("capture_sizes")
    first = sizes.Timed({"first": 100.0, "second": 100.0, "third": 100.0}, 2)
    later = [sizes.Timed({"first": float(number), "second": 3.0, "third": 1.0}, 2) for number in (1, 1, 4)]
    row = sizes.summary([first, *later])
    assert row == {
        "sizes": 4, "first_size_ms": 300, "ms": 5, "median_ms": 4, "calls": 2, "all_ms": 6,
        "first_ms": 2, "second_ms": 3, "third_ms": 1,
    }  # fmt: skip
    assert sizes.summary([first]) == {"sizes": 1, "first_size_ms": 300}
    rows = {"bare": {"ms": 2.0}, "stock": {"ms": 10.0, "pool_mib": 230.0}, "multigraph": {"ms": 3.0, "pool_mib": 240.0}}
    sizes.ratios(rows)
    assert (rows["multigraph"]["over_bare"], rows["multigraph"]["over_stock"]) == (1.5, 0.3)
    said = load("measure").goals_text(sizes.GOALS, rows["multigraph"])
    assert said == "over stock <= 0.4 met, pool <= 230 MISSED"


def test_kernels_belong_to_the_call_that_launched_them(load: Callable[[str], Any]) -> None:
    def event(cat: str, name: str, correlation: int) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "args": {"correlation": correlation}}

    events = [
        event("cuda_runtime", "cudaGraphLaunch", 1),
        event("cuda_driver", "cuGraphLaunch", 2),
        event("cuda_runtime", "cudaLaunchKernel", 3),
        event("cuda_driver", "cuLaunchKernelEx", 4),
        *(event("kernel", f"triton_{number}", 1) for number in range(5)),
        event("kernel", "gemm", 2),
        event("kernel", "copy", 3),
        event("kernel", "fill", 4),
        event("kernel", "copy", 5),  # its call is not in the profile
        event("gpu_memcpy", "Memcpy HtoD", 3),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    models = load("models")
    seen = models.kernels(events)
    assert (seen.count, seen.in_graphs, seen.outside) == (9, 6, {"copy": 2, "fill": 1})
    assert seen.percent() == pytest.approx(100 * 6 / 9)
    assert models.kernels([]).percent() is None


def test_loops_find_outputs_that_the_next_call_overwrites(load: Callable[[str], Any]) -> None:
    models = load("models")
    model = models.model_of("decoder", "inference", torch.float32, "cpu")
    buffer = torch.empty(8, 32, 64)

    def form(x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=buffer[: len(x)].copy_(model.module(x).logits))

    for call, wrong in ((model.module, 0), (form, 3)):
        loop = models.Inference(call, model, torch.float32)
        loop.run(4, models.contextlib.nullcontext)
        assert (loop.tally.steps, loop.tally.raised) == (4, 0)
        assert loop.tally.wrong >= wrong
        assert (loop.tally.error is None) == (wrong == 0)
    assert "held outputs differ" in loop.tally.error


@pytest.mark.parametrize("what", ["right", "gradients", "losses", "held losses", "missing", "raises"])
def test_loops_find_what_is_wrong_in_training(load: Callable[[str], Any], what: str) -> None:
    models = load("models")
    model = models.model_of("decoder", "checkpointed", torch.float32, "cpu")
    last = list(model.module.parameters())[-1]
    kept: list[torch.Tensor] = []

    def form(**batch: torch.Tensor) -> Any:
        if what == "raises":
            raise ValueError("accessing tensor output that has been overwritten")
        output = model.module(**batch)
        if what == "held losses":  # the second step changes a loss of the first
            kept.append(output.loss.detach())
            kept[0].add_(len(kept) > 2)
        if what == "losses":
            return output._replace(loss=output.loss + output.loss.detach() * 0.1)
        if what == "missing":
            last.requires_grad_(False)
            output = model.module(**batch)
            last.requires_grad_(True)
        if what == "gradients":
            return output._replace(loss=output.loss * 1.1 - output.loss.detach() * 0.1)
        return output

    loop = models.Training(form, model, torch.float32)
    loop.run(2, models.contextlib.nullcontext)
    found = (loop.tally.raised, loop.tally.wrong > 0, loop.tally.error)
    if what == "right":
        assert found == (0, False, None)
    elif what == "raises":
        error = "step 1: ValueError: accessing tensor output that has been overwritten"
        assert (found, loop.tally.steps) == ((1, False, error), 1)
    else:
        assert found[:2] == (0, True)
        said = f"WrongNumbers: {'gradients' if what == 'missing' else what}"
        assert found[2].startswith(f"step {2 if what == 'held losses' else 1}: {said}")


def test_warnings_are_counted_once_each_without_the_deserved(load: Callable[[str], Any]) -> None:
    with load("models").Said() as said:
        for _ in range(2):
            warnings.warn("first line\nsecond", UserWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=1)
        logging.getLogger("multigraph_backend.events").warning("one of %s", "ours")
        logging.getLogger("torch._dynamo.convert_frame").warning("one of torch's")
        logging.getLogger("torch._inductor").info("no warning")
    assert said.lines == {
        "UserWarning: first line": 2,
        "multigraph_backend.events: one of ours": 1,
        "torch._dynamo.convert_frame: one of torch's": 1,
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("replay", ["--only", "decoder", "--rounds", "5", "--cudagraphs", "require", "--json", "a.json"]),
        ("capture_sizes", ["--order", "ascending", "largest", "--sizes", "2", "4", "--only", "multigraph"]),
        (
            "saved_tensors",
            ["--layers", "4", "--only", "int8", "--cudagraphs", "auto", "--no-reordering", "--rounds", "3"],
        ),
        ("allocator", ["--only", "stock", "multigraph, plain", "--programs", "no use", "--json", "a.json"]),
        ("stitching", ["--only", "sizes, random", "--traces", "here", "--json", "a.json"]),
        ("models", ["--models", "llama", "vit", "--modes", "training", "--dtype", "bfloat16", "--no-stock"]),
    ],
)
def test_arguments(load: Callable[[str], Any], name: str, words: list[str]) -> None:
    parser = load(name).parser()
    assert vars(parser.parse_args(words)) != vars(parser.parse_args([]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "tpu"])


@pytest.mark.slow
def test_losses_of_training_on_text(load: Callable[[str], Any]) -> None:
    curve, unpacked = load("loss_curve"), []
    plain, packed = (curve.row_of(name, 3, "cpu", True, unpacked) for name in ("unpacked", "int8"))
    assert (plain["packed"], plain["over_unpacked"]) == (0, 1.0)
    assert packed["packed"] > 0
    assert packed["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-5)
    assert packed["last_loss"] != plain["last_loss"]
    assert packed["over_unpacked"] == pytest.approx(1, abs=0.02)


def test_what_is_offloaded_is_held_against_what_it_could_save(load: Callable[[str], Any]) -> None:
    saved, measure = load("saved_tensors"), load("measure")
    rows: dict[str, dict[str, Any]] = {
        "inductor": {"forward_mib": 100.0, "backward_mib": 110.0, "over_inductor": 1.0},
        "multigraph, offload": {
            "forward_mib": 90.0, "backward_mib": 100.4, "over_unpacked": 1.012, "offloaded_mib": 10.0,
        },
    }  # fmt: skip
    saved.compare(rows)
    form = saved.Form("multigraph, offload", lambda: None, "offload")
    said = measure.goals_text(saved.goals_of(form, 12, True), rows["multigraph, offload"])
    assert said == "step/unpacked <= 1.01 MISSED, saving/theory >= 0.95 met"


def test_the_language_models_as_programs(load: Callable[[str], Any]) -> None:
    saved = load("saved_tensors")
    stack = saved.Language("small", "cpu", None)
    inputs = stack.inputs()
    by_block = stack.program(lambda block, x: block(x))
    torch.testing.assert_close(stack.program()(*inputs), by_block(*inputs))
    assert stack.first_blocks() == 1
    names = [form.name for form in saved.forms_of(stack, {})]
    assert "multigraph, budget 0.5" in names
    assert "multigraph, offload" not in names  # on the CPU


# ---------------------------------------------------------------- architectures


@pytest.fixture
def settings() -> Iterator[None]:
    """torch's settings are put back: a benchmark changes them in a process of its own."""
    flags = parcel._flags()
    yield
    for name, value in flags.items():
        parcel._set_flag(name, value)


@pytest.mark.usefixtures("settings")
def test_architectures_are_compared_with_eager_in_both_loops(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo = load("zoo")

    def toy(device: str) -> Any:
        layers = (torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
        module = torch.nn.Sequential(*layers).to(device)
        return zoo.Model(module, lambda rows: {"input": torch.randn(rows, 8, device=device)})

    monkeypatch.setitem(zoo.MODELS, "toy", toy)
    monkeypatch.setattr(zoo, "compiled", lambda form, module: torch.compile(module, backend="aot_eager"))
    for mode in zoo.MODES:
        told = zoo.measured("multigraph", "toy", mode, "cpu")
        assert (told["steps"], told["raised"], told["wrong"], told["why"]) == (6, 0, 0, None)
    monkeypatch.setattr(zoo, "compiled", lambda form, module: lambda input: module(input) * 1.01)
    off = zoo.loop_of("multigraph", "toy", "inference", "cpu")
    assert off.wrong(zoo.BOUND) == 6
    told = zoo.measured("multigraph", "toy", "training", "cpu")  # where Inductor is as far off, it is no error
    assert (told["wrong"], told["inductor"]) == (0, told["worst"])


@pytest.mark.usefixtures("settings")
def test_a_form_that_is_wrong_or_raises_is_not_timed(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo, times = load("zoo"), load("zoo_times")

    def toy(device: str) -> Any:
        return zoo.Model(torch.nn.Linear(8, 4).to(device), lambda rows: {"input": torch.randn(rows, 8, device=device)})

    def compiled(form: str, module: torch.nn.Module) -> Any:
        def raises(input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("overwritten")

        return {"stock": raises, "multigraph": module, "inductor": lambda input: module(input) * 1.0}[form]

    monkeypatch.setitem(times.zoo.MODELS, "toy", toy)
    monkeypatch.setattr(times, "compiled", compiled)
    monkeypatch.setattr(times, "PASS_US", 500.0)
    for kind, ways in zip(times.LOOPS, (2, 1, 1), strict=True):
        rows = times.made("toy", kind, "cpu").measure(2)
        assert [row["error"] for row in rows] == [None] * ways
        for row in rows:
            assert (row["best"], row["stock_said"]) == ("inductor", "RuntimeError: overwritten")
            assert row["ratio"] == row["over_inductor"]
            assert "stock_us" not in row
    wrong = {"stock": 1.0, "multigraph": 1.01, "inductor": 1.0}
    monkeypatch.setattr(times, "compiled", lambda form, module: lambda input: module(input) * wrong[form])
    for kind in times.LOOPS:
        row = times.made("toy", kind, "cpu").measure(2)[0]
        assert row["error"].startswith("WrongNumbers: off by ")
        assert "us" not in row
        assert row["stock_us"] > 0


def test_ratios_are_averaged_over_all_and_over_what_stock_records(load: Callable[[str], Any]) -> None:
    rows = [{"loop": "step", "ratio": 0.5, "stock_us": 1.0}, {"loop": "step", "ratio": 2.0}, {"loop": "step"}]
    assert [
        (about["model"], about["loop"], values["ratio"]) for about, values in load("zoo_times").summaries(rows)
    ] == [
        ("2 models", "step", 1.0),
        ("1 models that stock records", "step", 0.5),
        ("2 models", "all", 1.0),
        ("1 models that stock records", "all", 0.5),
    ]


def test_every_float_of_an_output_is_compared(load: Callable[[str], Any]) -> None:
    zoo = load("zoo")
    one, two, whole = torch.ones(1), torch.ones(2), torch.ones(3, dtype=torch.int64)
    assert [found.numel() for found in zoo.tensors({"a": one, "b": (whole, [two, None])})] == [1, 2]
