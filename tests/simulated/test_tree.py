"""The tree of recordings, behaviour by behaviour, on the simulated device."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings.cost import REPLAYS, Trial
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece
from multigraph_backend.cudagraphs.recordings.settling import MOST_STEPS
from multigraph_backend.cudagraphs.recordings.warm_up import MOST_LAYERS
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values

LARGE = 1 << 17  # numbers of an input that is read in place where it stays: smaller ones are copied


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def halve(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x / 2 - 1,)


def weighted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x @ w).relu() + x,)


# ---------------------------------------------------------------- warm-up, recording, replay


def test_the_first_call_warms_up_the_second_records_all_others_replay() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for _ in range(5):
        call_right(piece, double, values())
    assert (bench.recorded(), bench.replays()) == (1, 4)
    assert bench.unrecorded(piece) == {}


def test_numbers_among_the_inputs_are_a_key_of_their_own() -> None:
    bench = Bench()
    piece = bench.piece(grown, 2, 2)
    for n in (2, 3, 2, 3, 2, 3):
        call_right(piece, grown, n, values())
    assert (bench.recorded(), len(piece.by_key)) == (2, 2)


def grown(n: int, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x.repeat(n), n + 1


def test_floats_among_the_inputs_are_keys_by_what_they_are_not_by_what_they_equal() -> None:
    """0.0 equals -0.0, and NaN equals nothing."""
    bench = Bench()
    piece = bench.piece(lambda x, number: (x * number,), 2, 1)
    numbers = (0.0, -0.0, math.inf, math.nan, 1.0)
    for number in (*numbers, *numbers, *numbers):
        x = values()
        (y,) = piece([x, number])
        torch.testing.assert_close(y, x * number, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(y)[~y.isnan()], torch.signbit(x * number)[~y.isnan()])
        del y
    assert bench.recorded() == len(numbers)


def test_once_a_piece_was_recorded_its_other_keys_need_no_warm_up() -> None:
    bench = Bench()
    piece = bench.piece(grown, 2, 2)
    for n, recorded in ((2, 0), (2, 1), (3, 2), (4, 3)):
        call_right(piece, grown, n, values())
        assert bench.recorded() == recorded
    assert bench.unrecorded(piece) == {}


def test_a_key_that_cannot_be_recorded_at_its_first_call_is_at_its_second() -> None:
    bench = Bench()
    piece = bench.piece(grown, 2, 2)
    for _ in range(2):
        call_right(piece, grown, 2, values())
    bench.device.fail_at("capture_begin")
    call_right(piece, grown, 3, values())
    assert (bench.recorded(), bench.tree.counts["failed"], bench.unrecorded(piece)) == (1, 1, {})
    call_right(piece, grown, 3, values())
    assert bench.recorded() == 2
    for recorded in (2, 3):  # from now on each key warms up
        call_right(piece, grown, 4, values())
        assert bench.recorded() == recorded


def test_an_input_that_stays_is_read_in_place_and_one_that_moves_is_copied() -> None:
    bench = Bench(pool_bytes=1 << 24)
    piece = bench.piece(double, 1, 1)
    x = values(LARGE)
    for _ in range(4):
        x.normal_()
        call_right(piece, double, x)
    assert (bench.recorded(), bench.device.calls("copy")) == (1, [])
    others = [values(LARGE) for _ in range(3)]
    for other in others:
        call_right(piece, double, other)
    assert (bench.recorded(), bench.device.calls("copy")) == (2, [1, 1, 1])
    call_right(piece, double, x)
    assert bench.recorded() == 2


def test_outputs_that_are_inputs_views_constants_or_numbers() -> None:
    constant = torch.arange(4.0)

    def mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        y = x + w
        return x, x[2:6], w.view(2, 4), y, y[1:], y.view(4, 2).t(), constant, None, 7

    bench = Bench()
    piece = bench.piece(mixed, 2, 9, static=[1], constants=[constant])
    w = values()
    for _ in range(4):
        x = values()
        outputs = call_right(piece, mixed, x, w)
        assert outputs[0] is x
        assert outputs[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert outputs[2].data_ptr() == w.data_ptr()
        assert outputs[3].untyped_storage()._cdata == outputs[4].untyped_storage()._cdata
        outputs[3].add_(1)  # seen through the views of it, as in eager code
        assert torch.equal(outputs[4], outputs[3][1:])
        assert torch.equal(outputs[5], outputs[3].view(4, 2).t())
    assert bench.recorded() == 1


class Weight(torch.nn.Parameter):
    """As bitsandbytes has them."""


class Loaded(torch.nn.Parameter):
    """As vLLM has them; `asked` counts what is asked of it."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """Results of operations on it are of its class."""


@pytest.mark.parametrize("kind", [Weight, Loaded, Named])
def test_parameters_and_inputs_of_classes_that_change_nothing_beneath(kind: Any) -> None:
    def made(tensor: torch.Tensor) -> Any:
        return tensor.as_subclass(Named) if kind is Named else kind(tensor, requires_grad=False)

    def mixed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunctionSubclass():  # as compiled code does it, in plain tensors
            return x @ w + 1, w, w.view(4, 16), x[1:], b.add_(1), w.view(8, 8)

    bench = Bench()
    piece = bench.piece(mixed, 3, 6, static=[1, 2], mutated=[2])
    w, b = made(torch.randn(8, 8)), made(torch.zeros(8))
    for _ in range(6):
        x = values()
        Loaded.asked = 0
        outputs = piece([made(x), w, b])
        assert Loaded.asked == 0
        assert_equal([torch.Tensor(output) for output in outputs], mixed(x, w, b.clone().sub_(1)))
        assert outputs[1] is w
        assert outputs[4] is b
        assert [type(outputs[index]) for index in (0, 2, 3, 5)] == [torch.Tensor] * 4
        assert outputs[2].data_ptr() == w.data_ptr()
    assert_equal((b.view(-1).as_subclass(torch.Tensor),), (torch.full((8,), 6.0),))
    assert (bench.recorded(), bench.replays()) == (1, 5)
    assert bench.unrecorded(piece) == {}


def test_new_tensors_of_a_class_are_not_recorded() -> None:
    """What is handed out is made anew at each replay, as plain tensors."""

    def classed(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x * 2).as_subclass(Named),)

    bench = Bench()
    piece = bench.piece(classed, 1, 1)
    for _ in range(4):
        (y,) = piece([values()])
        assert type(y) is Named
    assert list(bench.unrecorded(piece)) == ["it returns a Named on cpu"]


def test_a_random_number_generator_among_the_inputs_is_part_of_the_recording() -> None:
    def shifted(x: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor]:
        return (x + generator.device.type.count("c"),)

    bench = Bench()
    piece = bench.piece(shifted, 2, 1)
    first, second = torch.Generator(), torch.Generator()
    for generator in (first, first, first, second, second, first, second):
        x = values()
        (y,) = piece([x, generator])
        assert_equal((y,), (x + 1,))
    assert bench.recorded() == 2
    assert bench.unrecorded(piece) == {}


def test_what_is_not_on_the_device_is_in_nobodys_way_where_it_is_not_read() -> None:
    """Floats of a program that its trace has made constants come on the CPU at each call, each time another tensor."""

    def doubled(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, other  # as what is saved for a backward is handed on

    def elsewhere() -> torch.Tensor:
        return torch.empty((), device="meta")

    bench = Bench()
    piece = bench.piece(doubled, 2, 2, unread=frozenset({1}))
    for _ in range(5):
        x, other = values(), elsewhere()
        y, same = piece([x, other])
        assert_equal((y,), (2 * x,))
        assert same is other
    assert (bench.recorded(), bench.replays()) == (1, 4)
    assert bench.unrecorded(piece) == {}
    assert next(iter(bench.tree.path)).recording.plan.copied == (0,)

    read = bench.piece(doubled, 2, 2)
    for _ in range(5):
        read([values(), elsewhere()])
    assert list(bench.unrecorded(read)) == ["input x1 is a Tensor on meta"]


def test_expanded_inputs_are_copied_element_by_element_once() -> None:
    def add(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + 1,)

    bench = Bench()
    piece = bench.piece(add, 1, 1)
    for _ in range(4):
        call_right(piece, add, values(3, 1).expand(3, 4))
    assert bench.recorded() == 1


def test_inputs_whose_elements_overlap_are_not_recorded() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for _ in range(4):
        call_right(piece, double, values(9).unfold(0, 3, 1))
    assert bench.recorded() == 0
    assert list(bench.unrecorded(piece)) == ["elements of input x0 overlap in memory"]


# ---------------------------------------------------------------- what is held


def test_a_loop_that_holds_the_last_output_needs_one_recording() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    held, expected = None, None
    for _ in range(8):
        x = values()
        y = piece([x])[0]
        if held is not None:
            torch.testing.assert_close(held, expected, rtol=0, atol=0)
        held, expected = y, double(x)[0]
        del y
        torch.testing.assert_close(held, expected, rtol=0, atol=0)
    assert (bench.recorded(), bench.clones()) == (1, 1)
    assert bench.unrecorded(piece) == {}


def test_outputs_kept_in_a_list_stay_what_they_were() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    inputs = [values() for _ in range(10)]
    outputs = [piece([x])[0] for x in inputs]
    assert_equal(outputs, [double(x)[0] for x in inputs])
    assert bench.recorded() == 1


def test_views_of_a_held_output_move_with_it() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for _ in range(3):
        x = values()
        view = piece([x])[0][2:5]
        alias = view.untyped_storage()
        other = values()
        call_right(piece, double, other)
        torch.testing.assert_close(view, double(x)[0][2:5], rtol=0, atol=0)
        del view
        torch.testing.assert_close(
            torch.empty(0).set_(alias),
            double(x)[0],
            rtol=0,
            atol=0,  # a storage alone keeps its memory too
        )


def larger(y: torch.Tensor) -> None:
    y.resize_(64)[8:] = 7


def written_to(y: torch.Tensor) -> None:
    torch.mul(torch.ones(40), 3, out=y.resize_(0))


def emptied(y: torch.Tensor) -> None:
    y.untyped_storage().resize_(0)


def emptied_and_back(y: torch.Tensor) -> None:
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(32)
    y.fill_(5)


def smaller(y: torch.Tensor) -> None:
    y.untyped_storage().resize_(8)


RESIZES = [larger, written_to, emptied, emptied_and_back, smaller]


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_outputs_that_the_user_resizes_are_his_and_later_ones_are_right(
    resize: Callable[[torch.Tensor], None], kept: bool
) -> None:
    bench = Bench()
    piece, other = bench.piece(double, 1, 1), bench.piece(lambda x: (x + 1, x * x), 1, 2, label="other")
    held: list[torch.Tensor] = []
    contents: list[torch.Tensor] = []
    for _ in range(6):
        (y,) = call_right(piece, double, values())
        resize(y)
        if kept:
            held.append(y)
            contents.append(y.clone() if y.untyped_storage().nbytes() >= y.nbytes else torch.empty(0))
        del y
        x = values()
        assert_equal(other([x]), (x + 1, x * x))
    for y, content in zip(held, contents, strict=True):
        if content.numel():
            assert_equal((y,), (content,))
    assert bench.recorded() >= 2
    assert (bench.tree.counts["resized"], bench.clones()) == (1, 0)
    assert bench.unrecorded(piece, other) == {}


def test_an_output_that_is_resized_while_it_is_held_is_read_where_it_lies() -> None:
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(lambda x: (x + 1, x[:2]), 1, 2, label="second")
    for step in range(8):
        x = values()
        (y,) = call_right(first, double, x)
        if step % 3 == 1:
            emptied_and_back(y)
        expected = y.clone()
        z, view = second([y])
        assert_equal((z, view), (expected + 1, expected[:2]))
        y.zero_()
        assert_equal((view,), (torch.zeros(2),))
        del y, z, view
    assert bench.tree.counts["resized"] == 1
    assert bench.unrecorded(first, second) == {}


def test_a_saved_tensor_that_is_taken_out_and_put_back_is_read_where_it_lies() -> None:
    """As hooks do that keep saved tensors on the host."""
    bench = Bench()
    training = Training(bench)
    for step in range(8):
        loss, saved, x = training.ahead()
        if step >= 1:
            host = [tensor.clone() for tensor in saved]
            for tensor in saved:
                tensor.untyped_storage().resize_(0)
            for _ in range(step % 2):
                call = training.ahead()  # meanwhile another forward runs
                del call
            for tensor, content in zip(saved, host, strict=True):
                tensor.untyped_storage().resize_(content.nbytes)
                tensor.copy_(content)
            del tensor
        training.back(saved, x)
        del loss
    assert bench.tree.counts["resized"] >= 2
    assert bench.unrecorded(training.forward, training.backward) == {}


def test_a_constant_that_was_handed_out_and_resized_is_read_where_it_lies() -> None:
    constant = torch.arange(8.0)

    def shifted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + constant[:8], constant

    bench = Bench()
    piece = bench.piece(shifted, 1, 2, constants=[constant])
    for step in range(6):
        x = values()
        y, handed = piece([x])
        assert_equal((y, handed[:8]), (x + constant[:8], constant[:8]))
        if step == 3:
            constant.resize_(64)[:8] = 7
        del y, handed
    assert bench.recorded() == 2


# ---------------------------------------------------------------- addresses that others keep


def in_pool(bench: Bench, tensor: torch.Tensor) -> bool:
    return bench.device._memory.of(tensor.untyped_storage()) is not None


def test_all_outputs_are_copies_where_that_is_asked_for() -> None:
    def several(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        y = x + w
        return y, y[1:], y * 2, w, y.sin()

    bench = Bench()
    piece = bench.piece(several, 2, 5, static=[1], copies=True, visible=[True] * 4 + [False])
    w, held = values(), []
    for step in range(6):
        x = values()
        outputs = call_right(piece, several, x, w)
        assert not any(in_pool(bench, output) for output in outputs[:4])
        assert outputs[0].untyped_storage()._cdata == outputs[1].untyped_storage()._cdata
        assert outputs[3] is w
        if step:
            assert in_pool(bench, outputs[4])
        held.append(([output.clone() for output in outputs[:4]], outputs[:4]))
        del outputs
    for contents, outputs in held:
        assert_equal(outputs, contents)
    assert (bench.recorded(), bench.clones()) == (1, 0)
    assert bench.unrecorded(piece) == {}


@pytest.mark.parametrize("kept", [False, True])
def test_what_only_compiled_code_held_is_handed_out_as_a_copy(kept: bool) -> None:
    """A backward returns a saved tensor, or a view of it."""

    def ahead(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x * 3

    def back(saved: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return saved, saved.view(2, 4).t(), saved + g

    bench = Bench()
    first = bench.piece(ahead, 1, 2, visible=[True, False], copies=True)
    second = bench.piece(back, 2, 3, static=[0], is_backward=True, copies=True)
    for step in range(8):
        x, g = values(), values()
        y, saved = first([x])
        args = [saved, g]
        if not kept:
            del saved
        captures = bench.device.user_captures = step == 6
        gradients = second(args)
        bench.device.user_captures = False
        assert_equal(gradients, back(x * 3, g))
        assert not any(in_pool(bench, gradient) for gradient in (y, *gradients)), captures
        assert gradients[0].untyped_storage()._cdata == gradients[1].untyped_storage()._cdata
        del y, gradients
    assert bench.recorded() >= 2
    assert bench.unrecorded(first, second) == {}


def test_an_address_that_others_keep_stays_right_once_outputs_are_copies() -> None:
    """They are from the start where that is asked for, and else from the first that was held on."""
    for asked in (False, True):
        bench = Bench()
        piece = bench.piece(double, 1, 1, copies=asked)
        held = []
        for step in range(8):
            x = values()
            (y,) = piece([x])
            held.append((x, y))
            if step == (1 if asked else 2):
                kept, expected = y, double(x)[0]
                place = bench.device._memory.reference(y)  # as a graph of the user's knows it
        assert_equal((place.tensor(),), (expected,))
        kept.add_(1)
        assert_equal((place.tensor(),), (expected + 1,))
        assert bench.clones() == (0 if asked else 1)


def test_an_output_fed_back_is_read_before_it_is_written_over() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    x = values()
    expected = x.clone()
    for _ in range(8):
        x = piece([x])[0]
        expected = double(expected)[0]
        torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert bench.recorded() <= 3


def test_what_follows_is_recorded_behind_it_and_reads_it_in_place() -> None:
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(5):
        y = call_right(first, double, values())[0]
        z = call_right(second, halve, y)[0]
        del y, z
    assert bench.recorded() == 2
    assert [detail for detail in bench.device.calls("copy") if detail] == [1] * 4  # the input of the first alone
    (root,) = (node for nodes in bench.tree.root.children.values() for node in nodes)
    assert [node.keyed.piece for nodes in root.children.values() for node in nodes] == [second]


def test_ten_layers_of_one_function_are_ten_recordings_on_one_path() -> None:
    bench = Bench()
    layer = bench.piece(weighted, 2, 1, static=[1])
    weights = [torch.randn(8, 8) / 4 for _ in range(10)]
    for _ in range(4):
        x = values()
        expected = x
        for w in weights:
            expected = weighted(expected, w)[0]
            x = layer([x, w])[0]
        torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert bench.recorded() <= 11
    assert bench.unrecorded(layer) == {}


def test_a_marked_step_moves_what_is_held_and_begins_anew() -> None:
    marks = [0]
    bench = Bench(marks=lambda: marks[0])
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(5):
        x = values()
        y = call_right(first, double, x)[0]
        marks[0] -= 1
        z = call_right(second, halve, values())[0]
        torch.testing.assert_close(y, double(x)[0], rtol=0, atol=0)
        marks[0] -= 1
        del y, z
    assert all(node.depth == 1 for node in bench.tree.root.below() if node.parent)


# ---------------------------------------------------------------- training


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x * w
    b = a.sin()
    return b.sum(), a, b


def backward(g: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return (g * a.cos() * w + b,)


class Training:
    """A forward whose saved tensors only a backward can hold."""

    def __init__(self, bench: Bench) -> None:
        self.forward = bench.piece(forward, 2, 3, visible=[True, False, False], static=[1])
        self.backward = bench.piece(backward, 4, 1, static=[1, 2, 3], is_backward=True)
        self.w = values()

    def ahead(self) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
        x = values()
        loss, *saved = self.forward([x, self.w])
        torch.testing.assert_close(loss, forward(x, self.w)[0], rtol=0, atol=0)
        return loss, saved, x

    def back(self, saved: list[Any], x: torch.Tensor, keep: bool = False) -> torch.Tensor:
        g = values(1).view(())
        args = [g, self.w, *(list(saved) if keep else saved)]
        if not keep:
            saved.clear()
        (gradient,) = self.backward(args)
        _, a, b = forward(x, self.w)
        torch.testing.assert_close(gradient, backward(g, self.w, a, b)[0], rtol=0, atol=0)
        return gradient


def test_a_training_step_is_one_path_and_saved_tensors_die_in_the_backward() -> None:
    bench = Bench()
    training = Training(bench)
    for _ in range(5):
        loss, saved, x = training.ahead()
        training.back(saved, x)
        del loss
    assert bench.clones() == 0
    assert bench.recorded() <= 4  # each may be recorded for inputs that stayed in place, and for copied ones
    assert bench.unrecorded(training.forward, training.backward) == {}
    node = next(node for node in bench.tree.root.below() if node.depth == 2)
    assert len(node.recording.consumed) == 2  # type: ignore[union-attr]


def test_gradients_held_over_steps_are_moved_once_and_then_handed_out_as_copies() -> None:
    bench = Bench()
    training = Training(bench)
    gradient, expected = None, None
    for _ in range(6):
        loss, saved, x = training.ahead()
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
        gradient = training.back(saved, x)
        expected = gradient.clone()
        del loss
    assert bench.recorded() <= 4
    assert 1 <= bench.clones() <= 2


@pytest.mark.parametrize("lasting", ["nothing", "the last loss", "all losses"])
@pytest.mark.parametrize("micro", [2, 3, 5])
def test_accumulated_gradients_stay_where_they_are(micro: int, lasting: str) -> None:
    """Those of the first micro-batch are held over all others of the step: these are recorded once, behind it."""
    bench = Bench()
    training = Training(bench)
    losses: list[torch.Tensor] = []
    for step in range(6):
        total = expected = None
        for _ in range(micro):
            loss, saved, x = training.ahead()
            if lasting != "nothing":
                losses = [*losses, loss] if lasting == "all losses" else [loss]
            del loss
            if total is not None:
                torch.testing.assert_close(total, expected, rtol=0, atol=0)
            gradient = training.back(saved, x)
            if total is None:  # as autograd does where a leaf has no gradient
                total, expected = gradient, gradient.clone()
            else:
                total += gradient
                expected += gradient
            del gradient
        if step == 3:
            moved, recorded = bench.clones(), bench.recorded()
    # the loss that is held when the next micro-batch begins is moved out, once for each recording of a forward
    assert bench.clones() == moved <= (0 if lasting == "nothing" else 2)
    assert bench.recorded() == recorded == 4
    assert not any(slot.copied for node in bench.tree.root.below() if node.is_backward for slot in node.slots)


@pytest.mark.parametrize("shared", [True, False], ids=["one code", "codes of their own"])
@pytest.mark.parametrize("micro", [2, 4])
def test_gradients_accumulate_over_layers_that_are_compiled_one_by_one(micro: int, shared: bool) -> None:
    def there(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * w
        return y.tanh(), y

    def back(grad: torch.Tensor, y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        slope = grad * (1 - y.tanh() ** 2)
        return slope * w, slope * x

    bench = Bench()

    def pieces() -> tuple[Piece, Piece]:
        return (
            bench.piece(there, 2, 2, visible=(True, False), static=[1]),
            bench.piece(back, 4, 2, static=[2], is_backward=True),
        )

    first = pieces()
    layers = [(*(first if shared else pieces()), values()) for _ in range(3)]
    for step in range(8):
        total: list[torch.Tensor | None] = [None] * len(layers)
        expected = [torch.zeros(8) for _ in layers]
        for _ in range(micro):
            x, saved, inputs = values(), [], []
            for forward_of, _, w in layers:
                inputs.append(x)
                x, y = forward_of([x, w])
                saved.append(y)
                del y
            grad = values(8)
            wanted = [w.clone().requires_grad_() for _, _, w in layers]
            right = inputs[0].detach()
            for weight in wanted:
                right = (right * weight).tanh()
            right.backward(grad)
            torch.testing.assert_close(x, right.detach())
            del x
            for at, (_, backward_of, w) in reversed(list(enumerate(layers))):
                grad, gradient = backward_of([grad, saved.pop(), w, inputs.pop()])
                if total[at] is None:
                    total[at] = gradient
                else:
                    total[at] += gradient  # type: ignore[operator]
                del gradient
            del grad
            for at, weight in enumerate(wanted):
                assert weight.grad is not None
                expected[at] += weight.grad
            torch.testing.assert_close(total, expected)
        if step == 4:
            recorded = bench.recorded()
    assert bench.recorded() == recorded
    assert not any(slot.copied for node in bench.tree.root.below() if node.is_backward for slot in node.slots)


def test_large_gradients_are_copied_where_they_are_accumulated() -> None:
    """Two steps in one pool would take more memory than their copies."""
    bench = Bench()
    bench.tree.stay = 31  # bytes; a gradient has 32
    training = Training(bench)
    for _ in range(6):
        total = expected = None
        for _ in range(3):
            loss, saved, x = training.ahead()
            del loss
            gradient = training.back(saved, x)
            if total is None:
                total, expected = gradient, gradient.clone()
            else:
                total += gradient
                expected += gradient
            del gradient
        torch.testing.assert_close(total, expected, rtol=0, atol=0)
    assert bench.recorded() <= 4  # each may be recorded for inputs that stayed in place, and for copied ones
    assert bench.clones() == 1
    assert all(slot.copied for node in bench.tree.root.below() if node.is_backward for slot in node.slots)


def test_gradients_that_are_kept_for_good_are_moved() -> None:
    """Here a step would become longer with each gradient that a hook keeps."""
    bench = Bench()
    training = Training(bench)
    kept: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for _ in range(8):
        loss, saved, x = training.ahead()
        kept.append(training.back(saved, x))
        expected.append(kept[-1].clone())
        torch.testing.assert_close(kept, expected, rtol=0, atol=0)
        del loss
    assert bench.recorded() <= 6
    assert all(slot.copied for node in bench.tree.root.below() if node.is_backward for slot in node.slots)
    assert not any(node.alive() for node in bench.tree.path)


def test_where_a_further_micro_batch_cannot_be_recorded_gradients_are_copied() -> None:
    bench = Bench(Limits(depth=2))
    training = Training(bench)
    for _ in range(6):
        total = None
        for _ in range(3):
            loss, saved, x = training.ahead()
            del loss
            gradient = training.back(saved, x)
            total = gradient if total is None else total.add_(gradient)
            del gradient
    assert bench.recorded() <= 4
    assert bench.unrecorded(training.forward, training.backward) == {}
    assert bench.clones() == 1
    assert bench.tree.size == 2


def test_several_forwards_before_their_backwards_in_either_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        bench = Bench()
        training = Training(bench)
        for _ in range(4):
            ahead = [training.ahead() for _ in range(3)]
            for index in order:
                _, saved, x = ahead[index]
                training.back(saved, x)
            del ahead
        assert bench.unrecorded(training.forward, training.backward) == {}
        assert bench.clones() == 0


def test_a_backward_that_runs_twice_over_the_same_saved_tensors() -> None:
    bench = Bench()
    training = Training(bench)
    for keeps in (False, False, True, False, True, True, False):
        loss, saved, x = training.ahead()
        if keeps:
            training.back(saved, x, keep=True)
        training.back(saved, x)
        del loss
    assert bench.unrecorded(training.forward, training.backward) == {}


def test_saved_tensors_that_are_never_used_do_not_pile_up_without_end() -> None:
    bench = Bench(Limits(depth=6))
    training = Training(bench)
    kept = []
    for _ in range(MOST_LAYERS + 8):
        kept.append(training.ahead())
    for _loss, saved, x in kept:
        assert_equal(saved, forward(x, training.w)[1:])
    assert bench.recorded() == 6
    assert sum(bench.unrecorded(training.forward).values()) == 2
    kept.clear()
    del _loss, saved
    training.ahead()
    assert sum(bench.unrecorded(training.forward).values()) == 2


# ---------------------------------------------------------------- inputs that a piece changes


def accumulate(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    total.add_(x)
    return (total * 2,)


def test_a_buffer_is_changed_in_place() -> None:
    bench = Bench()
    piece = bench.piece(accumulate, 2, 1, static=[0], mutated=[0])
    total, expected = torch.zeros(8), torch.zeros(8)
    for _ in range(5):
        x = values()
        (y,) = piece([total, x])
        expected += x
        assert_equal((total, y), (expected, expected * 2))
    assert bench.recorded() == 1


def test_an_input_at_the_same_address_is_changed_in_place_and_one_that_moves_runs_unrecorded() -> None:
    bench = Bench()
    piece = bench.piece(accumulate, 2, 1, mutated=[0])
    cache, expected = torch.zeros(8), torch.zeros(8)
    for _ in range(4):
        x = values()
        piece([cache, x])
        expected += x
        assert_equal((cache,), (expected,))
    assert bench.recorded() == 1
    for _ in range(3):
        other, x = values(), values()
        before = other.clone()
        piece([other, x])
        assert_equal((other,), (before + x,))
    (reason,) = bench.unrecorded(piece)
    assert "changes input x0" in reason


def test_an_output_of_a_recording_is_changed_in_place() -> None:
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(accumulate, 2, 1, mutated=[0])
    for _ in range(5):
        x, add = values(), values()
        (y,) = first([x])
        (z,) = second([y, add])
        assert_equal((y, z), (double(x)[0] + add, (double(x)[0] + add) * 2))
        del y, z
    assert bench.recorded() == 2


# ---------------------------------------------------------------- addresses that change


def test_parameters_at_new_addresses_are_recorded_again_up_to_a_limit_and_then_copied() -> None:
    bench = Bench(most=3)
    piece = bench.piece(weighted, 2, 1, static=[1])
    weights = [torch.randn(8, 8) for _ in range(12 + MOST_STEPS)]
    for w in weights:
        call_right(piece, weighted, values(), w)
    assert bench.recorded() == 4
    for w in weights:
        call_right(piece, weighted, values(), w)
    assert bench.recorded() == 4
    assert bench.unrecorded(piece) == {}


@pytest.mark.parametrize("shared", [True, False], ids=["one code", "codes of their own"])
def test_parameters_of_several_pieces_that_move_on_their_own_are_copied_before_long(shared: bool) -> None:
    """As of blocks whose parameters are gathered anew at each step: one that moves leads to no new recordings of all
    blocks that follow, without end."""
    depth, chance = 6, random.Random(0)
    bench = Bench(most=3)
    first = bench.piece(weighted, 2, 1, static=[1])
    blocks = [first if shared else bench.piece(weighted, 2, 1, static=[1]) for _ in range(depth)]
    places = [[torch.randn(8, 8) for _ in range(4)] for _ in range(depth)]
    held: list[torch.Tensor] = []

    def step() -> None:
        held.clear()
        x = values().expand(2, 8).contiguous()
        for block, found in zip(blocks, places, strict=True):
            held.append(x)
            (x,) = call_right(block, weighted, x, chance.choice(found))

    for _ in range(60):
        step()
    assert bench.recorded() <= 2 * (3 + 1) * depth, bench.recorded()
    before = bench.recorded()
    for _ in range(20):
        step()
    assert bench.recorded() == before
    assert bench.unrecorded(*blocks) == {}


def test_what_moves_is_told_by_input_and_depth() -> None:
    piece = Bench().piece(weighted, 3, 1, static=[1, 2])
    keyed = KeyedPiece(piece, ())
    keyed.recorded(2, [None, 100, 200])
    keyed.recorded(2, [None, 300, 200])
    assert keyed.recorded_at == {2: 2}
    assert [keyed.moves(1, 2, address) for address in (100, 300, 400)] == [True, True, True]
    assert [keyed.moves(2, 2, address) for address in (200, 201)] == [False, True]
    assert not keyed.moves(1, 3, 400)


def test_a_buffer_that_is_changed_and_keeps_moving_runs_unrecorded_after_the_limit() -> None:
    bench = Bench(most=3)
    piece = bench.piece(accumulate, 2, 1, static=[0], mutated=[0])
    buffers = [torch.zeros(8) for _ in range(8 + MOST_STEPS)]
    for total in buffers:
        x = values()
        piece([total, x])
        assert_equal((total,), (x,))
    assert bench.recorded() == 3
    assert sum(bench.unrecorded(piece).values()) == 4


# ---------------------------------------------------------------- budget


def test_the_least_recently_used_recording_is_given_up_and_can_be_made_again() -> None:
    bench = Bench(Limits(per_device=3))
    piece = bench.piece(lambda n, x: (x * n,), 2, 1)
    for n in (1, 2, 3, 4, 1, 2, 3, 4):
        for _ in range(3):
            call_right(piece, lambda n, x: (x * n,), n, values())
    assert bench.tree.size == 3
    assert bench.tree.counts["evicted"] == bench.recorded() - 3 > 0


def test_recordings_of_code_that_is_gone_are_given_up_and_the_pool_with_the_last() -> None:
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(3):
        call_right(second, halve, call_right(first, double, values())[0])
    bench.tree.drop([first])
    assert bench.tree.size == 0
    assert bench.device.generation == 1
    for _ in range(3):
        call_right(second, halve, values())
    assert bench.tree.size == 1


def test_what_is_alive_survives_that_all_recordings_are_forgotten() -> None:
    bench = Bench()
    training = Training(bench)
    for _ in range(3):
        loss, saved, x = training.ahead()
        bench.tree.forget()
        assert_equal((loss, *saved), forward(x, training.w))
        training.back(saved, x)
        del loss
    for _ in range(4):
        loss, saved, x = training.ahead()
        training.back(saved, x)
        del loss
    assert 2 <= bench.tree.size <= 4


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("spoilt", [False, True], ids=["pool kept", "new pool"])
@pytest.mark.parametrize("call", ["capture_begin", "allocate", "launch", "capture_end"])
def test_a_failed_recording_leaves_everything_right(call: str, spoilt: bool) -> None:
    for after in range(4):
        bench = Bench()
        bench.device.failures_spoil_the_pool = spoilt
        training = Training(bench)
        other = bench.piece(double, 1, 1)
        for round_ in range(6):
            if round_ == 2:
                bench.device.fail_at(call, after)
            y = call_right(other, double, values())[0]
            kept = y.clone()
            loss, saved, x = training.ahead()
            training.back(saved, x)
            torch.testing.assert_close(y, kept, rtol=0, atol=0)
            del loss, y
        # what failed once was recorded at the next call
        assert sum(bench.unrecorded(other, training.forward, training.backward).values()) <= 1


def test_a_function_that_fails_again_and_again_is_not_tried_for_ever() -> None:
    def fetches(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * x.sum().item(),)

    bench = Bench()
    piece = bench.piece(fetches, 1, 1)
    for _ in range(6):
        call_right(piece, fetches, values())
    assert len(bench.device.calls("capture_begin")) == Limits().failures
    (reason,) = bench.unrecorded(piece)
    assert "not permitted" in reason


# ---------------------------------------------------------------- callers


def test_inside_a_capture_of_the_user_nothing_is_recorded() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for _ in range(3):
        call_right(piece, double, values())
    bench.device.user_captures = True
    replays = bench.replays()
    call_right(piece, double, values())
    assert bench.replays() == replays


def test_another_stream_waits_for_the_last() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for stream in (0, 0, 0, 5, 5, 0, 7):
        bench.device.set_stream(stream)
        call_right(piece, double, values())
    assert bench.device.calls("wait_for") == [(5, 0), (0, 5), (7, 0)]


def test_work_on_another_stream_reads_a_held_output_as_it_was() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    results, held = [], []
    for _ in range(5):
        x = values()
        (y,) = piece([x])
        held.append((x, y))
        results.append(torch.zeros(8))
        bench.device.behind(7, lambda result, y: result.copy_(y), results[-1], y)
    assert (bench.recorded(), bench.clones()) == (1, 1)
    bench.device.synchronize()
    assert_equal([y for _, y in held], [double(x)[0] for x, _ in held])
    assert_equal(results, [double(x)[0] for x, _ in held])


def test_what_another_stream_writes_to_a_held_output_moves_with_it() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    held = []
    for _ in range(5):
        x = values()
        (y,) = piece([x])
        held.append((x, y))
        bench.device.behind(7, lambda y: y.add_(100), y)
    assert (bench.recorded(), bench.clones()) == (1, 1)
    bench.device.synchronize()
    assert_equal([y for _, y in held], [double(x)[0] + 100 for x, _ in held])


def test_what_was_moved_is_there_for_streams_that_wait_for_nothing_more() -> None:
    """They are ordered behind the work that made it, and know of no copy."""
    marks = [0]
    bench = Bench(marks=lambda: marks[0])
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(2):
        x = values()
        (y,) = first([x])
    marks[0] -= 1
    call_right(second, halve, values())
    assert bench.clones() == 1
    result = torch.zeros(8)
    bench.device.behind(7, lambda result, y: result.copy_(y), result, y)
    bench.device.synchronize()
    assert_equal((result,), double(x))


def test_a_copy_that_is_not_finished_leaves_what_is_held_right() -> None:
    """The driver fails between two outputs that are to be moved, or behind them."""
    for call, after in (("move_out", 1), ("finish", 0)):
        bench = Bench()
        both = bench.piece(lambda x: (x * 2, x + 3), 1, 2)
        held = []
        for step in range(6):
            if step == 2:
                bench.device.fail_at(call, after)
            x = values()
            held.append((x, both([x])))
        assert len(bench.unrecorded(both)) == 1
        for x, outputs in held:
            bench.device.behind(7, lambda *outputs: None, *outputs)
            assert_equal(outputs, (x * 2, x + 3))


def test_a_step_marked_on_another_stream_moves_outputs_after_the_last_work_on_them() -> None:
    marks = [0]
    bench = Bench(marks=lambda: marks[0])
    piece = bench.piece(double, 1, 1)
    for _ in range(2):
        x = values()
        held = piece([x])
    bench.device.set_stream(5)
    marks[0] -= 1
    call_right(piece, double, values())
    assert_equal(held, double(x))
    assert bench.clones() == 1


def test_threads_share_one_set_of_recordings_and_their_outputs_are_their_own() -> None:
    bench = Bench()
    piece = bench.piece(weighted, 2, 1, static=[1])
    w = torch.randn(8, 8)
    start = threading.Barrier(8)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            start.wait()
            held: list[tuple[torch.Tensor, torch.Tensor]] = []
            for _ in range(20):
                x = values()
                held.append((piece([x, w])[0], weighted(x, w)[0]))
                for output, expected in held:
                    torch.testing.assert_close(output, expected, rtol=0, atol=0)
                del held[:-3]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bench.recorded() <= 4
    assert sum(bench.unrecorded(piece).values()) == 0


def test_an_intermediate_that_a_piece_hands_on_stays() -> None:
    """Inductor reuses memory: an output of the second piece may lie where its input lay, or be it."""

    def first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x + 1

    def second(y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.add_(z)
        return y, y[2:], z * 3

    bench = Bench()
    one = bench.piece(first, 1, 2, visible=[False, False])
    two = bench.piece(second, 2, 3, reused=[0, 1])
    held: list[tuple[torch.Tensor, ...]] = []
    expected: list[tuple[torch.Tensor, ...]] = []
    for _ in range(7):
        x = values()
        between = list(one([x]))
        held.append(tuple(two(between)))
        expected.append(second(*first(x)))
        for outputs, wanted in zip(held, expected, strict=True):
            assert_equal(outputs, wanted)
        del held[:-2], expected[:-2]
    assert bench.unrecorded(one, two) == {}


# ---------------------------------------------------------------- what does not pay


def slow(x: torch.Tensor) -> tuple[torch.Tensor]:
    time.sleep(0.05)  # of the code alone: a replay does not run it
    return (x * 2,)


def test_a_recording_whose_copies_take_longer_than_its_code_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.device.copies_us = 1e9
    piece, after = bench.piece(slow, 1, 1, must_pay=True), bench.piece(double, 1, 1)
    with caplog.at_level(logging.INFO, "multigraph_backend"):
        for _ in range(REPLAYS + 4):
            (y,) = call_right(piece, slow, values())
            call_right(after, double, y)
    said = [record.levelname for record in caplog.records if "does not pay" in record.getMessage()]
    assert said == ["INFO"], "a choice is no warning"
    (reason,) = bench.unrecorded(piece)
    assert reason.startswith("it does not pay: a replay takes ")
    assert bench.tree.counts["not worth it"] == 1
    kept = {node.keyed.piece for node in bench.tree.root.below() if node.keyed}
    assert kept == {after}  # recorded anew, as the first of its step


def test_finding_memory_for_the_pool_is_no_time_of_the_code() -> None:
    bench = Bench(Limits(copied_bytes=0))
    bench.device.copies_us = 100_000
    called = 0

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal called
        called += 1
        if called == 2:  # the first is the warm-up: this is the capture in which the pool grows
            time.sleep(0.2)
        return (x * 2,)

    piece = bench.piece(code, 1, 1, must_pay=True)
    for _ in range(REPLAYS + 2):
        call_right(piece, lambda x: (x * 2,), values())
    (reason,) = bench.unrecorded(piece)
    assert reason.startswith("it does not pay: a replay takes ")
    # captured once more, and once unrecorded when the verdict was there
    assert called == 4


@pytest.mark.parametrize(
    ("limits", "groups", "captured"),
    [(Limits(copied_bytes=0), (), 2), (Limits(copied_bytes=0), ("a group",), 1), (Limits(), (), 1)],
    ids=["", "with a collective", "little is copied"],
)
def test_only_where_the_pool_grew_code_with_large_copies_is_captured_twice(
    limits: Limits, groups: tuple[str, ...], captured: int
) -> None:
    bench = Bench(limits)
    called: list[str] = []

    def code(name: str) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            called.append(name)
            return (x * 2,)

        return run

    for name in ("first", "second"):
        piece = bench.piece(code(name), 1, 1, must_pay=True, groups=groups)
        for _ in range(3):
            call_right(piece, lambda x: (x * 2,), values())
    assert called == ["first"] * (1 + captured) + ["second"] * 2  # each once as a warm-up
    assert bench.recorded() == 2


@pytest.mark.parametrize(("copies", "must_pay"), [(0.0, True), (None, True), (1e9, False)])
def test_a_recording_that_pays_or_need_not_is_kept(copies: float | None, must_pay: bool) -> None:
    bench = Bench()
    bench.device.copies_us = copies
    piece = bench.piece(slow, 1, 1, must_pay=must_pay)
    for _ in range(REPLAYS + 4):
        call_right(piece, slow, values())
    assert (bench.unrecorded(piece), bench.recorded(), bench.replays()) == ({}, 1, REPLAYS + 3)


def test_the_quickest_replay_and_the_copies_are_held_against_the_code() -> None:
    def loss(code: float, replays: list[float], copies: float | None = 0.0) -> str | None:
        trial = Trial(code, lambda: copies)
        enough = [trial.ran(replay) for replay in replays]
        assert enough == [False] * (REPLAYS - 1) + [True]
        return trial.loss()

    times = [900.0, 10.0, *[50.0] * (REPLAYS - 2)]
    assert loss(10.0, times) is None
    assert loss(15.0, times, copies=4.0) is None
    assert loss(15.0, times, copies=None) is None
    assert loss(9.0, times) == (
        "it does not pay: a replay takes 10.0 us, its code 9.0 us (record_small=True records it all the same)"
    )
    assert "a replay takes 10.0 us and 6.0 us of copying, its code 15.0 us" in str(loss(15.0, times, copies=6.0))


def test_the_log_of_a_recording_made_anew_names_addresses_and_the_users_line(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    piece = bench.piece(weighted, 2, 1, static=[1], traces=(None, 'File "model.py", line 7, in forward'))
    first, second = torch.eye(8), torch.eye(8) * 2
    with caplog.at_level(logging.INFO, logger="multigraph_backend"):
        for w in (first, first, second):
            call_right(piece, weighted, values(3, 8), w)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"weighted is recorded again: x1 from {first.data_ptr():#x} to {second.data_ptr():#x}",
        'x1 is first used here:\nFile "model.py", line 7, in forward',
    ]


# ---------------------------------------------------------------- what is known of an input from other keys


def test_an_input_that_stays_at_one_address_for_all_keys_is_read_in_place() -> None:
    bench = Bench(pool_bytes=1 << 24)
    piece = bench.piece(grown, 2, 2)
    x = values(LARGE)
    for n in (2, 2, 3, 4, 3, 4):
        call_right(piece, grown, n, x)
    assert (bench.recorded(), bench.device.calls("copy")) == (3, [])


def test_a_small_input_is_copied_though_a_warm_up_calls_with_the_same_tensor() -> None:
    """To copy it costs a launch at most; to record each size once more, when requests come, costs milliseconds."""
    bench = Bench()
    piece = bench.piece(grown, 2, 2)
    x = values()
    for n in (4, 4, 4, 3, 3, 3, 2, 2, 2):
        call_right(piece, grown, n, x)
    warmed_up = bench.recorded()
    for n in (2, 3, 4, 3):
        call_right(piece, grown, n, values())
    assert (warmed_up, bench.recorded()) == (3, 3)
    assert bench.unrecorded(piece) == {}


def test_where_no_input_is_small_what_stays_is_read_in_place() -> None:
    bench = Bench(Limits(small_bytes=0))
    piece = bench.piece(double, 1, 1)
    x = values()
    for _ in range(4):
        call_right(piece, double, x)
    assert (bench.recorded(), bench.device.calls("copy")) == (1, [])


def test_many_small_inputs_that_stay_are_read_in_place() -> None:
    """As where a model's parameters are arguments (torch.func.functional_call); the last one is made for each call."""

    def summed(*numbers: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.stack(numbers).sum(0),)

    bench = Bench()
    weights = [values() for _ in range(17)]
    piece = bench.piece(summed, 18, 1)
    for _ in range(4):
        call_right(piece, summed, *weights, values())
    assert (bench.recorded(), bench.device.calls("copy")) == (1, [1, 1, 1])


def test_a_large_input_is_recorded_once_more_where_its_address_came_twice_by_chance() -> None:
    bench = Bench(pool_bytes=1 << 24)
    piece = bench.piece(double, 1, 1)
    memory = bytearray(4 * LARGE)
    for step in range(2):
        call_right(piece, double, torch.frombuffer(memory, dtype=torch.float32).fill_(step))
    for _ in range(3):
        call_right(piece, double, values(LARGE))
    assert bench.recorded() == 2
    assert bench.unrecorded(piece) == {}


def test_an_input_that_moved_at_one_key_is_copied_at_each_further_one(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(pool_bytes=1 << 24)
    piece = bench.piece(grown, 2, 2)
    x, y = values(LARGE), values(LARGE)
    with caplog.at_level(logging.INFO, logger="multigraph_backend"):
        for n, at in ((2, x), (2, x), (2, y), (3, y), (3, y), (3, x), (4, x), (4, x), (4, y)):
            call_right(piece, grown, n, at)
    said = f"grown is recorded again: x1 from {x.data_ptr():#x} to {y.data_ptr():#x}"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert bench.recorded() == 4  # twice at the first key, and once at each of the others


def test_inputs_that_are_made_for_each_call_are_copied_though_one_comes_at_the_same_address() -> None:
    for fresh, copies in ((False, []), (True, [1, 1, 1, 1])):
        bench = Bench(pool_bytes=1 << 24)
        piece = bench.piece(grown, 2, 2, fresh=fresh)
        x = values(LARGE)
        for n in (2, 2, 3, 2, 3):
            call_right(piece, grown, n, x)
        assert (bench.recorded(), bench.device.calls("copy")) == (2, copies)


def appended(n: int, cache: torch.Tensor) -> tuple[torch.Tensor]:
    return (cache.add_(n).sum() * 2,)


def test_a_cache_that_a_piece_changes_is_recorded_at_the_first_call_of_further_keys() -> None:
    bench = Bench()
    piece = bench.piece(appended, 2, 1, mutated=[1], required=True)
    mine, right = torch.zeros(8), torch.zeros(8)
    for n in (1, 1, 2, 3, 2):
        assert_equal([piece([n, mine])[0], mine], [appended(n, right)[0], right])
    assert bench.recorded() == 3


def test_a_changed_input_at_another_address_is_no_error_at_the_first_call_of_a_key() -> None:
    bench = Bench()
    piece = bench.piece(appended, 2, 1, mutated=[1], required=True)
    first = values()
    for _ in range(2):
        call_right(piece, appended, 1, first)
    second = values()
    call_right(piece, appended, 2, second)  # as any first call
    assert bench.recorded() == 1
    call_right(piece, appended, 2, second)
    assert bench.recorded() == 2


def test_a_thread_takes_over_from_one_that_has_ended() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)

    def warm_up() -> None:
        for _ in range(2):
            call_right(piece, double, values())

    thread = threading.Thread(target=warm_up)
    thread.start()
    thread.join()
    for _ in range(3):
        call_right(piece, double, values())
    assert (bench.tree.shared, bench.recorded()) == (False, 1)
