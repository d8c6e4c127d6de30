"""What a function does, as a hash: the same in another process, another for a changed body or a changed constant.

A compile that has a user's function traced into it may come from a cache only for a function that does the same.  A
name does not say that, and neither does a promise; the code, what it closes over and what it refers to do.

In: a function, a graph module, or any value that one refers to.  Out: a hexadecimal digest, or `CannotHash`.

Invariant: what cannot be told apart by its content raises; nothing is left out because it is unknown.  The content of
an object is its class, all of that, and what a copy of it would be made of; an object that defines itself how it is
copied raises.  Modules of the standard library, torch and numpy count by name and version, and so do operators of
torch, which code calls by name.  Annotations of functions, and what Python notes about a class for itself, are no
content.
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

_PLAIN = frozenset({
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), torch.dtype, torch.device,
    torch.Size, torch.layout, torch.memory_format, range, slice,
})  # fmt: skip
_STABLE = frozenset({"torch", "numpy", "math", *sys.stdlib_module_names}) - {"__main__"}
#: of a class: its own dict, where it stands in a file, and what annotations said
_NOTES = frozenset({
    "__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__", "__annotations__",
    "__annotations_cache__", "__annotate_func__", "__annotate__",
})  # fmt: skip
_COPIED_BY = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


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
        kind = type(value)
        if kind in _PLAIN:
            self._say(kind.__name__, repr(value))
            return
        if id(value) in self._seen:
            self._say("seen", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif kind is tuple or kind is list:
            self._say(kind.__name__, len(value))
            self._all(value)
        elif kind is dict or kind is types.MappingProxyType:
            self._say("dict", len(value))
            self._all(part for pair in value.items() for part in pair)
        elif kind is set or kind is frozenset:
            self._say(kind.__name__, *sorted(digest(entry) for entry in value))
        elif isinstance(value, types.ModuleType):
            if not _stable(value):
                raise CannotHash(f"the module {value.__name__} is used in a way that does not tell what of it")
            self._module(value, ())
        elif isinstance(value, torch.fx.GraphModule):
            self._graph(value)
        elif _bound(value):
            self._say("bound", value.__name__)
            self.read(value.__self__)
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
            self._class(value)
        elif isinstance(value, _SLOTS):
            self._say("slot", value.__name__)
        elif isinstance(value, staticmethod | classmethod):
            self._say(kind.__name__)
            self.read(value.__func__)
        elif kind is property:
            self._say("property", value.__doc__)
            self._all((value.fget, value.fset, value.fdel))
        elif kind.__module__ in ("typing", "types"):  # list[int], Optional[str]
            self._say("annotation", repr(value))
        elif _remembers(value):
            self._say("cached", sorted(value.cache_parameters().items()))
            self._all((value.__wrapped__, vars(value)))
        else:
            self._object(value)

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.read(value)

    def _tensor(self, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise CannotHash(f"a {_name(type(value))} has no content that can be read")
        if isinstance(value, _compat.FakeTensor):
            raise CannotHash("a tensor without memory has no content")
        plain = value.detach().cpu().contiguous()
        self._say("tensor", type(value).__name__, value.dtype, tuple(value.shape), value.stride(), value.device)
        self._say(value.requires_grad, value.is_conj(), value.is_neg())
        self._update(ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b"")
        if vars(value):
            self.read(vars(value))

    def _function(self, value: types.FunctionType) -> None:
        self._say("function", value.__doc__)
        self._all((value.__code__, value.__defaults__, value.__kwdefaults__, vars(value)))
        names = _names(value.__code__)
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self._say("empty cell")
                continue
            self._found(content, names)
        for name in sorted(names):
            if name in value.__globals__:
                self._say("global", name)
                self._found(value.__globals__[name], names)

    def _found(self, value: Any, names: set[str]) -> None:
        """What a function refers to; of a module of the user's, what it may use of that."""
        if isinstance(value, types.ModuleType) and not _stable(value):
            self._module(value, names)
        else:
            self.read(value)

    def _module(self, module: types.ModuleType, names: Iterable[str], within: tuple[str, ...] = ()) -> None:
        self._say("module", module.__name__, getattr(module, "__version__", ""))
        for name in sorted(names):
            if name not in vars(module):
                continue
            self._say("attribute", name)
            found = vars(module)[name]
            if not isinstance(found, types.ModuleType) or _stable(found):
                self.read(found)
            elif found.__name__ not in within:
                self._module(found, names, (*within, module.__name__, found.__name__))

    def _class(self, value: type) -> None:
        self._say("class", _name(value))
        for name, entry in vars(value).items():
            if name not in _NOTES:
                self._say(name)
                self.read(entry)
        self._all((value.__bases__, type(value)))

    def _code(self, code: types.CodeType) -> None:
        self._say("code", code.co_code.hex(), code.co_names, code.co_freevars, code.co_cellvars, code.co_varnames)
        self._say(code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self._say(code.co_exceptiontable.hex())
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

    def _object(self, value: Any) -> None:
        """Its class, and what a copy of it is made of."""
        kind = type(value)
        for name in _COPIED_BY:
            owner = next((entry for entry in kind.__mro__ if name in vars(entry)), object)
            if not _stable(owner) and not _stable(vars(owner)[name]):  # a namedtuple's is of the standard library
                raise CannotHash(f"a {_name(kind)} says itself what its copies are made of")
        try:
            made = value.__reduce_ex__(2)
        except Exception as error:
            raise CannotHash(f"a {_name(kind)} has no content that can be read: {error}") from error
        if not isinstance(made, tuple):
            raise CannotHash(f"a {_name(kind)} has no content that can be read")
        self._say("object")
        self.read(kind)
        self._all((*made[:3], *(list(part) for part in made[3:5] if part is not None)))


def _names(code: types.CodeType) -> set[str]:
    inner = [entry for entry in code.co_consts if isinstance(entry, types.CodeType)]
    return {*code.co_names, *(name for entry in inner for name in _names(entry))}


def _stable(value: Any) -> bool:
    """Whether a function, class or module is part of Python, torch or numpy; operators of torch are called by name."""
    if isinstance(value, _compat.OpOverload | _compat.OpOverloadPacket):
        return True
    if isinstance(value, _DESCRIPTORS):
        return _stable(value.__objclass__)
    module: str | None = None
    if isinstance(value, types.ModuleType):
        module = value.__name__
    elif isinstance(value, types.FunctionType):  # `functools.wraps` copies the name of the module, and not this one
        module = value.__globals__.get("__name__")
    elif isinstance(value, types.BuiltinFunctionType):
        module = value.__module__ or getattr(value.__self__, "__name__", None)
    elif isinstance(value, type):
        module = value.__module__
    return str(module).split(".")[0] in _STABLE


def _bound(value: Any) -> bool:
    """Whether it is a method of a builtin type with the object that it is of; a function of a module names that."""
    if not isinstance(value, _BOUND) or getattr(value, "__module__", None) is not None:
        return False
    return not isinstance(value.__self__, types.ModuleType | None)


def _remembers(value: Any) -> bool:
    """Whether it is a function behind `functools.lru_cache`."""
    return type(value) is type(_remembered)


@functools.lru_cache
def _remembered() -> None: ...


def _name(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return f"{module}.{getattr(value, '__qualname__', str(value))}"
