"""The function that Dynamo is tracing, as its user knows it.

Dynamo traces a frame.  That may be the user's `forward`, a wrapper around it (`@functools.wraps`, a decorator of a
model library, torch's own around modules that it will not trace itself), or the rest of a function after a graph break.
In a wrapper the arguments are called `args[0]` and `kwargs['input_ids']`; the user knows them by the names in the
signature of what is wrapped.  This module finds both, so that names and reports are the user's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.environment import NAME_ATTRIBUTE


@dataclass(frozen=True)
class Owner:
    """A module's `multigraph_name`, and how Dynamo's guards reach the module: from a local, by attributes of it.

    `free`: the local is a variable of an enclosing function.
    """

    attribute: object
    own: bool  # whether it is the module's, and not its class's
    local: str
    within: tuple[str, ...] = ()
    free: bool = False

    def keep_apart(self) -> None:
        """Guard the code of the trace in progress, so that no module of another name runs it."""
        if _compat.missing("instances"):
            return
        value = self.attribute if self.own and isinstance(self.attribute, str) else None
        _compat.guard_attribute(self.local, self.within, NAME_ATTRIBUTE, value, self.free)


@dataclass(frozen=True)
class UserCode:
    """`models`: names by which options may be keyed (class of the module, function, both as reports show them).

    `integers`: integer arguments.  `owner`: the module whose function it is, in the traced frame.  `name`: what the
    model is called among others of its class, where the user has given it a name.
    `parameters` are the user's names of the entries of the wrapper's `varargs`; `varkeyword` is its `**` argument.
    """

    function: str = "<graph>"
    file: str = "<unknown>"
    line: int = 0
    models: tuple[str, ...] = ()
    name: str | None = None
    owner: Owner | None = None
    varargs: str | None = None
    varkeyword: str | None = None
    parameters: tuple[str, ...] = ()
    integers: Mapping[str, int] = field(default_factory=dict)
    # traced on its own after a graph break: the rest of a function, or one that it calls.  Its names are not declared
    partial: bool = False

    def __str__(self) -> str:
        place = f"{self.function} ({self.file}:{self.line})"
        return place if self.name is None else f"{place}, {self.name}"

    @property
    def title(self) -> str:
        """The function, with the model's name if it has one."""
        return self.function if self.name is None else f"{self.function}, {self.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """All by which the user may ask for it."""
        return self.models if self.name is None else (*self.models, self.name)

    def same_function(self, other: UserCode) -> bool:
        """Whether both are of one function, and of models of one name."""
        mine, theirs = ((code.function, code.file, code.line, code.name) for code in (self, other))
        return mine == theirs

    def known_as(self, name: str) -> str:
        """The user's name of an input: `args[0]`, `kwargs['mask']` by the signature of what is wrapped."""
        if self.varkeyword is not None:
            match = re.match(rf"{re.escape(self.varkeyword)}\['(\w+)'\]", name)
            if match is not None:
                return match.group(1) + name[match.end() :]
        if self.varargs is not None:
            match = re.match(rf"{re.escape(self.varargs)}\[(\d+)\]", name)
            if match is not None and int(match.group(1)) < len(self.parameters):
                return self.parameters[int(match.group(1))] + name[match.end() :]
        return name


def current() -> UserCode:
    """The user's function of the trace in progress; without one, placeholders for text."""
    frame = None if _compat.missing("names") else _compat.root_frame() or _compat.frame_ahead_of_time()
    if frame is None:
        return UserCode()
    code, local_values = frame
    owner = local_values.get(code.co_varnames[0]) if code.co_varnames else None
    wrapped: Callable[..., Any] | None = None
    if code.co_flags & inspect.CO_VARARGS or code.co_flags & inspect.CO_VARKEYWORDS:
        wrapped = _wrapped_by(code, local_values, owner)
    if isinstance(wrapped, torch.nn.Module):
        owner, wrapped = wrapped, wrapped.forward
    if isinstance(wrapped, MethodType):
        owner = wrapped.__self__
    shown = _code_of(wrapped) or code
    # after a graph break `self` may be gone; the code still says where it was defined
    module = type(owner).__name__ if isinstance(owner, torch.nn.Module) else _defining_class(shown)
    return UserCode(
        function=f"{module}.{shown.co_name}" if module else shown.co_name,
        file=shown.co_filename,
        line=shown.co_firstlineno,
        models=(module, shown.co_name, f"{module}.{shown.co_name}") if module else (shown.co_name,),
        owner=_owner(owner, code, local_values) if isinstance(owner, torch.nn.Module) else None,
        varargs=_special(code, inspect.CO_VARARGS),
        varkeyword=_special(code, inspect.CO_VARKEYWORDS),
        parameters=_parameters_after(wrapped, code),
        integers={name: value for name, value in local_values.items() if type(value) is int},
        partial="torch_dynamo_resume_in" in code.co_name or _compat.traced_from_user_code(),
    )


def _owner(module: torch.nn.Module, code: CodeType, local_values: Mapping[str, Any]) -> Owner | None:
    """None where no local of the frame leads to the module, so that no guard can ask for its name."""
    own = vars(module).get(NAME_ATTRIBUTE)
    attribute = own if own is not None else getattr(type(module), NAME_ATTRIBUTE, None)
    for local in (*code.co_varnames[:1], *code.co_freevars):
        value, free = local_values.get(local), local in code.co_freevars
        if value is module:
            return Owner(attribute, own is not None, local, free=free)
        if isinstance(value, MethodType) and value.__self__ is module:
            return Owner(attribute, own is not None, local, ("__self__",), free)
    return None


def _special(code: CodeType, flag: int) -> str | None:
    """The name of `*args` or `**kwargs`: they follow the ordinary arguments in that order."""
    if not code.co_flags & flag:
        return None
    position = code.co_argcount + code.co_kwonlyargcount
    if flag == inspect.CO_VARKEYWORDS and code.co_flags & inspect.CO_VARARGS:
        position += 1
    return code.co_varnames[position]


def _wrapped_by(code: CodeType, local_values: Mapping[str, Any], owner: object) -> Callable[..., Any] | None:
    """What the wrapper with this code calls: a module's own method, or the one function that it closes over."""
    if isinstance(owner, torch.nn.Module):
        method: Any = type(owner).forward
        while method is not None:
            if getattr(method, "__code__", None) is code:
                return MethodType(inspect.unwrap(method), owner) if hasattr(method, "__wrapped__") else None
            method = getattr(method, "__wrapped__", None)
        return None
    closed_over = [local_values.get(name) for name in code.co_freevars]
    functions = [entry for entry in closed_over if isinstance(entry, FunctionType | MethodType | torch.nn.Module)]
    if len(functions) != 1:
        return None
    (function,) = functions
    if isinstance(function, MethodType) and isinstance(function.__self__, torch.nn.Module):
        module: torch.nn.Module = function.__self__  # a module's call: its forward has the signature
        return module
    innermost: Callable[..., Any] = inspect.unwrap(function)
    return innermost


def _defining_class(code: CodeType) -> str | None:
    *_, outer, _name = ("", *code.co_qualname.split("."))
    return outer if outer and outer != "<locals>" else None


def _code_of(function: object) -> CodeType | None:
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _parameters_after(wrapped: Callable[..., Any] | None, code: CodeType) -> tuple[str, ...]:
    """Names for the entries of the wrapper's `*args`: the wrapped parameters after those it takes by name itself."""
    if wrapped is None:
        return ()
    try:
        signature = inspect.signature(wrapped)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    taken = code.co_argcount
    if isinstance(wrapped, MethodType) and taken and code.co_varnames[0] not in names:
        taken -= 1  # the wrapper's own `self`, which a bound method no longer shows
    return tuple(names[taken:])
