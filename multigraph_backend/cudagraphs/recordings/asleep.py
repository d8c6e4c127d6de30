"""Recordings while memory that they read or write sleeps (`allocator.sleeping`): none of them is replayed.

In:  what sleeps on the tree's device, whenever that changes.  Out: recordings that answer no call until it is there
again; and for a call that would read it, recorded or not, the error `Asleep`.

Other recordings pay nothing: those that sleep answer "no" to whether they may be replayed, and only calls that no
recording answers look at what sleeps.  An input that is copied is not looked at before a replay: one that lies in
memory that sleeps ends with the driver's "illegal memory access".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.allocator import sleeping
from multigraph_backend.allocator.sleeping import Asleep, Sleeper
from multigraph_backend.cudagraphs.devices.device import Device
from multigraph_backend.cudagraphs.recordings.nodes import Holds, Node
from multigraph_backend.distributed.groups import REGISTERS_CAPTURED


def never(inputs: list[object]) -> bool:
    """Stands for `Node.holds` while what the recording reads sleeps."""
    return False


class Sleepers:
    """What sleeps of one device: `any` of it, or `all`.  Under the tree's lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.any = self.all = False
        self.now: Sequence[Sleeper] = ()

    def change(self, nodes: Iterable[Node], now: Sequence[Sleeper]) -> None:
        """`nodes`: all there are.  Raises `Asleep`, and has changed nothing, where recordings hold collectives over
        memory that is about to sleep: NCCL may have registered it, and would go on with the pages of before."""
        held = list(nodes)
        asleep = [node for node in held if any(self._uses(node, sleeper) for sleeper in now)]
        for node in asleep:
            registers = os.environ.get(REGISTERS_CAPTURED) != "0"
            if registers and not node.destroyed and node.keyed is not None and node.keyed.piece.spec.groups:
                raise Asleep(
                    f"{node.keyed.piece.spec.label}: its recordings hold collectives, and NCCL may have registered "
                    f"memory that is to sleep; set {REGISTERS_CAPTURED}=0, or options={{'collectives': 'cut'}}"
                )
        for node in held:
            wake = node.slept is not None and (node not in asleep or node.destroyed)
            if wake and node.slept is not None:
                node.holds = never if node.destroyed else node.slept
                node.slept = None
            elif node in asleep and node.slept is None:
                slept: Holds = node.holds
                node.slept, node.holds = slept, never
        self.now = now
        self.any, self.all = bool(now), any(sleeper.ranges is None for sleeper in now)

    def refuse(
        self, inputs: Sequence[Any], label: str = "compiled code", constants: Sequence[torch.Tensor] = ()
    ) -> None:
        """Raise `Asleep` where one of these lies in memory that sleeps."""
        for sleeper in sleeping.asleep(self._device.index):
            if sleeper.ranges is None:
                raise Asleep(f"{label}: called while all memory of the device sleeps; wake it first")
            with _compat.without_torch_function():
                if any(map(sleeper.has, self._addresses((*inputs, *constants)))):
                    raise Asleep(f"{label}: called while memory that it reads sleeps; wake it first")

    def _uses(self, node: Node, sleeper: Sleeper) -> bool:
        if sleeper.ranges is None:
            return True
        if node.recording is None or node.keyed is None:
            return False
        constants = self._addresses(node.keyed.piece.spec.constants)
        return any(
            address is not None and sleeper.has(address) for address in (*node.recording.plan.addresses, *constants)
        )

    def _addresses(self, values: Iterable[Any]) -> Iterator[int]:
        device = self._device
        for value in values:
            if isinstance(value, torch.Tensor) and device.is_on_device(value):
                yield device.address(value)
