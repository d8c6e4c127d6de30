"""A late compile runs for the call that needs it: in that call's context, with the configuration of the first compile,
and without a lock that another thread may wait for."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.backend import multigraph
from multigraph_backend.distributed.sequence import Issued
from multigraph_backend.lower import lowering
from multigraph_backend.region.region import Region
from tests.support.activity import assert_right, ran

request: contextvars.ContextVar[Any] = contextvars.ContextVar("request", default=None)


class Request:
    """What a server keeps of one request while it answers it."""

    def __init__(self, name: str) -> None:
        self.name = name


@contextlib.contextmanager
def answering(name: str) -> Iterator[Request]:
    token = request.set(Request(name))
    try:
        yield request.get()
    finally:
        request.reset(token)


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + x.shape[0]


def compiled_by(compiler: Callable[..., Any] | str, **options: Any) -> Any:
    options = {"specialize": [{"x[0]": [8, 16]}], "compiler": compiler, **options}
    return torch.compile(f, backend=multigraph, dynamic=True, options=options)


def test_a_compile_sees_the_request_that_it_is_for_and_no_request_outlives_its_end() -> None:
    seen: list[str] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(request.get().name)
        return gm.forward

    compiled = compiled_by(compiler)
    ended = []
    with ran(variants=2, generic=1):
        for name, rows in (("first", 5), ("second", 8), ("third", 16)):
            with answering(name) as current:
                assert_right(compiled, f, torch.randn(rows, 3), exact=True)
            ended.append(weakref.ref(current))
            del current
    assert seen == ["first", "second", "third"]
    gc.collect()
    assert [reference() for reference in ended] == [None, None, None]


def test_a_compile_has_the_configuration_of_the_first_whatever_its_own_request_has_set() -> None:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    seen: list[tuple[Any, ...]] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append((inductor.max_fusion_size, inductor.epilogue_fusion, inductor.freezing, dynamo.recompile_limit))
        return gm.forward

    compiled = compiled_by(compiler)
    before = inductor.max_fusion_size, inductor.epilogue_fusion, inductor.freezing, dynamo.recompile_limit
    with inductor.patch(max_fusion_size=7), ran(generic=1):
        assert_right(compiled, f, torch.randn(5, 3), exact=True)
    with inductor.patch(epilogue_fusion=not inductor.epilogue_fusion), ran(variants=1):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)
        portable = inductor.save_config_portable()["epilogue_fusion"]
        assert portable is inductor.epilogue_fusion  # what torch keys its caches by is this context's own again
    other: list[Any] = []

    def elsewhere() -> None:
        with inductor.patch(freezing=not before[2]):
            other.append(compiled(torch.full((16, 3), 0.5)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    torch.testing.assert_close(other, [f(torch.full((16, 3), 0.5))])
    assert seen == [(7, *before[1:])] * 3
    assert (inductor.max_fusion_size, inductor.epilogue_fusion, inductor.freezing, dynamo.recompile_limit) == before


def test_the_compile_lock_that_is_held_by_who_waits_for_the_call_costs_the_variant_not_the_call() -> None:
    compiled = compiled_by("eager", compile_timeout=0.5)
    assert_right(compiled, f, torch.randn(5, 3), exact=True)
    x, got = torch.randn(8, 3), []
    caller = threading.Thread(target=lambda: got.append(compiled(x)), daemon=True)
    with ran(generic=1, failures=1):
        with _compat.compile_lock:  # as a compile of Dynamo's whose user code waits for another thread
            caller.start()
            caller.join(10)
            assert not caller.is_alive()
        torch.testing.assert_close(got, [f(x)], rtol=0, atol=0)
    (variant, _) = multigraph_backend.explain().to_dict()["regions"][0]["variants"]
    assert "another compile has held Dynamo's compile lock" in variant["reason"]


def test_the_collectives_of_generic_are_traced_with_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who traces them waits for the compile lock; its owner may ask for the same."""
    issued = SimpleNamespace(issued=Issued((), (), None), sizes=None)
    waits, owner_asks = threading.Event(), threading.Event()

    def only_traced(*args: Any) -> Any:
        waits.set()
        if not _compat.owns_compile_lock():
            assert owner_asks.wait(10)
            with _compat.compile_lock:
                pass
        return issued

    monkeypatch.setattr(lowering, "only_traced", only_traced)
    region: Any = Region.__new__(Region)
    region._issued, region._issued_lock, region._graph, region.options, region._state = (
        None,
        threading.Lock(),
        None,
        None,
        None,
    )
    variant, done = SimpleNamespace(generic=False), []

    def ask() -> None:
        region._check_collectives(variant, SimpleNamespace(issued=Issued((), (), None), sizes=None), ())
        done.append(threading.get_ident())

    def owner() -> None:
        with _compat.compile_lock:
            assert waits.wait(10)
            threading.Timer(0.2, owner_asks.set).start()
            ask()

    threads = [threading.Thread(target=work, daemon=True) for work in (owner, ask)]
    threads[0].start()
    time.sleep(0.1)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert len(done) == 2
