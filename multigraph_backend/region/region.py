"""One Dynamo graph and its variants.

A `Region` owns the captured graph, one `Variant` per declared condition and the generic one.  A call whose variant is
ready goes through generated code alone (`dispatch`); any other comes to `missed`, which compiles, or falls back to the
next safer form: variant, generic, the graph run eagerly.

Locks: `Variant.lock` while compiling; `_publish_lock` for `_ready`, whose entries are replaced whole, so that generated
code reads them without a lock.  The dispatcher keeps its region alive, not the other way round.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

from multigraph_backend import _compat, events, sealing
from multigraph_backend.cache.manifest import UsedForm
from multigraph_backend.capture import declared
from multigraph_backend.capture.aliasing import Sharing, sharing
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.capture.user_code import UserCode
from multigraph_backend.distributed import sequence
from multigraph_backend.distributed.sequence import SameSizes
from multigraph_backend.lower import guards, lowering
from multigraph_backend.lower.compile_thread import Interrupted, describe, enter, reaching_the_caller
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.lower.only_cached import NotCached
from multigraph_backend.lower.stand_ins import Likeness, stand_ins
from multigraph_backend.options import Options
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.region import dispatch, first_run, gains, registry, rules, warm_start
from multigraph_backend.region.compile_options import options_for
from multigraph_backend.region.dispatch import Ready
from multigraph_backend.region.first_run import WrongOutputs
from multigraph_backend.region.tiers import Tier
from multigraph_backend.region.variant import Floats, Form, Variant
from multigraph_backend.saved_tensors import account as saved_account
from multigraph_backend.saved_tensors.account import SavedTensors

if TYPE_CHECKING:
    from multigraph_backend.lower.worker import Outcome
    from multigraph_backend.padding.padded import Account
    from multigraph_backend.region.background import Asked, Background

log = logging.getLogger(__name__)

_serials = itertools.count()

_NO_COMPILE_STANCES = ("eager_on_recompile", "fail_on_recompile", "force_eager")

_ASK_AGAIN = 60.0  # seconds until torch's caches are asked again for what they lacked

_NOT_READY: Ready = (lambda args: False, lambda: None, None, None)


_TRACED_ANEW = (
    "it takes Python floats, and torch's caches forget what its code relies on of them: each process traces it anew, "
    "nothing is loaded ahead, and seal() counts that as a compile"
)


class VariantFailed(RuntimeError):
    """A compile failed and the user asked to hear of it (`on_failure="raise"`)."""


class OtherCollectives(RuntimeError):
    """A variant issues other collectives than the generic graph, or in another order."""


class Region:
    """See the module's text.  `dispatcher()` makes what Dynamo calls."""

    def __init__(self, graph: CapturedGraph, options: Options, state: CompileState) -> None:
        self.serial = next(_serials)
        self.options = options
        self.name = options.name
        self.user_code: UserCode = graph.user_code
        self.sizes = {size: str(entry.expr) for size, entry in graph.sizes.items()}
        self.argument_names = rules.argument_names(graph)
        self._graph = graph
        self._state = state
        if options.on_failure == "raise" and not graph.user_code.partial:
            rules.refuse_unknown_names(graph, options)
        conditions, notes = declared.resolve(graph, options.specialize)
        self.padding: Account | None = None
        said, expected = list[str](), list[str]()
        if options.pad:
            from multigraph_backend.padding import padded  # a start without it is shorter

            self.padding, said, expected = padded.resolve(graph, options, conditions)
        self.notes = list(dict.fromkeys([*graph.notes, *options.notes, *notes, *said]))
        self.variants = [Variant(number, condition) for number, condition in enumerate(conditions)]
        self.generic = Variant(len(conditions), None)
        self.plan, self._checks = rules.plan(graph, self.variants, self.generic.number)
        self._ready: list[Ready] = [_NOT_READY] * (len(conditions) + 1)
        self._publish_lock = threading.RLock()  # a handler of a signal may call what it interrupts
        self._all_pending = options.compile == "eager"
        self._issued: Lowered | None = None  # what generic's first form issues: the reference for all others
        self._issued_lock = threading.Lock()
        self._warm_start = warm_start.of(graph, options, state)
        self._background: Background | None = None
        if options.compile == "background":
            from multigraph_backend.region import background  # and without workers

            self._background = background.Background(graph, options, state)
        self._first_call: tuple[Likeness, dict[sympy.Symbol, int]] | None = None
        if self._background is not None and self._background.cannot is not None:
            self.notes.append(f"compile='background': variants are compiled in calls: {self._background.cannot}")
        events.count("regions")
        registry.add(self)
        for note in self.notes:
            events.warn_once(f"{self.user_code}: {note}", "%s: %s", self.user_code, note)
        # each server meets sizes 0 and 1: the report says it, and no warning does
        unremarkable = [*graph.remarks, *expected]
        for note in unremarkable:
            log.info("%s: %s", self.user_code, note)
        self.notes += unremarkable

    @property
    def captured(self) -> CapturedGraph | None:
        """The graph as Dynamo traced it; None where it was compiled at once."""
        return self.__dict__.get("_graph")

    def may_be_saved(self) -> None:
        """From now on what its code is found by is taken down with it."""
        self._state = dataclasses.replace(self._state, saved=True)

    @property
    def state(self) -> CompileState:
        """The state in which it is compiled."""
        return self._state

    def dispatcher(self) -> Callable[..., Any]:
        """The function that runs a call: same arguments as the graph, same outputs."""
        profiler = dispatch.NoProfiler if _compat.missing("instruments") else _compat.profiler
        run = dispatch.install(self.plan, self._ready, self.missed, self._checks, profiler, self._profiled)
        if self.padding is None:
            return run
        from multigraph_backend.padding import padded

        return padded.install(self._graph, self.options, self._state, self.padding, run)

    def _profiled(self, target: int, args: tuple[Any, ...]) -> Any:
        """A call while torch's profiler runs: the same, under the variant's name."""
        with torch.profiler.record_function(f"multigraph: {self.user_code.title}: {self._variant(target).text}"):
            check, tick, run, _ = self._ready[target]
            if run is not None and (check is None or check(args)):
                tick()
                return run(*args)
            return self.missed(target, args)

    # ---------------------------------------------------------------- a call that generated code could not run

    def missed(self, target: int, args: tuple[Any, ...]) -> Any:
        """Run a call whose variant is not ready, or whose forms do not hold for it."""
        with reaching_the_caller():
            return self._run_missed(target, args)

    def _run_missed(self, target: int, args: tuple[Any, ...]) -> Any:
        if self._all_pending:
            self._compile_all(args)
        variant = self._variant(target)
        for candidate in (variant,) if variant.generic else (variant, self.generic):
            form = self._form_for(candidate, args)
            if form is None:
                continue
            if form.proven:
                candidate.tick()
                return self._run_proven(candidate, form, args)
            return self._first_run(candidate, form, args)
        in_force = stance()
        if in_force == "fail_on_recompile":
            raise RuntimeError(
                f"{self.user_code}: no compiled form fits this call of {variant.text}, and torch.compiler.set_stance "
                "is 'fail_on_recompile'; call it once under the default stance, or use 'eager_on_recompile'"
            )
        why = f"stance {in_force!r}" if in_force in _NO_COMPILE_STANCES else self.generic.reason
        return self._run_eagerly(args, why or "no form may be compiled")

    def _run_proven(self, variant: Variant, form: Form, args: tuple[Any, ...]) -> Any:
        if gains.measuring() and not variant.generic and self._graph.repeatable:
            generic = self._form_for(self.generic, args)
            if generic is not None:
                return gains.run_beside(form.lowered.run, generic.lowered.run, args, variant.gain)
        return form.lowered.run(*args)

    def _variant(self, target: int) -> Variant:
        return self.variants[target] if target < len(self.variants) else self.generic

    def _form_for(self, variant: Variant, args: Sequence[Any]) -> Form | None:
        """A form that holds for `args`, compiled now if it must and may be; one compile at a time per variant."""
        form = variant.fitting(args)
        if form is not None or variant.resting or variant.in_background:
            return form
        beside = self._background is not None and self._background.cannot is None and not variant.generic
        if not variant.may_compile(*self._case(args)):
            return None
        if (in_force := stance()) in _NO_COMPILE_STANCES and not beside:
            return None if in_force == "force_eager" else self._saved_form(variant, args)
        if sealing.sealed():
            form = self._from_caches(variant, args)
            if form is not None or sealing.refused(f"{self.user_code}: {variant.text} is compiled") is not None:
                return form
        if beside and (self._begin_beside(variant, args) or stance() in _NO_COMPILE_STANCES):
            return None
        if not enter(variant.lock, self.options.compile_timeout):
            return None
        try:
            form = variant.fitting(args)
            # compiling already: this call interrupted that one, in a handler of a signal, and nobody else can end it
            if form is None and not variant.compiling and variant.may_compile(*self._case(args)):
                variant.compiling = True
                try:
                    form = self._compile(variant, args)
                finally:
                    variant.compiling = False
        finally:
            variant.lock.release()
        return form

    def _saved_form(self, variant: Variant, args: Sequence[Any]) -> Form | None:
        """For a call under a stance by which nothing is compiled: what the region was saved with."""
        return None

    def _compile(self, variant: Variant, args: Sequence[Any]) -> Form | None:
        """Compile a form of `variant` for `args`; the caller holds its lock."""
        pinned = {} if variant.condition is None else self._pinned(variant.condition, args)
        exact = rules.exact(variant, args)
        if exact is not None and variant.exact not in (None, exact):
            return None
        log.info("%s: compiling %s", self.user_code, variant.text)
        try:
            lowered = self._kept(variant, args)
            if lowered is None:
                options = options_for(self.options, variant, args, self._state.grad)
                floats = self._new_name()
                lowered = lowering.lower(
                    self._graph, variant.facts, args, options, self._state, pinned, variant.text, floats=floats
                )
            self._refuse_missed_goal(lowered)
            if self._graph.communicates:
                self._check_collectives(variant, lowered, args)
        except Exception as error:
            if from_outside(error):
                raise Interrupted(error) from None
            self._failed(variant, error, args)
            return None
        if self._warm_start is not None and self._graph.floats and _TRACED_ANEW not in self.notes:
            found = lowered.floats or lowering.kept_by_caches(self._graph, args)
            self.notes += [] if found else [_TRACED_ANEW]
        form = Form(lowered)
        variant.exact = exact
        variant.add(form, *self._case(args))
        log.info("%s: compiled %s in %.2f s", self.user_code, variant.text, lowered.seconds)
        return form

    def _new_name(self) -> str:
        """Under which torch's caches get code that computes with Python floats; "" where nobody would be told of it."""
        told = self._state.saved or self._warm_start is not None
        return lowering.new_name() if self._graph.floats and told else ""

    def _check_collectives(self, variant: Variant, lowered: Lowered, args: Sequence[Any]) -> None:
        """Raises `OtherCollectives` where code does not issue what the generic graph does: other ranks may run that."""
        if self._issued is None:
            made = lowered
            if not variant.generic:
                # nothing is locked meanwhile: who traces waits for Dynamo's compile lock, whose owner may come here
                made = lowering.only_traced(self._graph, {}, args, self.options, self._state)
            with self._issued_lock:
                self._issued = self._issued or made
            if self._issued is lowered:
                return
        assert self._issued.issued is not None
        assert lowered.issued is not None
        same = SameSizes(self._issued.sizes, lowered.sizes)
        different = sequence.difference(self._issued.issued, lowered.issued, same)
        if different is None:
            return
        if variant.generic:  # nothing safer is left; each rank that comes here compiles the same
            where = self.user_code
            events.warn_once(f"{where}: {different}", "%s: %s: ranks may wait forever", where, different)
            return
        events.count("refused_collectives")
        raise OtherCollectives(f"{different}; ranks that run generic would wait forever, or mix up data")

    def _case(self, args: Sequence[Any]) -> tuple[Sharing, Floats]:
        """What a failure of a compile for `args` speaks for."""
        return sharing(self._graph, args), _floats(self._graph, args)

    def _failed(self, variant: Variant, error: BaseException, args: Sequence[Any]) -> None:
        variant.fail(error, *self._case(args))
        self._publish(variant)
        if self.options.cudagraphs == "require" and (missed := _not_all_recorded(error)) is not None:
            raise missed
        remedy = _remedy(error)
        if remedy is not None:  # a lack of this machine: every compile fails, and one line says it
            events.warn_once(remedy, "%s", remedy)
        elif isinstance(error, _compat.MissingSymbol):  # said at the first graph
            log.debug("%s: %s cannot be compiled: %s", self.user_code, variant.text, error)
        else:
            events.warn_once(
                f"{self.user_code}: {variant.text} failed",
                "%s: %s could not be compiled; calls run %s instead. %s",
                self.user_code,
                variant.text,
                "eagerly" if variant.generic else "generic",
                variant.reason,
            )
        log.debug("%s", variant.details)
        if self.options.on_failure == "raise":
            raise VariantFailed(f"{self.user_code}: {variant.text} could not be compiled: {describe(error)}") from error

    def _first_run(self, variant: Variant, form: Form, args: Sequence[Any]) -> Any:
        """The first call of new code: its outputs are checked for structure, and an error is held against eager."""
        draw_again = first_run.draw_again(self._graph, args)
        outputs, problem = self._run_checked(form, args)
        if problem is None:
            if self._may_be_better(form, args):
                form.tier = Tier(form.lowered, variant, self)
            self._publish(variant)
            variant.tick()
            if self._warm_start is not None:
                self._warm_start.ran(self, variant, form, args)
            if self._background is not None and self._first_call is None:
                self._first_call = _as_first(self._graph, args)
            return outputs
        is_wrong = isinstance(problem, WrongOutputs)
        if draw_again is None:
            if is_wrong:
                variant.drop(form, problem, *self._case(args))
            raise first_run.not_again(self._graph, variant.text, problem)
        draw_again()
        # eager raises the program's own error
        outputs = self._run_eagerly(args, str(problem) if is_wrong else "the first run of new code raised")
        variant.drop(form, problem, *self._case(args))
        self._publish(variant)
        events.warn_once(
            f"{self.user_code}: {variant.text} wrong",
            "%s: the compiled %s was dropped: %s",
            self.user_code,
            variant.text,
            variant.reason,
        )
        if self.options.on_failure == "raise":
            what = f"{self.user_code}: the compiled {variant.text}"
            raise VariantFailed(f"{what} is wrong: {variant.reason}") from problem
        return outputs

    def _run_checked(self, form: Form, args: Sequence[Any]) -> tuple[Any, Exception | None]:
        """See `first_run.checked`; code that nothing speaks against is proven."""
        outputs, problem = first_run.checked(self._graph, form.lowered.run, args)
        form.proven = form.proven or problem is None
        return outputs, problem

    def _run_eagerly(self, args: Sequence[Any], why: str) -> Any:
        events.count("eager_calls")
        # What raises here, too, is the program's own, and says enough.  A call of the module would print it as well,
        # and forget where it was raised; so would its `forward`, which is unwritten until somebody asks for the code.
        module = self._graph.module
        _ = module.code
        outputs = module.forward(*args)
        if not self.generic.failures:  # else it was said when generic failed
            events.warn_once(f"{self.user_code}: eager", "%s: runs eagerly: %s", self.user_code, why)
        return outputs

    # ---------------------------------------------------------------- publishing

    def publish(self) -> None:
        """Let generated code run what it may: all of it, but for variants while gains are measured."""
        for variant in (self.generic, *self.variants):
            self._publish(variant)

    def _publish(self, variant: Variant) -> None:
        """Let generated code run the proven forms of `variant` without coming here, and generic where it rests."""
        with self._publish_lock:
            self._ready[variant.number] = self._entry(variant)
            if variant.generic:
                for other in self.variants:
                    if other.resting or other.failed_floats or other.in_background:
                        self._ready[other.number] = self._entry(other)

    def _entry(self, variant: Variant) -> Ready:
        forms = [form for form in variant.forms if form.proven]
        if gains.measuring() and not variant.generic:
            return _NOT_READY
        rests = not variant.generic and (variant.resting or variant.failed_floats or variant.in_background)
        past = self._ready[self.generic.number] if rests else _NOT_READY
        if past[2] is not None:
            past = _while_resting(variant, past, self._graph)
            return (None, lambda: None, self._chooser(variant, forms, past), None) if forms else past
        if not forms:
            return _NOT_READY
        if len(forms) == 1:
            return forms[0].lowered.guards.check, variant.tick, forms[0].run, forms[0].boxed
        return None, lambda: None, self._chooser(variant, forms), None

    def _chooser(self, variant: Variant, forms: Sequence[Form], past: Ready | None = None) -> Callable[..., Any]:
        """Tries one form after the other, then `past`."""
        entries = [(form.lowered.guards.check, variant.tick, form.run) for form in forms]
        choices = (*entries, *(() if past is None or past[2] is None else ((past[0], past[1], past[2]),)))
        number, missed = variant.number, weakref.WeakMethod(self.missed)

        def choose(*args: Any) -> Any:
            for check, tick, run in choices:
                if check is None or check(args):
                    tick()
                    return run(*args)
            region_missed = missed()
            assert region_missed is not None  # the dispatcher that called keeps the region
            return region_missed(number, args)

        return choose

    # ---------------------------------------------------------------- compile="background"

    def _begin_beside(self, variant: Variant, args: Sequence[Any], like: Likeness | None = None) -> bool:
        """Have a worker compile a form for calls like this one, if none does so; False where a call has to.

        `like`: what `args` were made of, where they are none of a call.
        """
        assert self._background is not None
        if not variant.lock.acquire(blocking=False):
            return True  # another call is here
        try:
            exact = rules.exact(variant, args)
            if variant.in_background or variant.fitting(args) is not None:
                return True
            if exact is not None and variant.exact not in (None, exact):
                return True
            if not self._background.begin(self, variant, args, like, exact, self._case(args)):
                return False
        finally:
            variant.lock.release()
        log.info("%s: %s compiles in a worker", self.user_code, variant.text)
        self._publish(variant)  # generic's code, until it is there
        return True

    def swap_in(self, asked: Asked, made: Outcome | None = None) -> None:
        """In a worker's thread: take what it, or another process, has compiled out of torch's caches.

        `made`: what the worker says of it, where it has.  Raises where they do not have it.
        """
        variant, tier = asked.variant, asked.tier
        args = asked.likeness.with_values(self._graph, asked.values)
        if args is None:
            raise CannotLower("a parameter is gone")
        with variant.lock:
            how = (variant, args, tier is not None)
            lowered = self._cached(*how, made.floats) if made and made.floats else self._if_cached(*how)
            if lowered is None:
                raise NotCached("it is not there")
            form = Form(lowered, loaded=True)
            if made is not None and made.kind == "made":
                seconds = lowered.seconds + made.seconds
                repeated = made.repeated if made.repeated and made.repeated.said else lowered.repeated
                form = Form(dataclasses.replace(lowered, seconds=seconds, repeated=repeated), by_worker=True)
            if tier is not None:
                tier.begin_trial(form)
            else:
                variant.exact = asked.exact
                variant.add(form, *asked.case)
                variant.in_background = False
        self._publish(variant)
        what = "a worker compiled" if form.by_worker else "loaded"
        whole = "" if tier is None else ", whole"
        log.info("%s: %s %s%s in %.2f s", self.user_code, what, variant.text, whole, form.lowered.seconds)

    def not_made(self, asked: Asked, error: Exception | None) -> None:
        """In a worker's thread: there is no code.  `error`: the failure; None: calls compile it."""
        variant = asked.variant
        if asked.tier is not None:
            asked.tier.refuse(f"the whole graph could not be compiled ({describe(error) if error else 'by no worker'})")
            return
        with variant.lock:
            variant.in_background = False
            if error is not None:
                variant.fail(error, *asked.case)
        self._publish(variant)
        if error is not None:
            events.warn_once(
                f"{self.user_code}: {variant.text} failed",
                "%s: %s could not be compiled in the background; calls run generic. %s",
                self.user_code,
                variant.text,
                variant.reason,
            )

    def compile_ahead(self) -> None:
        """Have workers compile all that was declared, for sizes made up from the first call."""
        if self._background is None or self._background.cannot is not None or self._first_call is None:
            return
        likeness, first = self._first_call
        for variant in self.variants:
            condition = variant.condition
            if condition is None or condition.never is not None or condition.check is not None:
                continue
            values = dict(first)
            for symbol, facts in variant.facts.items():
                values[symbol] = rules.example(facts.intersect(declared.bounds(self._graph, symbol)), values[symbol])
            made = likeness.with_values(self._graph, {str(symbol): value for symbol, value in values.items()})
            if made is None or not rules.declared_for(variant, made) or variant.fitting(made) is not None:
                continue
            if variant.may_compile(*self._case(made)) and not sealing.sealed():
                self._begin_beside(variant, made, likeness)

    # ---------------------------------------------------------------- bodies first, the whole graph later: `tiers`

    def _may_be_better(self, form: Form, args: Sequence[Any]) -> bool:
        """Whether the whole graph's code is to be tried in place of new code that calls bodies."""
        return (
            self._background is not None
            and self._background.cannot is None
            and self.options.repeat == "auto"
            and form.lowered.repeated.calls
            and not any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
        )

    def compile_whole(self, tier: Tier, args: Sequence[Any]) -> bool | None:
        """See `tiers.Region`, as of the next two."""
        variant = tier.variant
        if self._background is None:
            return False
        if not variant.lock.acquire(blocking=False):
            return None  # another form of it is compiled
        try:
            exact = rules.exact(variant, args)
            return self._background.begin(self, variant, args, None, exact, self._case(args), tier)
        finally:
            variant.lock.release()

    def first_of_whole(self, tier: Tier, whole: Form, args: Sequence[Any]) -> Any:
        draw_again = first_run.draw_again(self._graph, args)
        outputs, problem = self._run_checked(whole, args)
        if problem is None:
            return outputs
        what = f"is wrong ({problem})" if isinstance(problem, WrongOutputs) else f"raised {describe(problem)}"
        tier.refuse(f"the whole graph's code {what}")
        if draw_again is None:
            raise first_run.not_again(self._graph, tier.variant.text, problem)
        draw_again()
        return tier.first.run(*args)

    def decided(self, tier: Tier) -> bool:
        variant = tier.variant
        if tier.taken is not None:
            if not variant.lock.acquire(blocking=False):
                return False  # another form of it is compiled
            try:
                form = next((form for form in variant.forms if form.tier is tier), None)
                whole, tier.whole, tier.run = tier.whole, None, None
                if tier.taken and whole is not None and form is not None:
                    variant.replace(form, whole)
                    tier.first, form.tier, whole.tier = whole.lowered, None, tier
            finally:
                variant.lock.release()
        self._publish(variant)
        return True

    # ---------------------------------------------------------------- before a call asks for it

    def load_ahead(self, condition: str, likeness: Likeness, values: Mapping[str, int]) -> bool:
        """Take a form of the variant of that text from torch's caches, for such values; whether there is one more.

        Not for callables that could not be understood: these belong to the first size that a call of this process has.
        """
        everything = (self.generic, *self.variants)
        variant = next((entry for entry in everything if entry.text == condition and entry.state != "inactive"), None)
        if variant is None or (variant.condition is not None and variant.condition.check is not None):
            return False
        args = likeness.with_values(self._graph, values)
        if args is None or not rules.declared_for(variant, args) or not variant.lock.acquire(blocking=False):
            return False  # whoever has it compiles, and will ask the same caches
        try:
            if variant.compiling or variant.fitting(args) is not None or not variant.may_compile(*self._case(args)):
                return False
            return self._load(variant, args) is not None
        finally:
            variant.lock.release()

    def _load(self, variant: Variant, args: Sequence[Any]) -> Form | None:
        """A form for `args` out of torch's caches, None where they have none; the caller holds the variant's lock."""
        if (lowered := self._if_cached(variant, args)) is None:
            return None
        form = Form(lowered, loaded=True)
        variant.add(form, *self._case(args))
        log.info("%s: loaded %s in %.2f s", self.user_code, variant.text, lowered.seconds)
        return form

    def _kept(self, variant: Variant, args: Sequence[Any]) -> Lowered | None:
        """Code that an earlier process noted: torch's caches are asked alone, before a compile is begun, which traces
        one of the blocks that come again before it asks them, and asks for no code that computes with Python floats."""
        if not (self.options.repeat or self._graph.floats) or (
            variant.condition is not None and variant.condition.check is not None
        ):
            return None
        return self._if_cached(variant, args) if self._is_kept(variant, args) else None

    def _is_kept(self, variant: Variant, args: Sequence[Any]) -> bool:
        """Whether torch's caches are likely to have code of `variant`."""
        return self._warm_start is not None and self._warm_start.kept(variant, args)

    def _if_cached(self, variant: Variant, args: Sequence[Any], whole: bool = False) -> Lowered | None:
        """Code for `args` out of torch's caches, None where they have none; `whole`: without bodies."""
        found = lowering.kept_by_caches(self._graph, args)
        for floats in ("",) if found else warm_start.names_of_floats(self._noted(variant, args)):
            try:
                return self._cached(variant, args, whole, floats)
            except Exception as error:  # it says nothing of the code: a call that needs it compiles it
                if from_outside(error):
                    raise
                log.debug("%s: %s is not in torch's caches: %s", self.user_code, variant.text, describe(error))
        return None

    def _cached(self, variant: Variant, args: Sequence[Any], whole: bool = False, floats: str = "") -> Lowered:
        """Code for `args` out of torch's caches, of that name; raises what `lower` raises."""
        pinned = {} if variant.condition is None else self._pinned(variant.condition, args)
        options = options_for(self.options, variant, args, self._state.grad, whole)
        lowered = self._take(variant, args, options, pinned, floats)
        self._refuse_missed_goal(lowered)
        if whole:
            return lowered
        # of blocks that come again, which code does not tell
        repeated = warm_start.repeated_in(self._noted(variant, args))
        return lowered if repeated is None else dataclasses.replace(lowered, repeated=repeated)

    def _take(
        self, variant: Variant, args: Sequence[Any], options: Options, pinned: Mapping[sympy.Symbol, int], floats: str
    ) -> Lowered:
        graph, state = self._graph, self._state
        return lowering.lower(graph, variant.facts, args, options, state, pinned, variant.text, True, floats)

    def _noted(self, variant: Variant, args: Sequence[Any]) -> Sequence[UsedForm]:
        """What was noted of code of `variant` where it was compiled, the newest last."""
        return () if self._warm_start is None else self._warm_start.noted(variant, args)

    def _refuse_missed_goal(self, lowered: Lowered) -> None:
        """Raises `GoalMissed` where the user asked to hear of it, before anything has run."""
        if self.options.on_failure == "raise" and self.options.memory_goal is not None:
            saved_account.refuse_missed(lowered.saved)

    def _from_caches(self, variant: Variant, args: Sequence[Any]) -> Form | None:
        """After `seal()`: what torch's caches have is no compile.  Asked in vain, they are asked again in a minute."""
        if not warm_start.in_caches(self._graph, self.options) or not variant.lock.acquire(blocking=False):
            return None
        try:
            if variant.compiling or variant.clock() < variant.asked_caches + _ASK_AGAIN:
                return None
            form = variant.fitting(args)
            if form is None and (variant.condition is None or variant.condition.check is None):
                form = self._load(variant, args)
                variant.asked_caches = -math.inf if form is not None else variant.clock()
            return form
        finally:
            variant.lock.release()

    def _pinned(self, condition: declared.Condition, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        return declared.exact_values(condition, self._graph.values(args))

    # ---------------------------------------------------------------- compile="eager"

    def _compile_all(self, args: Sequence[Any]) -> None:
        """Compile every declared variant and generic now, for sizes that fit each, made up from `args`.

        Where failures are to be raised, all are compiled before the first one is.  Once sealed, a call gets, or is
        refused, what it needs itself.
        """
        if sealing.sealed():
            return
        self._all_pending = False
        errors: list[Exception] = []
        try:
            for variant, made in self._made_up(args):
                try:
                    self._form_for(variant, made)
                except Exception as error:
                    errors.append(error)
        except BaseException:  # interrupted: the next call goes on
            self._all_pending = True
            raise
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"and: {further}")
            raise errors[0]

    def prepare(self, args: Sequence[Any]) -> None:
        """Compile what a call with `args` needs, without running it."""
        if self._all_pending:
            self._compile_all(args)
        none = [_NOT_READY] * len(self._ready)
        variant = self._variant(dispatch.install(self.plan, none, lambda target, args: target, self._checks)(*args))
        if self._form_for(variant, args) is None and not variant.generic:
            self._form_for(self.generic, args)

    def _made_up(self, args: Sequence[Any]) -> Iterator[tuple[Variant, Sequence[Any]]]:
        """Each variant that can be compiled now, generic last, with arguments that fit it."""
        for variant, values in self._examples(args):
            try:
                made = stand_ins(self._graph, args, values)
            except CannotLower as error:
                log.info("%s: %s stays lazy: %s", self.user_code, variant.text, error)
                self.notes.append(f"{variant.text} stays lazy: {error}")
                continue
            yield variant, made

    def _examples(self, args: Sequence[Any]) -> Iterator[tuple[Variant, dict[sympy.Symbol, Any]]]:
        """Each variant that can be compiled before a call asks for it, generic last, with values that fit it: those of
        `args`, where its condition has a place for them."""
        for variant in (*self.variants, self.generic):
            condition = variant.condition
            if condition is not None and (condition.never is not None or condition.check is not None):
                continue
            values = self._graph.values(args)
            for symbol, facts in variant.facts.items():
                values[symbol] = rules.example(facts.intersect(declared.bounds(self._graph, symbol)), values[symbol])
            yield variant, values


def compiled_at_once(
    run: Callable[..., Any],
    user_code: UserCode,
    options: Options,
    seconds: float,
    reason: str,
    saved: tuple[SavedTensors, ...] = (),
) -> Callable[..., Any]:
    """The dispatcher of a graph that cannot be compiled late: one generic form, covered by Dynamo's own guards."""
    region = Region.__new__(Region)
    region.serial = next(_serials)
    region.options, region.name, region.user_code, region.sizes = options, options.name, user_code, {}
    region.argument_names = {}
    region.padding = None
    region.notes = [f"compiled at once, without variants: {reason}", *options.notes]
    region.variants, region.generic = [], Variant(0, None)
    region.generic.add(Form(Lowered(run, guards.NONE, seconds, saved=saved), proven=True))
    region.plan, region._checks = dispatch.plan((), (), 0), {}
    region._ready, region._publish_lock, region._all_pending = [_NOT_READY], threading.RLock(), False
    region._background = region._first_call = None
    region._publish(region.generic)
    events.count("regions")
    registry.add(region)
    # what torch lacks it lacks for every graph
    key = reason.partition(";")[0] if reason.startswith("this torch differs") else f"{user_code}: {reason}"
    events.warn_once(key, "%s: %s", user_code, region.notes[0])
    for note in options.notes:
        events.warn_once(f"{user_code}: {note}", "%s: %s", user_code, note)
    return region.dispatcher()


# ---------------------------------------------------------------- helpers


def _while_resting(variant: Variant, generic: Ready, graph: CapturedGraph) -> Ready:
    """Generic's code in place of a variant that nobody compiles for a while, or not for some values of floats."""
    check, tick, run, code = generic
    clock, until = variant.clock, variant.rests_until
    if until == math.inf or variant.in_background:  # when a worker is done, other entries are put in place
        return generic
    if variant.failed_floats:
        return (
            (lambda args: variant.rests_for(_floats(graph, args)) and (check is None or check(args))),
            tick,
            run,
            code,
        )
    if check is None:
        return (lambda args: clock() < until), tick, run, code
    return (lambda args: clock() < until and check(args)), tick, run, code


def _floats(graph: CapturedGraph, args: Sequence[Any]) -> Floats:
    """What a failure of a compile for `args` speaks for, of Python floats."""
    return tuple((str(symbol), repr(value)) for symbol, value in lowering.telling_floats(graph, args).items())


def _as_first(graph: CapturedGraph, args: Sequence[Any]) -> tuple[Likeness, dict[sympy.Symbol, int]] | None:
    """What is kept of a call, for other sizes to be made up from it; None where they cannot."""
    try:
        likeness = Likeness.of(graph, args)
    except Exception as error:
        if from_outside(error):
            raise
        return None
    values = {symbol: value for symbol, value in graph.values(args).items() if type(value) is int}
    return None if likeness is None else (likeness, values)


def stance() -> str:
    """torch's stance, "default" where this torch does not tell."""
    return "default" if _compat.missing("stances") else _compat.stance()


def _not_all_recorded(error: BaseException) -> BaseException | None:
    """The error in the chain of causes that says what `cudagraphs="require"` could not have."""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "NotAllRecorded":
        cause = cause.__cause__ or cause.__context__
    return cause


def _remedy(error: BaseException) -> str | None:
    """What the machine lacks and what to do, where that is why a compile failed."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "InvalidCxxCompiler":
            return (
                "no C++ compiler was found, which Inductor needs for CPU code: graphs run eagerly; install g++ or "
                "clang, or set CXX"
            )
        cause = cause.__cause__ or cause.__context__
    return None
