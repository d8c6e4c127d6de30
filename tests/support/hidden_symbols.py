"""A torch in which one private symbol has another name: torch itself goes on, and multigraph does not find it.

`python hidden_symbols.py` hides each symbol of `_compat` in a process of its own, forked from one that has imported
torch, runs a program there, and prints what became of it, one JSON object a line.

Hiding looks at who asks: attribute accesses from code of the package fail, all others are answered.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
JOBS = os.cpu_count() or 1
#: what a compile without variants needs, too: it runs the whole program
NOTHING = "nothing"
AT_ONCE = ("compile_fx", "inductor_config", "functorch_config")
#: and what that needs in the code of a backward; without a part of these it runs what stands in front of a compiler
IN_BACKWARDS = ("TracingContext", "OutputCode.post_compile")


@dataclass(frozen=True)
class Hidden:
    """`part` of what `row` names, or all of it; `row` "": what only a trace carries."""

    row: str
    part: str | None = None
    carried: bool = False  # only an instance has it

    @property
    def name(self) -> str:
        return f"{self.row}.{self.part}" if self.part else self.row


def from_package(depth: int = 2) -> bool:
    """Whether the caller's caller is code of the package."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("multigraph_backend")


# ---------------------------------------------------------------- hiding


def hide(hidden: Hidden, rows: dict[str, Any]) -> None:
    if not hidden.row:
        assert hidden.part is not None
        hide_in_traces(hidden.part)
        return
    row = rows[hidden.row]
    module = importlib.import_module(row.module)
    *path, last = row.attribute.split(".")
    parent: Any = module
    for name in path:
        parent = getattr(parent, name)
    if hidden.part is None:
        hide_attribute(parent, last)
        return
    value = getattr(parent, last)
    if hidden.carried:
        hide_attribute(type(row.made(value)), hidden.part)
    elif isinstance(value, ModuleType) or (isinstance(value, type) and not issubclass(value, enum.Enum)):
        hide_attribute(value, hidden.part)
    elif inspect.isroutine(value):
        replace_attribute(parent, last, without_parameter(value, hidden.part))
    else:
        replace_attribute(parent, last, Proxy(value, hidden.part))


def hide_attribute(owner: Any, name: str) -> None:
    if isinstance(owner, ModuleType):
        answer_module(owner, name, None)
        return
    setattr(owner, name, Hiding(name, inspect.getattr_static(owner, name, None), owner))
    if "__annotations__" in vars(owner):
        owner.__annotations__ = {key: kind for key, kind in owner.__annotations__.items() if key != name}
    try:
        parameters = inspect.signature(owner).parameters
    except ValueError:  # a type of C
        return
    if name in parameters:
        init = owner.__init__
        owner.__init__ = without_parameter(init, name)
        owner.__signature__ = inspect.signature(owner.__init__)


def replace_attribute(owner: Any, name: str, stand_in: Any) -> None:
    if isinstance(owner, ModuleType):
        answer_module(owner, name, stand_in)
    else:
        setattr(owner, name, Hiding(name, inspect.getattr_static(owner, name), owner, stand_in))


def answer_module(module: ModuleType, name: str, stand_in: Any) -> None:
    kind: Any = type(module)

    def asked(self: Any, asked_for: str) -> Any:
        if asked_for == name and from_package():
            if stand_in is None:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            return stand_in
        return kind.__getattribute__(self, asked_for)

    def found(self: Any, asked_for: str) -> Any:  # configuration is answered here
        if asked_for == name and from_package():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return kind.__getattr__(self, asked_for)

    members: dict[str, Any] = {"__getattribute__": asked}
    if hasattr(kind, "__getattr__"):
        members["__getattr__"] = found
    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), members))  # also of a configuration


class Hiding:
    """In a class: what the class and its instances answer."""

    def __init__(self, name: str, original: Any, owner: type, stand_in: Any = None) -> None:
        self.name, self.original, self.owner, self.stand_in = name, original, owner, stand_in

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if from_package():
            if self.stand_in is None:
                raise AttributeError(f"{self.owner.__name__!r} has no attribute {self.name!r}")
            original = self.stand_in
        else:
            original = self.original
        if hasattr(type(original), "__set__"):
            return original.__get__(instance, owner)
        if instance is not None and self.name in getattr(instance, "__dict__", {}):
            return instance.__dict__[self.name]
        if original is None:
            raise AttributeError(self.name)
        return original.__get__(instance, owner) if hasattr(type(original), "__get__") else original

    def __set__(self, instance: Any, value: Any) -> None:
        if hasattr(type(self.original), "__set__"):
            self.original.__set__(instance, value)
        else:
            instance.__dict__[self.name] = value

    def __delete__(self, instance: Any) -> None:
        instance.__dict__.pop(self.name)


class Proxy:
    """Stands for an object, and lacks an attribute."""

    def __init__(self, value: Any, hidden: str) -> None:
        vars(self).update(_value=value, _hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        if name in (vars(self)["_hidden"], "__annotations__"):
            raise AttributeError(name)
        return getattr(vars(self)["_value"], name)


def without_parameter(function: Any, name: str) -> Any:
    """A function whose parameter `name` has another name, to code of the package."""

    def renamed(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs and from_package():
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    renamed.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    renamed.__name__ = function.__name__
    return renamed


def hide_in_traces(name: str) -> None:
    """Dynamo's graphs carry it under another name."""
    import torch

    if name == "_param_name_to_source":
        setattr(torch.fx.GraphModule, name, Hiding(name, None, torch.fx.GraphModule))
    elif name.startswith("_"):
        setattr(torch.fx.Node, name, Hiding(name, None, torch.fx.Node))
    else:

        class Meta(dict):  # type: ignore[type-arg]
            def __contains__(self, key: object) -> bool:
                return dict.__contains__(self, key) and not (key == name and from_package())

            def get(self, key: Any, default: Any = None) -> Any:
                return default if key == name and from_package() else dict.get(self, key, default)

            def __getitem__(self, key: Any) -> Any:
                if key == name and from_package():
                    raise KeyError(key)
                return dict.__getitem__(self, key)

        made = torch.fx.Node.__init__

        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            self.meta = Meta(self.meta)

        torch.fx.Node.__init__ = make  # type: ignore[method-assign]


# ---------------------------------------------------------------- the program


def program(whole: bool) -> dict[str, Any]:
    """Marks, a changed input, and variants or, if `whole`, Inductor, training, rules, a mode, and graphs that stay
    after their backward, which torch may refuse.  Compared with eager.
    """
    import logging

    import torch

    import multigraph_backend

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("multigraph_backend").addHandler(Lines(logging.WARNING))
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 64))

    def trained(x: torch.Tensor, n: int, scale: float) -> torch.Tensor:
        return torch.relu(x @ weight) * scale + n

    def changing(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    options: dict[str, Any] = {"specialize": [{"x[0]": 8}, {"x[0]": {"min": 10, "max": 20}}]}
    if not whole:
        options.update(compiler="aot_eager")  # what stands between Dynamo and a compiler, without the time of one
    else:
        rule = {"match": {"dtype": "bool", "min_bytes": 0}, "pack": "bits"}
        options.update(saved_tensors=[rule], inductor={"epilogue_fusion": True})
    compiled = torch.compile(trained, backend="multigraph", dynamic=True, options=options)
    for rows, n, scale in ((5, 3, 2.5), (5 if whole else 8, 4, 0.5), (5, 7, 0.0)):
        x = torch.randn(rows, 6)
        multigraph_backend.mark(x, 0, specialize_on=[8])
        with torch.set_grad_enabled(whole):
            got, want = compiled(x, n, scale), trained(x, n, scale)
        torch.testing.assert_close(got, want)
        if whole:
            (mine,), (theirs,) = (torch.autograd.grad(y.square().sum(), [weight]) for y in (got, want))
            torch.testing.assert_close(mine, theirs)
    mode = "max-autotune-no-cudagraphs" if whole else None
    others = {"mode": mode} if whole else {"options": {"compiler": "aot_eager"}}
    compiled = torch.compile(changing, backend="multigraph", dynamic=True, **others)
    x = torch.randn(5, 6)
    own = x.clone()
    torch.testing.assert_close(compiled(x), changing(own))
    torch.testing.assert_close(x, own)
    refused = []
    if whole:
        refused.append(backward_again(lambda x, weight: (x @ weight).sin().exp().softmax(-1), from_cache=False))
        refused.append(backward_again(lambda x, weight: (x @ weight).cos().exp().softmax(-1), from_cache=True))
    str(multigraph_backend.explain())
    torch._dynamo.reset()
    return {"lines": lines, "stats": multigraph_backend.stats(), "refused": refused}


def backward_again(writing: Any, from_cache: bool) -> str | None:
    """Two backwards of a graph whose saved tensors Inductor's code writes into: what torch refuses, if it does so."""
    import torch
    import torch._functorch.config as functorch_config

    weight = torch.randn(6, 6, requires_grad=True)
    x, cotangent = torch.randn(5, 6), torch.randn(5, 6)
    (wanted,) = torch.autograd.grad(writing(x, weight), [weight], cotangent)
    refused = None
    with functorch_config.patch(enable_autograd_cache=from_cache):
        got = torch.compile(writing, backend="multigraph", dynamic=True)(x, weight)
    try:
        again = torch.autograd.grad(got, [weight], cotangent, retain_graph=True)
        torch.testing.assert_close(again[0], wanted)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        refused = str(error)
    (last,) = torch.autograd.grad(got, [weight], cotangent)
    torch.testing.assert_close(last, wanted)
    return refused


# ---------------------------------------------------------------- processes


def table() -> Any:
    """`_compat`, without the package: what that decides when it is imported, it decides in each process anew."""
    spec = importlib.util.spec_from_file_location("compat_table", ROOT / "multigraph_backend" / "_compat.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compat_table"] = module
    spec.loader.exec_module(module)
    return module


def is_private(module: str, attribute: str) -> bool:
    names = [*module.split("."), *attribute.split(".")]
    return any(name.startswith("_") for name in names) or "experimental" in names


def all_hidden(compat: Any) -> Iterator[Hidden]:
    for row in compat.expected().values():
        if is_private(row.module, row.attribute):
            yield Hidden(row.name)
        yield from (Hidden(row.name, part) for part in row.shape)
        yield from (Hidden(row.name, part, carried=True) for part in row.carried)
    yield from (Hidden("", name) for name in compat.CARRIED)


def import_all() -> None:
    """What a first compile imports, so that no process has to do it again; Inductor itself would begin threads here."""
    import torch

    for name in ("async_compile", "graph", "lowering", "scheduler", "codegen.cpp", "fx_passes.joint_graph"):
        importlib.import_module(f"torch._inductor.{name}")
    importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()  # asks the C++ compiler for each set
    # autograd of a torch with CUDA begins threads in its first backward, which no fork survives
    weight = torch.randn(6, 8, requires_grad=torch.version.cuda is None)

    def stock(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.relu(x @ weight) * scale

    torch.compile(stock, dynamic=True, backend="aot_eager")(torch.randn(5, 6), 0.5)
    torch._dynamo.reset()


def asked() -> dict[str, Any]:
    """What the package finds missing, without a program."""
    from multigraph_backend import _compat

    features = {row.feature for row in _compat.expected().values()}
    problems = {feature: list(_compat.missing(feature)) for feature in sorted(features)}
    return {
        "problems": {feature: found for feature, found in problems.items() if found},
        "lines": [line for _, line in _compat.switched_off()],
    }


def run_in_child(hidden: Hidden, rows: dict[str, Any], write: int, only_asked: bool) -> None:
    said: dict[str, Any] = {"hidden": hidden.name}
    started = time.perf_counter()
    try:
        if hidden.row != NOTHING:
            hide(hidden, rows)
        if (known := sys.modules.get("multigraph_backend._compat")) is not None:
            known.lacking.clear()
            known.switched_off.cache_clear()
            for name in rows:
                vars(known).pop(name, None)
        if only_asked:
            said.update(asked())
        else:
            said.update(program(whole=is_whole(hidden, rows)))
    except BaseException as error:
        said.update(error=f"{type(error).__name__}: {error}"[:600], where=traceback.format_exc()[-1500:])
    said["seconds"] = round(time.perf_counter() - started, 2)
    text = json.dumps(said) + "\n"
    with os.fdopen(write, "w") as out:
        out.write(text)
    os._exit(0)


def in_children(work: Sequence[Hidden], rows: dict[str, Any], only_asked: bool = False) -> None:
    """Each in a process forked from this one, as many at a time as there are processors."""
    waiting, running = list(work), dict[int, int]()
    while waiting or running:
        while waiting and len(running) < JOBS:
            hidden = waiting.pop(0)
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                run_in_child(hidden, rows, write, only_asked)
            os.close(write)
            running[pid] = read
        pid, _ = os.wait()
        with os.fdopen(running.pop(pid)) as lines:
            print(lines.read().strip() or json.dumps({"error": "the process died"}), flush=True)


def is_whole(hidden: Hidden, rows: dict[str, Any]) -> bool:
    if hidden.row in (*AT_ONCE, NOTHING) or hidden.name in IN_BACKWARDS:
        return True
    return hidden.row in rows and rows[hidden.row].of_inductor


#: without these the program takes another way; without others it does not notice
NOTICED = (
    "variants",
    "changed inputs",
    "saved tensors",
    "names",
    "stances",
    "instruments",
    "modes",
    "marks",
    "retained graphs",
)


def different_ways(work: Sequence[Hidden], rows: dict[str, Any]) -> list[Hidden]:
    """One symbol for each way of falling back, and what only a trace shows."""
    chosen: dict[object, Hidden] = {}
    for hidden in work:
        row = rows.get(hidden.row)
        if row is None:
            chosen[hidden] = hidden
        elif hidden.row in AT_ONCE:
            chosen.setdefault(hidden.row, hidden)
        elif hidden.name in IN_BACKWARDS:
            chosen[hidden.name] = hidden
        elif row.feature in NOTICED:
            alone = hidden.part == "specializations" or hidden.row in ("TracingContext", "lookup_backend")
            chosen.setdefault((hidden.row, hidden.part) if alone else row.feature, hidden)
    return list(chosen.values())


def main(way: str) -> None:
    """`ask`: what is found missing when each symbol is hidden.  `run`: the program, where each way of falling back is
    taken once; `run-all`: where each symbol is hidden.  Else the names of symbols, with which it is run."""

    compat = table()
    rows = dict(compat.expected())
    for row in rows.values():
        row.problem()  # imports
    work = list(all_hidden(compat))
    if way == "ask":
        importlib.import_module("multigraph_backend.backend")
        in_children(work, rows, only_asked=True)
        return
    if way == "run":
        work = different_ways(work, rows)
    elif way != "run-all":
        work = [hidden for hidden in work if hidden.name in way.split()]
    import_all()
    in_children([Hidden(NOTHING)], rows)  # fills the caches
    in_children([hidden for hidden in work if is_whole(hidden, rows)], rows)
    importlib.import_module("multigraph_backend.report")
    importlib.import_module("multigraph_backend.backend")
    in_children([hidden for hidden in work if not is_whole(hidden, rows)], rows)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1])
