"""What a function does, as a hash: the same in another process, another for a changed body or a changed constant.

A compile that has a user's function traced into it may come from a cache only for a function that does the same.  A
name does not say that, and neither does a promise; the code, what it closes over and what it refers to do.

In: a function, a graph module, or any value that one refers to.  Out: a hexadecimal digest, or `CannotHash`.

Invariant: what cannot be told apart by its content raises; nothing is left out because it is unknown.  Modules of the
standard library, torch and numpy count by name and version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from multigraph_backend import _compat

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, range, slice,
)  # fmt: skip
_STABLE = frozenset({"torch", "numpy", "math", *sys.stdlib_module_names}) - {"__main__"}


class CannotHash(TypeError):
    """A value whose content cannot be read, so that no cache may know it."""


def digest(*values: Any) -> str:
    """The hash of these values' content.  Raises CannotHash."""
    made = hashlib.sha256()
    reader = _Reader(made.update)
    for value in values:
        reader.read(value)
    return made.hexdigest()


class _Reader:
    def __init__(self, update: Callable[[bytes], None]) -> None:
        self._update = update
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # ids stay unique while their values are kept

    def _say(self, *parts: object) -> None:
        for part in parts:
            text = str(part).encode()
            self._update(f"{len(text)}:".encode() + text)

    def read(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._say("seen", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, tuple | list):
            self._say(_name(type(value)), len(value))
            self._all(value)
        elif isinstance(value, dict):
            self._say("dict", len(value))
            self._all(part for pair in value.items() for part in pair)
        elif isinstance(value, set | frozenset):
            self._say("set", *sorted(digest(entry) for entry in value))
        elif isinstance(value, types.ModuleType):
            self._say("module", value.__name__, getattr(value, "__version__", ""))
        elif isinstance(value, torch.fx.GraphModule):
            self._graph(value)
        elif isinstance(value, functools.partial):
            self._say("partial")
            self._all((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._say("method")
            self._all((value.__func__, value.__self__))
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif _stable(value):
            self._say("name", _name(value), torch.version.__version__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._say("class", _name(value))
            self._all(part for pair in vars(value).items() if not pair[0].startswith("__") or pair[0] == "__init__"
                      for part in pair)  # fmt: skip
            self._all(value.__bases__)
        elif isinstance(value, staticmethod | classmethod):
            self.read(value.__func__)
        elif isinstance(value, property):
            self._all((value.fget, value.fset))
        elif hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            self._say("object")
            self._all((type(value), vars(value)))
        else:
            raise CannotHash(f"a {_name(type(value))} has no content that can be read")

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.read(value)

    def _tensor(self, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise CannotHash(f"a {_name(type(value))} has no content that can be read")
        if isinstance(value, _compat.FakeTensor):
            raise CannotHash("a tensor without memory has no content")
        plain = value.detach().cpu().contiguous()
        self._say("tensor", value.dtype, tuple(value.shape), value.stride(), value.device)
        self._update(ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b"")

    def _function(self, value: types.FunctionType) -> None:
        self._say("function")
        self._all((value.__code__, value.__defaults__, value.__kwdefaults__))
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self._say("empty cell")
                continue
            self.read(content)
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                self._say("global", name)
                found = value.__globals__[name]
                self.read(found)
                if isinstance(found, types.ModuleType) and not _stable(found):
                    self._attributes(found, _names(value.__code__))

    def _attributes(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """What a function may use of a module of the user's."""
        for name in sorted(names):
            if name in vars(module) and not isinstance(vars(module)[name], types.ModuleType):
                self._say("attribute", name)
                self.read(vars(module)[name])

    def _code(self, code: types.CodeType) -> None:
        self._say("code", code.co_code.hex(), code.co_names, code.co_freevars, code.co_varnames, code.co_flags)
        self._all(code.co_consts)

    def _graph(self, module: torch.fx.GraphModule) -> None:
        self._say("graph", module.code)
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.read(node.target)
            elif node.op == "get_attr":
                self.read(functools.reduce(getattr, str(node.target).split("."), module))
            elif node.op == "call_module":
                raise CannotHash("a graph that calls a module")


def _names(code: types.CodeType) -> set[str]:
    inner = [entry for entry in code.co_consts if isinstance(entry, types.CodeType)]
    return {*code.co_names, *(name for entry in inner for name in _names(entry))}


def _stable(value: Any) -> bool:
    """Whether a function, class or module is part of Python, torch or numpy."""
    if (
        not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType)
        and not hasattr(value, "overloads")
        and not hasattr(value, "overloadpacket")
    ):
        return isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType)
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.BuiltinFunctionType) or hasattr(value, "overloadpacket") or hasattr(value, "overloads"):
        return True
    return str(module).split(".")[0] in _STABLE


def _name(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return f"{module}.{getattr(value, '__qualname__', str(value))}"
