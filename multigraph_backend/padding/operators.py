"""What each operator does with rows behind the real ones: the table that padding is proven with.

A *size* (a symbol `s`, say the first dimension of a batch) is padded from n to p.  A value is *kept* if, in a call with
padded inputs, its first f(n) entries along each dimension of size f(s) are what the call without padding has, and all
of it where no dimension depends on `s`.  For `y = x @ w`, `z = y.mean(1)`, `t = y.mean(0)` over `x` of sizes `[s, 8]`:

    y  [s, 4]   kept: mm computes each row from the same row of x
    z  [s]      kept: the mean is taken over the other dimension
    t  [4]      not kept: the rows behind n are part of the mean

A rule proves for one call of one operator: if its operands are kept, so are its results.  It says why where they are
not (`NotKept`).  An operator that has no rule is not known; nothing is said of it.

In: calls of ATen operators in a functional graph, with fake tensors over symbols.  Out: nothing, or `NotKept`.  Pure.

Positions: `torch.arange(s)` is kept, but its entries behind n are numbers that no call without padding has.  As indices
they could lie outside of what they index, and as divisors they could be zero.  Values that come from such are told
apart (`Call.positions`), and are neither.  So are values that come from several rows, `x[1:] - x[:-1]`: rows behind the
real ones repeat the last one, and so each by itself is one that a call may have, but not with the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from multigraph_backend import _compat

Shape = tuple[sympy.Expr, ...]
Rule = Callable[["Call"], None]

END = 2**62  # slices to the end have a larger number than any size


class NotKept(Exception):
    """The results of a call depend on rows behind the real ones; the message says in which way."""


@dataclass
class Call:
    """One call of an operator: its operands by the names of its schema, and results, under one padded size.

    `replace` gives an expression by what the trace found equal.  `positions`: nodes whose padded entries are numbers
    that no call without padding has.  `counting`: nodes that are `arange(0, f(s))`, or that with dimensions of size 1
    and expanded.  `shifted`: nodes whose rows are in other places than where they came from.
    """

    node: torch.fx.Node
    symbol: sympy.Symbol
    replace: Callable[[Any], Any]
    positions: set[torch.fx.Node] = field(default_factory=set)
    counting: dict[torch.fx.Node, sympy.Expr] = field(default_factory=dict)
    shifted: set[torch.fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.given = _Operands(_given(self.node))

    # ------------------------------------------------------------ numbers

    def expr(self, number: Any) -> Any:
        """An integer, SymInt or node of one as an expression; None for what is no number of sizes."""
        if isinstance(number, torch.fx.Node):
            number = number.meta.get("val")
        if isinstance(number, (*_compat.SymTypes, torch.SymBool)):
            return self.replace(_compat.sympy_expr(number))
        return sympy.Integer(number) if type(number) is int else None

    def depends(self, expr: Any) -> bool:
        return isinstance(expr, sympy.Basic) and self.symbol in expr.free_symbols

    def constant(self, number: Any, what: str) -> int | None:
        """An integer that is known; None for None.  Raises NotKept for one that depends on sizes."""
        if number is None:
            return None
        expr = self.expr(number)
        if expr is None or not expr.is_Integer:
            raise NotKept(f"takes {what} that depends on sizes")
        return int(expr)

    # ------------------------------------------------------------ tensors

    def shape(self, value: Any) -> Shape:
        """The sizes of a node's tensor, or of a fake tensor."""
        tensor = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        return tuple(self.expr(size) for size in tensor.shape)

    def padded(self, value: Any) -> list[int]:
        """The dimensions of a tensor that depend on the padded size."""
        return [dim for dim, size in enumerate(self.shape(value)) if self.depends(size)]

    def is_padded(self, value: Any) -> bool:
        """Whether this is a tensor with a padded dimension."""
        return isinstance(value, torch.fx.Node) and _is_tensor(value.meta.get("val")) and bool(self.padded(value))

    def apart_from_all(self) -> bool:
        """Whether no operand depends on the padded size: whatever this is, it is the same with padding and without."""
        nodes = self.node.all_input_nodes
        return not any(self.is_padded(node) or self.depends(self.expr(node)) or _is_list_of(node) for node in nodes)

    def tensors(self) -> list[torch.fx.Node]:
        """All operands that are tensors."""
        self.given.asked.update(self.given)
        found = [node for node in self.node.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        return list(dict.fromkeys(found))

    def results(self) -> list[torch.Tensor]:
        value = self.node.meta.get("val")
        entries = value if isinstance(value, list | tuple) else [value]
        return [entry for entry in entries if isinstance(entry, torch.Tensor)]

    def operand(self, name: str) -> torch.fx.Node | None:
        """The tensor that is given for an argument, None where it is left out.  Raises KeyError if there is no such."""
        value = self.given[name]
        return value if isinstance(value, torch.fx.Node) else None

    # ------------------------------------------------------------ what rules ask for

    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other or sympy.expand(one - other) == 0)

    def aligned(self, shape: Shape, result: Shape) -> None:
        """Entries of a broadcast operand go to entries of the result at the same place."""
        if len(shape) > len(result):
            raise NotKept("combines operands of other sizes than its result")
        for own, out in zip(reversed(shape), reversed(result), strict=False):
            if (self.depends(own) or self.depends(out)) and own != 1 and not self.same(own, out):
                raise NotKept(f"combines sizes {own} and {out}")

    def free(self, *names: str) -> None:
        """These operands do not depend on the padded size."""
        for name in names:
            value = self.given.get(name)
            for entry in value if _is_list(value) else [value]:
                if self.is_padded(entry):
                    raise NotKept(f"{_SHOWN.get(name, name)} has the padded dimension")

    def apart(self, name: str, dims: Sequence[int], what: str = "works along") -> None:
        """None of these dimensions of an operand is padded."""
        operand = self.operand(name)
        if operand is None:
            return
        count = len(self.shape(operand))
        if {dim % count for dim in dims if count}.intersection(self.padded(operand)):
            raise NotKept(f"{what} the padded dimension")

    def in_range(self, name: str) -> None:
        """Entries of these indices behind the real ones are in range, for rows of inputs are what they come from."""
        if self.operand(name) in self.positions:
            raise NotKept("takes positions as indices, which may lie outside of the table for padded rows")

    def takes_positions(self) -> None:
        self.positions.add(self.node)


_SHOWN = {"weight": "its weight", "mat2": "its right operand", "self": "its operand", "bias": "its bias"}


class _Operands(dict[str, Any]):
    """Operands by name; `asked`: those that a rule has looked at."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_list_of(node: torch.fx.Node) -> bool:
    return _is_list(node.meta.get("val"))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _given(node: torch.fx.Node) -> dict[str, Any]:
    """Operands by the names of the schema, with defaults."""
    given: dict[str, Any] = {}
    positional = iter(node.args)
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        if not argument.kwarg_only and (value := next(positional, node)) is not node:
            given[argument.name] = value
        elif argument.name in node.kwargs:
            given[argument.name] = node.kwargs[argument.name]
        else:
            given[argument.name] = argument.default_value if argument.has_default_value() else None
    return given


def check(call: Call) -> bool:
    """Whether the operator of this call has a rule, by which its results are kept.

    Raises NotKept where its results depend on padding.
    """
    target: Any = call.node.target
    schema = target._schema
    if call.apart_from_all() and not schema.is_mutable:
        return True
    name = schema.name
    entry = RULES.get(f"{name}.{schema.overload_name or 'default'}", RULES.get(name))
    if entry is None and torch.Tag.nondeterministic_seeded in target.tags:
        raise NotKept("draws random numbers, as many as there are rows")
    if schema.is_mutable and not _only_here(call.node):
        raise NotKept("changes its operands in place")
    if entry is None and torch.Tag.pointwise in target.tags:
        entry = _Entry(pointwise)
    if entry is None:
        return False
    for operand, value in call.given.items():
        if operand in entry.sizes:
            continue
        for number in value if _is_list(value) else [value]:
            if call.depends(call.expr(number)):
                raise NotKept("takes the padded size as a number")
    try:
        entry.rule(call)
    except KeyError:  # an overload with other operands than the rule is for
        return False
    for operand, value in call.given.items():
        if operand not in call.given.asked and any(map(call.is_padded, value if _is_list(value) else [value])):
            return False
    check_sizes(call)
    padded = [node for node in call.node.all_input_nodes if call.is_padded(node)]
    if call.shifted.intersection(padded):
        call.shifted.add(call.node)
        if len(padded) > 1:  # of which one may be of another row than the other
            call.takes_positions()
    if call.positions.intersection(call.node.all_input_nodes):
        call.takes_positions()
    return True


def _only_here(node: torch.fx.Node) -> bool:
    """Whether what is changed in place was made for it: nothing looks at it later, or by another name."""
    first = node.args[0] if node.args else None
    written = [entry for entry in node.target._schema.arguments if entry.alias_info and entry.alias_info.is_write]  # type: ignore[union-attr]
    if not isinstance(first, torch.fx.Node) or written != [node.target._schema.arguments[0]]:  # type: ignore[union-attr]
        return False
    before = first.op == "call_function" and all(user is node or user < node for user in first.users)
    return before and not any(_shares(entry) for entry in (first, *first.users) if entry is not node)


def _shares(node: torch.fx.Node) -> bool:
    """Whether its result may be memory of an operand."""
    if not isinstance(node.target, _compat.OpOverload):
        return True
    return any(entry.alias_info is not None for entry in node.target._schema.returns)


def check_sizes(call: Call) -> None:
    """Raises NotKept where a dimension of a result does not grow with the padded size."""
    for result in call.results():
        for size in call.shape(result):
            if call.depends(size) and not grows(size, call.symbol):
                raise NotKept(f"makes a dimension of size {size}")


def grows(size: sympy.Expr, symbol: sympy.Symbol) -> bool:
    """Whether a size is `a*symbol + b` with a positive `a`, so that more rows make it larger in the same steps."""
    size = sympy.expand(size)
    factor = size.coeff(symbol, 1)
    rest = sympy.expand(size - factor * symbol)
    if symbol in factor.free_symbols or symbol in rest.free_symbols:
        return False
    return bool(factor.is_positive)


# ---------------------------------------------------------------- rules


def pointwise(call: Call) -> None:
    (result, *_) = call.results()
    for operand in call.tensors():
        call.aligned(call.shape(operand), call.shape(result))
    divisor = call.given.get("other")
    name = call.node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if name in _DIVIDING and divisor in call.positions and not divisor.meta["val"].is_floating_point():
        raise NotKept("divides integers by positions, which may be zero for padded rows")


_DIVIDING = ("div", "floor_divide", "remainder", "fmod", "true_divide", "divide")


def same_place(call: Call) -> None:
    """A view or copy that moves dimensions as a whole."""
    operand = call.operand("a" if "a" in call.given else "self")
    if operand in call.counting and call.node.meta["val"].dtype in (torch.int32, torch.int64):
        call.counting[call.node] = call.counting[operand]


def moved(call: Call) -> None:
    """Dimensions change places."""
    call.operand("self")


def expand(call: Call) -> None:
    operand = call.operand("self")
    assert operand is not None
    call.aligned(call.shape(operand), call.shape(call.node))
    same_place(call)


def reshape(call: Call) -> None:
    """The same elements in the same order: a dimension of size f(s) has to stay the outermost of its elements."""
    operand = call.operand("self")
    assert operand is not None
    before, after = list(call.shape(operand)), list(call.shape(call.node))
    if operand in call.counting and sorted(map(str, filter(lambda n: n != 1, before))) == sorted(
        map(str, filter(lambda n: n != 1, after))
    ):
        call.counting[call.node] = call.counting[operand]
    while before and after and call.same(before[0], after[0]):
        del before[0], after[0]
    while before and after and call.same(before[-1], after[-1]):
        del before[-1], after[-1]
    found = [[dim for dim, size in enumerate(sizes) if call.depends(size)] for sizes in (before, after)]
    if not any(found):
        return
    if [len(dims) for dims in found] != [1, 1]:
        raise NotKept("reshapes across the padded dimension")
    outside = [sympy.prod(sizes[: dims[0]]) for sizes, dims in zip((before, after), found, strict=True)]
    if not call.same(*outside):
        raise NotKept("reshapes so that padded rows lie between real ones")


def select(call: Call) -> None:
    dims = call.padded(call.given["self"])
    if _dim(call) in dims:
        index = call.constant(call.given["index"], "a row")
        if index is None or index < 0:
            raise NotKept("reads a row counted from the end")


def _dim(call: Call, name: str = "self") -> int:
    count = len(call.shape(call.given[name]))
    return int(call.constant(call.given["dim"], "a dimension") or 0) % max(count, 1)


def slice_(call: Call) -> None:
    dim = _dim(call)
    start, end = call.given.get("start"), call.given.get("end")
    if start in (None, 0) and call.given.get("step") in (None, 1) and _to_the_end(call, end, dim):
        same_place(call)  # `positions[:, None]` takes all of them first
        return
    if dim not in call.padded(call.given["self"]):
        if call.depends(call.expr(start)):
            raise NotKept("reads rows from a place on that depends on the padded size")
        if call.depends(call.expr(end)):
            call.takes_positions()  # a table up to row s: rows of it that no call without padding reads
        return
    first = call.constant(start, "a start") or 0
    if first < 0:
        raise NotKept("reads rows counted from the end")
    if first > 0:
        call.shifted.add(call.node)


def _to_the_end(call: Call, end: Any, dim: int) -> bool:
    known = call.expr(end)
    if known is None or (known.is_Integer and known >= END):
        return True
    return call.same(known, call.shape(call.given["self"])[dim])


def slice_scatter(call: Call) -> None:
    source = call.given["src"]
    dim = _dim(call)
    if dim in call.padded(call.given["self"]):
        start, end = call.constant(call.given.get("start"), "a start"), call.given.get("end")
        known = call.expr(end)
        if (start or 0) < 0 or not (_to_the_end(call, end, dim) or (known.is_Integer and known >= 0)):
            raise NotKept("writes to rows counted from the end")
        call.shifted.add(call.node)
    elif any(call.depends(call.expr(call.given.get(name))) for name in ("start", "end")):
        raise NotKept("writes to a part that depends on the padded size")
    others = [size for at, size in enumerate(call.shape(source)) if at != dim]
    call.aligned(tuple(others), tuple(size for at, size in enumerate(call.shape(call.given["self"])) if at != dim))


def select_scatter(call: Call) -> None:
    dim = _dim(call)
    if dim in call.padded(call.given["self"]) and (call.constant(call.given["index"], "a row") or 0) < 0:
        raise NotKept("writes to a row counted from the end")
    sizes = [size for at, size in enumerate(call.shape(call.given["self"])) if at != dim]
    call.aligned(call.shape(call.given["src"]), tuple(sizes))


def cat(call: Call) -> None:
    tensors = [entry for entry in call.given["tensors"] if call.shape(entry) != (0,)]
    count = len(call.shape(call.node))
    dim = int(call.constant(call.given["dim"], "a dimension") or 0) % max(count, 1)
    for entry in tensors[:-1]:
        if dim in call.padded(entry):
            raise NotKept("puts rows behind padded ones")
    if len(tensors) > 1 and dim in call.padded(call.node):
        call.shifted.add(call.node)
    for entry in tensors:
        for at, (own, out) in enumerate(zip(call.shape(entry), call.shape(call.node), strict=True)):
            if at != dim and (call.depends(own) or call.depends(out)) and not call.same(own, out):
                raise NotKept(f"joins sizes {own} and {out}")


def stack(call: Call) -> None:
    for entry in call.given["tensors"]:
        if not all(map(call.same, call.shape(entry), call.shape(call.given["tensors"][0]))):
            raise NotKept("joins tensors of other sizes")


def repeat(call: Call) -> None:
    operand, repeats = call.given["self"], call.given["repeats"]
    more = len(repeats) - len(call.shape(operand))
    for dim in call.padded(operand):
        if call.expr(repeats[dim + more]) != 1:
            raise NotKept("repeats rows behind padded ones")


def filled(call: Call) -> None:
    """New tensors that are the same everywhere."""
    call.given.get("self")


def assertion(call: Call) -> None:
    """What the program says of its sizes, it says of the real ones."""
    said = call.given["self"]
    compared = [said, *said.all_input_nodes] if isinstance(said, torch.fx.Node) else []
    if any(call.depends(call.expr(number)) for number in compared):
        raise NotKept("asserts something of the padded size")


def arange(call: Call) -> None:
    if call.depends(call.expr(call.given["end"])):
        call.takes_positions()
        whole = call.given.get("start") in (None, 0) and call.given.get("step") in (None, 1)
        if whole and call.node.meta["val"].dtype in (torch.int32, torch.int64):
            call.counting[call.node] = call.shape(call.node)[0]


def looked_at(call: Call) -> None:
    """Asks for types alone."""
    call.tensors()


def by_place(call: Call) -> None:
    """What depends on the place of an entry among its rows and columns, counted from the first."""
    call.given.get("self")
    if any(map(call.padded, call.results())):
        call.takes_positions()


def along(name: str = "dim", operand: str = "self") -> Rule:
    """Works along the dimensions that an argument lists, all where it lists none."""

    def rule(call: Call) -> None:
        given = call.given.get(name)
        count = len(call.shape(call.given[operand]))
        dims = [given] if isinstance(given, int) else list(given or range(count))
        call.apart(operand, dims)

    return rule


def over_all(call: Call) -> None:
    call.apart("self", range(len(call.shape(call.given["self"]))), "works over all entries, those of")


def last(count: int, operand: str = "self", *constants: str) -> Rule:
    """Works along the last `count` dimensions of an operand; the other operands do not depend on the size."""

    def rule(call: Call) -> None:
        call.apart(operand, range(-count, 0))
        call.free(*constants)

    return rule


def leading(count: int, operand: str, *constants: str) -> Rule:
    """Works on all but the first `count` dimensions of an operand."""

    def rule(call: Call) -> None:
        call.apart(operand, range(count, len(call.shape(call.given[operand]))))
        call.free(*constants)

    return rule


def layer_norm(call: Call) -> None:
    shape = call.given["normalized_shape"]
    call.apart("input", range(-len(shape), 0))
    call.free("weight", "bias")


def convolution(call: Call) -> None:
    call.free("weight", "bias")
    if len(call.shape(call.given["input"])) != len(call.shape(call.given["weight"])):
        raise NotKept("convolves what has no batch dimension")
    call.apart("input", range(1, len(call.shape(call.given["input"]))))


def batch_norm(call: Call) -> None:
    if call.given.get("training"):
        raise NotKept("takes the mean over all rows (training)")
    call.free("weight", "bias", "running_mean", "running_var")
    call.apart("input", [1])


def product(left: str, right: str, bias: str | None = None) -> Rule:
    """A matrix product: rows of the left operand, columns of the right one."""

    def rule(call: Call) -> None:
        call.apart(left, [-1], "adds up along")
        right_count = len(call.shape(call.given[right]))
        call.apart(right, [0 if right_count == 1 else -2], "adds up along")
        batch = call.shape(call.node)[:-2] if right_count > 2 else ()
        if batch:
            for operand in (left, right):
                call.aligned(call.shape(call.given[operand])[:-2], batch)
        if bias is not None and call.operand(bias) is not None:
            call.aligned(call.shape(call.given[bias]), call.shape(call.node))

    return rule


def linear(call: Call) -> None:
    call.apart("input", [-1], "adds up along")
    call.free("weight", "bias")


def dot(call: Call) -> None:
    call.apart("self", [0], "adds up along")


def scaled_mm(call: Call) -> None:
    call.apart("self", [-1], "adds up along")
    call.free("mat2", "scale_b", "bias", "scale_result")
    scale = call.operand("scale_a")
    if scale is not None and call.padded(scale) and call.shape(scale) != (call.shape(call.given["self"])[0], 1):
        raise NotKept("has scales along the padded dimension")


def embedding(call: Call) -> None:
    call.free("weight")
    call.in_range("indices")


def index_select(call: Call) -> None:
    _lookup(call, _dim(call), call.given["index"])


def _lookup(call: Call, dim: int, indices: Any) -> None:
    """Entries of dimension `dim` by their numbers."""
    if dim in call.padded(call.given["self"]):
        if not call.same(call.counting.get(indices, sympy.Integer(-1)), call.shape(call.given["self"])[dim]):
            raise NotKept("reads rows of the padded dimension by numbers")
    elif indices in call.positions:
        raise NotKept("takes positions as indices, which may lie outside of the table for padded rows")


def index(call: Call) -> None:
    for dim, indices in enumerate(call.given["indices"]):
        if indices is None:
            continue
        if indices.meta["val"].dtype in (torch.bool, torch.uint8):
            raise NotKept("picks rows by a mask, as many as there are")
        _lookup(call, dim, indices)


def gather(call: Call) -> None:
    dim = _dim(call)
    call.apart("self", [dim], "reads by numbers along")
    call.in_range("index")
    _beside(call, dim, "index")


def _beside(call: Call, dim: int, *names: str) -> None:
    """Apart from `dim`, these operands have the sizes of the first one where they are padded.

    Where they are not, they are about the first rows of it, which are real.
    """
    for name in names:
        operand = call.given.get(name)
        if not isinstance(operand, torch.fx.Node):
            continue
        for at, (own, size) in enumerate(zip(call.shape(operand), call.shape(call.given["self"]), strict=False)):
            if at != dim and call.depends(own) and not call.same(own, size):
                raise NotKept(f"combines sizes {own} and {size}")


def scatter(call: Call) -> None:
    dim = _dim(call)
    for name in ("self", "index", *(["src"] if "src" in call.given else [])):
        call.apart(name, [dim], "writes by numbers along")
    call.in_range("index")
    _beside(call, dim, "index", "src")


def along_index(call: Call) -> None:
    """Writes to places along one dimension by numbers."""
    dim = _dim(call)
    call.apart("self", [dim], "writes by numbers along")
    call.free("index")
    _beside(call, dim, *(["source"] if "source" in call.given else []))


def index_put(call: Call) -> None:
    for dim, indices in enumerate(call.given["indices"]):
        if indices is not None:
            call.apart("self", [dim], "writes by numbers along")
            if call.padded(indices):
                raise NotKept("writes where the padded rows say, too")
    call.free("values")


def attention(call: Call) -> None:
    """softmax(query @ key) @ value over the last two dimensions; batch and heads come before."""
    if call.given.get("dropout_p"):
        raise NotKept("draws random numbers (dropout)")
    sizes = call.shape(call.given["query"])
    for name in ("key", "value"):
        call.apart(name, [-1, -2], "works along")
        for own, other in zip(call.shape(call.given[name])[:-2], sizes[:-2], strict=True):
            if (call.depends(own) or call.depends(other)) and not call.same(own, other):
                raise NotKept(f"combines sizes {own} and {other}")
    call.apart("query", [-1])
    if call.given.get("is_causal"):
        call.apart("query", [-2])
    for name in ("attn_bias", "attn_mask"):
        mask = call.given.get(name)
        if isinstance(mask, torch.fx.Node):
            call.aligned(call.shape(mask), (*sizes[:-1], call.shape(call.given["key"])[-2]))


def constant_pad(call: Call) -> None:
    pad = list(call.given["pad"])
    dims = call.padded(call.given["self"])
    count = len(call.shape(call.given["self"]))
    for step in range(len(pad) // 2):
        dim = count - 1 - step
        if dim in dims and ((call.constant(pad[2 * step], "a width") or 0) < 0 or call.expr(pad[2 * step + 1]) != 0):
            raise NotKept("adds entries behind padded rows")
        if dim in dims and call.expr(pad[2 * step]) != 0:
            call.shifted.add(call.node)


def split(call: Call) -> None:
    call.apart("self", [_dim(call)], "splits")


def view_dtype(call: Call) -> None:
    call.apart("self", [-1], "reads as another type along")


def by_memory(call: Call) -> None:
    """A padded input lies in other memory than the window that a caller gives: what its trial reads says nothing."""
    raise NotKept("reads memory by its place, and padded inputs lie elsewhere")


@dataclass(frozen=True)
class _Entry:
    """A rule, and which operands may be sizes that depend on the padded one."""

    rule: Rule
    sizes: tuple[str, ...] = ()


def _table(entries: Mapping[str, tuple[Rule, tuple[str, ...]] | Rule]) -> dict[str, _Entry]:
    table: dict[str, _Entry] = {}
    for names, entry in entries.items():
        rule, sizes = entry if isinstance(entry, tuple) else (entry, ())
        table.update((name if "::" in name else f"aten::{name}", _Entry(rule, sizes)) for name in names.split())
    return table


_SIZE = ("size",)

RULES: dict[str, _Entry] = _table({
    "clone detach alias _to_copy lift_fresh_copy lift_fresh unsqueeze positive": same_place,
    "prims::convert_element_type prims::view_of prims::device_put": same_place,
    "copy fill masked_fill isin.Tensor_Scalar floor_divide": pointwise,
    "view_as_real view_as_complex permute transpose t movedim squeeze numpy_T mT adjoint": moved,
    "conj _conj resolve_conj resolve_neg real imag": moved,
    "expand": (expand, _SIZE),
    "view.dtype": view_dtype,
    "view _unsafe_view reshape _reshape_copy": (reshape, _SIZE),
    "select": select,
    "slice": (slice_, ("start", "end")),
    "slice_scatter": (slice_scatter, ("start", "end")),
    "select_scatter": select_scatter,
    "cat concat": cat,
    "stack": stack,
    "repeat": (repeat, ("repeats",)),
    "full zeros ones empty new_full new_zeros new_ones new_empty": (filled, _SIZE),
    "empty_strided new_empty_strided empty_permuted": (filled, ("size", "stride")),
    "full_like zeros_like ones_like empty_like scalar_tensor zero": filled,
    "linspace logspace": filled,
    "arange": (arange, ("end",)),
    "prims::iota": (by_place, ("length",)),
    "tril triu": by_place,
    "as_strided as_strided_copy as_strided_scatter": (by_memory, ("size", "stride", "storage_offset")),
    "eye": (by_place, ("n", "m")),
    "sum mean amax amin prod any all argmax argmin var std var_mean std_mean logsumexp linalg_vector_norm": along(),
    "norm median nanmedian mode kthvalue topk sort argsort cumsum cumprod cummax cummin logcumsumexp nansum": along(),
    "_softmax _log_softmax softmax log_softmax _safe_softmax glu max.dim min.dim aminmax count_nonzero": along(),
    "roll flip": along("dims"),
    "sum.default mean.default prod.default any.default all.default max.default min.default var.default": over_all,
    "std.default median.default nonzero masked_select unique _unique2 bincount histc dot vdot allclose equal": over_all,
    "is_nonzero _local_scalar_dense item": over_all,
    "mm _int_mm": product("self", "mat2"),
    "bmm": product("self", "mat2"),
    "matmul": product("self", "other"),
    "mv": product("self", "vec"),
    "addmm": product("mat1", "mat2", "self"),
    "baddbmm": product("batch1", "batch2", "self"),
    "linear": linear,
    "_scaled_mm": scaled_mm,
    "embedding": embedding,
    "index": index,
    "index_select": index_select,
    "gather": gather,
    "scatter scatter_add scatter_reduce": scatter,
    "index_fill index_add index_copy": along_index,
    "index_put _unsafe_index_put": index_put,
    "_unsafe_index": index,
    "native_layer_norm _fused_rms_norm": layer_norm,
    "native_group_norm": (leading(1, "input", "weight", "bias"), ("N",)),
    "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm": batch_norm,
    "_native_batch_norm_legit _batch_norm_with_update batch_norm_with_update": batch_norm,
    "_native_batch_norm_legit_functional _batch_norm_no_update": batch_norm,
    "convolution": convolution,
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d": last(2),
    "reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d": last(2),
    "upsample_bicubic2d _upsample_bilinear2d_aa": last(2),
    "avg_pool1d max_pool1d reflection_pad1d upsample_linear1d upsample_nearest1d": last(1),
    "sym_size sym_stride sym_numel sym_storage_offset": filled,
    "_assert_tensor_metadata": looked_at,
    "_assert_async": over_all,
    "_assert_scalar": assertion,
    "sym_constrain_range sym_constrain_range_for_size": filled,
    "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d": last(3),
    "upsample_trilinear3d upsample_nearest3d pixel_shuffle": last(3),
    "constant_pad_nd": (constant_pad, ()),
    "unsafe_split unsafe_split_with_sizes split split_with_sizes split_with_sizes_copy split_copy unbind chunk": split,
    "bucketize": last(0, "self", "boundaries"),
    "searchsorted": last(0, "self", "sorted_sequence"),
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention": attention,
    "_scaled_dot_product_fused_attention_overrideable": attention,
})  # fmt: skip
