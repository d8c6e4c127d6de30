"""What is written in another way than it is read gets an error or a hint that names the right spelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.capture import size_names
from multigraph_backend.options import Options, OptionsError

KNOWN = ("x[0]", "x[1]", "x[2]", "batch['ids'][0]", "batch['ids'][1]", "n")


@pytest.mark.parametrize(
    ("declared", "meant"),
    [
        ("x[-1]", "x[2]"),
        ("x[-3]", "x[0]"),
        ("x[-4]", ["x[0]", "x[1]", "x[2]"]),
        ("x.shape[0]", "x[0]"),
        ("x.shape[-1]", "x[2]"),
        ("x.size(1)", "x[1]"),
        ("x.size(dim=-1)", "x[2]"),
        ("x.size()[0]", "x[0]"),
        ('batch["ids"].shape[1]', "batch['ids'][1]"),
        ("x", ["x[0]", "x[1]", "x[2]"]),
        ("x.shape", ["x[0]", "x[1]", "x[2]"]),
        ("y[-1]", None),
    ],
)
def test_a_name_as_python_has_it_stands_for_a_size(declared: str, meant: str | list[str] | None) -> None:
    assert size_names.meant(declared, KNOWN) == meant


DEEP = (
    "input.data['input_ids'][0]",
    "input.data['input_ids'][1]",
    "input.data['attention_mask'][0]",
    "input.data['attention_mask'][1]",
    "past[0][0]",
    "past[0][1]",
    "scale_factor[0]",
    "n",
)


@pytest.mark.parametrize(
    ("declared", "meant"),
    [
        ("input['input_ids'][0]", "input.data['input_ids'][0]"),
        ("input.input_ids[0]", "input.data['input_ids'][0]"),
        ("input['input_ids'].size(-1)", "input.data['input_ids'][1]"),
        ("input_ids[1]", "input.data['input_ids'][1]"),
        ("input_ids.shape[0]", "input.data['input_ids'][0]"),
        ("Input.data['inputIds'][0]", "input.data['input_ids'][0]"),
        ("inputs['input_ids'][0]", "input.data['input_ids'][0]"),
        ("input['atention_mask'][0]", "input.data['attention_mask'][0]"),
        ("attention_mask", ["input.data['attention_mask'][0]", "input.data['attention_mask'][1]"]),
        ("L['past'][0][1]", "past[0][1]"),
        ("past.0[1]", "past[0][1]"),
        ("past_0[1]", "past[0][1]"),
        ("len(past[0])", "past[0][0]"),
        ("scaleFactor[0]", "scale_factor[0]"),
        ("SCALE-FACTOR[0]", "scale_factor[0]"),
        ("scale_factor.shape", ["scale_factor[0]"]),
        ("N", "n"),
        ("self.n", "n"),
        ("kwargs['n']", "n"),
        ("n.item()", "n"),
        ("scale[0]", "scale_factor[0]"),
        ("scale_factor_of_all[0]", "scale_factor[0]"),
        ("input[0]", None),  # two have these words
        ("input['labels'][0]", None),
        ("batch_size", None),
        ("args[3]", None),
        ("0", ["past[0][0]", "past[0][1]"]),
        ("", None),
    ],
)
def test_a_name_that_has_the_words_of_one_stands_for_it(declared: str, meant: str | list[str] | None) -> None:
    assert size_names.meant(declared, DEEP) == meant


def test_where_there_is_one_tensor_a_size_is_of_that() -> None:
    assert size_names.meant("y[-1]", ["x[0]", "x[1]", "n"]) == "x[1]"
    assert size_names.meant("y[-1]", ["n"]) is None


def f(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + x.shape[0]


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ({"x[-1]": 8}, "did you mean 'x[1]'?"),
        ({"x.shape[0]": 8}, "did you mean 'x[0]'?"),
        ({"x": 8}, "x is a tensor, name one of its sizes: 'x[0]', 'x[1]'"),
        ({"X[0]": 8}, "did you mean 'x[0]'?"),
        ({"self.x": 8}, "did you mean one of 'x[0]', 'x[1]'?"),
        ({"min": 2}, 'min belongs to a size: {"x[0]": {"min": 8}}'),
        ({"x[0]": -8}, "x[0] is a size, which is never negative"),
        ({"x[0]": {"max": -1}}, "x[0] is a size, which is never negative"),
    ],
    ids=str,
)
def test_what_only_a_graph_shows_is_said_with_the_graph(
    entry: dict[str, Any], hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"specialize": [entry], "compiler": "eager"}
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=options)
    x = torch.randn(8, 3)
    torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)
    (variant,) = multigraph_backend.explain().to_dict()["regions"][0]["variants"]
    assert variant["state"] == "inactive"
    assert hint in variant["reason"]
    assert hint in caplog.text


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"compiler": "inducter"}, "did you mean 'inductor'?"),
        ({"compiler": "aot_eagr"}, "did you mean 'aot_eager'?"),
        ({"compiler": "multigraph"}, "name the compiler that lowers each graph, such as 'inductor'"),
        (
            {"specialize": [{"x[0]": range(1, 9)}]},
            'write list(range(1, 9)) for a variant of each, {"min": 1, "max": 8}',
        ),
        ({"specialize": [{"x[0]": range(8, 33, 8)}]}, '{"min": 8, "max": 32, "multiple_of": 8} for one variant of all'),
        ({"specialize": [{"x[0]": {8, 4}}]}, "write [4, 8]"),
        ({"specialize": [{"x[0]": frozenset((8, 4))}]}, "write [4, 8]"),
        ({"specialize": [{"x[0]": {}}]}, 'name a size, and what holds of it: {"x[0]": 8}'),
        ({"specialize": [{}]}, 'name a size, and what holds of it: {"x[0]": 8}'),
        ({"specialize": [{"x[0]": "8"}]}, "write 8"),
        ({"specialize": [{"x[0]": 8.0}]}, "write 8"),
    ],
    ids=str,
)
def test_what_an_option_cannot_be_is_an_error_with_the_right_spelling(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Options.build(options, environ={})
    assert hint in str(caught.value)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_backends_that_torch_has_are_accepted(compiler: str) -> None:
    assert Options.build({"compiler": compiler}, environ={}).compiler == compiler


@pytest.mark.parametrize(
    "options", [{"specialize": [{"x[0]": 8}]}, {"compile": "eager"}, {"inductor": {"max_autotune": True}}], ids=str
)
def test_options_without_the_names_of_models_in_the_environment_are_an_error(options: dict[str, Any]) -> None:
    """The last of these was taken for a model of the name "inductor", and dropped."""
    with pytest.raises(OptionsError) as caught:
        Options.build(model_names=("MLP", "forward"), environ={"MULTIGRAPH_OPTIONS": json.dumps(options)})
    assert f"for every model write {json.dumps({'*': options})}" in str(caught.value)
    named = {"MULTIGRAPH_OPTIONS": json.dumps({"compile": {"compile": "eager"}})}
    assert Options.build(model_names=("compile",), environ=named).compile == "eager"


x = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("call", "kind", "hint"),
    [
        (lambda: multigraph_backend.mark([1, 2], 0), TypeError, "mark takes a tensor"),  # type: ignore[arg-type]
        (lambda: multigraph_backend.mark(x, "0"), TypeError, "dim must be an int or a list of ints"),
        (lambda: multigraph_backend.mark(x, True), TypeError, "dim must be an int or a list of ints"),
        (lambda: multigraph_backend.mark(x, 2), ValueError, "dimension 2 cannot be marked"),
        (lambda: multigraph_backend.mark(x, 0, specialize_on=8), TypeError, "write [8]"),  # type: ignore[arg-type]
        (lambda: multigraph_backend.mark(x, 0, specialize_on={"min": 2}), TypeError, "write [{'min': 2}]"),
        (lambda: multigraph_backend.mark(x, 0, specialize_on={8, 4}), TypeError, "write [4, 8]"),  # type: ignore[arg-type]
        (lambda: multigraph_backend.mark(x, 0, specialize_on=[[2, 3]]), TypeError, "write 2, 3"),  # type: ignore[list-item]
        (lambda: multigraph_backend.mark(x, 0, specialize_on=[{}]), ValueError, "holds for every size"),
        (lambda: multigraph_backend.mark(x, 0, specialize_on=[-3]), ValueError, "never negative"),
        (lambda: multigraph_backend.mark(x, 0, min="1"), TypeError, "min must be an int"),  # type: ignore[arg-type]
        (lambda: multigraph_backend.mark(x, 0, min=5, max=2), ValueError, "min 5 is greater than max 2"),
        (lambda: multigraph_backend.mark(x, 0, max=-2), ValueError, "max must be at least 0"),
        (lambda: multigraph_backend.mark(x, 0, unbacked=1), TypeError, "unbacked must be"),  # type: ignore[arg-type]
    ],
)
def test_a_mark_of_a_wrong_type_is_an_error_and_marks_nothing(
    call: Callable[[], None], kind: type[Exception], hint: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert hint in str(caught.value)
    assert not hasattr(x, "_specialize_on")
