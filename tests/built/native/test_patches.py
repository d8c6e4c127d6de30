"""What native calls read off a captured graph, and what they tell its kernels at each launch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

GRAPH = 4242
NODES, PARAMETERS, BYTES = 8, 4, 40
KERNEL, COPY, FILL, EMPTY = 0, 1, 2, 5
SAME = (2, 3, 4, 5, 6, 7, 8)


class Graph:
    """The graph of `driver.cc`."""

    def __init__(self, driver: Any) -> None:
        self._library = ctypes.CDLL(str(driver.path))
        self.kinds = self._ints("kinds", NODES)
        self.by_kernel = self._ints("by_kernel", NODES)
        self.counts = self._ints("counts", NODES)
        self.times_told = self._ints("times_told", NODES)
        self.sizes = self._ints("sizes", NODES * PARAMETERS)
        self.bytes = self._bytes("bytes")
        self.told = self._bytes("told")
        for many in (self.kinds, self.by_kernel, self.counts, self.times_told, self.sizes):
            many[:] = [0] * len(many)
        for name in ("count_nodes", "fail_info", "in_one_piece", "fail_told"):
            self.be(name, 0)

    def _ints(self, name: str, count: int) -> Any:
        return (ctypes.c_int * count).in_dll(self._library, name)

    def _bytes(self, name: str) -> Any:
        return (ctypes.c_ubyte * (NODES * PARAMETERS * BYTES)).in_dll(self._library, name)

    def be(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, name).value = value

    def add(self, kind: int, *values: bytes, by_kernel: bool = False) -> int:
        count = ctypes.c_int.in_dll(self._library, "count_nodes")
        at = count.value
        count.value += 1
        self.kinds[at], self.by_kernel[at], self.counts[at] = kind, by_kernel, len(values)
        for number, value in enumerate(values):
            self.sizes[at * PARAMETERS + number] = len(value)
            begin = (at * PARAMETERS + number) * BYTES
            self.bytes[begin : begin + len(value)] = list(value)
        return 1000 + at

    def parameter(self, handle: int, number: int) -> bytes:
        """What a node was told of a parameter."""
        at = handle - 1000
        begin = (at * PARAMETERS + number) * BYTES
        return bytes(self.told[begin : begin + self.sizes[at * PARAMETERS + number]])

    def times(self, *handles: int) -> list[int]:
        return [self.times_told[handle - 1000] for handle in handles]


@pytest.fixture
def graph(driver: Any) -> Graph:
    return Graph(driver)


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


# ---------------------------------------------------------------- what is read


def test_all_nodes_are_described(calls: Any, graph: Graph) -> None:
    assert calls.reads_nodes()
    graph.add(KERNEL, word(77), b"1234", word(5) + b"abc")
    graph.add(KERNEL, word(78), by_kernel=True)
    graph.add(COPY)
    graph.add(FILL)
    graph.add(EMPTY)
    function, kernel, copy, fill, empty = calls.nodes(GRAPH)
    assert function == (1000, KERNEL, (500, 0, 0, *SAME), (word(77), b"1234", word(5) + b"abc"))
    assert kernel == (1001, KERNEL, (0, 501, 99, *SAME), (word(78),))
    assert copy[:2] == (1002, COPY)
    assert copy[2][:2] == (2, 2)
    assert 16 in copy[2]
    assert copy[3] == (word(0x111), word(0x222))
    assert fill == (1003, FILL, (0, 7, 4, 10, 1), (word(0x333),))
    assert empty == (1004, EMPTY, (), ())


def test_an_empty_graph_has_no_nodes(calls: Any, graph: Graph) -> None:
    assert calls.nodes(GRAPH) == []


def test_what_the_driver_does_not_tell_is_an_error(calls: Any, graph: Graph) -> None:
    with pytest.raises(ValueError, match="answers 1 to what is asked of a graph"):
        calls.nodes(GRAPH + 1)
    graph.add(KERNEL, word(1))
    graph.be("fail_info", 400)
    with pytest.raises(ValueError, match="answers 400 to what is asked of a kernel's parameters"):
        calls.nodes(GRAPH)
    graph.be("fail_info", 0)
    graph.be("in_one_piece", 1)
    with pytest.raises(ValueError, match="its parameters are not known"):
        calls.nodes(GRAPH)


# ---------------------------------------------------------------- what is told


class Case:
    """Two kernels: the first is given input 1 twice and input 2, the second input 2, 8 bytes in."""

    def __init__(self, calls: Any, graph: Graph, driver: Any, written: Any = (), **how: Any) -> None:
        self.graph, self.driver = graph, driver
        zero = word(0)
        self.first = graph.add(KERNEL, zero + word(11) + zero, b"keep", zero)
        self.second = graph.add(KERNEL, word(22), zero, by_kernel=True)
        nodes = {entry[0]: entry for entry in calls.nodes(GRAPH)}
        words = {self.first: ((0, 0, 0, 0), (0, 16, 0, 4), (2, 0, 1, 0)), self.second: ((1, 0, 1, 8),)}
        told = tuple((handle, nodes[handle][2], nodes[handle][3], words[handle]) for handle in words)
        inputs = tuple((index, torch.empty(4, 8), 128, 64) for index in (1, 2))
        self.left: list[list[Any]] = []
        self.go = calls.Launch(
            1234, -1, how.get("otherwise", self.left.append), None, how.get("replay"), "replay" in how, (), None,
            patches=(inputs, told, tuple(written), how.get("by_others", False)),
        )  # fmt: skip

    def right(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        at, other = x.data_ptr(), y.data_ptr()
        first = word(at) + word(11) + word(at + 4), b"keep", word(other)
        second = word(22), word(other + 8)
        return all(
            self.graph.parameter(handle, number) == value
            for handle, values in ((self.first, first), (self.second, second))
            for number, value in enumerate(values)
        )

    def times(self) -> list[int]:
        return self.graph.times(self.first, self.second)


@pytest.fixture
def case(calls: Any, graph: Graph, driver: Any) -> Case:
    return Case(calls, graph, driver)


_made: list[torch.Tensor] = []


def tensor() -> torch.Tensor:
    """At an address of its own."""
    _made.append(torch.empty(4, 8))
    return _made[-1]


def test_kernels_are_told_where_inputs_lie(case: Case) -> None:
    for call in range(1, 4):
        x, y = tensor(), tensor()
        assert case.go([0, x, y]) is None
        assert case.right(x, y)
        assert case.times() == [call, call]
        assert case.driver.count("graphs") == call
    assert case.left == []


def test_only_what_has_changed_is_told(case: Case) -> None:
    x, y, z = tensor(), tensor(), tensor()
    case.go([0, x, y])
    case.go([0, x, y])
    assert case.times() == [1, 1]
    case.go([0, z, y])
    assert case.times() == [2, 1]
    assert case.right(z, y)
    case.go([0, z, x])
    assert case.times() == [3, 2]
    assert case.right(z, x)
    assert case.driver.count("graphs") == 4


def test_one_input_may_come_twice(case: Case) -> None:
    x = tensor()
    case.go([0, x, x])
    assert case.right(x, x)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.empty(33)[1:].view(4, 8),
        lambda: torch.empty(8, 4).t(),
        lambda: torch.empty(8, 4),
        lambda: torch.empty(4, 8, dtype=torch.int32),
        lambda: torch._neg_view(tensor()),
        lambda: None,
        lambda: 7,
        lambda: torch.eye(4).to_sparse(),
    ],
)
def test_what_lies_otherwise_is_left_to_others_and_all_is_told_again(case: Case, other: Any) -> None:
    x, y = tensor(), tensor()
    case.go([0, x, y])
    for place in (1, 2):
        inputs: list[Any] = [0, x, y]
        inputs[place] = other()
        case.left.clear()
        case.go(inputs)
        assert case.left == [inputs]
        times = case.times()
        case.go([0, x, y])  # others have told the driver what is not known here
        assert case.times() == [time + 1 for time in times]
        assert case.right(x, y)
    case.left.clear()
    case.go([0, x])
    assert case.left == [[0, x]]


def test_a_storage_that_is_too_small_is_left_to_others(case: Case) -> None:
    x, y = tensor(), tensor()
    x.untyped_storage().resize_(64)
    case.go([0, x, y])
    assert len(case.left) == 1


def test_what_shares_memory_with_what_is_written_is_left_to_others(calls: Any, graph: Graph, driver: Any) -> None:
    base = torch.empty(2, 4, 8)
    x, y = tensor(), tensor()
    begin = base.data_ptr()
    case = Case(calls, graph, driver, written=((8, 16), (begin + 120, begin + 136), (1 << 62, 1 << 63)))
    case.go([0, x, y])
    assert case.left == []
    case.go([0, x, base[0]])
    case.go([0, base[1], x])
    assert len(case.left) == 2
    other = Case(calls, graph, driver, written=((begin + 128, begin + 129),))
    other.go([0, base[0], x])  # beside it
    assert other.left == []


def test_a_node_that_is_refused_is_told_again(case: Case) -> None:
    x, y = tensor(), tensor()
    case.go([0, x, y])
    x, y = tensor(), tensor()
    case.graph.be("fail_told", case.second - 1000 + 1)
    case.go([0, x, y])
    assert len(case.left) == 1
    assert case.driver.count("graphs") == 1  # what is half told is not launched
    case.graph.be("fail_told", 0)
    case.go([0, x, y])
    assert case.right(x, y)
    assert case.driver.count("graphs") == 2


def test_a_launch_that_fails_is_left_to_others(case: Case) -> None:
    x, y = tensor(), tensor()
    case.driver.fail("graph")
    case.go([0, x, y])
    assert len(case.left) == 1
    case.driver.be("fail_graph", 0)
    case.go([0, x, y])
    assert case.times() == [2, 2]


def test_where_others_tell_too_all_is_told_each_time(calls: Any, graph: Graph, driver: Any) -> None:
    case = Case(calls, graph, driver, by_others=True)
    x, y = tensor(), tensor()
    for call in range(1, 4):
        case.go([0, x, y])
        assert case.times() == [call, call]


def test_torch_launches_after_they_were_told(calls: Any, graph: Graph, driver: Any) -> None:
    seen: list[list[int]] = []
    case = Case(calls, graph, driver, replay=lambda: seen.append(graph.times(1000, 1001)))
    case.go([0, tensor(), tensor()])
    assert seen == [[1, 1]]
    assert driver.count("graphs") == 0


def test_a_thread_without_a_context_gets_one(calls: Any, graph: Graph, driver: Any) -> None:
    case = Case(calls, graph, driver)
    driver.be("needs_context", 1)
    x, y = tensor(), tensor()
    case.go([0, x, y])
    assert case.right(x, y)
    assert (driver.count("graphs"), driver.count("contexts"), case.left) == (1, 1, [])


@pytest.mark.parametrize(
    "word_",
    [
        (0, 4, 0, 0),
        (0, 24, 0, 0),
        (1, 0, 0, 0),
        (9, 0, 0, 0),
        (0, 0, 2, 0),
        (-1, 0, 0, 0),
        (0, -8, 0, 0),
        (0, 0, -1, 0),
    ],
)
def test_words_that_are_not_there_are_errors(calls: Any, graph: Graph, driver: Any, word_: Any) -> None:
    graph.add(KERNEL, word(0) * 3, b"keep")
    (node,) = calls.nodes(GRAPH)
    inputs = ((1, torch.empty(4, 8), 128, 64),)
    told = ((node[0], node[2], node[3], (word_,)),)
    with pytest.raises(ValueError, match="inside of one"):
        calls.Launch(1, -1, print, None, None, False, (), None, patches=(inputs, told, (), False))


@pytest.mark.parametrize("written", [((4, 4),), ((8, 12), (0, 4)), ((0, 8), (8, 12))])
def test_ranges_that_are_not_apart_are_errors(calls: Any, graph: Graph, driver: Any, written: Any) -> None:
    with pytest.raises(ValueError, match="apart from each other"):
        Case(calls, graph, driver, written=written)


def test_it_lets_go_of_what_it_held(calls: Any, graph: Graph, driver: Any) -> None:
    import sys

    like = torch.empty(4, 8)
    graph.add(KERNEL, word(0))
    (node,) = calls.nodes(GRAPH)
    before = sys.getrefcount(like), sys.getrefcount(node[3])
    made = calls.Launch(
        1, -1, print, None, None, False, (), None,
        patches=(((1, like, 128, 64),), ((node[0], node[2], node[3], ((0, 0, 0, 0),)),), (), False),
    )  # fmt: skip
    del made
    assert (sys.getrefcount(like), sys.getrefcount(node[3])) == before
