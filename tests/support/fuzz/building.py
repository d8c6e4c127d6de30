"""The body of a random program: operations chosen among those that fit the values made so far.

Each value carries its sizes as expressions over the axes ("A", "(A)*8"), equal only when written the same; an operation
that needs two equal sizes compares these, so that what is built is valid whatever the axes are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Dim = int | str
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Body:
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[tuple[str, tuple[int, ...]], ...]
    lines: tuple[str, ...]
    returns: tuple[str, ...]
    features: frozenset[str]  # names of the operations used


@dataclass(frozen=True)
class Value:
    name: str
    dims: Dims
    grad: bool
    is_input: bool = False


def evaluate(dim: Dim, axes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else int(eval(dim, {"__builtins__": {}}, dict(axes)))


def _times(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a == 1:
        return b
    return a if b == 1 else f"({a})*({b})"


def _plus(a: Dim, b: Dim) -> Dim:
    return a + b if isinstance(a, int) and isinstance(b, int) else f"({a})+({b})"


def build_body(
    rng: random.Random,
    inputs: Sequence[tuple[str, Dims, bool]],
    ints: Sequence[str],
    operations: int,
    hidden: tuple[int, ...],
    ending: str = "",
) -> Body:
    """A body, and at its end what shows whether two tensors share memory, or are only read.

    `twins`: the first input is changed and the second read afterwards.  `window`: parameters and a buffer are read
    afterwards.  `overload`: both inputs are read by operators that are called by their overload.  `raising`: a custom
    operator is called that raises in some calls.  `gradient`: inputs come with gradients; that of the first is read.
    """
    builder = _Builder(rng, inputs, ints, hidden)
    made = 0
    for _ in range(operations * 20):
        operation = rng.choices(_OPERATIONS, _WEIGHTS)[0]
        if operation(builder):
            builder.features.add(operation.__name__.lstrip("_"))
            made += 1
        if made == operations:
            break
    if ending:
        builder.end(ending)
    builder.use_all()
    return builder.body()


class _Builder:
    def __init__(
        self,
        rng: random.Random,
        inputs: Sequence[tuple[str, Dims, bool]],
        ints: Sequence[str],
        hidden: tuple[int, ...],
    ) -> None:
        self.rng = rng
        self.hidden = hidden
        self.ints = list(ints)
        self.values = [Value(name, dims, grad, is_input=True) for name, dims, grad in inputs]
        self.inputs = list(self.values)
        self.parameters: list[tuple[str, tuple[int, ...]]] = []
        self.buffers: list[tuple[str, tuple[int, ...]]] = []
        self.lines: list[str] = []
        self.features: set[str] = set()

    def value(self, fits: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """One of the values that fit, recent ones rather."""
        fitting = [v for v in self.values if fits(v)]
        if not fitting:
            return None
        return self.rng.choices(fitting, [i + 1 for i in range(len(fitting))])[0]

    def uses(self, name: str) -> bool:
        """Whether a line reads this name for more than to define it."""
        return any(re.search(rf"\b{name}\b", line.removeprefix(f"{name} = ")) for line in self.lines)

    def emit(self, text: str, dims: Dims, grad: bool) -> bool:
        name = f"v{len(self.values)}"
        self.lines.append(f"{name} = {text}")
        self.values.append(Value(name, dims, grad))
        return True

    def parameter(self, *shape: int) -> str:
        same = [name for name, s in self.parameters if s == shape]
        if same and self.rng.random() < 0.3:
            return f"self.{self.rng.choice(same)}"
        name = f"w{len(self.parameters)}"
        self.parameters.append((name, shape))
        return f"self.{name}"

    def size(self) -> str:
        """A size of an input as the program reads it."""
        v = self.rng.choice(self.inputs)
        if not v.dims:
            return "2"
        return f"{v.name}.shape[{self.rng.randrange(len(v.dims))}]"

    def end(self, ending: str) -> None:
        first, second = self.inputs[0], self.inputs[min(1, len(self.inputs) - 1)]
        if ending == "overload":
            text = f"torch.ops.aten.add.Tensor({first.name}, torch.ops.aten.mul({second.name}, {second.name}))"
            self.emit(text, second.dims, second.grad)
            return
        self.features.add(ending)
        if ending == "raising":
            self.emit(f"checked({first.name} + 1.0)", first.dims, False)
            return
        if ending == "gradient":
            self.emit(f"{first.name} + {first.name}.grad", first.dims, False)
            return
        self.lines.append(f"{first.name}.mul_(0.5)")
        if ending == "twins":
            self.emit(f"{second.name} * 2.0", second.dims, second.grad)
        else:
            self.parameter(self.hidden[0])
            self.buffers.append((f"b{len(self.buffers)}", (self.hidden[0],)))
            held = " + ".join(f"self.{name}.sum()" for name, _ in (*self.parameters, *self.buffers))
            self.emit(f"{held} + {first.name}.sum()", (), False)

    def use_all(self) -> None:
        for v in self.inputs:
            if not self.uses(v.name):
                last = self.values[-1]
                self.emit(f"{last.name} + {v.name}.mean() * 0.1", last.dims, last.grad or v.grad)
        for n in self.ints:
            if not self.uses(n):
                last = self.values[-1]
                self.emit(f"{last.name} + {n} * 0.1", last.dims, last.grad)

    def body(self) -> Body:
        ends = [v.name for v in self.values if not v.is_input and not self.uses(v.name)] or [self.values[-1].name]
        returns = ends if len(ends) <= 4 else [*self.rng.sample(ends[:-1], 3), ends[-1]]
        if self.rng.random() < 0.15:
            returns.append(self.rng.choice(self.values).name)
        if self.rng.random() < 0.15:  # an output that aliases an input, or is one
            v = self.rng.choice(self.inputs)
            views = [v.name, f"{v.name}.view(-1)" if len(v.dims) == 1 else f"{v.name}.transpose(0, 1)", f"{v.name}[1:]"]
            returns.append(self.rng.choice(views))
        if self.rng.random() < 0.1:
            returns.append(f"{self.size()} * 2")
        return Body(
            tuple(self.parameters), tuple(self.buffers), tuple(self.lines), tuple(returns), frozenset(self.features)
        )


# ---------------------------------------------------------------- operations: each says whether it found what it needs


def _unary(b: _Builder) -> bool:
    v = b.value()
    forms = ("torch.tanh({0})", "torch.sigmoid({0})", "torch.sin({0})", "F.relu({0})", "F.gelu({0})", "{0} * 0.5 + 1.0")
    more = ("-{0}", "torch.exp(-{0}.abs())", "torch.rsqrt({0} * {0} + 1.0)", "{0}.clamp(-1.0, 1.0)", "{0}.clone()")
    return v is not None and b.emit(b.rng.choice(forms + more).format(v.name), v.dims, v.grad)


def _binary(b: _Builder) -> bool:
    v = b.value()
    w = b.value(lambda w: v is not None and w.dims == v.dims)
    if v is None or w is None:
        return False
    form = b.rng.choice(
        (
            "{0} + {1}",
            "{0} * {1}",
            "{0} - {1} * 0.5",
            "torch.maximum({0}, {1})",
            "torch.where({0} > {1}, {0}, {1} * 0.5)",
        )
    )
    return b.emit(form.format(v.name, w.name), v.dims, v.grad or w.grad)


def _broadcast(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1)
    if v is None:
        return False
    w = b.value(lambda w: len(w.dims) < len(v.dims) and w.dims == v.dims[len(v.dims) - len(w.dims) :])
    if w is not None and b.rng.random() < 0.5:
        return b.emit(f"{v.name} * {w.name}", v.dims, v.grad or w.grad)
    u = b.value(lambda u: len(u.dims) == 1)
    if u is not None and len(v.dims) == 1:
        return b.emit(f"{v.name}[:, None] * {u.name}[None, :]", (v.dims[0], u.dims[0]), v.grad or u.grad)
    u = b.value(lambda u: u.dims == v.dims[:1])
    if u is not None and len(v.dims) == 2:
        return b.emit(f"{v.name} + {u.name}.unsqueeze(-1)", v.dims, v.grad or u.grad)
    d = b.rng.randrange(len(v.dims))
    return b.emit(f"{v.name} - {v.name}.mean({d}, keepdim=True)", v.dims, v.grad)


def _matmul_parameter(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1 and v.dims[-1] in b.hidden)
    if v is None:
        return False
    h = v.dims[-1]
    assert isinstance(h, int)
    k = b.rng.choice(b.hidden)
    if b.rng.random() < 0.5:
        return b.emit(f"{v.name} @ {b.parameter(h, k)}", (*v.dims[:-1], k), True)
    return b.emit(f"F.linear({v.name}, {b.parameter(k, h)}, {b.parameter(k)})", (*v.dims[:-1], k), True)


def _layer_norm(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1 and v.dims[-1] in b.hidden)
    if v is None:
        return False
    h = v.dims[-1]
    assert isinstance(h, int)
    weight = f", {b.parameter(h)}" if b.rng.random() < 0.5 else ""
    return b.emit(f"F.layer_norm({v.name}, ({h},){weight})", v.dims, v.grad or bool(weight))


def _product(b: _Builder) -> bool:
    """A matrix product of two values, one of them perhaps itself."""
    v = b.value(lambda v: len(v.dims) in (2, 3))
    if v is None:
        return False
    w = b.value(lambda w: len(w.dims) == len(v.dims) and w.dims[:-2] == v.dims[:-2] and w.dims[-2] == v.dims[-1])
    if w is not None and b.rng.random() < 0.5:
        return b.emit(f"({v.name} @ {w.name}) * 0.2", (*v.dims[:-1], w.dims[-1]), v.grad or w.grad)
    if len(v.dims) == 2 and b.rng.random() < 0.3:
        return b.emit(f'torch.einsum("ab,cb->ac", {v.name}, {v.name}) * 0.1', (v.dims[0], v.dims[0]), v.grad)
    return b.emit(f"({v.name} @ {v.name}.transpose(-1, -2)) * 0.1", (*v.dims[:-1], v.dims[-2]), v.grad)


def _reduce(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1)
    if v is None:
        return False
    if b.rng.random() < 0.15:
        return b.emit(f"{v.name}.{b.rng.choice(('mean()', 'sum() * 0.05'))}", (), v.grad)
    d = b.rng.randrange(len(v.dims))
    keep = b.rng.random() < 0.4
    form = b.rng.choice(
        (
            "{0}.sum({1}) * 0.2",
            "{0}.mean({1})",
            "{0}.amax({1})",
            "torch.logsumexp({0}, {1})",
            "{0}.std({1}, correction=0)",
        )
    )
    dims = (*v.dims[:d], *((1,) if keep else ()), *v.dims[d + 1 :])
    return b.emit(form.format(v.name, f"{d}, keepdim=True" if keep else d), dims, v.grad)


def _along(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1)
    if v is None:
        return False
    d = b.rng.randrange(len(v.dims))
    form = b.rng.choice(
        (
            "torch.softmax({0}, {1})",
            "torch.cumsum({0}, {1}) * 0.2",
            "torch.log_softmax({0}, {1})",
            "{0}.flip({1})",
            "torch.roll({0}, 1, {1})",
        )
    )
    return b.emit(form.format(v.name, d), v.dims, v.grad)


def _view(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1)
    if v is None:
        return False
    n, last = len(v.dims), v.dims[-1]
    found: list[tuple[str, Dims]] = [
        (f"{v.name}.unsqueeze(0)", (1, *v.dims)),
        (f"{v.name}.unsqueeze(-1)", (*v.dims, 1)),
        (f"{v.name}.unsqueeze(0).expand(3, {', '.join('-1' for _ in v.dims)})", (3, *v.dims)),
    ]
    if n >= 2:
        flat = _times(v.dims[0], v.dims[1])
        found += [(f"{v.name}.flatten(0, 1)", (flat, *v.dims[2:]))] * 2
        found += [(f"{v.name}.transpose(0, 1)", (v.dims[1], v.dims[0], *v.dims[2:]))] * 2
        found.append((f"{v.name}.reshape({v.name}.shape[0], -1)", (v.dims[0], _product_of(v.dims[1:]))))
        found.append((f"{v.name}.reshape(-1, {v.name}.shape[-1])", (_product_of(v.dims[:-1]), last)))
        found.append((f"{v.name}.reshape(-1)", (_product_of(v.dims),)))
    if isinstance(last, int) and last in b.hidden:
        found += [(f"{v.name}.unflatten(-1, (2, {last // 2}))", (*v.dims[:-1], 2, last // 2))] * 2
        found.append((f"{v.name}[..., : {last // 2}]", (*v.dims[:-1], last // 2)))
        found.append((f"{v.name}.chunk(2, -1)[1]", (*v.dims[:-1], last // 2)))
        if n == 2:
            found.append((f"{v.name}.reshape({v.name}.shape[0] * 2, -1)", (_times(v.dims[0], 2), last // 2)))
    if isinstance(v.dims[0], str):
        found += [
            (f"{v.name}[1:]", (_plus(v.dims[0], "-1"), *v.dims[1:])),
            (f"{v.name}[:-1]", (_plus(v.dims[0], "-1"), *v.dims[1:])),
        ]
        found.append((f"{v.name}[::2]", (f"(({v.dims[0]})+1)//2", *v.dims[1:])))
    if v.dims[0] == 1:
        found.append((f"{v.name}.squeeze(0)", v.dims[1:]))
    text, dims = b.rng.choice(found)
    if len(dims) > 4:
        return False
    return b.emit(text, dims, v.grad)


def _product_of(dims: Dims) -> Dim:
    out: Dim = 1
    for d in dims:
        out = _times(out, d)
    return out


def _index(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1)
    if v is None:
        return False
    arange = f"torch.arange({v.name}.shape[0])"
    found: list[tuple[str, Dims]] = [
        (f"{v.name}[0]", v.dims[1:]),
        (f"{v.name}[-1]", v.dims[1:]),
        (f"{v.name}[{arange}.flip(0)]", v.dims),
        (f"{v.name}[{arange} // 2]", v.dims),
        (f"{v.name}.index_select(0, torch.tensor([1, 0, 1]))", (3, *v.dims[1:])),
        (f"torch.zeros_like({v.name}).index_add(0, {arange}, {v.name})", v.dims),
        (f"torch.gather({v.name}, 0, {v.name}.argsort(0))", v.dims),
        (f"{v.name}.sort(0).values", v.dims),
    ]
    if len(v.dims) == 2:
        found.append((f"{v.name}.gather(1, ({arange} % 2)[:, None].expand(-1, 2))", (v.dims[0], 2)))
        found.append((f"F.embedding({arange} % 4, {b.parameter(4, b.hidden[0])})", (v.dims[0], b.hidden[0])))
    text, dims = b.rng.choice(found)
    return b.emit(text, dims, v.grad or "embedding" in text)


def _concatenate(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1)
    if v is None:
        return False
    d = b.rng.randrange(len(v.dims))

    def rest(dims: Dims) -> Dims:
        return (*dims[:d], *dims[d + 1 :])

    w = b.value(lambda w: len(w.dims) == len(v.dims) and rest(w.dims) == rest(v.dims))
    assert w is not None
    if w.dims == v.dims and b.rng.random() < 0.3 and len(v.dims) < 3:
        return b.emit(f"torch.stack([{v.name}, {w.name}])", (2, *v.dims), v.grad or w.grad)
    dims = (*v.dims[:d], _plus(v.dims[d], w.dims[d]), *v.dims[d + 1 :])
    return b.emit(f"torch.cat([{v.name}, {w.name}], {d})", dims, v.grad or w.grad)


def _size_as_number(b: _Builder) -> bool:
    """A size that becomes data: where a compiler bakes in a size of another call, this is the wrong number."""
    v = b.value()
    if v is None:
        return False
    size = b.size()
    found = [
        f"{v.name} + torch.ones({size}).sum() * 0.1",
        f"{v.name} * torch.full(({size},), 0.5).mean()",
        f"{v.name} + torch.arange({size}).sum() * 0.01",
        f"{v.name} * ({size} * 0.1)",
        f"{v.name} / ({size} + 1)",
        f"{v.name} + ({size} % 8) * 0.1",
        f"{v.name} + {v.name}.numel() * 0.001",
    ]
    if v.dims:
        found.append(f"{v.name} + torch.arange({v.name}.shape[-1], dtype={v.name}.dtype) * 0.1")
        found.append(f"torch.where(torch.arange({v.name}.shape[-1]) < {size}, {v.name}, -{v.name})")
    return b.emit(b.rng.choice(found), v.dims, v.grad)


def _ones_of_size(b: _Builder) -> bool:
    v = b.rng.choice(b.inputs)
    if not v.dims:
        return False
    d = b.rng.randrange(len(v.dims))
    form = b.rng.choice(
        ("torch.ones({0}.shape[{1}], dtype={0}.dtype)", "torch.arange({0}.shape[{1}], dtype={0}.dtype) * 0.1")
    )
    return b.emit(form.format(v.name, d), (v.dims[d],), False)


def _mask(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 2)
    if v is None:
        return False
    form = b.rng.choice(("torch.tril({0})", "torch.triu({0})", "{0}.masked_fill({0} > 0.5, 0.1)", "F.pad({0}, (0, 1))"))
    dims = (*v.dims[:-1], _plus(v.dims[-1], 1)) if "pad" in form else v.dims
    return b.emit(form.format(v.name), dims, v.grad)


def _integer(b: _Builder) -> bool:
    if not b.ints:
        return False
    v = b.value()
    n = b.rng.choice(b.ints)
    if v is None:
        return False
    if b.rng.random() < 0.2:
        return b.emit(f"torch.arange({n}, dtype={v.name}.dtype) * 0.1", (n,), False)
    if b.rng.random() < 0.15 and len(v.dims) < 3:
        return b.emit(
            f"{v.name}.unsqueeze(0).expand({n}, {', '.join('-1' for _ in v.dims)})"
            if v.dims
            else f"{v.name}.expand({n})",
            (n, *v.dims),
            v.grad,
        )
    form = b.rng.choice(("{0} * ({1} * 0.1)", "{0} + {1}", "{0} * ({1} % 3)", "{0} - {1} // 2", "{0} / ({1} + 2)"))
    return b.emit(form.format(v.name, n), v.dims, v.grad)


def _branch(b: _Builder) -> bool:
    """Python control flow on a size: a guard of the trace, and a second trace."""
    v = b.value()
    if v is None:
        return False
    test = b.rng.choice((f"{b.size()} > {b.rng.choice((3, 6, 8))}", f"{b.size()} % 2 == 0"))
    return b.emit(f"torch.tanh({v.name}) if {test} else torch.sin({v.name}) * 0.5", v.dims, v.grad)


def _mutate_intermediate(b: _Builder) -> bool:
    v = b.value(lambda v: not v.is_input)
    if v is None:
        return False
    name = f"v{len(b.values)}"
    w = b.value(lambda w: w.dims == v.dims)
    steps = ["{0}.add_(0.5)", "{0}.mul_(0.5)"]
    if v.dims:
        steps += ["{0}[0] = 0.25", "{0}[..., -1:].mul_(2.0)", "{0}[1:].add_(1.0)"]
    if len(v.dims) >= 2:
        steps += ["{0}.transpose(0, 1)[0].add_(1.0)"]
    if w is not None:
        steps += [f"{{0}}.add_({w.name})"] * 2
    b.emit(f"{v.name}.clone()", v.dims, v.grad or (w is not None and w.grad))
    b.lines.append(b.rng.choice(steps).format(name))
    return True


def _mutate_input(b: _Builder) -> bool:
    v = b.value(lambda v: v.is_input and not v.grad)
    if v is None:
        return False
    w = b.value(lambda w: w.dims == v.dims)
    steps = ["{0}.add_(0.5)", "{0}.mul_(0.5)"]
    if v.dims:
        steps += ["{0}[0] = 0.25", "{0}[1:].mul_(2.0)", "{0}[..., -1].add_(1.0)"]
    if w is not None:
        steps += [f"{{0}}.copy_(torch.tanh({w.name}.detach()))"]
    b.lines.append(b.rng.choice(steps).format(v.name))
    return True


def _mutate_buffer(b: _Builder) -> bool:
    v = b.value(lambda v: len(v.dims) >= 1 and v.dims[-1] in b.hidden)
    if v is None or len(b.buffers) > 1:
        return False
    h = v.dims[-1]
    assert isinstance(h, int)
    name = f"b{len(b.buffers)}"
    b.buffers.append((name, (h,)))
    axes = tuple(range(len(v.dims) - 1))
    mean = f"{v.name}.detach().mean({axes})" if axes else f"{v.name}.detach()"
    b.lines.append(f"self.{name}.mul_(0.9).add_({mean} * 0.1)")
    return b.emit(f"{v.name} + self.{name}.clone()", v.dims, v.grad)


_TABLE: dict[Callable[[_Builder], bool], int] = {
    _unary: 4,
    _binary: 3,
    _broadcast: 4,
    _matmul_parameter: 6,
    _layer_norm: 1,
    _product: 2,
    _reduce: 3,
    _along: 3,
    _view: 6,
    _index: 4,
    _concatenate: 3,
    _size_as_number: 4,
    _ones_of_size: 1,
    _mask: 1,
    _integer: 6,
    _branch: 1,
    _mutate_intermediate: 2,
    _mutate_input: 2,
    _mutate_buffer: 1,
}
_OPERATIONS = list(_TABLE)
_WEIGHTS = list(_TABLE.values())
