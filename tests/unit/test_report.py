"""The account is what happened: in text for people, in plain data for programs."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline

import multigraph_backend
from multigraph_backend.backend import multigraph


def f(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.sum(1) * n


def shown() -> str:
    text = re.sub(r"\(/.*?/([\w.]+):\d+\)", r"(\1)", str(multigraph_backend.explain()))
    text = re.sub(r"graph \d+", "graph N", text)
    return re.sub(r"\d+\.\d\d s", "T s", text)


def test_the_text_names_sizes_variants_calls_and_reasons() -> None:
    declared = [{"x[0]": 1}, {"x[0]": 8, "n": 3}, {"x[0]": {"multiple_of": 4}}, {"x[0]": 16}, {"y[0]": 2}]

    compiled = torch.compile(
        f, backend=multigraph, dynamic=True, options={"specialize": declared, "compiler": "aot_eager"}
    )
    for rows, n in ((8, 3), (8, 4), (6, 3), (1, 5), (1, 6)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x, n), f(x, n))
    assert_expected_inline(
        shown(),
        """\
graph N: f (test_report.py)
  sizes: x[0] = s77, x[1] = s27, n = s86
  x[0] == 1             inactive         0 calls  (where torch traced it as a graph of its own, that graph serves it (graph N))
  x[0] == 8 and n == 3  ready            1 calls  compiled in T s
  x[0] % 4 == 0         ready            1 calls  compiled in T s
  x[0] == 16            inactive         0 calls  (unreachable: x[0] % 4 == 0 is declared earlier and covers it)
  y[0] == 2             inactive         0 calls  ('y[0]' is no size or integer input of f (it has: x[0], x[1], n); did you mean 'x[0]'?)
  generic               ready            1 calls  compiled in T s
graph N: f (test_report.py)
  sizes: x[0] = 1, x[1] = s27, n = s86
  x[0] == 1             ready            2 calls  compiled in T s  (this graph was traced for it)
  x[0] == 8 and n == 3  inactive         0 calls  (x[0] is 1 in this graph)
  x[0] % 4 == 0         inactive         0 calls  (x[0] is 1 in this graph)
  x[0] == 16            inactive         0 calls  (x[0] is 1 in this graph)
  y[0] == 2             inactive         0 calls  ('y[0]' is no size or integer input of f (it has: x[0], x[1], n); did you mean 'x[0]'?)
  generic               declared         0 calls""",
    )


def test_the_same_account_as_plain_data() -> None:
    compiled = torch.compile(
        f, backend=multigraph, dynamic=True, options={"specialize": [{"x[0]": 8}], "compiler": "aot_eager"}
    )
    compiled(torch.randn(8, 3), 3)
    account = multigraph_backend.explain()
    data = account.to_dict()
    assert json.loads(account.to_json()) == data
    (region,) = data["regions"]
    (variant,) = region["variants"]
    assert {"condition": "x[0] == 8", "state": "ready", "calls": 1, "reason": None}.items() <= variant.items()
    assert variant["compile_seconds"] > 0
    assert region["generic"]["state"] == "declared"
    assert region["sizes"].keys() == {"x[0]", "x[1]", "n"}


def test_nothing_compiled_is_said_plainly() -> None:
    assert str(multigraph_backend.explain()) == "multigraph: nothing compiled yet"
    assert str(multigraph_backend.explain("g")) == "multigraph: nothing compiled yet"
    torch.compile(f, backend=multigraph, options={"compiler": "aot_eager"})(torch.randn(8, 3), 3)
    of_none = "multigraph: nothing that was compiled is of this model; names were: f"
    assert str(multigraph_backend.explain("g")) == of_none
    assert multigraph_backend.explain("f").others == ()


def test_torch_s_own_switch_turns_on_the_log() -> None:
    program = (
        "import torch; from multigraph_backend.backend import multigraph\n"
        "torch.compile(lambda x: x + 1, backend=multigraph, options={'compiler': 'eager'})(torch.ones(3))"
    )
    for switch, expected in (("+multigraph_backend", True), ("+dynamo", False)):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TORCH_LOGS": switch},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("compiling generic" in ran.stderr) == expected, ran.stderr


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sin())


def test_the_account_of_one_model() -> None:
    options = {"compiler": "eager"}
    model, function = (torch.compile(it, backend=multigraph, dynamic=True, options=options) for it in (Outer(), f))
    model(torch.randn(3, 3))
    function(torch.randn(3, 3), 2)

    def functions(chosen: object) -> set[str]:
        return {entry.function for entry in multigraph_backend.explain(chosen).regions}

    of_model = {"Outer.forward", "Inner.forward"}
    assert functions(function) == functions(f) == functions("f") == {"f"}
    assert of_model <= functions(model) == functions(model._orig_mod)
    assert "f" not in functions(model)
    assert "Inner.forward" in functions("Inn*")
    assert "Outer.forward" not in functions("Inn*")
    assert functions(None) == functions(model) | {"f"}
    assert functions("Nobody") == set()
    with pytest.raises(TypeError, match="a module, a function or a name, not 3"):
        multigraph_backend.explain(3)


def test_a_name_declared_for_the_model_is_no_error_in_what_it_breaks_into(caplog: pytest.LogCaptureFixture) -> None:
    options = {"compiler": "eager", "specialize": [{"x[0]": 3}, {"x[1]": 5}], "on_failure": "raise"}

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.outer(x * other.sum())

    options["specialize"].append({"other[0]": 4})
    compiled = torch.compile(Named(), backend=multigraph, dynamic=True, options=options)
    compiled(torch.randn(3, 4), torch.randn(4))
    assert "other[0]" not in caplog.text
    inner, *_ = multigraph_backend.explain("Inner").regions
    assert inner.variants[2].state == "inactive"
    assert "'other[0]' is no size or integer input of Inner.forward" in str(inner.variants[2].reason)
    with pytest.raises(Exception, match="'nothing' is no size or integer input of f"):
        torch.compile(f, backend=multigraph, options={**options, "specialize": [{"nothing": 3}]})(torch.randn(3, 3), 2)


def test_stances_in_force_and_switches_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "variants")
    with torch.compiler.set_stance("eager_on_recompile"):
        account = multigraph_backend.explain()
    assert (account.stance, account.disabled) == ("eager_on_recompile", ("variants",))
    assert_expected_inline(
        str(account),
        """\
multigraph: nothing compiled yet
stance in force: eager_on_recompile
MULTIGRAPH_DISABLE turns off: variants""",
    )


def test_a_mark_that_no_trace_has_met_is_shown() -> None:
    compiled = torch.compile(lambda x: x * 2, backend=multigraph, options={"compiler": "eager"})
    marked, lost = torch.randn(8, 3), torch.randn(8, 3)
    for x in (marked, lost):
        multigraph_backend.mark(x, 0, specialize_on=[8])
    multigraph_backend.mark(lost, 1)
    line = inspect.currentframe().f_lineno - 1
    compiled(lost.clone())
    assert len(multigraph_backend.explain().unmet_marks) == 2
    compiled(marked)
    assert multigraph_backend.explain().unmet_marks == (f"{__file__}:{line}",)
    assert f"marked at {__file__}:{line}: no trace has had that tensor" in str(multigraph_backend.explain())
    torch._dynamo.reset()
    assert multigraph_backend.explain().unmet_marks == ()


def test_a_name_is_found_as_it_is_written_also_where_it_could_be_a_glob() -> None:
    for name in ("[x]", "y"):
        options = {"compiler": "eager", "name": name}
        torch.compile(lambda x: x * 2, backend=multigraph, options=options)(torch.randn(3, 2))
    assert [region.name for region in multigraph_backend.explain("[x]").regions] == ["[x]"]
    assert len(multigraph_backend.explain("[y-z]").regions) == 1


def test_a_failure_shows_the_lines_of_the_program_that_it_was_about() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        class Refuses(torch.fx.Interpreter):
            def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
                if "tanh" in str(target):
                    raise NotImplementedError("no such instruction")
                return super().call_function(target, args, kwargs)

        return Refuses(gm).run(*inputs)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return torch.tanh(y)

    x = torch.randn(3)
    compiled = torch.compile(program, backend=multigraph, options={"compiler": compiler})
    torch.testing.assert_close(compiled(x), program(x))
    (region,) = multigraph_backend.explain().regions
    assert region.generic.state == "failed"
    assert str(region.generic.reason).startswith("NotImplementedError: no such instruction")
    assert str(region.generic.user_stack).splitlines()[1].strip() == "return torch.tanh(y)"
    assert "    return torch.tanh(y)" in str(multigraph_backend.explain())
