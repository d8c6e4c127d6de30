"""Tuples among a piece's inputs, opened: an operator with several results that runs between two pieces hands all of
them to the next one as one value, and a recording knows tensors and numbers only.

In:  per input of Inductor's function, of how many results it is a tuple.
Out: the piece's spec, its function and its caller, as they are when each result is an input of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from multigraph_backend.cudagraphs.partition.graph_spec import PartitionSpec


class Opened:
    """`results`: per input, how many results it is a tuple of; 0 where it is no tuple."""

    def __init__(self, results: Sequence[int]) -> None:
        self.results = tuple(results)
        self._starts = [sum(count or 1 for count in self.results[:at]) for at in range(len(self.results))]

    def spec(self, part: PartitionSpec) -> PartitionSpec:
        """`part`, with each result as an input."""
        counted = list(zip(part.names, part.inputs, self.results, strict=True))
        return dataclasses.replace(
            part,
            inputs=tuple(index for _, index, count in counted for _ in range(count or 1)),
            names=tuple(f"{name}[{at}]" if count else name for name, _, count in counted for at in range(count or 1)),
            static=self._positions(part.static),
            mutated=self._positions(part.mutated),
            results=(),
        )

    def _positions(self, of: Iterable[int]) -> tuple[int, ...]:
        """Where inputs that are no tuples are."""
        return tuple(self._starts[at] for at in of)

    def caller(self, piece: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`piece`, which takes results one by one, as Inductor's code calls it.  Clears its list, as `piece` does."""
        results = self.results

        def call(inputs: list[Any]) -> Any:
            flat: list[Any] = []
            for value, count in zip(inputs, results, strict=True):
                flat.extend(value) if count else flat.append(value)
            inputs.clear()
            del value
            return piece(flat)

        return call

    def function(self, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Inductor's `function` as the piece calls it."""
        results = self.results

        def call(flat: list[Any]) -> Any:
            rest = iter(flat)
            inputs = [tuple(next(rest) for _ in range(count)) if count else next(rest) for count in results]
            flat.clear()
            return function(inputs)

        return call
