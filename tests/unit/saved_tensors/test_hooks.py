"""Hooks of the user's own: what they may do, what is checked, what is said where they cannot be used.

Rows of the table of stock's defects are named where a test is about one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from multigraph_backend import Match, Rule, saved_hook
from multigraph_backend.saved_tensors import content
from multigraph_backend.saved_tensors.hooks import SavedHook
from tests.support.saved_tensors.partitioned import Partitioned, gradients, partition

X, W, V = torch.randn(8, 12), torch.randn(12, 24), torch.randn(24, 12)
TURN = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(0)))[0]
Named = collections.namedtuple("Named", ["narrow", "dtype"])


def two_layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(x @ w) @ v).sin()


def packed_by(hook: SavedHook, dynamic: bool = False) -> Partitioned:
    return partition(two_layers, [Rule(Match(min_bytes=0), hook)], dynamic)


def assert_gradients(hook: SavedHook, bound: float, dynamic: bool = False) -> None:
    """Gradients are within `bound` of eager's, and everything that may be was packed by `hook`."""
    made = packed_by(hook, dynamic=dynamic)
    got, expected = gradients(made.run, X, W, V), gradients(two_layers, X, W, V)
    (said,) = made.accounts
    assert said.failed is None
    assert [entry.packed for entry in said.tensors if entry.op in ("aten::mm", "aten::sigmoid")] == [str(hook)] * 2
    for gradient, wanted in zip(got, expected, strict=True):
        assert (gradient - wanted).norm() <= bound * wanted.norm()


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


@dataclasses.dataclass
class Holder:
    narrow: torch.Tensor
    other: list[Any]


def rebuilt(holder: Holder) -> torch.Tensor:
    return (holder.narrow + holder.other[0] - holder.other[0]).to(holder.other[1])


HOOKS = {
    "identity": saved_hook(lambda x: x, lambda x: x),
    "cast (row 9: plain traced hook)": saved_hook(to(torch.bfloat16), to(torch.float32)),
    "random numbers (row 1)": saved_hook(
        lambda x: (x * 999 + torch.rand_like(x)).floor().to(torch.int16), lambda q: q.to(torch.float32) / 999
    ),
    "torch.tensor (row 3)": saved_hook(lambda x: x / torch.tensor(3.0), lambda x: x * torch.tensor(3.0)),
    "a captured tensor (row 3)": saved_hook(lambda x: x * TURN[0, 0], lambda x: x / TURN[0, 0]),
    "None, 0 and () (row 4)": saved_hook(lambda x: (x.half(), None, 0, ()), lambda p: p[0].float() + p[2]),
    "the same tensor twice (row 5)": saved_hook(lambda x: (y := x.half(), y), lambda p: (p[0].float() + p[1]) / 2),
    "its input twice (row 5)": saved_hook(lambda x: (x, x), lambda p: (p[0] + p[1]) / 2),
    "a namedtuple (row 6)": saved_hook(lambda x: Named(x.half(), x.dtype), lambda p: p.narrow.to(p.dtype)),
    "an object (row 6)": saved_hook(lambda x: Holder(x.half(), [x[:1], x.dtype]), rebuilt),
    "a dict of lists": saved_hook(lambda x: {"a": [x.half(), "b"]}, lambda p: p["a"][0].float()),
    "another layout": saved_hook(lambda x: x.half().T.contiguous(), lambda x: x.float().T),
    "in place, on its own": saved_hook(lambda x: x.clone().mul_(2).half(), lambda x: x.float().div_(2)),
}


@pytest.mark.parametrize(
    ("what", "dynamic"), [*((what, False) for what in HOOKS), *((what, True) for what in list(HOOKS)[1::3])]
)
def test_what_a_hook_may_do(what: str, dynamic: bool) -> None:
    assert_gradients(HOOKS[what], 0.02, dynamic)


def test_a_captured_tensor_is_a_constant_of_the_graphs() -> None:
    """A later change of the captured tensor is not seen, on purpose: it would be seen by code from no cache alone."""
    turn = TURN[0, 0].clone()
    hook = saved_hook(lambda x: x * turn, lambda x: x / turn)
    made = packed_by(hook)
    before = gradients(made.run, X, W, V)
    turn.zero_()
    for gradient, again in zip(before, gradients(made.run, X, W, V), strict=True):
        torch.testing.assert_close(again, gradient, rtol=0, atol=0)


UNFIT = {
    "another dtype (row 7)": (lambda x: x.half(), lambda x: x, "unpack returned torch.float16 where torch.float32"),
    "another shape (row 7)": (lambda x: x[:4], lambda x: x, "unpack returned the shape"),
    "no tensor": (lambda x: x, lambda x: (x,), "unpack returned a tuple, not a tensor"),
    "another device": (lambda x: x, lambda x: x.to("meta"), "on meta where one on cpu was saved"),
    "a value": (lambda x: x if x.sum() > 0 else -x, lambda x: x, "pack cannot be traced"),
    "a change of its input": (lambda x: x.mul_(2), lambda x: x / 2, "changes its input"),
    "memory, by numpy": (lambda x: torch.from_numpy(x.numpy()), lambda x: x, "memory of a tensor (numpy)"),
    "memory, by an array": (lambda x: torch.from_numpy(numpy.asarray(x)), lambda x: x, "memory of a tensor"),
    "memory, by DLPack": (lambda x: torch.from_dlpack(x), lambda x: x, "memory of a tensor"),
    "memory, unpacking": (lambda x: x, lambda x: torch.from_numpy(x.numpy() * 1.0), "unpack takes the memory"),
    "an error of its own": (lambda x: x.no_such(), lambda x: x, "AttributeError"),
    "what hides tensors": (lambda x: lambda: x, lambda f: f(), "in which tensors cannot be found"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_hook_that_cannot_be_used_leaves_the_tensor_as_it_is(what: str) -> None:
    pack, unpack, reason = UNFIT[what]
    made = packed_by(saved_hook(pack, unpack))
    got, expected = gradients(made.run, X, W, V), gradients(two_layers, X, W, V)
    torch.testing.assert_close(got, expected)
    (said,) = made.accounts
    assert said.packed == 0
    reasons = [entry.reason for entry in said.tensors if entry.op in ("aten::mm", "aten::sigmoid")]
    assert len(reasons) == 2
    assert all(reason in str(given) for given in reasons), reasons


def test_a_pair_of_decorators_makes_a_hook() -> None:
    @saved_hook
    def halves(x: torch.Tensor) -> Any:
        """Half precision."""
        return x.half()

    assert not halves.complete
    with pytest.raises(ValueError, match=r"halves has no unpack function; decorate one with its \.unpack"):
        Rule(pack=halves)

    @halves.unpack
    def halves(packed: Any) -> torch.Tensor:
        return packed.float()

    assert halves.complete
    assert halves.__doc__ == "Half precision."
    assert_gradients(halves, 0.01)


def test_what_is_no_hook() -> None:
    with pytest.raises(TypeError, match="takes a function that packs one tensor"):
        saved_hook(3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="a rule packs with Keep, Cast, Scaled, Bits, Offload, Recompute or a saved_hook"
    ):
        Rule(pack=lambda x: x)  # type: ignore[arg-type]


# ---------------------------------------------------------------- content


def scaled(by: float, dtype: torch.dtype = torch.float16) -> SavedHook:
    table = torch.tensor([by])
    return saved_hook(lambda x: (x * by).to(dtype), lambda x: x.float() / table)


def test_equal_hooks_built_anew_are_one_hook() -> None:
    assert scaled(2.0) == scaled(2.0)
    assert len({scaled(2.0), scaled(2.0), scaled(3.0)}) == 2
    assert scaled(2.0) != scaled(3.0)
    assert scaled(2.0) != scaled(2.0, torch.bfloat16)


FACTOR = 2.0


def by_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def through_another(x: torch.Tensor) -> torch.Tensor:
    return by_a_global(x) + 1


@pytest.mark.parametrize("function", [by_a_global, through_another])
def test_what_a_function_refers_to_is_part_of_it(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    key = saved_hook(function, to(torch.float32)).key
    assert key == saved_hook(function, to(torch.float32)).key
    monkeypatch.setitem(function.__globals__, "FACTOR", 3.0)
    assert key != saved_hook(function, to(torch.float32)).key


def test_a_tensor_that_changes_in_place_changes_the_hook() -> None:
    table = torch.ones(4)
    hook = saved_hook(lambda x: x * table[0], lambda x: x / table[0])
    key = hook.key
    assert hook.key == key
    table.mul_(2)
    assert hook.key != key


def test_graph_modules_are_their_code_and_constants() -> None:
    def traced(by: float) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(lambda x: x * by)

    assert SavedHook(traced(2.0), traced(0.5)) == SavedHook(traced(2.0), traced(0.5))
    assert SavedHook(traced(2.0), traced(0.5)) != SavedHook(traced(4.0), traced(0.5))


class Caller:
    """Does what it is told; `mode` says by which of its methods."""

    by = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def __getitem__(self, index: int) -> float:
        return self.by * index

    @property
    def twice(self) -> float:
        return 2 * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Table(dict[str, float]):
    """A container of a user's own, with state beside what it contains."""

    by = 1.0

    def __missing__(self, key: str) -> float:
        return self.by


class Number(float):
    by = 1.0


def other(self: Any, *args: Any) -> Any:
    return 7.0


def table(by: float) -> Table:
    made = Table(a=1.0)
    made.by = by
    return made


def number(by: float) -> Number:
    made = Number(2.0)
    made.by = by
    return made


def with_attribute(by: float) -> Callable[..., Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * function.by  # type: ignore[attr-defined]

    function.by = by  # type: ignore[attr-defined]
    return function


def wrapping(by: float) -> Callable[..., Any]:
    """What `functools.wraps` makes look like a function of torch."""

    @functools.wraps(torch.nn.functional.relu)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * by

    return function


def remembering(by: float) -> Callable[..., Any]:
    @functools.lru_cache
    def function(size: int) -> float:
        return size * by

    return function


def submodule(by: float) -> Callable[..., Any]:
    """Of a module of the user's inside of another one."""
    outer, inner = types.ModuleType("outer"), types.ModuleType("outer.inner")
    inner.by, outer.inner = by, inner  # type: ignore[attr-defined]
    return lambda x: x * outer.inner.by


@dataclasses.dataclass(frozen=True)
class Scale:
    by: float
    also: tuple[float, ...] = dataclasses.field(default=(1.0,), hash=False)


def keyword_only(yes: bool) -> Callable[..., Any]:
    if yes:
        return lambda x, y=1, *, z=2: x * z
    return lambda x, y=1, z=2: x * z


#: values of each kind, made of a number: content differs where the number does, and nowhere else
OF_A_NUMBER: dict[str, Callable[[float], Any]] = {
    "a bound method of a dict": lambda by: {"a": by}.get,
    "a bound method of a list": lambda by: [by].__getitem__,
    "a bound method of a number": lambda by: by.__mul__,
    "the state of a subclass of dict": table,
    "the state of a subclass of float": number,
    "slots": Slotted,
    "an attribute of a function": with_attribute,
    "a function that looks like torch's": wrapping,
    "a function that remembers": remembering,
    "a module inside of a module": submodule,
    "a dataclass": Scale,
    "a field of a namedtuple": lambda by: Named(by, torch.float32),
    "a default dict": lambda by: collections.defaultdict(lambda: by),
    "a deque": lambda by: collections.deque([by]),
    "a partial function": lambda by: functools.partial(max, by),
    "an array": lambda by: numpy.array([by]),
    "a tensor's attribute": lambda by: _tensor_with(by),
    "a deep one": lambda by: [{"a": (Slotted(by), [table(by)])}],
}


def _tensor_with(by: float) -> torch.Tensor:
    made = torch.ones(2)
    made.by = by  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("what", OF_A_NUMBER)
def test_nothing_is_left_out(what: str) -> None:
    make = OF_A_NUMBER[what]
    assert content.digest(make(2.0)) == content.digest(make(2.0))
    assert content.digest(make(2.0)) != content.digest(make(3.0))


@pytest.mark.parametrize("method", ["__call__", "__getitem__", "__enter__", "__add__", "twice"])
def test_any_method_of_a_class_is_part_of_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = saved_hook(Caller(), lambda x: x)
    key = hook.key
    assert key == saved_hook(Caller(), lambda x: x).key
    monkeypatch.setattr(Caller, method, other, raising=False)
    assert not key.startswith("unreadable")
    assert hook.key != key


def test_how_a_function_is_called_is_part_of_it() -> None:
    assert content.digest(keyword_only(True)) != content.digest(keyword_only(False))


class CopiesItself:
    def __init__(self, by: float) -> None:
        self.by = by

    def __getstate__(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    "value",
    [CopiesItself(1.0), types.ModuleType("mine"), (entry for entry in ()), threading.Lock(), weakref.ref(Caller)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_is_refused(value: Any) -> None:
    with pytest.raises(content.CannotHash):
        content.digest([value])


@pytest.mark.parametrize("seed", range(40))
def test_values_at_random_differ_by_content_alone(seed: int) -> None:
    """Kinds inside of kinds: made anew they are the same, and one number that differs anywhere is seen."""

    def make(numbers: list[float]) -> Any:
        rng = random.Random(seed)

        def draw(depth: int) -> Any:
            kind = rng.choice([*OF_A_NUMBER, "list", "dict", "object", "closure"] if depth else [*OF_A_NUMBER])
            if kind == "list":
                return [draw(depth - 1) for _ in range(rng.randint(1, 3))]
            if kind == "dict":
                return {rng.random(): draw(depth - 1) for _ in range(rng.randint(1, 3))}
            if kind == "object":
                made = Caller()
                made.held = draw(depth - 1)  # type: ignore[attr-defined]
                return made
            if kind == "closure":
                held = draw(depth - 1)
                return lambda x: (x, held)
            numbers.append(0.0)
            return OF_A_NUMBER[kind](changes.get(len(numbers), 2.0))

        return draw(3)

    numbers: list[float] = []
    changes: dict[int, float] = {}
    first = content.digest(make(numbers))
    assert content.digest(make([])) == first
    changes = {random.Random(seed + 1000).randint(1, len(numbers)): 3.0}
    assert content.digest(make([])) != first


@pytest.mark.parametrize("mutant", ["dunder methods", "bound objects", "states of containers"])
def test_it_would_be_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the defects that there were, put back."""
    if mutant == "dunder methods":
        monkeypatch.setattr(content, "_NOTES", {*content._NOTES, "__call__"})
        with pytest.raises(AssertionError):
            test_any_method_of_a_class_is_part_of_it("__call__", monkeypatch)
        return
    if mutant == "bound objects":
        monkeypatch.setattr(content, "_bound", lambda value: False)
        monkeypatch.setattr(content, "_stable", lambda value: isinstance(value, types.BuiltinFunctionType))
        what = "a bound method of a dict"
    else:
        monkeypatch.setattr(content._Reader, "_object", lambda self, value: self.read(dict(value)))
        what = "the state of a subclass of dict"
    with pytest.raises(AssertionError):
        test_nothing_is_left_out(what)


def test_a_hook_whose_content_cannot_be_read_equals_itself_alone() -> None:
    lock = threading.Lock()

    def make() -> SavedHook:
        return saved_hook(lambda x: (x, lock)[0], lambda x: x)

    hook = make()
    assert hook.key.startswith("unreadable")
    assert hook == hook
    assert hook != make()
