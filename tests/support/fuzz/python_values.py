"""Arguments that are no tensors, as Python code has them: floats, ints, bools, None, strings, and where they come from.

A compiler may take any of them for a constant, a symbol or a tensor, and has to notice each change.  So the values of a
call, the first one above all, are drawn from the edges, where such rules change: 0 and 1, both zeros, infinities, NaN.

    value = PythonValue("s0", "float", "dict")
    value.read                      # 'p_s0["scale"]', in the program's text
    use(rng, value, "v3")           # 'v3 * p_s0["scale"]'
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "int", "bool", "none", "str"]
# "default": the last argument of `forward`, left out where the call has the default.  "closure": a variable of an
# enclosing function that `forward` reaches through a helper.  "object": an attribute of a plain object of the module.
Place = Literal["argument", "default", "list", "tuple", "dict", "nested", "attribute", "object", "closure", "global"]
PLACES: tuple[Place, ...] = (
    "argument", "default", "list", "tuple", "dict", "nested", "attribute", "object", "closure", "global",
)  # fmt: skip
DEFAULT = 1.0

# how often each is drawn
KINDS: dict[Kind, int] = {"float": 8, "int": 4, "bool": 1, "none": 2, "str": 1}
# as Python text; "none" is a float or None.  What stands more than once is drawn more often.
EDGES: dict[Kind, tuple[str, ...]] = {
    "float": ("0.0", "0.0", "1.0", "1.0", "-0.0", "2.0", "-1.0", "0.5", "1e-30", "-0.75", "inf", "-inf", "nan"),
    "int": ("0", "0", "1", "1", "2", "-1", "3", "7"),
    "bool": ("True", "False"),
    "none": ("None", "None", "0.0", "1.0", "0.5", "-0.0", "inf"),
    "str": ("'tanh'", "'sin'", "''"),
}
# {v}: a tensor of the program, {s}: the value
FORMS: dict[Kind, tuple[str, ...]] = {
    "float": (
        "{v} * {s}",
        "{v} * {s}",
        "{v} + {s}",
        "{s} - {v}",
        "{v} / {s}",
        "torch.add({v}, {v}, alpha={s})",
        "torch.full_like({v}, {s})",
        "{v}.clamp(max={s})",
        "torch.where({v} > {s}, {v}, {s})",
        "{v}.masked_fill({v} > 0.0, {s})",
        "torch.softmax({v}.reshape(-1) * {s}, 0)",
        "F.leaky_relu({v}, {s})",
        "F.elu({v}, {s})",
        "torch.lerp({v}, {v} * 2.0, {s})",
        "{v} * ({s} * 2.0 + 1.0)",
        "{v} * math.sqrt(abs({s}))",
        "{v}.tanh() if {s} > 0.5 else {v} * {s}",
        "{v} if {s} else -{v}",
        "{v} * float({s} == 1.0)",
        "{v} * max({s}, 0.5)",
        "torch.copysign({v}, torch.full_like({v}, {s}))",
    ),
    "int": (
        "{v} * {s}",
        "{v} + {s}",
        "{s} - {v}",
        "torch.full_like({v}, {s})",
        "{v}.reshape(-1).roll({s})",
        "{v} * ({s} % 3)",
        "{v} * ({s} // 2)",
        "{v} / ({s} or 1)",
        "{v} * ({s} == 1)",
        "{v} + torch.ones(abs({s})).sum()",
        "{v}.tanh() if {s} > 1 else {v} * {s}",
        "{v} if {s} else -{v}",
    ),
    "bool": ("{v} if {s} else -{v}", "{v} * {s}", "{v} * (2.0 if not {s} else 1.0)", "{v} + int({s})"),
    "none": (
        "{v} if {s} is None else {v} * {s}",
        "{v} * 1.0 if {s} is None else {v}.clamp(max={s})",
        "torch.clamp({v}, min=-2.0, max={s})",
        "{v} * ({s} or 0.5)",
    ),
    "str": ("{v}.tanh() if {s} == 'tanh' else {v}.sin()", "getattr(torch, {s} or 'cos')({v})"),
}


@dataclass(frozen=True)
class PythonValue:
    """One value: its kind, and how the program gets it."""

    name: str
    kind: Kind
    place: Place

    @property
    def read(self) -> str:
        """Its text in `forward`."""
        return {
            "argument": self.name,
            "default": self.name,
            "list": f"p_{self.name}[0]",
            "tuple": f"p_{self.name}[1]",
            "dict": f'p_{self.name}["scale"]',
            "nested": f'p_{self.name}["all"][1]["scale"]',
            "attribute": f"self.{self.name}",
            "object": f"self.config.{self.name}",
            "closure": f"read_{self.name}()",
            "global": self.name.upper(),
        }[self.place]

    @property
    def parameter(self) -> str | None:
        """Its text among the parameters of `forward`, or None where it comes another way."""
        if self.place in ("argument", "default"):
            return self.name if self.place == "argument" else f"{self.name}={DEFAULT}"
        return f"p_{self.name}" if self.place in ("list", "tuple", "dict", "nested") else None

    @property
    def argument(self) -> str | None:
        """What a call passes for it, where `values[name]` is its value; None where it comes another way."""
        value = f"values[{self.name!r}]"
        return {
            "argument": value,
            "list": f"[{value}, 0.25]",
            "tuple": f"(0.25, {value})",
            "dict": f'{{"scale": {value}}}',
            "nested": f'{{"all": [0.25, {{"scale": {value}}}]}}',
        }.get(self.place)

    @property
    def set_by(self) -> str | None:
        """The statement by which a call sets it, where it is no argument."""
        value = f"values[{self.name!r}]"
        return {
            "attribute": f"model.{self.name} = {value}",
            "object": f"model.config.{self.name} = {value}",
            "closure": f"write_{self.name}({value})",
            "global": f"globals()[{self.name.upper()!r}] = {value}",
        }.get(self.place)


def draw(rng: random.Random, kinds: Mapping[Kind, int]) -> tuple[PythonValue, ...]:
    """One to three values, at most one of them a default."""
    values: list[PythonValue] = []
    for index in range(rng.choice((1, 1, 2, 3))):
        kind: Kind = rng.choices(list(kinds), list(kinds.values()))[0]
        places = [place for place in PLACES if place != "default" or all(v.place != "default" for v in values)]
        values.append(PythonValue(f"s{index}", kind, rng.choice(places)))
    return tuple(sorted(values, key=lambda value: value.place == "default"))


def use(rng: random.Random, value: PythonValue, tensor: str) -> str:
    """A random expression of the value and a tensor."""
    return rng.choice(FORMS[value.kind]).format(v=tensor, s=value.read)


def draw_text(rng: random.Random, kind: Kind, given: tuple[str, ...] = ()) -> str:
    """A value, as Python text: of those that are `given`, or of its kind's."""
    return rng.choice(given or EDGES[kind])
