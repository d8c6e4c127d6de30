"""Options as someone writes them who knows torch.compile and not multigraph: each error says what to write instead."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from multigraph_backend.options import Options, OptionsError


def check(value: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        # what belongs elsewhere
        ({"max_autotune": True}, "(it is Inductor's: write {'inductor': {'max_autotune': True}})"),
        ({"max-autotune": True}, "(it is a mode: write {'mode': 'max-autotune'})"),
        ({"triton.cudagraphs": True}, "(it is Inductor's: write {'inductor': {'triton.cudagraphs': True}})"),
        ({"epilogue-fusion": True}, "(it is Inductor's: write {'inductor': {'epilogue_fusion': True}})"),
        ({"fullgraph": True}, '(it is an argument of torch.compile, beside backend="multigraph")'),
        ({"dynamic": True}, "(it is an argument of torch.compile"),
        ({"backend": "inductor"}, "(it is an argument of torch.compile"),
        ({"pool_bytes": 3}, "(it is a limit: write {'limits': {'pool_bytes': 3}})"),
        ({"limits": {"max_recordings": 3}}, "(it is an option: write it beside 'limits')"),
        ({"x[0]": 8}, "(it is of a condition: write {'specialize': [{'x[0]': 8}]})"),
        ({"multiple_of": 8}, "(it is of a condition: write {'specialize': [{'x[0]': {'multiple_of': 8}}]})"),
        ({"pack": "bits"}, '(it is part of a rule: write {"saved_tensors": [{"match": ..., "pack": ...}]})'),
        ({"multigraph_name": "draft"}, "(it is an attribute of a module; here write {'name': 'draft'})"),
        ({"MULTIGRAPH_DISABLE": "all"}, "(it is a variable of the environment)"),
        ({"options": {"compile": "eager"}}, "(write its entries in its place)"),
        ({"reduce-overhead": True}, "(it is a mode: write {'mode': 'reduce-overhead'})"),
        # other words
        ({"variants": []}, "(did you mean 'specialize'?)"),
        ({"shapes": [8]}, "(did you mean 'specialize'?)"),  # not 'safe'
        ({"packs": []}, "(did you mean 'saved_tensors'?)"),
        ({"memory_limit": "8 GiB"}, "(did you mean 'memory_goal'?)"),
        ({"memory_goal": "8 G"}, "write 8000000000"),
        ({"memory_goal": "80%"}, "write 0.8"),
        ({"cuda_graphs": False}, "(did you mean 'cudagraphs'?)"),
        ({"SplittingOps": []}, "(did you mean 'splitting_ops'?)"),
        ({"compile ": "eager"}, "(did you mean 'compile'?)"),
        ({"mode": "reduce_overhead"}, "(did you mean 'reduce-overhead'?)"),
        ({"compiler": "Inductor"}, "(did you mean 'inductor'?)"),
        ({"compiler": "aot-eager"}, "(did you mean 'aot_eager'?)"),
        # values of another type
        ({"cudagraphs": True}, "write 'auto', which is the default"),
        ({"cudagraphs": "off"}, "write False"),
        ({"cudagraphs": None}, "write False"),
        ({"record_small": "true"}, "write True"),
        ({"copy_outputs": 0}, "write False"),
        ({"max_recordings": "5"}, "write 5"),
        ({"compile_timeout": "10s"}, "write 10"),
        ({"compile_timeout": "1.5 min"}, "write 90"),
        ({"limits": {"pool_bytes": "1.5 GiB"}}, "write 1610612736"),
        ({"limits": {"idle": "60"}}, "write 60"),
        ({"saved_tensors_budget": "50%"}, "write 0.5"),
        ({"saved_tensors_budget": "8GB"}, "write 8000000000"),
        ({"inductor": "max-autotune"}, "write {'mode': 'max-autotune'}"),
        ({"inductor": {"triton": {"cudagraphs": True}}}, "(write {'triton.cudagraphs': True})"),
        ({"inductor": {"max_autotune": "true"}}, "write True"),
        ({"inductor": {"max_fusion_size": "64"}}, "write 64"),
        ({"safe": ["mm"]}, "an operator has a namespace: write 'aten::mm', or '*::mm' for any"),  # it had no effect
        # conditions
        ({"specialize": [("x[0]", 8)]}, "write {'x[0]': 8}"),
        ({"specialize": ["x[0] == 8"]}, "write {'x[0]': 8}"),
        ({"specialize": ["x[0] % 16 == 0"]}, "write {'x[0]': {'multiple_of': 16}}"),
        ({"specialize": ["x.shape[0] <= 512"]}, "write {'x.shape[0]': {'max': 512}}"),
        ({"specialize": [[{"x[0]": 8}]]}, "take the inner list away"),
        ({"specialize": [check]}, "a callable is asked about one size: mark(x, 0, specialize_on=[...])"),
        ({"specialize": [{"x[0]": check}]}, "a callable is for mark(x, 0, specialize_on=[...])"),
        ({"specialize": [8]}, 'such as {"x[0]": 8}'),
        ({"specialize": "auto"}, 'such as {"x[0]": 8}'),
        ({"specialize": [{"x": {"0": 8}}]}, '(a size is named with its dimension: write {"x[0]": 8})'),
        ({"specialize": [{"x[0]": {"eq": 8}}]}, '(write {"x[0]": 8})'),
        ({"specialize": [{"x[0]": {"values": [1, 2]}}]}, '(write {"x[0]": [1, 2]})'),
        ({"specialize": [{"x[0]": {"in": 2}}]}, "(did you mean 'min'?)"),
        ({"specialize": [{"x[0]": {"divisible_by": 8}}]}, "(did you mean 'multiple_of'?)"),
        ({"specialize": [{"x[0]": {"min": 1, "step": 8}}]}, "(did you mean 'multiple_of'?)"),
        ({"specialize": [{"x[0]": {">=": 8}}]}, "(did you mean 'min'?)"),
        ({"specialize": [{"x[0]": {"max": "512"}}]}, "write 512"),
        ({"specialize": [{"x[0]": "1-512"}]}, 'write {"min": 1, "max": 512}'),
        ({"specialize": [{"x[0]": "1, 2, 4"}]}, "write [1, 2, 4]"),
        ({"specialize": [{"x[0]": [1, "2"]}]}, "write 2"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),  # the same in every process
)
def test_what_to_write_instead_in_code(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Options.build(options, environ={})
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "remedy"),
    [
        ({"*": {"max_autotune": True}}, '(it is Inductor\'s: write {"inductor": {"max_autotune": true}})'),
        ({"*": {"dynamic": True}}, "(it is given in code, as an argument of torch.compile"),
        ({"*": {"Llama": {"compile": "eager"}}}, "(is it the name of a model? These stand one level above)"),
        ({"*": {"//": "all models"}}, "(take it away: there is no place for remarks)"),
        ({"*": {"record_small": "true"}}, "write true"),
        ({"*": {"cudagraphs": "on"}}, 'write "auto", which is the default'),
        ({"*": {"name": "draft"}}, "it is given in code, or by the module's multigraph_name"),
        ({"Llama": [{"x[0]": 8}]}, '; write {"Llama": {"specialize": [{"x[0]": 8}]}}'),
        ({"x[0]": 8}, '; write {"*": {"specialize": [{"x[0]": 8}]}}'),
        ({"specialise": []}, '; is it the option \'specialize\'? For every model write {"*": {"specialize": []}}'),
        ('{"*": {}}', "; take the quotes away that stand around it"),
    ],
    ids=str,
)
def test_what_to_write_instead_in_the_environment(entries: object, remedy: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Options.build(environ={"MULTIGRAPH_OPTIONS": json.dumps(entries)})
    assert remedy in str(caught.value)


def test_a_higher_order_operator_has_no_namespace() -> None:
    names = ("flex_attention", "triton_kernel_wrapper_mutation", "mine.attention", "*mm", "no_operator_of_aten")
    assert Options.build({"cut": names}, environ={}).cut == (*names[:2], "mine::attention", *names[3:])


def test_what_has_no_plain_meaning_has_no_remedy() -> None:
    for options in (
        {"compile_timeout": "soon"},
        {"record_small": "perhaps"},
        {"cudagraphs": "sometimes"},
        {"saved_tensors_budget": "150%"},
        {"specialize": [{"x[0]": "some"}]},
        {"inductor": {"triton": {"no_such_knob": True}}},
    ):
        with pytest.raises(OptionsError) as caught:
            Options.build(options, environ={})
        assert "write" not in str(caught.value)
