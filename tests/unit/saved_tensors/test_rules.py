"""Rules: the first that matches decides, what nobody named is left alone, JSON both ways, errors that help."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from multigraph_backend.options import Options, OptionsError
from multigraph_backend.saved_tensors.rules import (
    SMALL_BYTES,
    Cast,
    Described,
    Keep,
    Match,
    Rule,
    Scaled,
    decide,
    rule_from_json,
    rule_to_json,
)

TENSOR = Described(("aten::mul", "aten::gelu"), "float32", True, SMALL_BYTES, "layers.0.mlp", "intermediate")
ANY = Rule(pack=Cast("bfloat16"))


def test_a_keep_decides_about_small_tensors_and_bools_and_masks_too() -> None:
    keep, pack = Rule(Match(module=TENSOR.module), Keep()), Rule(Match(min_bytes=0), Cast("bfloat16"))
    changes: tuple[dict[str, Any], ...] = ({"bytes": 4}, {"number": False, "dtype": "bool"}, {"role": "mask"})
    for change in changes:
        assert decide([keep, pack], dataclasses.replace(TENSOR, **change)) is keep
    assert decide([keep, pack], dataclasses.replace(TENSOR, role="input")) is not keep


def test_the_first_rule_that_matches_decides() -> None:
    other = Rule(pack=Scaled("int8"))
    assert decide([ANY, other], TENSOR) is ANY
    assert decide([Rule(Match(module="head"), Keep()), other, ANY], TENSOR) is other
    assert decide([], TENSOR) == "no rule matches it"


@pytest.mark.parametrize(
    "match",
    [Match(op="aten::gelu"), Match(op="aten.mul"), Match(op="aten::m*"), Match(dtype="float32"),
     Match(min_bytes=SMALL_BYTES), Match(module="layers.*.mlp"), Match(role="intermediate"), Match()],
    ids=str,
)  # fmt: skip
def test_what_a_match_finds(match: Match) -> None:
    rule = Rule(match, Keep())
    assert decide([rule], TENSOR) is rule


@pytest.mark.parametrize(
    "match",
    [Match(op="aten::mm"), Match(dtype="bf16"), Match(min_bytes=SMALL_BYTES + 1), Match(module="layers.0"),
     Match(role="input")],
    ids=str,
)  # fmt: skip
def test_what_a_match_does_not_find(match: Match) -> None:
    assert isinstance(decide([Rule(match, Keep())], TENSOR), str)


@pytest.mark.parametrize(
    ("change", "named", "reason"),
    [
        ({"bytes": SMALL_BYTES - 1}, Match(min_bytes=0), "small"),
        ({"dtype": "int64", "number": False}, Match(dtype="int64"), "int64"),
        ({"dtype": "bool", "number": False}, Match(dtype="bool"), "bool"),
        ({"role": "input"}, Match(role="input"), "an input"),
        ({"role": "parameter"}, Match(role="parameter"), "a parameter"),
        ({"role": "output"}, Match(role="output"), "an output"),
    ],
)
def test_what_nobody_named_is_left_alone(change: dict[str, Any], named: Match, reason: str) -> None:
    tensor = dataclasses.replace(TENSOR, **change)
    kept = decide([ANY], tensor)
    assert isinstance(kept, str)
    assert reason in kept
    rule = Rule(named, Cast("bf16"))
    assert decide([ANY, rule], tensor) is rule


RULES = [
    Rule(Match("aten::mm", "float32", 0, "layers.*", "input"), Keep()),
    Rule(pack=Cast("bf16", stochastic=True)),
    Rule(Match(min_bytes=10), Scaled("fp8", per=64)),
    Rule(Match(dtype=str(torch.float16).removeprefix("torch.")), Scaled("int8")),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_json_both_ways(rule: Rule) -> None:
    assert rule_from_json(json.loads(json.dumps(rule_to_json(rule)))) == rule


def test_options_take_rules_and_json() -> None:
    given = {"saved_tensors": [RULES[1], {"match": {"min_bytes": 10}, "pack": {"scale": "e4m3", "per": 64}}]}
    options = Options.build(given, environ={})
    assert options.saved_tensors == (RULES[1], RULES[2])
    assert hash(options) == hash(Options.build(given, environ={}))
    text = json.dumps({"*": {"saved_tensors": [{"pack": "keep"}]}})
    assert Options.build(environ={"MULTIGRAPH_OPTIONS": text}).saved_tensors == (Rule(),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"saved_tensor": []}, "did you mean 'saved_tensors'"),
        ({"saved_tensors": RULES[0]}, "wrap it in a list"),
        ({"saved_tensors": ["int8"]}, r"'saved_tensors\[0\]': expected a Rule"),
        ({"saved_tensors": [{"pack": "keep"}, {}]}, r"'saved_tensors\[1\]': a rule needs \"pack\""),
        ({"saved_tensors": [{"pack": {"cast": "bfloat61"}}]}, "did you mean 'bfloat16'"),
        ({"saved_tensors": [{"pack": {"cast": "int8"}}]}, "dtype 'int8' is not possible here"),
        ({"saved_tensors": [{"pack": {"scale": "int8", "pr": 3}}]}, "did you mean 'per'"),
        ({"saved_tensors": [{"pack": {"scale": "int8", "per": 1}}]}, "a number of elements above 1"),
        ({"saved_tensors": [{"match": {"opp": "x"}, "pack": "keep"}]}, "did you mean 'op'"),
        ({"saved_tensors": [{"match": {"role": "weights"}, "pack": "keep"}]}, "role must be one of"),
        ({"saved_tensors": [{"match": {"min_bytes": -1}, "pack": "keep"}]}, "min_bytes must be"),
        ({"saved_tensors": [{"match": {"module": 3}, "pack": "keep"}]}, "module must be a name or glob, got 3"),
        ({"saved_tensors": [{"pack": {"cast": "fp16", "stochastic": True}}]}, "stochastic rounding is for"),
        ({"saved_tensors": [Rule()], "compiler": "aot_eager"}, "only Inductor has it"),
    ],
)
def test_errors_name_the_cause_and_the_remedy(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Options.build(given, environ={})


def test_what_is_no_match_is_refused_where_a_rule_begins() -> None:
    with pytest.raises(TypeError, match=r"begins with a Match, not .*a pack comes second: Rule\(Match\(\), \.\.\.\)"):
        Rule(Scaled("int8"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="op must be a name or glob, got 3"):
        Match(op=3)  # type: ignore[arg-type]
