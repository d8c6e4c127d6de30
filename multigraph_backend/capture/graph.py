"""What is kept of one Dynamo graph, so that it can be compiled again and again later, as data.

A `CapturedGraph` has its own copy of the structure (tensors shared); for each placeholder the sizes, strides and offset
that it has over Dynamo's symbols; for each symbol its range, and where its value is found among the arguments of a
call; the guards that Dynamo put on them; and the marks of the user.

For `f(x, n)` over `x` of sizes `[s0, 8]` and an integer `n` that is `s1`:

    inputs    x: TensorLayout(size=(s0, 8), stride=(8, 1)), n: expr=s1
    symbols   s0: Location("size", 0, 0), s1: Location("arg", 1)
    sizes     "x[0]" -> s0, "x[1]" -> 8, "n" -> s1

`from_dynamo` makes it; nothing of Dynamo's tracer is alive in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

from multigraph_backend.capture import size_names
from multigraph_backend.capture.structure import copy_structure, graph_modules, held_tensors, uses_gpu
from multigraph_backend.capture.user_code import UserCode


@dataclass(frozen=True)
class Location:
    """Where the value of a symbol is found among the arguments of a call."""

    kind: Literal["arg", "item", "size", "stride", "offset"]
    index: int
    dim: int = 0

    def read(self, args: Sequence[Any]) -> Any:
        value = args[self.index]
        match self.kind:
            case "arg":
                return value
            case "item":
                return value.item()
            case "size":
                return value.size(self.dim)
            case "stride":
                return value.stride(self.dim)
            case "offset":
                return value.storage_offset()

    def text(self) -> str:
        """The same as Python text over the argument tuple `a`."""
        value = f"a[{self.index}]"
        match self.kind:
            case "arg":
                return value
            case "item":
                return f"{value}.item()"
            case "size":
                return f"{value}.size({self.dim})"
            case "stride":
                return f"{value}.stride({self.dim})"
            case "offset":
                return f"{value}.storage_offset()"


@dataclass(frozen=True)
class TensorLayout:
    """Sizes, strides and offset of one tensor input over Dynamo's symbols; `memo` by the name of their source."""

    source: Any
    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    offset: sympy.Expr
    memo: Mapping[str, sympy.Expr]


@dataclass(frozen=True)
class Input:
    """One placeholder: a tensor (`layout`), a symbolic number (`expr`), or anything else (neither): parameters that are
    tensor subclasses (`wrapper`), objects."""

    name: str
    source: Any
    layout: TensorLayout | None = None
    expr: sympy.Expr | None = None
    static: bool = False  # a parameter or buffer whose address torch keeps
    number: bool = False  # a Python float, which Dynamo passes as a 0-dim tensor made at each call
    into_subgraph: bool = False  # operand of a higher-order operator
    wrapper: str | None = None  # the class of a parameter that is a tensor subclass of fixed sizes; it has no layout
    is_dtensor: bool = False  # whether such a parameter is a DTensor
    grad: bool = False  # a tensor that required gradients in the trace


@dataclass(frozen=True)
class SymbolInfo:
    """One symbol of Dynamo's trace that the graph's inputs carry."""

    location: Location | None
    source: Any
    lower: Any
    upper: Any
    positive: bool | None
    unbacked: bool
    is_float: bool


@dataclass(frozen=True)
class NamedSize:
    """A size or integer input that a condition can be declared on: over symbols, and where a call has it."""

    expr: sympy.Expr
    location: Location


@dataclass(frozen=True)
class MarkedSize:
    """One entry of a stock `specialize_on`: the size's name and the user's callable."""

    name: str
    check: Callable[[int], object]


@dataclass
class CapturedGraph:
    """See the module's text.  `copy_module()` gives a compile its own structure."""

    module: torch.fx.GraphModule
    inputs: tuple[Input, ...]
    symbols: dict[sympy.Symbol, SymbolInfo]
    guards: tuple[Any, ...]
    shape_env_settings: dict[str, Any]
    sizes: dict[str, NamedSize]  # every named size and integer input of the graph
    traced_names: dict[str, str]  # as Dynamo calls it -> as the user calls it, where they differ
    marked_sizes: tuple[MarkedSize, ...]
    written: frozenset[int]  # positions of what a call may write to in place; `held` counts on behind the inputs
    viewed_inputs: tuple[int, ...]  # positions of inputs of which views are returned
    outputs: tuple[str, ...]  # "tensor" or "other", in order
    user_code: UserCode
    communicates: bool = False  # whether it issues collectives
    impure: str | None = None  # an operator or function that it calls and that is not known to be free of side effects
    compile_id: Any = None  # torch's id of the trace, for its own tools
    notes: list[str] = field(default_factory=list)
    remarks: tuple[str, ...] = ()  # for reports alone: what is as it should be
    computes_floats: bool = False  # whether Python floats go through arithmetic before tensors take them
    # symbols that Dynamo's guards relate to values that no argument has: those guards are not among `guards`
    unread: frozenset[sympy.Symbol] = frozenset()
    static: Mapping[str, str] = field(default_factory=dict)  # why sizes are constants, by their names; for reports
    zeros: tuple[int, ...] = ()  # positions of Python floats that Dynamo found to be zero, of whichever sign
    floats_are_constants: bool = False  # set by the first compile that cannot keep them apart from their values
    asked_floats: frozenset[sympy.Symbol] = frozenset()  # Python floats whose values a compile has asked for

    @property
    def mutates_inputs(self) -> bool:
        """Whether a call changes anything that was there before it: an input, or a tensor that the graph holds."""
        return bool(self.written)

    @functools.cached_property
    def tensor_inputs(self) -> tuple[int, ...]:
        """Positions of the tensors among the inputs, without Python floats."""
        return tuple(i for i, entry in enumerate(self.inputs) if entry.layout is not None and not entry.number)

    @functools.cached_property
    def user_inputs(self) -> tuple[int, ...]:
        """Positions of `tensor_inputs` that are no parameters or buffers."""
        return tuple(index for index in self.tensor_inputs if not self.inputs[index].static)

    @functools.cached_property
    def held(self) -> tuple[torch.Tensor, ...]:
        """Tensors that are attributes of the graph's modules: constants, and parameters that are no inputs."""
        return tuple(held_tensors(self.module))

    @functools.cached_property
    def codes(self) -> tuple[str, ...]:
        """Its text, and that of each graph inside of it."""
        return tuple(part.code for part in graph_modules(self.module))

    @functools.cached_property
    def holds_gpu(self) -> bool:
        """Whether anything that it holds or computes is on a GPU, as far as it tells; its inputs are not asked."""
        return uses_gpu(self.module)

    @property
    def once_because(self) -> str | None:
        """Why a call may not be run twice, None if it may: then it changes random number generators at most."""
        if self.mutates_inputs:
            return "mutates its inputs"
        if self.communicates:
            return "issues collectives"
        return None if self.impure is None else f"calls {self.impure}, which may have side effects"

    @property
    def repeatable(self) -> bool:
        """Whether a call may be run twice."""
        return self.once_because is None

    @property
    def floats(self) -> list[sympy.Symbol]:
        """Symbols of Python floats."""
        return [symbol for symbol, info in self.symbols.items() if info.is_float and info.location is not None]

    def copy_module(self) -> torch.fx.GraphModule:
        return copy_structure(self.module)

    def find(self, declared: str) -> NamedSize | int | None:
        """What a declared name stands for: a size or integer input, a constant of the trace, or nothing."""
        name = size_names.normalized(declared)
        size = self.sizes.get(self.traced_names.get(name, name))
        return size if size is not None else self.user_code.integers.get(name)

    def values(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of every symbol that the inputs carry, in a call with `args`."""
        return {symbol: info.location.read(args) for symbol, info in self.symbols.items() if info.location is not None}
