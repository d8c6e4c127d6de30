"""One padded call: inputs made longer, the region's code run, outputs cut back; as generated text.

For `f(x, w)` over `x` of sizes `[s0, 8]` (arguments `s0, x, w`), where the output `[s0, 4]` is a slice:

    def padded(a, p0):
        b1 = extended(a[1], ((0, a[0], p0, 1),), (p0, 8), (8, 1))
        o = dispatch(p0, b1, a[2])
        tick()
        return (o[0].narrow(0, 0, a[0]),)

Rows behind the real ones repeat the last real one, for all types: so indices stay in range, nothing is divided by a
zero that was not there before, and no NaN comes up.  Padded inputs are new tensors at each call, with the strides that
Dynamo's guards speak of.

In: a captured graph, a `Proof`, the symbols to pad.  Out: `PaddedCall`: functions of a call's arguments and of the
padded sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.padding.proof import CannotPad, Output, Proof, printer

Sizes = tuple[int, ...]
Dims = tuple[tuple[int, int, int, int], ...]  # dimension, real size, padded size, rows that are repeated together


@dataclass(frozen=True)
class PaddedCall:
    """`run(a, *sizes)`: the outputs of a call with arguments `a`, padded to `sizes`.  `inputs(a, *sizes)`: the padded
    arguments alone; `numbers(a, *sizes)`: with tensors as they are.  `cut(outputs, a)`: outputs of such arguments, cut
    back to what `a` stands for.

    `fits(a, *sizes)`: Dynamo's guards hold for the padded sizes too, and inputs can be padded.  `steady`: whether that
    depends on nothing but real and padded sizes.  `source`: the generated text.
    """

    run: Callable[..., Any]
    inputs: Callable[..., tuple[Any, ...]]
    numbers: Callable[..., tuple[Any, ...]]
    cut: Callable[..., tuple[Any, ...]]
    fits: Callable[..., bool]
    steady: bool
    source: str


def make(
    graph: CapturedGraph,
    proof: Proof,
    symbols: Sequence[sympy.Symbol],
    dispatch: Callable[..., Any],
    tick: Callable[[], object],
) -> PaddedCall:
    """Raises `CannotPad` where an input cannot be made longer."""
    real = {symbol: info.location.text() for symbol, info in graph.symbols.items() if info.location is not None}
    sizes = {symbol: f"p{number}" for number, symbol in enumerate(symbols)}
    texts = _Texts(graph, printer(real), printer({**real, **sizes}), frozenset(symbols))
    names = ", ".join(["a", *sizes.values()])
    made = [texts.input(index) for index in range(len(graph.inputs))]
    lines = [f"    b{index} = {text}" for index, text in enumerate(made) if text is not None]
    passed = ", ".join(f"a[{index}]" if text is None else f"b{index}" for index, text in enumerate(made))
    back = [
        f"    a[{index}].copy_({texts.prefix(index)})"
        for index, text in enumerate(made)
        if text is not None and index in graph.written
    ]
    cut = [_output(number, output) for number, output in enumerate(proof.outputs)]
    lines_of_cut = [
        f"    r{number} = {text}" for number, text in enumerate(cut) if proof.outputs[number].kind != "same"
    ]
    returned = "".join(f"r{output.of if output.kind == 'same' else at}, " for at, output in enumerate(proof.outputs))
    source = "\n".join([
        f"def padded({names}):", *lines, f"    o = dispatch({passed})", *back, "    tick()", *lines_of_cut,
        f"    return ({returned})",
        f"def inputs({names}):", *lines, f"    return ({passed}{',' if made else ''})",
        f"def numbers({names}):", f"    return ({texts.numbers(made)})",
        "def cut(o, a):", *lines_of_cut, f"    return ({returned})",
        f"def fits({names}):", f"    return {texts.fits()}",
        "",
    ])  # fmt: skip
    namespace: dict[str, Any] = {
        **_compat.SYMPY_INTERP,
        "dispatch": dispatch,
        "tick": tick,
        "extended": extended,
        "appended": appended,
        "copied": copied,
        "distinct": distinct,
    }
    exec(compile(source, "<multigraph padded call>", "exec"), namespace)  # made above, from expressions over sizes
    run, inputs, numbers, cut_back, fits = (
        namespace.pop(name) for name in ("padded", "inputs", "numbers", "cut", "fits")
    )
    return PaddedCall(run, inputs, numbers, cut_back, fits, texts.steady(), source)


@dataclass
class _Texts:
    """Text over the arguments `a` of the real call, and over padded sizes `p0`, ..."""

    graph: CapturedGraph
    real: Any
    longer: Any
    symbols: frozenset[sympy.Symbol]
    asked: list[tuple[str, frozenset[sympy.Symbol]]] = field(default_factory=list)  # what padding an input needs

    def _depends(self, expr: Any) -> bool:
        return isinstance(expr, sympy.Basic) and not self.symbols.isdisjoint(expr.free_symbols)

    def input(self, index: int) -> str | None:
        """A padded argument; None for one that stays what it is."""
        entry = self.graph.inputs[index]
        if entry.expr is not None:
            return self._padded(entry.expr) if self._depends(entry.expr) else None
        layout = entry.layout
        if layout is None or not any(map(self._depends, (*layout.size, *layout.stride))):
            return None
        if entry.static or entry.number:
            raise CannotPad(f"{entry.name} is a parameter or buffer, and has the padded dimension")
        dims = [dim for dim, size in enumerate(layout.size) if self._depends(size)]
        ends, blocks = [], []
        for dim in dims:
            size = layout.size[dim]
            (symbol, *others) = [symbol for symbol in size.free_symbols if symbol in self.symbols]
            factor = sympy.expand(size).coeff(symbol, 1)
            if others or symbol in factor.free_symbols:
                raise CannotPad(f"{entry.name} has a dimension of size {size}")
            blocks.append(factor)
            self.asked.append((f"{self._real(size)} >= {self._real(factor)} >= 1", frozenset(size.free_symbols)))
            ends.append(f"({dim}, {self._real(size)}, {self._padded(size)}, {self._real(factor)})")
        if _in_order(layout.size, layout.stride) and len(dims) == 1 and blocks == [1]:
            size = layout.size[dims[0]]
            return f"appended(a[{index}], {dims[0]}, {self._real(size)}, {self._padded(size)})"
        sizes, strides = (f"({', '.join(map(self._padded, exprs))},)" for exprs in (layout.size, layout.stride))
        needed = frozenset().union(*(sympy.sympify(expr).free_symbols for expr in (*layout.size, *layout.stride)))
        self.asked.append((f"distinct({sizes}, {strides})", needed))
        return f"extended(a[{index}], ({''.join(f'{end}, ' for end in ends)}), {sizes}, {strides})"

    def numbers(self, made: Sequence[str | None]) -> str:
        entries = enumerate(zip(self.graph.inputs, made, strict=True))
        return "".join(
            f"{text}, " if entry.expr is not None and text is not None else f"a[{at}], "
            for at, (entry, text) in entries
        )

    def prefix(self, index: int) -> str:
        """The real rows of a padded argument."""
        layout = self.graph.inputs[index].layout
        assert layout is not None
        dims = [dim for dim, size in enumerate(layout.size) if self._depends(size)]
        return f"b{index}" + "".join(f".narrow({dim}, 0, {self._real(layout.size[dim])})" for dim in dims)

    def _guards(self) -> list[Any]:
        return [guard for guard in self.graph.guards if self._depends(guard)]

    def fits(self) -> str:
        """Dynamo's guards and bounds, for padded sizes; and that inputs can be padded."""
        parts = [*(self._padded(guard) for guard in self._guards()), *(text for text, _ in self.asked)]
        for symbol in sorted(self.symbols, key=str):
            info = self.graph.symbols[symbol]
            for bound, sign in ((info.lower, ">="), (info.upper, "<=")):
                if isinstance(bound, int) or getattr(bound, "is_Integer", False):
                    parts.append(f"{self._padded(symbol)} {sign} {int(bound)}")
        return " and ".join(f"({part})" for part in parts) or "True"

    def steady(self) -> bool:
        needed = [*(guard.free_symbols for guard in self._guards()), *(symbols for _, symbols in self.asked)]
        return all(symbols <= self.symbols for symbols in needed)

    def _real(self, expr: Any) -> str:
        return self._print(self.real, expr)

    def _padded(self, expr: Any) -> str:
        return self._print(self.longer, expr)

    def _print(self, printer: Any, expr: Any) -> str:
        try:
            return str(printer.doprint(sympy.sympify(expr)))
        except KeyError as lacking:
            raise CannotPad(f"no argument has {lacking}, which {expr} depends on") from None


def _in_order(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether these are the strides of a contiguous tensor, for all sizes."""
    expected: Any = sympy.Integer(1)
    for own, step in zip(reversed(size), map(_compat.plain_size, reversed(stride)), strict=True):
        if own != 1 and sympy.expand(step - expected) != 0:
            return False
        expected = expected * own
    return True


def _output(number: int, output: Output) -> str:
    value = f"o[{number}]"
    size, stride = (f"({', '.join(entries)}{',' if entries else ''})" for entries in (output.size, output.stride))
    match output.kind:
        case "slice":
            return value + "".join(
                f".narrow({dim}, 0, {size})" for dim, size in zip(output.dims, output.size, strict=True)
            )
        case "copy":
            return f"copied({value}, {size}, {stride})"
        case "view":
            return f"a[{output.of}].as_strided({size}, {stride}, a[{output.of}].storage_offset() + {output.offset})"
        case "argument":
            return f"a[{output.of}]"
        case "number":
            return output.offset
        case _:
            return value


# ---------------------------------------------------------------- what the text calls


def appended(tensor: torch.Tensor, dim: int, real: int, size: int) -> torch.Tensor:
    """A contiguous tensor, its last entry along `dim` repeated up to `size`."""
    shape = [-1] * tensor.dim()
    shape[dim] = size - real
    return torch.cat((tensor, tensor.narrow(dim, real - 1, 1).expand(shape)), dim)


def extended(tensor: torch.Tensor, dims: Dims, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A tensor of these sizes and strides that begins with `tensor`, and repeats its last entries behind it."""
    made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    part = made
    for dim, real, _, _ in dims:
        part = part.narrow(dim, 0, real)
    part.copy_(tensor)
    for number, (dim, real, longer, block) in enumerate(dims):
        if longer == real:
            continue
        part = made
        for other, known, _, _ in dims[number + 1 :]:
            part = part.narrow(other, 0, known)
        tail = part.narrow(dim, real, longer - real).unflatten(dim, (-1, block))
        tail.copy_(part.narrow(dim, real - block, block).unsqueeze(dim))
    return made


def copied(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The beginning of `tensor` along each dimension, in memory of its own."""
    made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    for dim, length in enumerate(size):
        tensor = tensor.narrow(dim, 0, length)
    return made.copy_(tensor)


def distinct(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two entries of a tensor of these sizes and strides lie in one place, as far as strides tell."""
    end = 1
    for step, length in sorted((step, length) for length, step in zip(size, stride, strict=True) if length != 1):
        if step < end:
            return False
        end = step * (length - 1) + end
    return True
