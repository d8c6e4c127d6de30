"""The account is what happened: in text for people, in plain data for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

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
  x[0] == 1             declared         0 calls  (where torch traced it as a graph of its own, that graph serves it (graph N))
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
