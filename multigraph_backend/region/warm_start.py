"""What calls use is noted, and loaded at once when another process begins to use it.

A region says here which of its code a call has run for the first time (`WarmStart.ran`), and asks before it compiles
whether caches have it (`kept`).  All else happens beside the calls, in one thread of the process, in which nothing is
compiled:

- it is noted in the manifest of the graph (`cache`), and how often it was called when the process ends;
- when a region runs its first code, the manifest of its graph is read, and all that it names is loaded from torch's
  caches, most used first, as forms that the next matching call finds.

The thread waits until no compile is in progress and none was for a moment, so that it delays no first call of several
graphs.  What the caches lack is left to the call that needs it.  What was loaded is used as if a call had compiled it:
a form runs where its guards hold, and its first outputs are checked.

Invariants: no argument of a call is kept alive; a region that ends is not kept; a manifest only says for which values a
form is to be asked for, never what its code is.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from multigraph_backend import _compat
from multigraph_backend.cache import manifest, manifests, shipping, trusted
from multigraph_backend.cache.manifest import Manifest, RepeatedBlocks, Used, UsedForm
from multigraph_backend.cache.shipping import CacheRefused, Carried
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.events import CallCounter
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.stand_ins import Likeness
from multigraph_backend.options import Options
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.process.short_turns import ShortTurns
from multigraph_backend.region.variant import Form, Variant

log = logging.getLogger(__name__)

QUIET = 0.03  # seconds without a compile before something is loaded
_LOOK = 0.005
_BEFORE_A_NOTE = 0.02  # seconds: a program that compiles into a folder of its own may remove it right behind its call
_LONGEST_WAIT = 60.0  # for such a moment; then it goes on
_MOST_NAMES = 4  # under which code for Python floats is looked for
_TO_END = 5.0  # seconds that the end of the process waits for what is being loaded or compiled


class Loads(Protocol):
    """A region, as far as it is known here."""

    def load_ahead(self, condition: str, likeness: Likeness, values: Mapping[str, int]) -> bool:
        """Take a form from torch's caches; whether there is one more."""


class WarmStart:
    """One region's part: what it used, and that its manifest is loaded once."""

    def __init__(self, graph: CapturedGraph, options: Options, state: CompileState) -> None:
        self._graph, self._options, self._state = graph, options, state
        self._noted: _Noted | None = None
        self._name: str | None = None
        self._earlier: Manifest | None = None
        self._read = False
        self._lock = threading.RLock()  # a handler of a signal may call what it interrupts

    def kept(self, variant: Variant, args: Sequence[Any]) -> bool:
        """Whether an earlier process noted code of `variant`, which torch's caches still have."""
        return any(map(is_there, self.noted(variant, args)))

    def noted(self, variant: Variant, args: Sequence[Any]) -> list[UsedForm]:
        """The forms of `variant` that an earlier process noted, the newest last."""
        try:
            with self._lock:
                if not self._read:
                    self._earlier, self._read = manifests.load(self._named(args)), True
        except Exception as error:
            if from_outside(error):
                raise
            log.debug("what was noted of %s is not known", variant.text, exc_info=True)
        used = () if self._earlier is None else self._earlier.used
        return [form for entry in used if entry.condition == variant.text for form in entry.forms]

    def _named(self, args: Sequence[Any]) -> str:
        self._name = self._name or _identity(self._graph, self._options, self._state, args)
        return self._name

    def ran(self, region: Loads, variant: Variant, form: Form, args: Sequence[Any]) -> None:
        """New code of `variant` has run a call with `args`, and was right.  What fails here fails no call."""
        try:
            self._note(region, variant, form, args)
        except Exception as error:
            if from_outside(error):
                raise
            log.debug("%s is not noted", variant.text, exc_info=True)

    def _note(self, region: Loads, variant: Variant, form: Form, args: Sequence[Any]) -> None:
        with self._lock:
            first = self._noted is None
            if self._noted is None:
                self._noted = _noted_for(self._graph, self._named(args))
        noted = self._noted
        values = {
            str(symbol): int(value)
            for symbol, value in self._graph.values(args).items()
            if isinstance(value, int) and not isinstance(value, bool)
        }
        keys = tuple((kind, key) for kind, key in form.lowered.cached if manifest.safe_key(kind, key))
        said = form.lowered.repeated.said[: manifest.MOST_TEXT]
        repeated = dataclasses.replace(form.lowered.repeated, said=said)
        form_used = UsedForm(tuple(values.items()), keys, repeated, form.lowered.floats)
        noted.add(variant.text, variant.counter, form_used)
        if not first:
            _worker.now(noted.write_soon)
            return
        likeness = Likeness.of(self._graph, args)  # before the call gives its arguments back
        _worker.now(noted.write_soon)
        if likeness is not None:
            _worker.later(_Loading(weakref.ref(region), noted.graph, likeness).begin)


def of(graph: CapturedGraph, options: Options, state: CompileState) -> WarmStart | None:
    """A region's part, None where nothing is noted: it is off, or torch's caches do not have such code."""
    if not options.warm_start or not manifests.kept() or not in_caches(graph, options):
        return None
    return WarmStart(graph, options, state)


def in_caches(graph: CapturedGraph, options: Options) -> bool:
    """Whether torch's caches may have code of a graph, and it can be asked for alone."""
    if options.compiler != "inductor" or graph.communicates:
        return False
    return not (_compat.missing("warm start") or _compat.missing("one compile")) and _compat.caches_are_on()


def _identity(graph: CapturedGraph, options: Options, state: CompileState, args: Sequence[Any]) -> str:
    """What a graph is, in every process: its code, its inputs, what else chooses among compiles of it, and the name of
    the instance, which has a use of its own."""
    inputs = [
        (str(entry.layout.size), str(entry.layout.stride), str(arg.dtype), str(arg.device), arg.requires_grad)
        if entry.layout is not None and isinstance(arg, torch.Tensor)
        else (str(entry.expr), type(arg).__name__)
        for entry, arg in zip(graph.inputs, args, strict=True)
    ]
    chosen = (options.recording, [name for name, _ in options.inductor], len(options.saved_tensors), options.packing)
    symbols = [(str(symbol), str(info.lower), str(info.upper)) for symbol, info in graph.symbols.items()]
    around = (state.grad, [(entry.device_type, entry.enabled, str(entry.dtype)) for entry in state.autocast])
    said = ([*graph.codes], inputs, symbols, graph.outputs, chosen, around, state.hooks is not None, options.name)
    return hashlib.sha256(repr(said).encode()).hexdigest()


# ---------------------------------------------------------------- what was used


@dataclass
class _Noted:
    """What regions of one graph used in this process, and how much of it was written.

    `folder`: of the manifest, beside the caches that have the code.  Where torch has others by now, nothing is written.
    `lock` guards all of it and is held for moments; files are written under `_writing`.
    """

    graph: str
    folder: Path
    model: str
    names: tuple[str, ...]
    lock: threading.RLock = field(default_factory=threading.RLock)
    counters: dict[str, list[CallCounter]] = field(default_factory=dict)  # by condition, in the order of first use
    forms: dict[str, list[UsedForm]] = field(default_factory=dict)  # not written yet
    written: dict[str, int] = field(default_factory=dict)  # calls that the file knows of
    begun: bool = False

    def add(self, condition: str, counter: CallCounter, form: UsedForm) -> None:
        with self.lock:
            counters = self.counters.setdefault(condition, [])
            if counter not in counters:
                counters.append(counter)
            self.forms.setdefault(condition, []).append(form)

    def write_soon(self) -> None:
        time.sleep(_BEFORE_A_NOTE)
        self.write()

    def write(self, tuned: Sequence[str] = ()) -> None:
        """Into the manifest: what is new.  Where that cannot be done, it is kept for the next time."""
        if manifests.folder() != self.folder:
            return
        with _writing:
            with self.lock:
                calls = {condition: sum(c.value for c in counters) for condition, counters in self.counters.items()}
                forms, self.forms = self.forms, {}
            used = tuple(
                Used(condition, count - self.written.get(condition, 0), tuple(forms.get(condition, ())))
                for condition, count in calls.items()
                if count != self.written.get(condition) or condition in forms
            )
            if not used:
                return
            further = tuple(key for key in tuned if manifest.safe_key("autotune", key))
            if manifests.note(Manifest(self.graph, self.model, self.names, used, further), begins=not self.begun):
                self.written.update(calls)
                self.begun = True
                return
            with self.lock:
                for condition, entries in forms.items():
                    self.forms[condition] = [*entries, *self.forms.get(condition, ())]


_writing = threading.RLock()
_all_noted: dict[tuple[str, Path], _Noted] = {}
_all_lock = threading.RLock()


def _noted_for(graph: CapturedGraph, identity: str) -> _Noted:
    folder = manifests.folder()
    with _all_lock:
        made = _all_noted.get((identity, folder))
        if made is None:
            code = graph.user_code
            names = tuple(dict.fromkeys(code.names))[:64]
            made = _all_noted[identity, folder] = _Noted(identity, folder, str(code)[:1000], names)
        return made


def write_all() -> list[str]:
    """Write what this process used, with the number of calls so far; the names of its graphs."""
    with _all_lock:
        everything = list(_all_noted.values())
    tuned: list[str] = []
    if everything and _compat.compile_lock.acquire(timeout=_TO_END):  # a compile that hangs must not keep the process
        try:
            tuned = [key for kind, key in _compat.artifact_keys() if kind == "autotune"]
        finally:
            _compat.compile_lock.release()
    for noted in everything:
        noted.write(tuned)
    return list(dict.fromkeys(noted.graph for noted in everything))


# ---------------------------------------------------------------- carried to other machines


def save_cache(path: str | os.PathLike[str], model: str | None = None) -> Carried:
    """Write the caches of compiled code into one file, for `load_cache` on another machine; what went into it.

    In a process that compiled: all that torch has compiled in it, and the manifests of the graphs that it used.  In any
    other: what the manifests of earlier processes name, out of torch's folders.  `model`: only graphs of module classes
    or functions of that name or glob, or instances of that name.

    Raises `CacheRefused` where there is nothing to save, and OSError.
    """
    wait_until_warm(_TO_END)
    graphs = write_all()
    found: Iterable[Manifest] = ()
    if graphs:
        found = [entry for graph in graphs if (entry := manifests.load(graph)) is not None]
    elif manifests.kept():
        try:
            found = manifests.find().manifests
        except trusted.Refused as problem:
            raise CacheRefused(f"{manifests.folder()}: {problem}") from None
    return shipping.save(os.fspath(path), shipping.of_model(found, model))


def load_cache(path: str | os.PathLike[str]) -> Carried:
    """Put what `save_cache` wrote into torch's caches, for this process and later ones; what came out of it.

    Raises `CacheRefused`, with nothing taken, for a file that is not whole, is of another torch, package, Python or
    kind of machine, belongs to another user (but root), or that others may write to; and OSError.
    """
    return shipping.load(os.fspath(path))


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class _Loading:
    """All that one region is to load."""

    region: weakref.ref[Loads]
    graph: str
    likeness: Likeness

    def begin(self) -> None:
        found = manifests.load(self.graph)
        if found is None:
            return
        for entry in found.most_used_first():
            for form in entry.forms:
                if form.key is not None:
                    _worker.later(_LoadOne(self, entry.condition, form).run)


@dataclass(frozen=True)
class _LoadOne:
    loading: _Loading
    condition: str
    form: UsedForm

    def run(self) -> None:
        if is_there(self.form):
            _load(self.loading.region, self.condition, self.loading.likeness, dict(self.form.values))


def load_beside_calls(region: Loads, condition: str, likeness: Likeness, values: Mapping[str, int]) -> None:
    """Take a form of the variant of that text, for such values, from torch's caches when nothing is compiled."""
    _worker.later(functools.partial(_load, weakref.ref(region), condition, likeness, values))


def _load(region: weakref.ref[Loads], condition: str, likeness: Likeness, values: Mapping[str, int]) -> None:
    if (held := region()) is not None:
        held.load_ahead(condition, likeness, values)


def repeated_in(forms: Sequence[UsedForm]) -> RepeatedBlocks | None:
    """What the newest of `forms` that says anything of blocks that come again says of them."""
    return next((form.repeated for form in reversed(forms) if form.repeated.said), None)


def names_of_floats(forms: Sequence[UsedForm]) -> list[str]:
    """The names of code that computes with Python floats, of those of `forms` that torch's caches still have; the
    newest first, and few: each is asked for."""
    names = (form.floats for form in reversed(forms) if form.floats and is_there(form))
    return list(dict.fromkeys(names))[:_MOST_NAMES]


def is_there(form: UsedForm) -> bool:
    """Whether torch's caches have something under its keys: what they lack is not asked for."""
    if form.key is None:
        return False
    try:
        if not all(_compat.cache_entry("native", key).exists() for key in form.libraries):
            return False
        return any(not name.startswith(".") for name in os.listdir(_compat.cache_entry("aot_autograd", form.key)))
    except OSError:
        return False


class _Worker:
    """One thread of the process, there while there is something to do.

    `now`: as soon as possible.  `later`: when nothing is compiled.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._now: collections.deque[Callable[[], object]] = collections.deque()
        self._later: collections.deque[Callable[[], object]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._registered = False

    def now(self, task: Callable[[], object]) -> None:
        self._add(self._now, task)

    def later(self, task: Callable[[], object]) -> None:
        self._add(self._later, task)

    def _add(self, tasks: collections.deque[Callable[[], object]], task: Callable[[], object]) -> None:
        with self._lock:
            if self._ended:
                return
            tasks.append(task)
            if not self._registered:
                self._registered = True
                atexit.register(self._end)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="multigraph-warm-start", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be started, or the process ends
                    self._thread = None

    def _run(self) -> None:
        try:
            self._work()
        finally:
            _compat.hold_stashed()

    def _work(self) -> None:
        while True:
            with self._lock:
                task = self._now.popleft() if self._now else None
                if task is None and (self._ended or not self._later):
                    self._thread = None
                    self._lock.notify_all()
                    return
            if task is None:
                if not self._quiet():
                    continue
                with self._lock:
                    task = self._later.popleft() if self._later and not self._ended else None
            try:
                if task is not None:
                    with ShortTurns():  # calls go on, and let go of the interpreter at each operator
                        task()
            except Exception:
                log.debug("beside the calls", exc_info=True)
            del task  # it may be the last to hold something

    def _quiet(self) -> bool:
        """Wait for a moment in which nothing is compiled; False where something is to be done before."""
        began = since = time.monotonic()
        while True:
            if self._now or self._ended:
                return False
            now = time.monotonic()
            if not _compat.compile_lock_is_free():
                since = now
            if now - since >= QUIET or now - began >= _LONGEST_WAIT:
                return True
            time.sleep(_LOOK)

    def wait(self, seconds: float) -> bool:
        """Until nothing is left to do; whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, seconds)

    def _end(self) -> None:
        """The process ends: a thread inside of torch must not be met by that."""
        with self._lock:
            self._ended = True
            self._later.clear()
            self._lock.wait_for(lambda: self._thread is None, _TO_END)
        try:
            write_all()
        except Exception:
            log.debug("at the end", exc_info=True)


_worker = _Worker()


def wait_until_warm(seconds: float = 60.0) -> bool:
    """Wait until all is loaded that manifests name for the graphs that were called so far; whether that is so.

    For a server that calls each of its models once, and then takes requests.
    """
    return _worker.wait(seconds)


def _begin_anew() -> None:
    """In a forked process: the thread is not there, and what was called before is its parent's to note."""
    global _worker, _all_lock, _writing
    _worker, _all_lock, _writing = _Worker(), threading.RLock(), threading.RLock()
    _all_noted.clear()


os.register_at_fork(after_in_child=_begin_anew)

__all__ = [
    "CacheRefused",
    "Carried",
    "WarmStart",
    "in_caches",
    "is_there",
    "load_beside_calls",
    "load_cache",
    "names_of_floats",
    "of",
    "repeated_in",
    "save_cache",
    "wait_until_warm",
    "write_all",
]
