"""One fuzz case: a program played by eager and by a compiled model on equal random inputs; the records are compared.

A record of a call holds outputs, inputs after the call (mutations), buffers, which outputs share storage with what, and
gradients. After each call (or at the end, where backwards run late) the parameters change in place, as an optimizer
would change them. Beside the numbers the verdict says whether the feature was active: the variant that brute force
expects ran, nothing failed, nothing ran in eager.
"""

from __future__ import annotations

import collections
import contextlib
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config

from .programs import DYNAMIC, Call, Program, definition, dtype_for

# "torch": plain torch.compile, with nothing declared, gets the program wrong as well. "discarded": eager, or Dynamo's
# trace of it, refuses the program (a mark on a size that the program turns out to fix), so there is nothing to compare.
Outcome = Literal["right", "wrong", "error", "inactive", "torch", "discarded"]
Observe = Callable[[], Mapping[str, Any]]
# (model, program, specialize option, compiler) -> compiled model
Compile = Callable[[torch.nn.Module, Program, list[dict[str, Any]], str], Callable[..., Any]]


@dataclass(frozen=True)
class Verdict:
    seed: int
    profile: str
    outcome: Outcome
    detail: str = ""
    call: int | None = None
    checked: int = 0  # calls whose variant was known beforehand
    matched: int = 0  # of these, the calls that a declared condition meets

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Record:
    """What one call left behind."""

    outputs: list[Any]
    inputs: list[Any]
    buffers: list[torch.Tensor]
    sharing: list[tuple[str, str]]
    gradients: list[torch.Tensor | None]
    observed: Mapping[str, Any]
    runs: tuple[int, ...] = ()  # calls in which the program's own operator ran so far


class _Failed(Exception):
    def __init__(self, call: int, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.call = call


def run_case(program: Program, compiler: str, backend: str | Compile = "multigraph") -> Verdict:
    """Play the program by both and compare. A program that eager refuses, or whose numbers overflow, is discarded."""

    def verdict(outcome: Outcome, **more: Any) -> Verdict:
        return Verdict(program.seed, program.profile, outcome, **more)

    dtype = dtype_for(compiler)
    with _namespace(program, dtype) as space:
        try:
            expected = _play(program, space, space["Model"](), lambda model: model, dict, dtype)
        except _Failed as e:
            return verdict("discarded", detail=f"eager: {e}", call=e.call)
        if not all(_moderate(t) for r in expected for t in (*r.outputs, *r.gradients, *r.inputs, *r.buffers)):
            return verdict("discarded", detail="numbers too large to compare")
        make, observe = _backend(backend)

        def wrap(model: torch.nn.Module) -> Callable[..., Any]:
            return make(model, program, space["SPECIALIZE"], compiler)

        got = _compare(program, space, wrap, observe, expected, dtype)
        if isinstance(got, tuple):
            outcome, detail, call = got
            controls: list[tuple[str, Outcome]] = [("eager", "discarded"), (compiler, "torch")]
            if program.both_zeros or any(call.sharing not in ("", "same") for call in program.calls):
                controls.pop()  # torch tells no zeros apart, nor does it check which inputs overlap; multigraph must
            for control, means in controls:

                def plain(model: torch.nn.Module, by: str = control) -> Callable[..., Any]:
                    return _compile_plain(model, program, by)

                unmarked = {**space, "MARKS": dict.fromkeys(space["MARKS"], None)}
                # alone it refuses to run a backward again, unless it is told beforehand
                with functorch_config.patch(donated_buffer=program.backwards == 1):
                    alone = _compare(program, unmarked, plain, dict, expected, dtype)
                if isinstance(alone, tuple):
                    return verdict(means, detail=f"{control} alone: {outcome}: {detail}", call=call)
            return verdict(outcome, detail=detail, call=call)
    if backend == "multigraph":
        complaint, index, checked, matched = _activity(program, got)
        if complaint:
            return verdict("inactive", detail=complaint, call=index, checked=checked, matched=matched)
        return verdict("right", checked=checked, matched=matched)
    return verdict("right")


def _compare(
    program: Program,
    space: Mapping[str, Any],
    wrap: Callable[[torch.nn.Module], Callable[..., Any]],
    observe: Observe,
    expected: Sequence[Record],
    dtype: str,
) -> list[Record] | tuple[Outcome, str, int]:
    """The compiled model's records where they are right; else what is not."""
    torch._dynamo.reset()
    try:
        attributes = torch._dynamo.config.patch(prepare_freezing=program.weights_as_attributes)
        with warnings.catch_warnings(), attributes:
            warnings.simplefilter("ignore")
            got = _play(program, space, space["Model"](), wrap, observe, dtype)
    except _Failed as e:
        return "error", str(e)[:2000], e.call
    tolerance = 2e-3 if dtype == "float32" else 1e-9
    # code that is eager's, operator by operator, has its zeros
    signs = program.both_zeros and not program.changes_inputs and dtype == "float64"
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if difference := _difference(want, have, tolerance, signs):
            return "wrong", difference, index
    return got


# ---------------------------------------------------------------- playing


@contextlib.contextmanager
def _namespace(program: Program, dtype: str) -> Iterator[dict[str, Any]]:
    """The program's text, executed; its source can be looked up, as stock needs it of a mark's lambda."""
    text = definition(program, dtype)
    name = f"<fuzz {program.profile} {program.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": name}
    try:
        exec(compile(text, name, "exec"), space)
        yield space
    finally:
        linecache.cache.pop(name, None)


def _play(
    program: Program,
    space: Mapping[str, Any],
    model: torch.nn.Module,
    wrap: Callable[[torch.nn.Module], Callable[..., Any]],
    observe: Observe,
    dtype: str,
) -> list[Record]:
    names = [t.name for t in program.tensors] + list(program.ints)
    run = wrap(model)
    space.get("RUNS", []).clear()
    records: list[Record] = []
    late: list[tuple[int, list[torch.Tensor], list[Any]]] = []
    index = 0
    try:
        for index in range(len(program.calls)):
            inputs = space["make_inputs"](index)
            space["set_state"](model, index)
            space["lay_in_model"](index, model, inputs)
            for (name, dim), specialize_on in space["MARKS"].items():
                torch._dynamo.mark_dynamic(inputs[names.index(name)], dim, specialize_on=specialize_on)
            outputs: list[Any] = []
            with torch.set_grad_enabled(program.trainable), contextlib.suppress(space.get("Refused", ())):
                outputs = list(run(*inputs))
            observed = observe()
            record = Record(
                [_copy(o) for o in outputs],
                [_copy(i) for i in inputs],
                [b.clone() for b in model.buffers()],
                _sharing(inputs, outputs),
                [],
                observed,
                tuple(space.get("RUNS", ())),
            )
            records.append(record)
            late.append((index, outputs, inputs))
            if program.late_backward and index < len(program.calls) - 1:
                continue
            while late:
                which, made, given = late.pop()
                if program.trainable:
                    _backward(made, program.seed * 100 + which, dtype, program.backwards)
                records[which].gradients = _gradients([*given, *model.parameters()])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad = None
                    parameter.mul_(0.97).add_(0.01)
    except Exception as e:
        raise _Failed(index, e) from e
    return records


def _backward(outputs: Sequence[Any], seed: int, dtype: str, times: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    trained = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    for left in reversed(range(times if trained else 0)):
        # a number per element, so that a gradient in the wrong place or of the wrong call shows
        cotangents = [torch.randn(o.shape, generator=rng, dtype=getattr(torch, dtype)).to(o.dtype) for o in trained]
        torch.autograd.backward(trained, cotangents, retain_graph=left > 0)


def _gradients(leaves: Sequence[Any]) -> list[torch.Tensor | None]:
    return [
        None if leaf.grad is None else leaf.grad.clone()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad
    ]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _sharing(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[str, str]]:
    """Which outputs share storage with an input or with another output."""
    named = [(f"input {i}", t) for i, t in enumerate(inputs)] + [(f"output {i}", t) for i, t in enumerate(outputs)]
    tensors = [(name, t) for name, t in named if isinstance(t, torch.Tensor) and t.numel()]
    return [
        (a, b)
        for i, (a, s) in enumerate(tensors)
        for b, t in tensors[i + 1 :]
        if b.startswith("output") and s.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    ]


# ---------------------------------------------------------------- comparing


def _moderate(value: Any) -> bool:
    """Whether rounding cannot hide a difference; infinities are compared as they are."""
    return not isinstance(value, torch.Tensor) or not bool((value.isfinite() & (value.abs() > 1e4)).any())


def _difference(want: Record, have: Record, tolerance: float, signs: bool) -> str:
    for kind in ("outputs", "inputs", "buffers", "gradients"):
        for i, (a, b) in enumerate(zip(getattr(want, kind), getattr(have, kind), strict=True)):
            if text := _unlike(a, b, tolerance):
                return f"{kind}[{i}]: {text}"
    if signs and (text := _other_zeros(want.outputs, have.outputs)):
        return text
    if want.runs != have.runs:
        return f"its operator ran in calls {have.runs}, in eager in {want.runs}"
    if want.sharing != have.sharing:
        return f"storage shared by {have.sharing}, in eager by {want.sharing}"
    return ""


def _other_zeros(want: Sequence[Any], have: Sequence[Any]) -> str:
    for i, (a, b) in enumerate(zip(want, have, strict=True)):
        if isinstance(a, torch.Tensor) and bool(((a.signbit() != b.signbit()) & ~a.isnan()).any()):
            return f"outputs[{i}]: zeros of other signs"
    return ""


def _unlike(want: Any, have: Any, tolerance: float) -> str:
    if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
        # by their text: NaN in a list equals itself, and -0.0 is not 0.0
        return "" if type(want) is type(have) and repr(want) == repr(have) else f"{have!r} instead of {want!r}"
    if want.shape != have.shape or want.dtype != have.dtype:
        return f"{have.dtype} {tuple(have.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if not want.numel():
        return ""
    finite = want[want.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    if torch.allclose(have, want, rtol=0, atol=tolerance * scale, equal_nan=True):
        return ""
    return f"off by {float((have - want).abs().max()):.3g} (largest number {scale:.3g})"


# ---------------------------------------------------------------- backends and what they tell


def _backend(backend: str | Compile) -> tuple[Compile, Observe]:
    if callable(backend):
        return backend, dict
    if backend == "stock":
        return _compile_stock, dict
    import multigraph_backend

    multigraph_backend.reset_stats()
    return _compile_multigraph, _observe_multigraph


def _compile_stock(model: torch.nn.Module, program: Program, specialize: list[dict[str, Any]], compiler: str) -> Any:
    assert not specialize, "stock has no options to declare by"
    return torch.compile(model, backend=compiler, dynamic=_dynamic(program), fullgraph=True)


def _compile_plain(model: torch.nn.Module, program: Program, compiler: str) -> Any:
    """The control: torch.compile with nothing declared."""
    return torch.compile(model, backend=compiler, dynamic=_dynamic(program), fullgraph=True)


def _compile_multigraph(
    model: torch.nn.Module, program: Program, specialize: list[dict[str, Any]], compiler: str
) -> Any:
    from multigraph_backend.backend import multigraph

    options: dict[str, Any] = {"specialize": specialize, "compiler": compiler}
    return torch.compile(model, backend=multigraph, dynamic=_dynamic(program), fullgraph=True, options=options)


def _dynamic(program: Program) -> bool | None:
    return DYNAMIC[program.dynamic]


def _observe_multigraph() -> Mapping[str, Any]:
    """Counts so far; `ran`: calls of each declared condition over all graphs; `full`: those that have as many forms as
    they may in one; `reasons`: why conditions did not run."""
    import multigraph_backend
    from multigraph_backend.region.variant import MOST_FORMS

    ran: collections.Counter[int] = collections.Counter()
    reasons: list[str] = []
    full: set[int] = set()
    for region in multigraph_backend.explain().to_dict()["regions"]:
        for index, variant in enumerate(region["variants"]):
            ran[index] += variant["calls"]
            if len(variant["forms"]) >= MOST_FORMS:
                full.add(index)
        for variant in (*region["variants"], region["generic"]):
            if variant["reason"] and variant["state"] != "inactive":
                reasons.append(f"{variant['condition']} is {variant['state']}: {variant['reason']}")
    return {"stats": multigraph_backend.stats(), "ran": ran, "full": full, "reasons": reasons}


# ---------------------------------------------------------------- was the expected variant the one that ran


def _activity(program: Program, records: Sequence[Record]) -> tuple[str, int | None, int, int]:
    """-> (complaint, its call, calls checked, calls that a condition meets)."""
    checked = matched = 0
    before: Mapping[str, Any] = {"stats": {}, "ran": collections.Counter()}
    for index, (call, record) in enumerate(zip(program.calls, records, strict=True)):
        stats, earlier = record.observed["stats"], before["stats"]
        step = {k: v - earlier.get(k, 0) for k, v in stats.items() if k.endswith("_calls") or k == "failures"}
        reasons = record.observed["reasons"] if program.changes_inputs else ()
        if any(legal in reason for reason in reasons for legal in LEGALLY_EAGER):
            break
        if step["eager_calls"] or step["failures"]:
            return f"fell back: {step}; {'; '.join(record.observed['reasons'])}", index, checked, matched
        if call.raises:  # not counted
            before = record.observed
            continue
        expected = expected_condition(program, call)
        moved = list(record.observed["ran"] - before["ran"])
        before = record.observed
        if expected == UNKNOWN:
            continue
        generic_ran = (step["variant_calls"], step["generic_calls"]) == (0, 1)
        full = record.observed["full"]  # a form for each value of a float: generic serves what is left
        if generic_ran and (expected in full or (expected == SOME_VARIANT and full)):
            continue
        checked += 1
        matched += expected != GENERIC
        if expected == GENERIC and not generic_ran:
            return f"expected generic, saw {step}", index, checked, matched
        if expected != GENERIC and (step["variant_calls"], step["generic_calls"]) != (1, 0):
            return f"expected a variant, saw {step}", index, checked, matched
        if expected >= 0 and moved != [expected]:
            return f"expected condition {expected}, ran {moved}", index, checked, matched
    return "", None, checked, matched


GENERIC, SOME_VARIANT, UNKNOWN = -1, -2, -3
# torch itself gets these wrong, so such calls run eagerly; what is compiled afterwards is not checked
LEGALLY_EAGER = (
    "inputs that overlap in memory are changed in place",
    "a view of an input that is changed in place is returned",
    "a tensor that is changed in place is given twice",
)


def expected_condition(program: Program, call: Call) -> int:
    """What should run this call, by brute force.

    The place of the first condition of `options` that it meets (a list of values counts one per value), `SOME_VARIANT`
    where a mark matches (marks of several tensors have no order of their own), `GENERIC`; `UNKNOWN` where the declared
    conditions are not enough to tell: a size 0 or 1 (Dynamo traces these as static graphs of their own); sizes that
    are static in Dynamo's first trace (`dynamic=None` without marks) or in all (`dynamic=False`); inputs that are the
    same tensor, or of which the graph may take the size alone; lambdas that need a bool (one that is not understood is
    bound to the first size that met it).
    """
    if program.dynamic in ("automatic", "false") or call.sharing == "same" or min(call.sizes.values()) < 2:
        return UNKNOWN
    sizes = program.named_sizes(call)
    taken = {name for name in sizes if name.split("[")[0] in program.taken}
    variants = [v for condition in program.options for v in condition.variants()]
    for index, condition in enumerate(variants):
        if condition.holds(sizes):
            return index if condition.names <= taken else UNKNOWN
    opaque = False
    for mark in program.marks:
        for predicate in mark.specialize_on:
            if predicate.holds(sizes[mark.name]):
                if not predicate.opaque and mark.name in taken:
                    return SOME_VARIANT
                opaque = True
    return UNKNOWN if opaque else GENERIC
