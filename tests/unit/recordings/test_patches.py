"""What two captures prove of where kernels find their inputs, and what they do not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from multigraph_backend.cudagraphs.devices.patches import (
    COPY,
    EMPTY,
    FILL,
    KERNEL,
    MOST_NODES,
    RECORD,
    WAIT,
    Candidate,
    Described,
    Proven,
    Word,
    apart,
    overlaps,
    proven,
)

MIB = 1 << 20
X = Candidate(3, 0x7F00_0000_0000, 0x7F55_0000_0000, MIB, MIB)
Y = Candidate(5, 0x7F00_1000_0000, 0x7F55_0000_0100, MIB, MIB)
OUT = 0x7E00_0000_0000
FUNCTION = (11, 0, 7, 4, 1, 1, 128, 1, 1, 0)
ON_DEVICE = (2, 2, 0, 0)
DIFFERS = "two captures differ in a number that is not the address of an input"


def word(value: int) -> bytes:
    return (value % (1 << 64)).to_bytes(8, "little")


def kernel(*values: int | bytes, same: tuple[int, ...] = FUNCTION, handle: int = 99) -> Described:
    return Described(handle, KERNEL, same, tuple(word(v) if isinstance(v, int) else v for v in values))


def compare(there: Sequence[Described], here: Sequence[Described], *inputs: Candidate) -> Proven:
    return proven(there, here, inputs or (X,), MIB)


def refused(there: Sequence[Described], here: Sequence[Described], *inputs: Candidate) -> dict[int, str]:
    found = compare(there, here, *inputs)
    assert {entry.index for entry in (inputs or (X,))} >= set(found.refused)
    return found.refused


def test_the_words_that_hold_an_input_are_found() -> None:
    there = [kernel(X.elsewhere, OUT, 1024, handle=1), kernel(OUT, OUT + 512, handle=2)]
    here = [kernel(X.address, OUT, 1024, handle=3), kernel(OUT, OUT + 512, handle=4)]
    found = compare(there, here)
    assert found.refused == {}
    (told,) = found.told
    assert told.node is here[0]
    assert told.words == (Word(0, 0, 0, 0),)


def test_a_word_may_point_into_the_input_and_stand_in_a_structure() -> None:
    def fields(begin: int) -> bytes:
        return word(OUT) + word(begin + 4096) + word(77) + b"abc"

    found = compare([kernel(5, fields(X.elsewhere))], [kernel(5, fields(X.address))])
    assert found.refused == {}
    assert found.told[0].words == (Word(1, 8, 0, 4096),)


def test_several_inputs_in_several_kernels() -> None:
    def nodes(x: int, y: int) -> list[Described]:
        return [kernel(x, y, OUT), kernel(OUT, 3), kernel(y + 256, OUT)]

    found = compare(nodes(X.elsewhere, Y.elsewhere), nodes(X.address, Y.address), X, replace(Y, nbytes=2 * MIB))
    assert found.refused == {}
    assert [entry.words for entry in found.told] == [(Word(0, 0, 0, 0), Word(1, 0, 1, 0)), (Word(0, 0, 1, 256),)]


def test_inputs_that_share_memory_are_told_apart() -> None:
    z = replace(X, index=6, elsewhere=X.elsewhere + 256)  # the same memory, twice
    nodes = [[kernel(x, z_, OUT)] for x, z_ in ((X.elsewhere, z.elsewhere), (X.address, X.address))]
    assert compare(*nodes, X, z).told[0].words == (Word(0, 0, 0, 0), Word(1, 0, 1, 0))


def test_inputs_that_were_moved_alike_are_an_error() -> None:
    with pytest.raises(ValueError, match="the same distance"):
        compare([], [], X, replace(Y, elsewhere=Y.address + X.elsewhere - X.address))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (X.elsewhere + 8, X.address),  # another offset
        (X.elsewhere - 8, X.address - 8),  # before it
        (X.elsewhere + MIB, X.address + MIB),  # behind it, where something else may begin
        (X.elsewhere >> 8, X.address >> 8),  # a part of the address
        (X.elsewhere ^ 1, X.address),
        (17, 18),
        (0, X.address),
        (X.elsewhere, OUT),
        (word(X.elsewhere)[4:], word(X.address)[4:]),  # half of it
        (b"ab" + word(X.elsewhere), b"ab" + word(X.address)),  # not on 8 bytes
        (word(1) + b"x", word(1) + b"y"),  # behind the last whole word
    ],
)
def test_any_other_difference_refuses_all(there: int | bytes, here: int | bytes) -> None:
    right = [kernel(X.elsewhere, Y.elsewhere)], [kernel(X.address, Y.address)]
    assert refused(*right, X, Y) == {}
    found = refused([*right[0], kernel(there)], [*right[1], kernel(here)], X, Y)
    assert found == {X.index: DIFFERS, Y.index: DIFFERS}


@pytest.mark.parametrize("at", range(len(FUNCTION)))
def test_other_kernels_refuse_all(at: int) -> None:
    other = tuple(number + (place == at) for place, number in enumerate(FUNCTION))
    found = refused([kernel(X.elsewhere)], [kernel(X.address, same=other)])
    assert found == {X.index: "two captures launch different kernels"}


def test_other_parameters_or_kinds_refuse_all() -> None:
    why = {X.index: "two captures launch different kernels"}
    assert refused([kernel(X.elsewhere, 1)], [kernel(X.address)]) == why
    assert refused([kernel(b"1234")], [kernel(b"12345678")]) == why
    assert refused([Described(1, EMPTY, (), ())], [Described(1, WAIT, (), ())]) == why


def test_another_number_of_nodes_refuses_all() -> None:
    assert refused([kernel(X.elsewhere)], [kernel(X.address)] * 2) == {X.index: "two captures have 1 and 2 nodes"}


def test_nodes_in_another_order_refuse_all() -> None:
    there = [kernel(X.elsewhere, OUT), kernel(X.elsewhere, OUT + 512)]
    assert refused(there, [kernel(X.address, OUT + 512), kernel(X.address, OUT)]) == {X.index: DIFFERS}


def test_a_kernel_of_unknown_parameters_refuses_all() -> None:
    nodes = [kernel(X.elsewhere), kernel()], [kernel(X.address), kernel()]
    assert refused(*nodes) == {X.index: "it has a kernel whose parameters are not known"}


@pytest.mark.parametrize("kind", [3, 4, 8, 9, 10, 11, 12, 13, 14])
def test_nodes_whose_addresses_are_not_seen_refuse_all(kind: int) -> None:
    nodes = [kernel(X.elsewhere), Described(1, kind, (), ())], [kernel(X.address), Described(1, kind, (), ())]
    assert f"CUDA's kind {kind}," in refused(*nodes)[X.index]


@pytest.mark.parametrize("kind", [EMPTY, WAIT, RECORD])
def test_nodes_without_addresses_are_no_matter(kind: int) -> None:
    nothing = Described(1, kind, (), ())
    assert refused([nothing, kernel(X.elsewhere)], [nothing, kernel(X.address)]) == {}


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (2, 3), (4, 2), (2, 4), (1, 1)])
def test_copies_of_other_memory_refuse_all(source: int, target: int) -> None:
    copy = Described(1, COPY, (source, target, 0), (word(OUT), word(OUT + 512)))
    found = refused([copy, kernel(X.elsewhere)], [copy, kernel(X.address)])
    assert found == {X.index: "it copies memory of the host, which may hold addresses"}


def test_an_input_that_is_copied_or_filled_is_refused_and_others_are_not() -> None:
    def nodes(x: int, y: int) -> list[Described]:
        return [Described(1, COPY, ON_DEVICE, (word(y + 64), word(OUT))), kernel(x), kernel(y)]

    found = compare(nodes(X.elsewhere, Y.elsewhere), nodes(X.address, Y.address), X, Y)
    assert found.refused == {Y.index: "it is copied, or filled, by what is no kernel"}
    assert [entry.words for entry in found.told] == [(Word(0, 0, 0, 0),)]
    fill = [Described(1, FILL, (0, 0, 4, 1, 1), (word(at),)) for at in (X.elsewhere, X.address)]
    assert set(refused(fill[:1], fill[1:])) == {X.index}


def test_copies_and_fills_of_other_memory_may_not_differ() -> None:
    copies = [Described(1, COPY, ON_DEVICE, (word(OUT + at), word(OUT))) for at in (512, 1024)]
    assert refused(copies[:1], copies[1:]) == {X.index: DIFFERS}
    same = [Described(1, COPY, ON_DEVICE, (word(OUT + 512), word(OUT)))]
    assert refused([*same, kernel(X.elsewhere)], [*same, kernel(X.address)]) == {}


@pytest.mark.parametrize(("nbytes", "allowed"), [(128, False), (192, False), (64, True), (120, True), (136, True)])
def test_what_may_be_a_tensor_map_is_not_told(nbytes: int, allowed: bool) -> None:
    rest = bytes(nbytes - 8)
    found = refused([kernel(word(X.elsewhere) + rest)], [kernel(word(X.address) + rest)])
    assert (found == {}) is allowed


def test_an_input_that_was_not_seen_is_refused() -> None:
    found = compare([kernel(X.elsewhere)], [kernel(X.address)], X, Y)
    assert found.refused == {Y.index: "no kernel was seen to be given its address"}


def test_a_fixed_address_within_the_input_is_not_told() -> None:
    found = compare([kernel(X.elsewhere, X.address + 8)], [kernel(X.address, X.address + 8)])
    assert found.told[0].words == (Word(0, 0, 0, 0),)


def test_to_tell_has_to_take_no_longer_than_to_copy() -> None:
    two = [kernel(X.elsewhere), kernel(X.elsewhere)], [kernel(X.address), kernel(X.address)]
    assert "2 kernels read it" in refused(*two)[X.index]
    assert refused(*two, replace(X, nbytes=2 * MIB)) == {}
    assert refused([kernel(X.elsewhere, X.elsewhere)], [kernel(X.address, X.address)]) == {}  # one kernel, twice


def test_of_many_kernels_those_are_told_that_save_most() -> None:
    def nodes(x: int, y: int) -> list[Described]:
        return [*[kernel(x)] * (MOST_NODES - 1), *[kernel(y)] * 2]

    x, y = replace(X, nbytes=1000 * MIB), replace(Y, nbytes=2 * MIB)
    there, here = nodes(X.elsewhere, Y.elsewhere), nodes(X.address, Y.address)
    why = f"more than {MOST_NODES} kernels would have to be told where inputs lie"
    assert compare(there, here, x, y).refused == {Y.index: why}
    assert compare(there, here, x, replace(y, nbytes=100 * MIB)).refused == {X.index: why}
    assert len(compare(there, here, x, y).told) == MOST_NODES - 1


@pytest.mark.parametrize("seed", range(50))
def test_what_is_told_makes_the_capture_of_any_place(seed: int) -> None:
    chance = random.Random(seed)
    inputs = [
        Candidate(at, (1 << 40) + at * 3 * MIB, (1 << 42) + at * 256, MIB, 1000 * MIB)
        for at in range(chance.randrange(1, 6))
    ]
    template = [
        [
            (chance.randrange(len(inputs)), chance.randrange(MIB))
            if chance.random() < 0.4
            else chance.randrange(1 << 64)
            for _ in range(chance.randrange(1, 9))
        ]
        for _ in range(chance.randrange(1, 30))
    ]
    template.append([(which, 0) for which in range(len(inputs))])

    def nodes(where: Sequence[int]) -> list[Described]:
        return [kernel(*(e if isinstance(e, int) else where[e[0]] + e[1] for e in values), handle=number)
                for number, values in enumerate(template)]  # fmt: skip

    here = nodes([entry.address for entry in inputs])
    found = compare(nodes([entry.elsewhere for entry in inputs]), here, *inputs)
    assert found.refused == {}
    anywhere = [chance.randrange(1 << 47) for _ in inputs]
    told = {node.handle: [bytearray(value) for value in node.values] for node in here}
    for entry in found.told:
        for parameter, at, which, offset in entry.words:
            told[entry.node.handle][parameter][at : at + 8] = word(anywhere[which] + offset)
    assert [tuple(map(bytes, told[node.handle])) for node in here] == [node.values for node in nodes(anywhere)]


def test_ranges_are_put_apart() -> None:
    assert apart([(8, 16), (0, 4), (12, 20), (4, 6), (30, 30), (21, 22)]) == ((0, 6), (8, 20), (21, 22))
    assert overlaps(19, 21, ((0, 6), (8, 20)))
    assert not overlaps(6, 8, ((0, 6), (8, 20)))
    assert not overlaps(20, 30, ((0, 6), (8, 20)))
