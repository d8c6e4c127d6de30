"""Programs as placement sees them, of layers that each save one tensor."""

from __future__ import annotations

from multigraph_backend.saved_tensors.lifetimes import Program, Step

BIG = 100


def layers(count: int) -> tuple[Program, Program]:
    """Each layer makes a tensor from the one before; the backward goes back through them."""
    names = [f"h{index}" for index in range(count)]
    forward = []
    for before, name in zip(["x", *names], names, strict=False):
        forward += [Step(name, frozenset({before}), (name,)), Step(f"{name}.view", frozenset({name}), view=True)]
    forward.append(Step("out", frozenset({names[-1]}), ("out",)))
    forward.append(Step("output", frozenset({*names, "out"})))
    backward = []
    gradient = "tangent"
    for name in reversed(names):
        backward.append(Step(f"g.{name}", frozenset({gradient, name}), (f"g.{name}",)))
        gradient = f"g.{name}"
    backward.append(Step("output", frozenset({gradient})))
    sizes = {"x": BIG, "out": 1, "tangent": 1, **dict.fromkeys([*names, *(f"g.{name}" for name in names)], BIG)}
    return (
        Program(tuple(forward), sizes, frozenset({"x"}), frozenset({"x"}), frozenset({*names, "out"})),
        Program(tuple(backward), sizes, frozenset({*names, "tangent"}), results=frozenset({gradient})),
    )
