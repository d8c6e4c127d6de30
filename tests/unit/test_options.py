"""Options: what is accepted, what is refused and in which words, and how code and environment combine."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from expecttest import assert_expected_inline

import multigraph_backend
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.limits import LEAST, Limits, in_bytes
from multigraph_backend.cudagraphs.output_code import limits_of
from multigraph_backend.declare.predicates import And, Eq, In, MultipleOf, Range
from multigraph_backend.options import Options, OptionsError
from tests.support.simulated.pieces import Bench, call_right, values

KNOBS: dict[str, tuple[object, type | None]] = {
    "max_autotune": (False, bool),
    "max_fusion_size": (64, int),
    "triton.cudagraphs": (False, bool),
    "triton.cudagraph_or_error": (False, bool),
    "coordinate_descent_tuning": (False, bool),
    "realize_scale": (1.5, float),
    "cpp_wrapper_name": ("none", str),
    "post_grad_custom_pre_pass": (None, type(None)),
    "disabled_passes": ([], None),
}
MODES: dict[str, dict[str, object]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True, "coordinate_descent_tuning": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "coordinate_descent_tuning": True},
}


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small Inductor, the same for every version of torch."""
    stub = SimpleNamespace(
        inductor_config_names=lambda: {name: value for name, (value, _) in KNOBS.items()},
        inductor_config_type=lambda name: KNOBS[name][1],
        inductor_modes=lambda: MODES,
    )
    monkeypatch.setitem(sys.modules, "multigraph_backend._compat", stub)
    monkeypatch.setattr(multigraph_backend, "_compat", stub, raising=False)


def build(
    options: Any = None, mode: Any = None, names: tuple[str, ...] = (), env: Mapping[str, object] | str = ""
) -> Options:
    """Build with an environment of its own, given as text or as what the JSON says."""
    text = env if isinstance(env, str) else json.dumps(env)
    return Options.build(options, mode, names, {"MULTIGRAPH_OPTIONS": text} if text else {})


def error(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(OptionsError) as caught:
        build(*args, **kwargs)
    return str(caught.value)


# ---- values ----


def test_defaults() -> None:
    assert build() == Options() == build({}) == build(mode="default") == build({"inductor": {}})
    assert_expected_inline(
        repr(Options()),
        """Options(specialize=(), pad=(), compile='lazy', workers=(), on_failure='fallback', compile_timeout=600.0, warm_start=True, compiler='inductor', cudagraphs='auto', cut=(), safe=(), collectives='record', record_small=False, copy_outputs=False, max_recordings=5, limits=(), inductor=(), saved_tensors=(), saved_tensors_budget=None, memory_goal=None, repeat='auto', name=None, mode=None)""",  # noqa: E501
    )


def test_values_are_kept() -> None:
    def lower(gm: object, example_inputs: object) -> object:
        return gm

    options = build(
        {
            "compile": "eager",
            "on_failure": "raise",
            "compile_timeout": 30,
            "compiler": lower,
            "specialize": (),
        }
    )
    assert options == Options(compile="eager", on_failure="raise", compile_timeout=30.0, compiler=lower, repeat=False)
    assert isinstance(options.compile_timeout, float)
    assert build({"compile_timeout": None}).compile_timeout is None
    assert build({"compiler": "aot_eager"}).compiler == "aot_eager"


def test_specialize_declares_one_variant_per_listed_value() -> None:
    options = build(
        {
            "specialize": [
                {"x[0]": 1},
                {"x[0]": [2, 4], "n": [3, 5]},
                {"x[1]": {"min": 1, "max": 512}},
                In("x[0]", [8, 16]),
                And(MultipleOf("x[1]", 64), Eq("n", 1)),
            ]
        }
    )
    assert_expected_inline(
        "\n".join(map(str, options.specialize)),
        """\
x[0] == 1
x[0] == 2 and n == 3
x[0] == 2 and n == 5
x[0] == 4 and n == 3
x[0] == 4 and n == 5
1 <= x[1] <= 512
x[0] == 8
x[0] == 16
x[1] % 64 == 0 and n == 1""",
    )
    assert options.specialize[0] == Eq("x[0]", 1)
    assert options.specialize[5] == Range("x[1]", 1, 512)


def test_unknown_options() -> None:
    texts = [error({key: 1}) for key in ("specialise", "Compile", "timeout", "zzz")]
    texts.append(error(env={"*": {"specialise": 1}}))
    assert_expected_inline(
        "\n".join(texts),
        """\
unknown option 'specialise' (did you mean 'specialize'?); valid options: specialize, pad, compile, workers, on_failure, compile_timeout, warm_start, compiler, cudagraphs, cut, splitting_ops, safe, collectives, record_small, copy_outputs, max_recordings, limits, inductor, saved_tensors, saved_tensors_budget, memory_goal, repeat, mode, name
unknown option 'Compile' (did you mean 'compile'?); valid options: specialize, pad, compile, workers, on_failure, compile_timeout, warm_start, compiler, cudagraphs, cut, splitting_ops, safe, collectives, record_small, copy_outputs, max_recordings, limits, inductor, saved_tensors, saved_tensors_budget, memory_goal, repeat, mode, name
unknown option 'timeout' (did you mean 'compile_timeout'?); valid options: specialize, pad, compile, workers, on_failure, compile_timeout, warm_start, compiler, cudagraphs, cut, splitting_ops, safe, collectives, record_small, copy_outputs, max_recordings, limits, inductor, saved_tensors, saved_tensors_budget, memory_goal, repeat, mode, name
unknown option 'zzz'; valid options: specialize, pad, compile, workers, on_failure, compile_timeout, warm_start, compiler, cudagraphs, cut, splitting_ops, safe, collectives, record_small, copy_outputs, max_recordings, limits, inductor, saved_tensors, saved_tensors_budget, memory_goal, repeat, mode, name
unknown option 'specialise' (did you mean 'specialize'?) (in MULTIGRAPH_OPTIONS['*']); valid options: specialize, pad, compile, workers, on_failure, compile_timeout, warm_start, compiler, cudagraphs, cut, splitting_ops, safe, collectives, record_small, copy_outputs, max_recordings, limits, inductor, saved_tensors, saved_tensors_budget, memory_goal, repeat, mode, name""",  # noqa: E501
    )


def test_wrong_values() -> None:
    wrong: list[object] = [
        {"compile": "sometimes"},
        {"compile": "Eager"},
        {"compile": True},
        {"workers": 4},
        {"workers": {"counts": 4}},
        {"workers": {"count": 0}},
        {"workers": {"gpu": 1}},
        {"on_failure": "ignore"},
        {"compile_timeout": 0},
        {"compile_timeout": -1.5},
        {"compile_timeout": True},
        {"compile_timeout": float("nan")},
        {"compile_timeout": float("inf")},
        {"compile_timeout": 1e30},
        {"compile_timeout": "600"},
        {"compiler": ""},
        {"compiler": None},
        {"specialize": "auto"},
        {"specialize": None},
        {"specialize": {"x[0]": 1}},
        {"specialize": Eq("x[0]", 1)},
        {"specialize": [{"x[0]": 1}, 8]},
        {"specialize": ["x[0]"]},
        {"specialize": [{"x[0]": {"multipleof": 16}}]},
        {"specialize": [{"x[0]": 1}, {"x[0]": 1.0}]},
        {"specialize": [{"x[0]": []}]},
        {"specialize": [And(Eq("x", 1), Eq("x", 2))]},
        {"specialize": [{}]},
        {"specialize": [{"x[0]": {}}]},
        {"specialize": [MultipleOf("x", 1)]},
        {"inductor": True},
        {3: 4},
        [("compile", "lazy")],
        "compile",
    ]
    assert_expected_inline(
        "\n".join(error(options) for options in wrong),
        """\
option 'compile': expected 'lazy' or 'eager' or 'background', got 'sometimes' (str)
option 'compile': expected 'lazy' or 'eager' or 'background' (did you mean 'eager'?), got 'Eager' (str)
option 'compile': expected 'lazy' or 'eager' or 'background', got True (bool)
option 'workers': expected a mapping of count, memory, gpu to values, got 4 (int)
option 'workers': unknown key 'counts' (did you mean 'count'?); keys: count, memory, gpu
option "workers['count']": expected a number from 1 on, got 0 (int)
option "workers['gpu']": expected True or False, got 1 (int); write True
option 'on_failure': expected 'fallback' or 'raise', got 'ignore' (str)
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got 0 (int)
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got -1.5 (float)
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got True (bool)
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got nan (float)
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got inf (float); write None
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got 1e+30 (float); write None
option 'compile_timeout': expected a number of seconds greater than 0, or None for no limit, got '600' (str); write 600
option 'compiler': expected the name of a backend, or a callable of a graph module and its example inputs, got '' (str)
option 'compiler': expected the name of a backend, or a callable of a graph module and its example inputs, got None (NoneType)
option 'specialize': expected a list of conditions, got 'auto' (str); such as {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'specialize': expected a list of conditions, got None (NoneType); such as {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'specialize': expected a list of conditions, got {'x[0]': 1} (dict); wrap it in a list
option 'specialize': expected a list of conditions, got Eq(name='x[0]', value=1) (Eq); wrap it in a list
option 'specialize[1]': expected an object of size names to values, or a predicate, got 8 (int); such as {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'specialize[0]': expected an object of size names to values, or a predicate, got 'x[0]' (str); such as {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'specialize[0]': 'x[0]': unknown key 'multipleof' (did you mean 'multiple_of'?); allowed: min, max, multiple_of
option 'specialize[1]': 'x[0]': expected an int, a list of ints or an object, got 1.0 (float); write 1
option 'specialize[0]': expected a condition that some sizes satisfy, got {'x[0]': []} (dict); nothing satisfies x[0] in ()
option 'specialize[0]': expected a condition that some sizes satisfy, got And(Eq(name='x', value=1), Eq(name='x', value=2)) (And); nothing satisfies x in ()
option 'specialize[0]': expected a condition that some sizes do not satisfy, got {} (dict); the generic graph serves every size; name a size, and what holds of it: {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'specialize[0]': expected a condition that some sizes do not satisfy, got {'x[0]': {}} (dict); the generic graph serves every size; name a size, and what holds of it: {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'specialize[0]': expected a condition that some sizes do not satisfy, got MultipleOf(name='x', factor=1) (MultipleOf); the generic graph serves every size; name a size, and what holds of it: {"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}
option 'inductor': expected a mapping of names in torch._inductor.config to values, got True (bool)
the name of an option must be a str, got 3 (int)
options must be a mapping of names to values, got [('compile', 'lazy')] (list)
options must be a mapping of names to values, got 'compile' (str)""",  # noqa: E501
    )


def test_workers() -> None:
    options = build({"compile": "background", "workers": {"memory": 1 << 30, "count": 2, "gpu": False}})
    assert options.workers == (("count", 2), ("gpu", False), ("memory", 1 << 30))


def test_long_values_are_shortened_in_errors() -> None:
    assert len(error({"compile": "x" * 10_000})) < 400


# ---- Inductor ----


@pytest.mark.usefixtures("inductor")
def test_mode_and_patches_combine() -> None:
    assert build(mode="reduce-overhead").inductor == ()  # what it asks for is done anyway
    options = build({"inductor": {"triton.cudagraphs": False, "realize_scale": 2}}, mode="max-autotune")
    assert options.inductor == (
        ("coordinate_descent_tuning", True),
        ("max_autotune", True),
        ("realize_scale", 2.0),
        ("triton.cudagraphs", False),
    )
    assert build({"inductor": {"max-autotune": True}}).inductor == (("max_autotune", True),)
    assert build({"inductor": None}).inductor == ()
    assert build({"inductor": {"post_grad_custom_pre_pass": print}}).inductor == (("post_grad_custom_pre_pass", print),)
    assert build({"mode": "reduce-overhead"}) == build(mode="reduce-overhead")
    assert MODES["max-autotune"]["triton.cudagraphs"] is True, "the mode itself must not change"


@pytest.mark.usefixtures("inductor")
def test_what_inductors_knobs_modes_and_environment_say_of_recordings() -> None:
    assert build().cudagraphs == "auto"
    assert build(mode="max-autotune").cudagraphs == "auto"
    assert build(mode="max-autotune-no-cudagraphs").cudagraphs is False
    assert build({"inductor": {"triton.cudagraphs": False}}).cudagraphs is False
    assert build({"inductor": {"triton.cudagraph_or_error": True}}).cudagraphs == "require"
    assert build({"inductor": {"triton.cudagraph_or_error": True}}).inductor == ()
    asked = {"TORCHINDUCTOR_CUDAGRAPH_OR_ERROR": "1"}
    assert Options.build(None, None, (), asked).cudagraphs == "require"
    assert Options.build({"cudagraphs": "auto"}, None, (), asked).cudagraphs == "auto"
    off = build({"cudagraphs": False}, mode="reduce-overhead")
    assert (off.cudagraphs, off.inductor) == (False, (("triton.cudagraphs", True),))


def test_operators_to_cut_at_and_to_hold() -> None:
    options = build({"cut": ["aten::mm", "vllm.attention"], "splitting_ops": ["mine::*"], "safe": ("mine::pure",)})
    assert options.cut == ("aten::mm", "vllm::attention", "mine::*")
    assert options.safe == ("mine::pure",)
    assert hash(options) == hash(build({"cut": ["aten::mm", "vllm::attention", "mine::*"], "safe": ["mine::pure"]}))


def test_what_recordings_may_cost() -> None:
    options = build({"record_small": True, "copy_outputs": True, "max_recordings": 9, "collectives": "cut"})
    assert options.copy_outputs
    assert error({"copy_outputs": None}) == "option 'copy_outputs': expected True or False, got None (NoneType)"
    assert options.recording == ("auto", (), (), "cut", True, 9, True, (), False)
    assert "'record' or 'cut'" in error({"collectives": "split"})
    assert hash(options) != hash(build({}))
    assert error({"record_small": 1}) == "option 'record_small': expected True or False, got 1 (int); write True"
    for value in (0, -1, True, 2.0):
        assert error({"max_recordings": value}).startswith("option 'max_recordings': expected a number from 1 on, got ")


def test_wrong_values_for_recordings() -> None:
    texts = [
        error({"cudagraphs": True}),
        error({"cudagraphs": "required"}),
        error({"cudagraphs": "require", "compiler": "eager"}),
        error({"cut": "aten::mm"}),
        error({"safe": [1]}),
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
option 'cudagraphs': expected 'auto', 'require' or False, got True (bool); write 'auto', which is the default
option 'cudagraphs': expected 'auto', 'require' or False (did you mean 'require'?), got 'required' (str)
option 'cudagraphs': expected none, got 'require' (str); only Inductor's code is recorded, and the compiler is 'eager'
option 'cut': expected a list of names of operators, got 'aten::mm' (str); wrap it in a list
option 'safe[0]': expected the name of an operator, such as 'aten::mm', got 1 (int)""",
    )


@pytest.mark.usefixtures("inductor")
def test_wrong_inductor_values() -> None:
    texts = [
        error({"inductor": {"max_autotun": True}}),
        error({"inductor": {"zzz": True}}),
        error({"inductor": {3: True}}),
        error({"inductor": {"max_autotune": 1}}),
        error({"inductor": {"max_fusion_size": 1.0}}),
        error({"inductor": {"realize_scale": True}}),
        error({"inductor": {"max_autotune": True, "max-autotune": False}}),
        error(mode="max-autotun"),
        error(mode=3),
        error({"mode": "max-autotune"}, mode="reduce-overhead"),
        error({"compiler": "eager", "inductor": {"max_autotune": True}}),
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
option "inductor['max_autotun']": torch._inductor.config has no such name (did you mean 'max_autotune'?)
option "inductor['zzz']": torch._inductor.config has no such name
option 'inductor[3]': torch._inductor.config has no such name
option "inductor['max_autotune']": expected a value of type bool, got 1 (int); write True
option "inductor['max_fusion_size']": expected a value of type int, got 1.0 (float)
option "inductor['realize_scale']": expected a value of type float, got True (bool)
option "inductor['max-autotune']": 'max_autotune' is given twice
option 'mode': expected one of 'default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs' (did you mean 'max-autotune'?), got 'max-autotun' (str)
option 'mode': expected one of 'default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs', got 3 (int)
option 'mode': expected 'reduce-overhead', as the argument mode says, got 'max-autotune' (str)
option 'inductor': expected none, got {'max_autotune': True} (dict); only Inductor has it, and the compiler is 'eager'""",  # noqa: E501
    )
    assert build({"compiler": "eager", "inductor": {}}, mode="default").compiler == "eager"


@pytest.mark.usefixtures("inductor")
def test_equal_and_hashable_by_value() -> None:
    one = build({"inductor": {"disabled_passes": ["a"], "max_fusion_size": 3}, "specialize": [{"x": 1}]})
    other = build({"specialize": [Eq("x", 1)], "inductor": {"max_fusion_size": 3, "disabled_passes": ["a"]}})
    assert one == other
    assert hash(one) == hash(other)
    changed = build({"inductor": {"disabled_passes": ["b"], "max_fusion_size": 3}, "specialize": [{"x": 1}]})
    assert one != changed

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, gm: object, example_inputs: object) -> object:
            return gm

    assert hash(build({"compiler": Unhashable()})) == hash(build({"compiler": Unhashable()}))


@pytest.mark.usefixtures("inductor")
def test_later_changes_to_what_was_given_have_no_effect() -> None:
    passes = ["a"]
    given: dict[str, Any] = {"inductor": {"disabled_passes": passes}, "specialize": [{"x": 1}]}
    options = build(given)
    passes.append("b")
    given["specialize"].append({"x": 2})
    assert options.inductor == (("disabled_passes", ["a"]),)
    assert options.specialize == (Eq("x", 1),)


def test_the_real_inductor() -> None:
    from torch._inductor import config, list_mode_options

    before = config.get_config_copy()
    options = build({"inductor": {"max-autotune-gemm": True}}, mode="max-autotune")
    taken_over = {"triton.cudagraphs", "triton.cudagraph_or_error"}
    wanted = {**list_mode_options()["max-autotune"], "max_autotune_gemm": True}
    assert dict(options.inductor) == {name: value for name, value in wanted.items() if name not in taken_over}
    for mode, patches in list_mode_options().items():
        kept = {name: value for name, value in patches.items() if name not in taken_over}
        assert dict(build(mode=mode).inductor) == kept
        assert build({"inductor": patches}).inductor == build(mode=mode).inductor
    assert "did you mean 'max_autotune'?" in error({"inductor": {"max_autotun": True}})
    assert "expected a value of type bool, got 1 (int)" in error({"inductor": {"max_autotune": 1}})
    assert "expected one of 'default'" in error(mode="fastest")
    for name, value in before.items():
        wanted = {} if name == "triton.cudagraph_or_error" else {name: value}
        assert dict(build({"inductor": {name: value}}).inductor) == wanted
    assert config.get_config_copy() == before


# ---- the environment ----


def test_environment_goes_from_general_to_exact() -> None:
    env = {
        "LlamaForCausalLM": {"compile_timeout": 4},
        "Llama*": {"compile_timeout": 3, "on_failure": "raise"},
        "*": {"compile_timeout": 1, "compile": "eager", "on_failure": "fallback"},
        "*ForCausalLM": {"compile_timeout": 2},
        "llama*": {"compile_timeout": 9},
        "forward": {"specialize": [{"x[0]": 1}]},
    }
    everything = Options(specialize=(Eq("x[0]", 1),), compile="eager", on_failure="raise", compile_timeout=4.0)
    assert build(names=("LlamaForCausalLM", "forward"), env=env) == everything
    assert build(names=("LlamaModel",), env=env) == Options(compile="eager", on_failure="raise", compile_timeout=3.0)
    assert build(names=("OPTForCausalLM",), env=env) == Options(compile="eager", compile_timeout=2.0)
    assert build(names=("ResNet",), env=env) == build(env=env) == Options(compile="eager", compile_timeout=1.0)
    assert build(names=("ResNet",), env={"OPT*": {"compile": "eager"}}) == Options()


def test_globs_apply_in_their_order() -> None:
    first = {"Llama*": {"compile_timeout": 3}, "*ForCausalLM": {"compile_timeout": 2}}
    last = dict(reversed(first.items()))
    assert build(names=("LlamaForCausalLM",), env=first).compile_timeout == 2
    assert build(names=("LlamaForCausalLM",), env=last).compile_timeout == 3


def test_a_name_that_looks_like_a_glob_is_matched_exactly_too() -> None:
    env = {"f[0]": {"compile_timeout": 3}, "f*": {"compile_timeout": 2}}
    assert build(names=("f[0]",), env=env).compile_timeout == 3
    assert build(names=("f0",), env=env).compile_timeout == 2


@pytest.mark.usefixtures("inductor")
def test_code_replaces_the_environment_key_by_key() -> None:
    env = {"*": {"compile": "eager", "compile_timeout": 1, "mode": "max-autotune"}}
    assert build({"compile_timeout": 5}, env=env) == Options(
        compile="eager",
        compile_timeout=5.0,
        inductor=(("coordinate_descent_tuning", True), ("max_autotune", True)),
    )
    assert build(mode="reduce-overhead", env=env).inductor == ()
    assert build({"specialize": []}, env={"*": {"specialize": "auto"}}).specialize == ()


def test_wrong_environment() -> None:
    wrong: list[Mapping[str, object] | str] = [
        '{"*": {"compile": "eager"',
        '{\n  "*": {compile: "eager"}\n}',
        "[]",
        {"*": ["compile"]},
        {"Unrelated": "eager"},
        '{"*": {"compile": "eager", "compile": "lazy"}}',
        {"*": {"compile": "sometimes"}},
        {"f*": {"specialize": [{"x[0]": True}]}},
        {"f*": {"specialize": {"x[0]": 1}}},
        {"forward": {"inductor": 3}},
    ]
    assert_expected_inline(
        "\n".join(error(names=("forward",), env=env) for env in wrong),
        """\
MULTIGRAPH_OPTIONS is not valid JSON: Expecting ',' delimiter at line 1, column 26; a } or ] is missing at the end
MULTIGRAPH_OPTIONS is not valid JSON: Expecting property name enclosed in double quotes at line 2, column 9; write "compile", in double quotes
MULTIGRAPH_OPTIONS must be an object of model names to options, got [] (list)
MULTIGRAPH_OPTIONS['*'] must be an object of options, got ['compile'] (list)
MULTIGRAPH_OPTIONS['Unrelated'] must be an object of options, got 'eager' (str)
MULTIGRAPH_OPTIONS says 'compile' twice in one object
option 'compile': expected 'lazy' or 'eager' or 'background', got 'sometimes' (str) (in MULTIGRAPH_OPTIONS['*'])
option 'specialize[0]': 'x[0]': expected an int, a list of ints or an object, got True (bool) (in MULTIGRAPH_OPTIONS['f*'])
option 'specialize': expected a list of conditions, got {'x[0]': 1} (dict) (in MULTIGRAPH_OPTIONS['f*']); wrap it in a list
option 'inductor': expected a mapping of names in torch._inductor.config to values, got 3 (int) (in MULTIGRAPH_OPTIONS['forward'])""",  # noqa: E501
    )
    assert build(env="  \n") == Options()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", '{"*": {"compile": "eager"}}')
    assert Options.build().compile == "eager"
    assert Options.build({"compile": "lazy"}).compile == "lazy"
    monkeypatch.delenv("MULTIGRAPH_OPTIONS")
    assert Options.build() == Options()


def test_reading_options_does_not_import_torch() -> None:
    code = """
import sys, types
package = types.ModuleType("multigraph_backend")
package.__path__ = [sys.argv[1]]
sys.modules["multigraph_backend"] = package
from multigraph_backend import options
from multigraph_backend.declare import probing
built = options.Options.build({"specialize": [{"x[0]": 8}], "compile": "eager"}, None, (), {})
assert len(built.specialize) == 1
assert probing.understand(lambda n: n == 8)
print("torch" in sys.modules)
"""
    where = multigraph_backend.__path__[0]
    run = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_all_limits_of_recordings_are_options() -> None:
    names = {"per_device" if name == "count" else name for name in LEAST}
    assert names == {field.name for field in dataclasses.fields(Limits)}
    given = {"count": 3, "pool_bytes": None, "patience": 0, "idle": 2.5, "unreplayed": 7, "keep_free": 0.1}
    options = build({"limits": given})
    assert dict(options.limits) == given
    assert options.recording != build().recording
    assert hash(options) == hash(build({"limits": dict(reversed(given.items()))}))
    assert build({"limits": None}) == build({"limits": {}}) == build()


def test_code_whose_inputs_are_padded_is_not_taken_from_a_cache_for_calls_that_are_not() -> None:
    assert build({"pad": {"x[0]": [4, 8]}}).recording != build().recording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "option 'limits': expected a mapping of count, pool_bytes, "),
        ({"deptj": 3}, "option 'limits': unknown limit 'deptj' (did you mean 'depth'?); limits: count, "),
        ({"count": 0}, "option \"limits['count']\": expected a number from 1 on, got 0"),
        ({"depth": True}, "option \"limits['depth']\": expected a number from 1 on, got True"),
        ({"pool_bytes": 1.5}, "option \"limits['pool_bytes']\": expected a number of bytes from 1 on, a fraction "),
        ({"pool_bytes": 0.0}, "option \"limits['pool_bytes']\": expected a number of bytes from 1 on, a fraction "),
        ({"pool_bytes": True}, "option \"limits['pool_bytes']\": expected a number of bytes from 1 on, a fraction "),
        ({"keep_free": 1.0}, "option \"limits['keep_free']\": expected a number of bytes from 0 on, or a fraction "),
        ({"keep_free": -1}, "option \"limits['keep_free']\": expected a number of bytes from 0 on, or a fraction "),
        ({"keep_free": None}, "option \"limits['keep_free']\": expected a number of bytes from 0 on, or a fraction "),
        ({"copied_bytes": None}, "option \"limits['copied_bytes']\": expected a number from 0 on, got None"),
        (
            {"patience": 1e30},
            "option \"limits['patience']\": expected a number of seconds from 0 on, got 1e+30 (float); "
            "write 1000000000, or less",
        ),
        ({"patience": -1}, "option \"limits['patience']\": expected a number of seconds from 0 on, got -1"),
        ({"idle": math.inf}, "option \"limits['idle']\": expected a number of seconds from 0 on, got inf"),
    ],
)
def test_a_wrong_limit_is_an_error(value: object, text: str) -> None:
    assert error({"limits": value}).startswith(text)


@pytest.mark.parametrize(("amount", "bytes_of_1000"), [(1, 1), (1.0, 1000), (0.05, 50), (5000, 5000), (0, 0), (0.0, 0)])
def test_an_amount_of_memory_is_bytes_or_a_fraction_by_its_type(amount: float, bytes_of_1000: int) -> None:
    assert in_bytes(amount, 1000) == bytes_of_1000


def test_limits_of_the_process_and_of_one_model() -> None:
    bench = Bench()
    try:
        multigraph_backend.limit_recordings(count=7, patience=0.5, unreplayed=4)
        bench.tree.limits = runtime._limits
        assert bench.tree.limits == Limits(per_device=7, patience=0.5, unreplayed=4)
        mine = limits_of(bench.tree, (("count", 2), ("depth", 3)))
        assert mine() == Limits(per_device=2, depth=3, patience=0.5, unreplayed=4)
        assert limits_of(bench.tree, ())() is bench.tree.limits
        with pytest.raises(ValueError, match=r"limit_recordings: patience is at most 1000000000 seconds, got 1e\+30"):
            multigraph_backend.limit_recordings(patience=1e30)
        with pytest.raises(ValueError, match="limit_recordings: idle must be a number from 0 on or None, got -1"):
            multigraph_backend.limit_recordings(idle=-1)
        with pytest.raises(
            ValueError, match=r"limit_recordings: count must be a whole number from 1 on or None, got 2\.5"
        ):
            multigraph_backend.limit_recordings(count=2.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"limit_recordings: pool_bytes must be a number of bytes .*, got 1\.5"):
            multigraph_backend.limit_recordings(pool_bytes=1.5)
        with pytest.raises(ValueError, match=r"limit_recordings: keep_free must be a number of bytes .*, got 1\.0"):
            multigraph_backend.limit_recordings(keep_free=1.0)
        multigraph_backend.limit_recordings(pool_bytes=0.5, keep_free=1 << 30)
        assert runtime._limits == Limits(pool_bytes=0.5, keep_free=1 << 30)
    finally:
        multigraph_backend.limit_recordings()
    assert runtime._limits == Limits()


def test_the_limits_of_one_model_are_those_of_its_pieces_alone() -> None:
    bench = Bench()
    few = bench.piece(lambda n, x: (x * n,), 2, 1, limits=limits_of(bench.tree, (("count", 2),)))
    many = bench.piece(lambda n, x: (x + n,), 2, 1)
    for n in (0, *range(5)):
        call_right(many, lambda n, x: (x + n,), n, values())
    assert bench.tree.size == 5
    for n in (0, *range(5)):
        call_right(few, lambda n, x: (x * n,), n, values())
    assert bench.tree.size == 2
