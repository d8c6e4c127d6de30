"""What Inductor's generated code says of the pieces that it was cut into.

Inductor describes its pieces in `partition_maps`, but it makes them before it has generated code: a buffer that is
never made then is still in the map, and the numbers among a piece's arguments never are.  The code itself is what
runs, so it is read: the `call` of the class `Runner`, and the functions `partition_0`, `partition_1`...

    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        partition0_args = [primals_2, primals_1]
        del primals_1
        (buf1, primals_2) = self.partitions[0](partition0_args)
        del partition0_args
        return (reinterpret_tensor(buf1, (64, ), (1, ), 0), primals_2, )

Of this `call` the reader says: the inputs are `primals_1, primals_2`; piece 0 takes `primals_2, primals_1`, inputs 1
and 0 of the graph; of its outputs the first is seen by output 0 of the graph, as a view, and the second is output 1.

In:  the source.
Out: a `Call`: its inputs, and for each piece what its inputs and outputs are in the graph.  `NotUnderstood` where the
     code has another form.

Invariant: where it is unclear whether an output of a piece shares memory with something, it is said to.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from multigraph_backend.distributed import sequence


class NotUnderstood(ValueError):
    """The code is not of the form that was seen; its text says where."""


@dataclass(frozen=True)
class Parameters:
    """A function of a piece: how many inputs it takes, and per output, which of them it is and shares memory with."""

    names: tuple[str, ...]
    same: tuple[int | None, ...]
    memory: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class PieceCall:
    """inputs: names of the arguments.  of_graph: which inputs of the graph they are.  outputs: per output, the graph's
    outputs that are it, or a view of it.  memory: per output, the graph's outputs that may share its memory.  results:
    per input, how many results of an operator it is a tuple of; 0 where it is no tuple."""

    inputs: tuple[str, ...]
    of_graph: tuple[int | None, ...]
    outputs: tuple[tuple[int, ...], ...]
    memory: tuple[frozenset[int], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """inputs: names.  outputs: how many.  outside: whether anything runs between the pieces.  ops: what Inductor's
    comments say that is."""

    inputs: tuple[str, ...]
    outputs: int
    pieces: tuple[PieceCall, ...]
    outside: bool
    ops: tuple[str, ...]


class GeneratedCode:
    """The functions of a generated module."""

    def __init__(self, source: str) -> None:
        try:
            module = ast.parse(source)
        except SyntaxError as error:
            raise NotUnderstood(f"it is not Python: {error}") from None
        self.lines = source.split("\n")
        self.functions = {item.name: item for item in module.body if isinstance(item, ast.FunctionDef)}
        for item in module.body:
            if isinstance(item, ast.ClassDef) and item.name == "Runner":
                self.functions.update({method.name: method for method in item.body if _is_function(method)})
        self.partitions = _partitions(module, self.functions)

    @functools.cached_property
    def parameters(self) -> tuple[Parameters, ...]:
        """Of each piece.  Raises NotUnderstood."""
        return tuple(self._parameters(function) for function in self.partitions)

    @functools.cached_property
    def call(self) -> Call:
        """What the function `call` does.  Raises NotUnderstood."""
        function = self.functions.get("call")
        if function is None:
            raise NotUnderstood("it has no function 'call'")
        inputs = _unpacked(function)
        values = {name: _Value(graph_input=at) for at, name in enumerate(inputs)}
        lists: dict[str, tuple[list[str], list[_Value]]] = {}
        calls: dict[int, tuple[list[str], list[_Value]]] = {}
        outside, returned = False, None
        for statement, sure in _flat(function.body):
            if isinstance(statement, ast.Return):
                returned = _elements(statement.value)
                break
            if (made := _arguments_made(statement)) is not None:
                lists[made[0]] = made[1], [values.get(name, _Value()) for name in made[1]]
            elif (called := _piece_called(statement)) is not None and sure:
                number, name, targets = called
                names, given = lists.get(name, ([], []))
                if number in calls or not self._fits(number, given, targets):
                    raise NotUnderstood(f"piece {number} is not called as it is defined")
                calls[number] = names, given
                made_of = self.parameters[number]
                values.update((target, _output(number, at, made_of, given)) for at, target in enumerate(targets))
            else:
                outside = outside or not _runs_nothing(statement)
                self._follow(statement, values, sure)
        if returned is None or sorted(calls) != list(range(len(self.parameters))):
            raise NotUnderstood("'call' does not call each piece and return")
        results = [_value_of(expression, values, views=True) for expression in returned]
        outside = outside or not all(_only_looks(expression) for expression in returned)
        text = "\n".join(self.lines[function.lineno - 1 : function.end_lineno])
        ops = [op for entry in re.findall(r"Original ATen: \[(.*?)\]", text) for op in entry.split(", ") if op]
        pieces = tuple(
            _piece_call(number, *calls[number], self.parameters[number], results) for number in sorted(calls)
        )
        return Call(inputs, len(results), pieces, outside, tuple(dict.fromkeys(ops)))

    def unmade(self) -> tuple[int, str] | None:
        """The first piece that reads a buffer which it is not given and has not made, and that buffer."""
        for number, function in enumerate(self.partitions):
            made: set[str] = set()
            for statement, _ in _flat(function.body):
                names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
                if not hasattr(statement, "body"):  # what is inside of a `with` comes by itself
                    for name in names:
                        if isinstance(name.ctx, ast.Load) and _BUFFER.fullmatch(name.id) and name.id not in made:
                            return number, name.id
                    made.update(name.id for name in names if isinstance(name.ctx, ast.Store))
        return None

    def recorded(self, operators: Iterable[str]) -> tuple[int, str] | None:
        """The first piece that runs one of `operators`, each as code writes it (`torch.ops.aten.mm.default`)."""
        text = "\n".join(self.lines)
        wanted = {name for name in operators if name in text}
        for number, function in enumerate(self.partitions if wanted else ()):
            for inner in self._reached(function):
                for node in ast.walk(inner):
                    if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in wanted:
                        return number, name
        return None

    @functools.cached_property
    def communicates(self) -> bool:
        """Whether a collective is anywhere in it."""
        return _communicates("\n".join(self.lines))

    def issued(self) -> list[tuple[str, str]]:
        """Kind and group of each collective, in the order in which the code issues them.  Raises NotUnderstood."""
        function = self.functions.get("call")
        if function is None:
            raise NotUnderstood("it has no function 'call'")
        return [(sequence.kind_of(name), group) for name, group in self._issued(function, ())]

    def groups(self, number: int) -> tuple[str, ...]:
        """The process groups in which piece `number` communicates."""
        return tuple(dict.fromkeys(group for _, group in self._issued(self.partitions[number], ())))

    def waits_elsewhere(self, number: int) -> bool:
        """Whether piece `number` starts a collective that it does not wait for, or waits for what it has not started.

        Where that is unclear, the answer is yes.
        """
        function = self.partitions[number]
        inner = [other for other in self._reached(function) if other is not function]
        if any(_touches_collectives(other) for other in inner):
            return True
        of: dict[str, str] = {}  # names of one buffer
        started: set[str] = set()
        done: set[str] = set()
        for statement, sure in _flat(function.body):
            if isinstance(statement, ast.With):
                continue
            value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
            targets = [ast.unparse(target) for target in statement.targets] if isinstance(statement, ast.Assign) else []
            operator = _operator(value)
            if operator is None or not (sequence.issues(operator) or sequence.waits(operator)):
                if _touches_collectives(statement):
                    return True
                if value is not None and len(targets) == 1 and _only_looks(value) and (names := _names(value)):
                    of[targets[0]] = of.get(names[0], names[0])
                continue
            assert isinstance(value, ast.Call)
            given = [name for argument in (*value.args, *(word.value for word in value.keywords))
                     for name in _names(argument)]  # fmt: skip
            roots = {of.get(name, name) for name in given if name != "reinterpret_tensor"}
            if not sure or not roots:
                return True
            if sequence.waits(operator):
                if not roots <= started | done:
                    return True
                started -= roots
                done |= roots
                continue
            # what it fills is waited for: its result, a tensor given, or else what went in
            outs = {of.get(name, name) for word in value.keywords for name in _names(word.value)}
            if targets:
                of[targets[0]] = targets[0]
                of |= dict.fromkeys(outs, targets[0])
            started |= {targets[0]} if targets else outs or roots
        return bool(started)

    def _issued(self, function: ast.FunctionDef, within: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Operator and group of each collective, pieces and functions that are called among them."""
        for call in _calls(function):
            if (operator := _operator(call)) is not None and sequence.issues(operator):
                yield operator, _group(call)
                continue
            called = _CALLED_PIECE.fullmatch(ast.unparse(call.func))
            inner = self.partitions[int(called[1])] if called else None
            if inner is None and isinstance(call.func, ast.Name):
                inner = self.functions.get(call.func.id)
            if inner is not None and inner.name not in within and inner is not function:
                yield from self._issued(inner, (*within, function.name))

    def _reached(self, function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
        """`function`, and the functions of the module that it calls."""
        found = [function]
        for inner in found:
            yield inner
            found += [other for name in _names(inner) if (other := self.functions.get(name)) and other not in found]

    def _parameters(self, function: ast.FunctionDef) -> Parameters:
        names = _unpacked(function)
        values = {name: _Value(None, frozenset([at]), frozenset([at])) for at, name in enumerate(names)}
        for statement, sure in _flat(function.body):
            if isinstance(statement, ast.Return):
                results = [_value_of(expression, values, views=False) for expression in _elements(statement.value)]
                same = tuple(next(iter(value.same), None) for value in results)
                return Parameters(names, same, tuple(value.memory for value in results))
            self._follow(statement, values, sure)
        raise NotUnderstood(f"{function.name} returns nothing")

    def _fits(self, number: int, given: Sequence[object], targets: Sequence[str]) -> bool:
        if number >= len(self.parameters):
            return False
        piece = self.parameters[number]
        return len(given) == len(piece.names) and len(targets) == len(piece.same)

    def _follow(self, statement: ast.stmt, values: dict[str, _Value], sure: bool) -> None:
        """What names stand for after `statement`; it may not run if not `sure`."""
        if isinstance(statement, ast.Delete) and sure:
            for name in _names(statement):
                values.pop(name, None)
        if not isinstance(statement, ast.Assign) or _unpacks(statement):
            return
        value = _value_of(statement.value, values, views=False)
        if "# reuse" in self.lines[statement.lineno - 1]:  # other contents in the same memory
            value = _Value(memory=value.memory)
        for target in statement.targets:
            for name in _names(target):
                if sure and isinstance(target, ast.Name):
                    values[name] = value
                else:
                    values[name] = _Value(memory=value.memory | values.get(name, _Value()).memory)


# ---------------------------------------------------------------- collectives


def _communicates(text: str) -> bool:
    return any(f"torch.ops.{name}." in text for name in sequence.NAMESPACES)


def _touches_collectives(tree: ast.AST) -> bool:
    """Whether one is named in it, other than in a text: checks of sizes have the operator's name for their message."""
    names = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return any(_communicates(f"{name}.") for name in names)


def _operator(value: ast.expr | None) -> str | None:
    """`_c10d_functional.all_reduce_.default`, where that is what is called."""
    if not isinstance(value, ast.Call):
        return None
    name = ast.unparse(value.func)
    return name.removeprefix("torch.ops.") if name.startswith("torch.ops.") else None


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """In the order in which they run."""

    def inside(node: ast.AST) -> Iterator[ast.Call]:
        for child in ast.iter_child_nodes(node):
            yield from inside(child)
        if isinstance(node, ast.Call):
            yield node

    for statement in function.body:
        yield from inside(statement)


def _group(call: ast.Call) -> str:
    """The name of the process group: the last text that is given.  Raises NotUnderstood where there is none."""
    arguments = (*call.args, *(word.value for word in call.keywords))
    constants = [node.value for entry in arguments for node in ast.walk(entry) if isinstance(node, ast.Constant)]
    texts = [value for value in constants if isinstance(value, str)]
    if not texts:
        raise NotUnderstood(f"line {call.lineno}: {ast.unparse(call)} names no group")
    return texts[-1]


_CALLED_PIECE = re.compile(r"self\.partitions\[(\d+)\]")


# ---------------------------------------------------------------- what names stand for


@dataclass(frozen=True)
class _Value:
    """same: which tensors a name stands for.  memory: those that it may share memory with.  results: of how many it is
    a tuple, 0 for none.

    The first two are inputs of a piece's function, inside of it, or outputs of pieces (piece, output), in `call`.
    """

    graph_input: int | None = None
    same: frozenset[Any] = frozenset()
    memory: frozenset[Any] = frozenset()
    results: int = 0


def _output(number: int, at: int, piece: Parameters, given: Sequence[_Value]) -> _Value:
    """What an output of a piece stands for in `call`."""
    own = frozenset([(number, at)])
    memory = own.union(*(given[index].memory for index in piece.memory[at]))
    index = piece.same[at]
    if index is None:
        return _Value(None, own, memory)
    return _Value(given[index].graph_input, own | given[index].same, memory)


def _piece_call(
    number: int, names: Sequence[str], given: Sequence[_Value], piece: Parameters, results: Sequence[_Value]
) -> PieceCall:
    places = [(number, at) for at in range(len(piece.same))]
    return PieceCall(
        tuple(names),
        tuple(value.graph_input for value in given),
        tuple(tuple(at for at, value in enumerate(results) if place in value.same) for place in places),
        tuple(frozenset(at for at, value in enumerate(results) if place in value.memory) for place in places),
        tuple(value.results for value in given),
    )


def _value_of(expression: ast.expr, values: Mapping[str, _Value], views: bool) -> _Value:
    """What an expression stands for; `views`: a view of a tensor counts for the same as the tensor."""
    if isinstance(expression, ast.Name):
        return values.get(expression.id, _Value())
    if isinstance(expression, ast.Call):
        called = ast.unparse(expression.func)
        if called == "reinterpret_tensor" and views and isinstance(expression.args[0], ast.Name):
            value = values.get(expression.args[0].id, _Value())
            return _Value(None, value.same, value.memory)
        if called.startswith("empty_strided"):
            return _Value()
        if (returned := _returned(called)) is not None:
            functional, results = returned
            memory = frozenset[Any]() if functional else _memory_of(expression, values)
            return _Value(memory=memory, results=results if results > 1 else 0)
    return _Value(memory=_memory_of(expression, values))


def _memory_of(expression: ast.expr, values: Mapping[str, _Value]) -> frozenset[Any]:
    return frozenset().union(*(values[name].memory for name in _names(expression) if name in values))


@functools.cache
def _returned(name: str) -> tuple[bool, int] | None:
    """Of an operator (`torch.ops...`): whether its results share no memory with its arguments, and their number."""
    if not name.startswith("torch.ops."):
        return None
    op: Any = torch.ops
    for part in name.split(".")[2:]:
        op = getattr(op, part, None)
    schema = getattr(op, "_schema", None)
    if schema is None:
        return None
    return all(result.alias_info is None for result in schema.returns), len(schema.returns)


# ---------------------------------------------------------------- forms of statements


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


def _partitions(module: ast.Module, functions: Mapping[str, ast.FunctionDef]) -> tuple[ast.FunctionDef, ...]:
    """In the order in which `Runner(partitions=[partition_0, ...])` is given them."""
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "Runner"
        ):
            given = node.value.keywords[0].value if node.value.keywords else None
            names = [_name(item) for item in given.elts] if isinstance(given, ast.List) else []
            if any(name not in functions for name in names):
                raise NotUnderstood("the function of a piece is missing")
            return tuple(functions[name] for name in names)
    return ()


def _flat(body: Sequence[ast.stmt], sure: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Statements, each followed by those inside of it, and whether each is sure to run, once."""
    for statement in body:
        yield statement, sure
        for inner in ("body", "orelse", "handlers", "finalbody"):
            yield from _flat(getattr(statement, inner, ()), sure and isinstance(statement, ast.With))


def _unpacked(function: ast.FunctionDef) -> tuple[str, ...]:
    """Names that the list `args` is unpacked into: `a, b = args`."""
    for statement in function.body:
        if isinstance(statement, ast.Assign) and _unpacks(statement):
            return tuple(_name(item) for item in _elements(statement.targets[0]))
        if "args" in _names(statement) and ast.unparse(statement) != "args.clear()":
            raise NotUnderstood(f"{function.name} does not unpack its arguments")
    return ()


def _unpacks(statement: ast.Assign) -> bool:
    return isinstance(statement.value, ast.Name) and statement.value.id == "args"


def _arguments_made(statement: ast.stmt) -> tuple[str, list[str]] | None:
    """`partition0_args = [a, b]`."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List)):
        return None
    target = ast.unparse(statement.targets[0])
    return (target, [_name(item) for item in statement.value.elts]) if _ARGUMENTS.fullmatch(target) else None


def _piece_called(statement: ast.stmt) -> tuple[int, str, list[str]] | None:
    """`(c, d) = self.partitions[0](partition0_args)`: number, list of arguments, names of outputs."""
    if isinstance(statement, ast.With) or "self.partitions" not in (text := ast.unparse(statement)):
        return None  # what is inside of a `with` comes by itself
    found = _CALLED.fullmatch(ast.unparse(statement.value)) if isinstance(statement, ast.Assign) else None
    if found is None or not isinstance(statement, ast.Assign):
        raise NotUnderstood(f"line {statement.lineno}: {text}")
    return int(found[1]), found[2], [_name(target) for target in _elements(statement.targets[0])]


_BUFFER = re.compile(r"buf\d+")
_ARGUMENTS = re.compile(r"partition\d+_args")
_CALLED = re.compile(r"self\.partitions\[(\d+)\]\((\w+)\)")


def _runs_nothing(statement: ast.stmt) -> bool:
    """Whether a statement only names things, or gives them up."""
    if isinstance(statement, ast.Expr):
        return ast.unparse(statement) == "args.clear()"
    return isinstance(statement, ast.Delete) or (isinstance(statement, ast.Assign) and _only_looks(statement.value))


def _only_looks(expression: ast.expr) -> bool:
    """Whether an expression is made of names, numbers, sizes and views."""
    calls = [ast.unparse(node.func) for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return all(name == "reinterpret_tensor" or name.endswith((".size", ".stride")) for name in calls)


def _name(node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        raise NotUnderstood(f"line {node.lineno}: {ast.unparse(node)} is no name")
    return node.id


def _elements(node: ast.expr | None) -> list[ast.expr]:
    if not isinstance(node, ast.Tuple | ast.List):
        raise NotUnderstood("a tuple was expected" if node is None else f"line {node.lineno}: a tuple was expected")
    return list(node.elts)


def _names(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
