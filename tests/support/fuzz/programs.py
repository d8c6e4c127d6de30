"""Random small programs as data, and their text.

A program is a module of 3 to 12 operations over one to three tensors (and sometimes an integer, and other Python values
from wherever Python code has them), what it declares to specialize, and a sequence of calls. Everything follows from a
seed. Sizes are tracked as expressions over a few axes, so that a program is valid for every size of an axis; hidden
sizes and batches are drawn from the same numbers, as a compiler that confuses a batch with a hidden size of equal value
is wrong only then.

    program = generate(1234, PROFILES["default"])
    print(script(program, "aot_eager"))        # runs alone, without this package
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .building import Body, Dim, build_body, evaluate
from .declarations import SMALL, Condition, Kind, Mark, Predicate, random_predicate, respelled
from .python_values import DEFAULT, KINDS, PythonValue, draw, draw_text, use

Dynamic = Literal["marks", "true", "automatic", "false"]
Layout = Literal["contiguous", "transposed", "sliced"]
Sharing = Literal["", "same", "overlap", "weight", "beside a weight"]
Ending = Literal["", "twins", "window", "overload", "raising", "gradient"]  # see build_body


@dataclass(frozen=True)
class TensorInput:
    name: str
    dims: tuple[Dim, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Call:
    """One call: a size per axis (an integer input is an axis of its own name), and how the inputs lie in memory."""

    sizes: Mapping[str, int]
    layout: Layout = "contiguous"
    sharing: Sharing = ""  # of the first two inputs, where their sizes agree, or of the first with a weight or buffer
    values: tuple[tuple[str, str], ...] = ()  # name and text of each Python value
    raises: bool = False  # the program's own operator raises


@dataclass(frozen=True)
class Profile:
    """What to draw. The stock profiles aim at the defects that `mark_dynamic(specialize_on=...)` is known to have."""

    declare: tuple[str, ...] = ("options", "options", "marks", "both")
    dynamic: tuple[Dynamic, ...] = ("marks", "marks", "true", "true", "automatic")
    trainable: float = 0.35
    small_sizes: float = 0.08  # calls with a size 0 or 1
    needs_bool: float = 0.1  # marks whose lambda asks for a concrete bool
    ints: float = 0.25
    odd_memory: float = 0.12  # calls with transposed, sliced or overlapping inputs
    unused_input: float = 0.04
    operations: tuple[int, int] = (3, 12)
    hidden: tuple[int, ...] = (4, 8, 16)
    two_axes: float = 0.33
    weights_as_attributes: float = 0.1
    predicates: tuple[Kind, ...] = ()  # of these kinds alone
    equal_axes: float = 0.0  # calls with one size for all axes
    twins: bool = False  # a second input with the sizes of the first
    python_values: float = 0.3  # programs that take Python values beside tensors
    floats: tuple[str, ...] = ()  # what Python floats are drawn from, and then nothing else is
    ending: Ending = ""


PROFILES = {
    "default": Profile(),
    # torch's own specialize_on takes marks alone; sizes below 2 and unused inputs are a defect of their own there
    "stock": Profile(
        declare=("marks",),
        dynamic=("marks",),
        small_sizes=0,
        needs_bool=0,
        ints=0,
        odd_memory=0,
        unused_input=0,
        weights_as_attributes=0,
        python_values=0,
    ),
}
PROFILES["stock_bool"] = replace(PROFILES["stock"], needs_bool=1)
PROFILES["stock_batch_equals_hidden"] = replace(
    PROFILES["stock"], trainable=1, two_axes=0, predicates=("range", "multiple_of")
)
PROFILES["stock_equal_axes"] = replace(
    PROFILES["stock"], hidden=(20, 40, 80), two_axes=1, trainable=1, predicates=("range", "multiple_of"), equal_axes=0.5
)
PROFILES["training"] = replace(PROFILES["default"], trainable=1, weights_as_attributes=0)
PROFILES["attributes"] = replace(PROFILES["default"], weights_as_attributes=1)
PROFILES["two_axes"] = replace(PROFILES["default"], two_axes=1, equal_axes=0.5)
PROFILES["python_values"] = replace(PROFILES["default"], python_values=1, operations=(1, 3))
PROFILES["zeros"] = replace(
    PROFILES["python_values"], trainable=0, floats=("0.0", "0.0", "0.0", "-0.0", "-0.0", "nan", "nan", "2.0")
)
PROFILES["twins"] = replace(
    PROFILES["default"], twins=True, ending="twins", trainable=0, unused_input=0, operations=(3, 6)
)
PROFILES["overloads"] = replace(PROFILES["twins"], ending="overload")
PROFILES["raising"] = replace(PROFILES["default"], ending="raising", trainable=0, operations=(1, 4))
PROFILES["gradients"] = replace(PROFILES["default"], ending="gradient", trainable=0, operations=(1, 4))
PROFILES["windows"] = replace(PROFILES["default"], ending="window", trainable=0, unused_input=0, operations=(3, 6))


@dataclass(frozen=True)
class Program:
    seed: int
    profile: str
    axes: tuple[str, ...]
    tensors: tuple[TensorInput, ...]
    ints: tuple[str, ...]
    body: Body
    options: tuple[Condition, ...]
    marks: tuple[Mark, ...]
    dynamic: Dynamic
    calls: tuple[Call, ...] = field(repr=False)
    trainable: bool
    late_backward: bool  # all forwards first, then all backwards, in reverse
    backwards: int = 1  # over each forward: all but the last retain its graph
    weights_as_attributes: bool = False  # Dynamo leaves them in the graph module, instead of making them inputs
    values: tuple[PythonValue, ...] = ()

    @property
    def changes_inputs(self) -> bool:
        """Whether it may write to what was there before a call."""
        return bool(self.body.features & {"mutate_input", "mutate_buffer", "twins", "window"})

    @property
    def taken(self) -> frozenset[str]:
        """The inputs whose elements the program uses: the tensors (and integers) that Dynamo's graph takes for sure."""
        inputs = {*(t.name for t in self.tensors), *self.ints}
        text = "\n".join(r for r in self.body.returns if r not in inputs)  # an input returned as it is goes past it

        def used(name: str) -> bool:
            return re.search(rf"\b{name}\b(?!\.shape|\.numel|\.dtype)", text) is not None

        for line in reversed(self.body.lines):
            made = re.match(r"(\w+) = ", line)
            if made is None or used(made[1]):  # what nothing needs goes past it as well
                text = f"{line}\n{text}"
        return frozenset(filter(used, inputs))

    @property
    def both_zeros(self) -> bool:
        """Whether a Python value is 0.0 in one call and -0.0 in another."""
        drawn: dict[str, set[str]] = {}
        for call in self.calls:
            for name, text in call.values:
                drawn.setdefault(name, set()).add(text)
        return any({"0.0", "-0.0"} <= texts for texts in drawn.values())

    def named_sizes(self, call: Call) -> dict[str, int]:
        """Every size of a call that a condition can name."""
        out = {f"{t.name}[{d}]": evaluate(e, call.sizes) for t in self.tensors for d, e in enumerate(t.dims)}
        return out | {n: call.sizes[n] for n in self.ints}


def generate(seed: int, profile_name: str = "default", hidden: tuple[int, ...] = ()) -> Program:
    """The program of this seed; pure. Other `hidden` sizes in the same proportions keep the rest."""
    profile = PROFILES[profile_name]
    if hidden:
        profile = replace(profile, hidden=hidden)
    rng = random.Random(f"{profile_name}:{seed}")
    trainable = rng.random() < profile.trainable
    axes = ("A", "B")[: 2 if rng.random() < profile.two_axes else 1]
    ints = ("n",) if rng.random() < profile.ints else ()
    tensors = _inputs(rng, axes, trainable, profile.hidden)
    if profile.twins:
        tensors = (tensors[0], TensorInput("y", tensors[0].dims, tensors[0].requires_grad))
    axes = tuple(a for a in axes if any(a in t.dims for t in tensors))
    unused = frozenset({tensors[-1].name}) if len(tensors) > 1 and rng.random() < profile.unused_input else frozenset()
    body = build_body(
        rng,
        [(t.name, t.dims, t.requires_grad) for t in tensors if t.name not in unused],
        ints,
        operations=rng.randint(*profile.operations),
        hidden=profile.hidden,
        ending=profile.ending,
    )
    dynamic = rng.choice(profile.dynamic)
    declare = rng.choice(profile.declare)
    if dynamic != "marks" and declare != "options":
        dynamic = "marks"
    options, marks = _declarations(rng, profile, declare, dynamic, tensors, ints)
    program = Program(
        seed=seed,
        profile=profile_name,
        axes=axes,
        tensors=tensors,
        ints=ints,
        body=body,
        options=options,
        marks=marks,
        dynamic=dynamic,
        calls=(),
        trainable=trainable,
        late_backward=trainable and rng.random() < 0.35,
        # drawn apart, so that a seed is otherwise the program that it was; stock refuses more than one
        backwards=1 if profile_name.startswith("stock") else random.Random(f"backwards:{seed}").choice((1, 1, 2, 3)),
    )
    return _with_python_values(profile, _with_calls(rng, profile, program))


def _inputs(
    rng: random.Random, axes: tuple[str, ...], trainable: bool, sizes: tuple[int, ...]
) -> tuple[TensorInput, ...]:
    def hidden() -> int:
        return rng.choice(sizes)

    a, b = axes[0], axes[-1]
    shapes: list[tuple[Dim, ...]] = [(a, hidden())]
    if rng.random() < 0.3:
        shapes = [rng.choice([(a, b, hidden()), (a, hidden(), hidden()), (a,), (hidden(), a), (a, b)])]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        first = shapes[0]
        shapes.append(
            rng.choice([first, first, (a, hidden()), (b, hidden()), (hidden(),), (b,), (a, b), (b, first[-1])])
        )
    shapes = [tuple(b if d == a and i and shape[:i].count(a) else d for i, d in enumerate(shape)) for shape in shapes]
    return tuple(
        TensorInput(name, dims, requires_grad=trainable and rng.random() < 0.6)
        for name, dims in zip(("x", "y", "z"), shapes, strict=False)
    )


def _declarations(
    rng: random.Random,
    profile: Profile,
    declare: str,
    dynamic: Dynamic,
    tensors: tuple[TensorInput, ...],
    ints: tuple[str, ...],
) -> tuple[tuple[Condition, ...], tuple[Mark, ...]]:
    dims = [(t.name, d) for t in tensors for d, e in enumerate(t.dims) if isinstance(e, str)]
    names = [f"{name}[{d}]" for name, d in dims]
    options: list[Condition] = []
    if declare in ("options", "both"):
        for _ in range(rng.randint(1, 4)):
            choice = names + (list(ints) if dynamic == "true" else [])
            picked = rng.sample(choice, min(len(choice), rng.choice((1, 1, 1, 2))))
            options.append(Condition(tuple((name, random_predicate(rng, lists=True)) for name in picked)))
    marks: list[Mark] = []
    if dynamic == "marks":
        specialized = rng.sample(dims, rng.randint(1, min(2, len(dims)))) if declare != "options" else []
        for name, d in dims:
            count = rng.randint(1, 3) if (name, d) in specialized else 0
            predicates = [random_predicate(rng, lists=False, kinds=profile.predicates) for _ in range(count)]
            if predicates and rng.random() < profile.needs_bool:
                i = rng.randrange(len(predicates))
                predicates[i] = Predicate("always") if rng.random() < 0.15 else respelled(predicates[i], rng)
            marks.append(Mark(name, d, tuple(predicates)))
    return tuple(options), tuple(marks)


def _with_calls(rng: random.Random, profile: Profile, program: Program) -> Program:
    """4 to 8 calls with sizes that hit a declared condition, miss all, and repeat."""
    conditions = list(program.options) + [Condition(((m.name, p),)) for m in program.marks for p in m.specialize_on]
    axis_of = {f"{t.name}[{d}]": e for t in program.tensors for d, e in enumerate(t.dims)} | {
        n: n for n in program.ints
    }
    first_two = program.tensors[:2]
    can_share = (
        len(first_two) == 2 and first_two[0].dims == first_two[1].dims and not any(t.requires_grad for t in first_two)
    )
    calls: list[Call] = []
    for _ in range(rng.randint(4, 8)):
        if profile.twins and calls and rng.random() < 0.5:
            earlier = rng.choice(calls)
            calls.append(replace(earlier, layout="contiguous", sharing="" if earlier.sharing else "overlap"))
            continue
        if profile.ending == "window" and calls and rng.random() < 0.5:
            inside: Sharing = rng.choice(("weight", "beside a weight"))
            calls.append(replace(rng.choice(calls), sharing=inside))
            continue
        if calls and rng.random() < 0.25:
            calls.append(rng.choice(calls))
            continue
        sizes = {
            axis: rng.choice((4, 8, 16)) if rng.random() < 0.5 else rng.choice(SMALL)
            for axis in (*program.axes, *program.ints)
        }
        if conditions and rng.random() < 0.5:
            for name, predicate in rng.choice(conditions).terms:
                axis = axis_of[name]
                if isinstance(axis, str):
                    sizes[axis] = predicate.example(rng)
        if profile.equal_axes and calls and rng.random() < profile.equal_axes:
            sizes = dict.fromkeys(sizes, rng.choice((8, 16, 24)))
        if rng.random() < profile.small_sizes:
            sizes[rng.choice(list(sizes))] = rng.choice((1, 1, 1, 0))
        layout: Layout = "contiguous"
        sharing: Sharing = ""
        if rng.random() < profile.odd_memory:
            layout = rng.choice(("transposed", "sliced"))
            sharing = rng.choice(("same", "overlap")) if can_share else ""
        calls.append(Call(sizes, layout, sharing))
    if profile.ending == "raising" and not program.changes_inputs:  # what changed before the error is not compared
        calls = [replace(call, raises=rng.random() < 0.5) for call in calls]
    return replace(program, calls=tuple(calls), weights_as_attributes=rng.random() < profile.weights_as_attributes)


def _with_python_values(profile: Profile, program: Program) -> Program:
    """With values that are no tensors, each used for an output of its own, so that a NaN hides nothing else.

    They are drawn apart from the rest: a seed keeps its tensors, its declarations and its sizes.
    """
    rng = random.Random(f"{program.profile}:{program.seed}:python values")
    if rng.random() >= profile.python_values:
        return program
    values = draw(rng, {"float": 1} if profile.floats else KINDS)
    made = [name for name in program.body.returns if re.fullmatch(r"v\d+", name)]
    outputs = tuple(use(rng, value, rng.choice(made or [program.tensors[0].name])) for value in values)
    kinds = frozenset(f"{value.kind} {value.place}" for value in values)
    body = replace(program.body, returns=(*program.body.returns, *outputs), features=program.body.features | kinds)
    calls = []
    for call in program.calls:
        # two calls in a row with other sizes and one value are as telling as the opposite
        if calls and rng.random() < 0.25:
            texts = calls[-1].values
        else:
            texts = tuple((value.name, draw_text(rng, value.kind, profile.floats)) for value in values)
        calls.append(replace(call, values=texts))
    dynamic: Dynamic = "false" if program.dynamic != "marks" and rng.random() < 0.2 else program.dynamic
    return replace(program, body=body, values=values, calls=tuple(calls), dynamic=dynamic)


# ---------------------------------------------------------------- text


def definition(program: Program, dtype: str) -> str:
    """The module, its declarations, its calls and its inputs as Python; what the fuzzer runs and `script` prints."""
    arguments = [t.name for t in program.tensors] + list(program.ints)
    arguments += [value.parameter for value in program.values if value.parameter is not None]
    lines = ["import math", "import types", "", "import torch", "import torch.nn.functional as F", "", ""]
    lines += ["inf, nan = math.inf, math.nan", "", ""]
    for value in program.values:
        if value.place == "closure":
            lines += _CLOSURE.format(name=value.name).splitlines()
    if "raising" in program.body.features:
        lines += _RAISING.format(calls=[call.raises for call in program.calls]).splitlines()
    lines += ["class Model(torch.nn.Module):", "    def __init__(self):"]
    lines += ["        super().__init__()", f"        rng = torch.Generator().manual_seed({program.seed})"]
    for name, shape in program.body.parameters:
        value = f"torch.randn({shape!r}, generator=rng, dtype=torch.{dtype}) * 0.3"
        lines.append(f"        self.{name} = torch.nn.Parameter({value})")
    for name, shape in program.body.buffers:
        lines.append(
            f'        self.register_buffer("{name}", torch.randn({shape!r}, generator=rng, dtype=torch.{dtype}))'
        )
    if program.values:
        lines.append("        self.config = types.SimpleNamespace()")
    lines += ["", f"    def forward(self, {', '.join(arguments)}):"]
    lines += [f"        {line}" for line in program.body.lines]
    lines += [
        f"        return {', '.join(program.body.returns)}{',' if len(program.body.returns) == 1 else ''}",
        "",
        "",
    ]
    lines.append(f"SPECIALIZE = {json.dumps([c.declarative() for c in program.options])}")
    lines.append("MARKS = {")
    for mark in program.marks:
        lines.append(f'    ("{mark.tensor}", {mark.dim}): [')
        lines += [f"        {p.as_lambda()}," for p in mark.specialize_on]
        lines.append("    ],")
    lines.append("}")
    lines.append(f"DYNAMIC = {DYNAMIC[program.dynamic]}")
    lines.append("CALLS = [  # sizes, layout of the first input, storage shared by the first two")
    lines += [f"    ({dict(c.sizes)!r}, {c.layout!r}, {c.sharing!r})," for c in program.calls]
    lines += ["]", "VALUES = [  # what a call has beside tensors"]
    lines += [f"    {{{', '.join(f'{name!r}: {text}' for name, text in c.values)}}}," for c in program.calls]
    lines += [
        "]",
        "",
        "",
        _state_text(program),
        _INPUTS.format(seed=program.seed, dtype=dtype, body=_inputs_text(program)),
    ]
    return "\n".join(lines)


DYNAMIC: dict[Dynamic, bool | None] = {"true": True, "false": False, "marks": None, "automatic": None}

_CLOSURE = """\
def _make_{name}():
    held = None

    def read():
        return held

    def write(value):
        nonlocal held
        held = value

    return read, write


read_{name}, write_{name} = _make_{name}()


"""


def _state_text(program: Program) -> str:
    lines = ["def set_state(model, index):", "    values = VALUES[index]"]
    lines += [f"    {value.set_by}" for value in program.values if value.set_by is not None]
    return "\n".join([*lines, "", "", ""])


_RAISING = """\
RAISES, CALL, RUNS = {calls}, [0], []


class Refused(ValueError):
    pass


@torch.library.custom_op("multigraph_fuzz::checked", mutates_args=())
def checked(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(CALL[0])
    if RAISES[CALL[0]]:
        raise Refused
    return x * 2


@checked.register_fake
def _(x):
    return torch.empty_like(x)


"""


# The dimensions of "transposed" are made in another order; "sliced" leaves every other element of the last one out;
# "overlap" gives the second input the storage of the first, one row further; in every other call neither is a view, nor
# begins where the storage does. "weight" lets a weight or buffer of the model begin where the first input does, "beside
# a weight" puts it behind the input in the same storage.
_INPUTS = """\
def make(shape, layout, rng):
    if layout == "transposed":
        return torch.randn(shape[::-1], generator=rng, dtype=torch.{dtype}).permute(*range(len(shape))[::-1])
    if layout == "sliced":
        return torch.randn((*shape[:-1], shape[-1] * 2), generator=rng, dtype=torch.{dtype})[..., ::2]
    return torch.randn(shape, generator=rng, dtype=torch.{dtype})


def make_inputs(index):
    sizes, layout, sharing = CALLS[index]
    rng = torch.Generator().manual_seed({seed} * 100 + index)
{body}


def lay_in_model(index, model, inputs):
    sharing = CALLS[index][2]
    if "weight" in sharing:
        held = [*model.parameters(), *model.buffers()]
        tensor, x = held[index % len(held)], inputs[0]
        kept = tensor.data.reshape(-1)
        whole = torch.cat([x.reshape(-1), kept if "beside" in sharing else kept[x.numel() :]])
        start = x.numel() if "beside" in sharing else 0
        tensor.data = whole[start : start + kept.numel()].view(tensor.shape)
        inputs[0] = whole[: x.numel()].view(x.shape)
"""


def _inputs_text(program: Program) -> str:
    lines = [f"    {axis} = sizes[{axis!r}]" for axis in (*program.axes, *program.ints)]
    if "raising" in program.body.features:
        lines.append("    CALL[0] = index")
    for i, tensor in enumerate(program.tensors):
        shape = f"({''.join(f'{d}, ' for d in tensor.dims)})"
        lines.append(f"    {tensor.name} = make({shape}, {'layout' if i == 0 else repr('contiguous')}, rng)")
        if i == 1:
            lines.append(f'    if sharing == "same":\n        {tensor.name} = x')
            lines.append(f'    if sharing == "overlap":\n        both = torch.cat([x, {tensor.name}])')
            lines.append(f"        x, {tensor.name} = both[: x.shape[0]], both[1 : 1 + x.shape[0]]")
            lines.append(f"        if index % 2 == {program.seed % 2}:\n            both = torch.cat([x[:1], both])")
            lines.append(f"            x, {tensor.name} = (both[i : i + x.shape[0]].data for i in (1, 2))")
    lines += [f"    {t.name}.requires_grad_()" for t in program.tensors if t.requires_grad]
    if "gradient" in program.body.features:
        ways = ("layout", "'transposed'", "'sliced'")
        lines += [
            f"    {t.name}.grad = make({t.name}.shape, {ways[(program.seed + i) % 3]}, rng)"
            for i, t in enumerate(program.tensors)
        ]
    passed = [value.argument for value in program.values if value.argument is not None]
    lines.append(
        f"    values, given = VALUES[index], [{', '.join([*(t.name for t in program.tensors), *program.ints])}]"
    )
    lines += [f"    given.append({text})" for text in passed]
    for value in program.values:
        if value.place == "default":
            text = f"values[{value.name!r}]"
            lines.append(f"    given += [] if repr({text}) == {str(DEFAULT)!r} else [{text}]")
    return "\n".join([*lines, "    return given"])


_MAIN = """
if __name__ == "__main__":
    import copy

    same = lambda got, expected: torch.testing.assert_close(
        got, expected, rtol={tolerance}, atol={tolerance}, equal_nan=True
    )
    eager = Model()
    model = copy.deepcopy(eager)
    torch._dynamo.config.prepare_freezing = {freezing}
    compiled = torch.compile(model, backend={backend}, dynamic=DYNAMIC, fullgraph=True{options})
    names = {names}
    late = []
    for index, call in enumerate(CALLS):
        expected_inputs, inputs = make_inputs(index), make_inputs(index)
        set_state(eager, index), set_state(model, index)
        lay_in_model(index, eager, expected_inputs)
        lay_in_model(index, model, inputs)
        for (name, dim), specialize_on in MARKS.items():
            torch._dynamo.mark_dynamic(inputs[names.index(name)], dim, specialize_on=specialize_on)
{raising}        expected, got = eager(*expected_inputs), compiled(*inputs)
        same(got, expected)
        same(inputs, expected_inputs)
        same(list(model.buffers()), list(eager.buffers()))
        losses = []
        if {trainable}:
            for outputs in (expected, got):
                losses += [(o * o).sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        late += [losses, (inputs, expected_inputs)]
        if not {late_backward} or index == len(CALLS) - 1:
            while late:
                tensors, losses = late.pop(), late.pop()
                for loss in losses * {backwards}:
                    loss.backward(retain_graph=True)
                for b, a in zip(*tensors):
                    same(getattr(b, "grad", None), getattr(a, "grad", None))
            for a, b in zip(eager.parameters(), model.parameters()):
                same(b.grad, a.grad)
            with torch.no_grad():
                for p in (*eager.parameters(), *model.parameters()):
                    p.mul_(0.97).add_(0.01)
        print(index, call, "right")
"""


_MAIN_RAISING = """\
        if RAISES[index]:
            for run, given in ((eager, expected_inputs), (compiled, inputs)):
                RUNS.clear()
                try:
                    run(*given)
                except Refused:
                    assert len(RUNS) == 1, f"the operator ran {len(RUNS)} times in call {index}"
            continue
"""


def dtype_for(compiler: str) -> str:
    """float64 where the compiler runs eager's own kernels, so that hardly any tolerance is needed."""
    return "float32" if compiler == "inductor" else "float64"


def script(program: Program, compiler: str, backend: str = "multigraph") -> str:
    """The program as a file that runs alone and fails where a compiled call differs from eager."""
    names = [t.name for t in program.tensors] + list(program.ints)
    main = _MAIN.format(
        backend=repr("multigraph" if backend == "multigraph" else compiler),
        options=f', options={{"specialize": SPECIALIZE, "compiler": {compiler!r}}}' if backend == "multigraph" else "",
        names=names,
        freezing=program.weights_as_attributes,
        trainable=program.trainable,
        late_backward=program.late_backward,
        raising=_MAIN_RAISING if "raising" in program.body.features else "",
        backwards=program.backwards,
        tolerance=2e-3 if compiler == "inductor" else 1e-9,
    )
    head = f"# seed {program.seed}, profile {program.profile}\n"
    return head + definition(program, dtype_for(compiler)) + main
