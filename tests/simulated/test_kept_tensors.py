"""Tensors that a recorded forward saves are handed out again and again, by way of autograd: whoever holds one, or has
changed one, is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.simulated.pieces import Bench, values


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x * w
    b = a.sin()
    return (b * b).sum().view(1), a, b


def backward(grad: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (grad * 2 * b * a.cos() * w,)


class Net:
    """Recorded as AOTAutograd calls compiled code: in a function of autograd, which lets go of what it has saved."""

    def __init__(self, native_calls: bool = True) -> None:
        self.bench = bench = Bench(native_calls=native_calls)
        there = bench.piece(forward, 2, 3, visible=(True, False, False), static=[1])
        back = bench.piece(backward, 4, 1, static=[1, 2, 3], is_backward=True)
        self.pieces = there, back
        self.weight = values()
        self.saved: list[list[int]] = []
        self.at_once: list[bool] = []
        net = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                loss, *saved = there([x.detach(), net.weight])
                net.saved.append([id(tensor) for tensor in saved])
                ctx.save_for_backward(*saved)
                del saved
                return loss

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                args = [grad, net.weight, *ctx.saved_tensors]
                ctx.maybe_clear_saved_tensors()
                if len(net.saved) > 4:
                    net.look(args)
                (gradient,) = back(args)
                return gradient

        self.function = Function

    def look(self, args: list[Any]) -> None:
        """Note whether the backward's recordings see at once that nobody else holds what dies in them."""
        for node in self.bench.tree.path[-1].children.get(self.pieces[1].keyed_for(args), ()):
            known = getattr(node.holds, "__globals__", {})  # native calls ask one after the other
            if "counts" in known:
                counts = list(map(known["references"], known["take"](args)))
                used = list(map(known["use_count"], known["handles"]))
                self.at_once.append(counts == known["counts"] and used == known["bases"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)

    def right(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = forward(x, self.weight)[0]
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    def step(self, x: torch.Tensor, **how: Any) -> None:
        self.check(x, self(x), **how)

    def check(self, x: torch.Tensor, loss: torch.Tensor, **how: Any) -> None:
        x.grad = None
        loss.backward(**how)
        torch.testing.assert_close((loss.detach(), x.grad), self.right(x))
        x.grad = None  # it stays, with its address


def given() -> torch.Tensor:
    return values().requires_grad_()


@pytest.mark.parametrize("native_calls", [False, True])
def test_each_step_hands_out_the_same_tensors(native_calls: bool) -> None:
    net = Net(native_calls)
    for _ in range(8):
        net.step(given())
    assert len({tuple(saved) for saved in net.saved[4:]}) == 1
    assert native_calls or net.at_once
    assert all(net.at_once)
    assert net.bench.recorded() <= 4  # each may be recorded for inputs that stayed in place, and for copied ones
    assert net.bench.clones() == 0
    assert net.bench.unrecorded(*net.pieces) == {}


def test_steps_that_overlap_have_tensors_of_their_own() -> None:
    net = Net()
    for _ in range(6):
        xs = [given() for _ in range(3)]
        losses = [net(x) for x in xs]
        assert len({name for saved in net.saved[-3:] for name in saved}) == 6
        for x, loss in zip(xs, losses, strict=True):
            net.check(x, loss)
        del losses, loss


def test_a_graph_that_is_retained_holds_them() -> None:
    net = Net()
    for step in range(8):
        x = given()
        loss = net(x)
        if step % 2:
            net.check(x, loss, retain_graph=True)
            net.step(given())  # must not write over what is retained
        net.check(x, loss)
        del loss


@pytest.mark.parametrize("seen", [lambda saved: saved, lambda saved: saved[:2], lambda saved: saved.detach()])
def test_who_looks_into_the_graph_holds_them(seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = Net()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(8):
        x = given()
        loss = net(x)
        if step >= 3:
            found = [seen(saved) for saved in loss.grad_fn.saved_tensors]  # type: ignore[union-attr]
            held += [(tensor, tensor.clone()) for tensor in found]
            del found
        net.check(x, loss)
        del loss
        for tensor, content in held:
            torch.testing.assert_close(tensor, content, rtol=0, atol=0)
        held = held[-4:]


def _emptied(saved: torch.Tensor) -> torch.Tensor:
    host = saved.clone()
    saved.data = torch.empty(0)
    return host


def _resized(saved: torch.Tensor) -> torch.Tensor:
    host = saved.clone()
    saved.untyped_storage().resize_(0)
    return host


_kept: list[torch.Tensor] = []


def _held(saved: torch.Tensor) -> torch.Tensor:
    _kept.append(saved)
    return saved


@pytest.mark.parametrize("pack", [_emptied, _resized, _held])
def test_hooks_may_do_with_them_what_they_like(pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = Net()
    for step in range(12):
        x = given()
        if step % 3:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
                loss = net(x)
        else:
            loss = net(x)
        net.check(x, loss)
        del loss
        if step % 4 == 3:
            _kept.clear()
    _kept.clear()
    for _ in range(3):
        net.step(given())


def test_they_may_be_written_to_under_any_mode() -> None:
    """As an operator between two pieces may, which runs unrecorded."""
    bench = Bench()
    first = bench.piece(lambda x: (x * 2,), 1, 1, visible=(False,))
    second = bench.piece(lambda h: (h + 1,), 1, 1)
    for step in range(10):
        x = values()
        with torch.inference_mode(step < 5), torch.no_grad():
            (between,) = first([x])
            between.mul_(3)
            handed = [between]
            del between
            (result,) = second(handed)
            torch.testing.assert_close(result, x * 6 + 1)
            del result
    assert bench.recorded() == 2
