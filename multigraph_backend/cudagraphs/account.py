"""What is recorded, what memory that takes, and why the rest is not: the part of `explain()` about recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multigraph_backend import native
from multigraph_backend.allocator.statistics import readable
from multigraph_backend.cudagraphs import memory_map
from multigraph_backend.cudagraphs.partition.graph_spec import Cut
from multigraph_backend.cudagraphs.recordings import memory, patching
from multigraph_backend.cudagraphs.recordings.memory import PoolMemory, RecordingMemory
from multigraph_backend.cudagraphs.recordings.nodes import Node
from multigraph_backend.cudagraphs.recordings.piece_state import PieceState
from multigraph_backend.cudagraphs.recordings.recording import FIRST_CALL
from multigraph_backend.cudagraphs.recordings.tree import Tree

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.output_code import RecordedCode


@dataclass(frozen=True)
class PieceReport:
    """One piece of compiled code: how often it was recorded and replayed, which inputs it copies at each call (of its
    newest recording), outputs that are handed out as copies, and why calls after the first ran unrecorded.

    `again`: how often each input lay elsewhere when it was recorded again.  `moved`: outputs that were held when their
    memory was needed.  `stacks`: per reason of `unrecorded`, where the user's code first uses the input that it names.
    `patched_inputs`: those that the newest recording reads where they lie, `told_kernels`: how many kernels are told at
    each call where that is.  `unpatched`: why inputs that are copied are not.
    """

    label: str
    recordings: int
    replays: int
    copied_inputs: tuple[str, ...]
    copied_outputs: int
    unrecorded: dict[str, int]
    refused: str | None
    again: dict[str, int]
    moved: int
    stacks: dict[str, str]
    patched_inputs: tuple[str, ...] = ()
    told_kernels: int = 0
    unpatched: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceReport:
    """The recordings of one device.

    `pool_bytes`: held by all of its pools; `pools` says what of it is in use, `memory` what each recording takes of it;
    `graph_bytes`: what the driver took for the graphs themselves, see `Device.graph_bytes`.

    `moved`: outputs that were held when their memory was needed; `again`: recordings beyond the first of a piece at one
    key after the same one; `evicted`: given up for others; `gave_way`: given up for larger ones, in whose memory they
    are made again; `unprofitable`: given up because they did not pay; `shared`: how often several threads came to call;
    `copies`: whether all outputs are copies now because they do; `tree`: one line a recording, children indented below
    the one that they follow; `nodes`: the same as data, with its memory; `calls`: "native", or why they are not.
    """

    device: int
    recordings: int
    pool_bytes: int
    moved: int
    again: int
    failed: int
    evicted: int
    gave_way: int
    unprofitable: int
    shared: int
    copies: bool
    pieces: tuple[PieceReport, ...]
    tree: tuple[str, ...]
    nodes: tuple[memory_map.RecordingReport, ...] = ()
    pools: tuple[PoolMemory, ...] = ()
    memory: tuple[RecordingMemory, ...] = ()
    graph_bytes: int = 0
    calls: str = "native"

    def __str__(self) -> str:
        megabytes = self.pool_bytes / (1 << 20)
        lines = [f"recordings on device {self.device}: {self.recordings} in {megabytes:.1f} MiB"]
        rare = {
            "outputs moved": self.moved,
            "recorded again": self.again,
            "failed": self.failed,
            "given up for others": self.evicted,
            "gave way to larger ones": self.gave_way,
            "given up because they did not pay": self.unprofitable,
        }
        if any(rare.values()):
            lines[0] += "; " + ", ".join(f"{count} {name}" for name, count in rare.items() if count)
        if self.calls not in ("native", native.NOT_ASKED):
            lines.append(f"  calls go by way of Python: {self.calls}")
        lines += [f"  {line}" for line in self._memory_lines()]
        if self.shared:
            now = "all outputs are copies" if self.copies else "no more"
            lines.append(f"  several threads called {self.shared} times; now: {now}")
        for piece in self.pieces:
            text = f"  {piece.label}: {piece.recordings} recorded, {piece.replays} replays"
            if piece.copied_inputs:
                text += f", copies {', '.join(piece.copied_inputs)}"
            if piece.patched_inputs:
                kernels = "1 kernel is" if piece.told_kernels == 1 else f"{piece.told_kernels} kernels are"
                text += f", reads {', '.join(piece.patched_inputs)} where it lies ({kernels} told)"
            if piece.copied_outputs:
                text += f", hands out {piece.copied_outputs} copies"
            if piece.moved:
                text += f", {piece.moved} outputs moved"
            lines.append(text)
            lines += [f"    {name} is copied: {why}" for name, why in piece.unpatched.items()]
            lines += [f"    recorded again {count} times, for {why}" for why, count in piece.again.items()]
            for why in sorted(piece.unrecorded, key=lambda why: why != piece.refused):
                count = piece.unrecorded[why]
                said = f"not recorded, {count} calls" if why == piece.refused else f"{count} calls unrecorded"
                lines += [f"    {said}: {why}", *_stack(piece.stacks.get(why), "      ")]
        return "\n".join([*lines, *(f"  {line}" for line in self.tree)])

    def _memory_lines(self) -> list[str]:
        lines = []
        for pool in self.pools:
            name = "pool" if len(self.pools) == 1 else f"pool {pool.generation}"
            parts = {"live": pool.live, "lent": pool.lent, "dead": pool.dead}
            text = f"{name}: {readable(pool.held)} held: " + ", ".join(f"{readable(n)} {of}" for of, n in parts.items())
            lines.append(f"{text}, {readable(pool.warm)} of what is live from first calls" if pool.warm else text)
        if self.graph_bytes:
            lines.append(f"graphs: {readable(self.graph_bytes)} of the driver's own")
        return lines


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph on a GPU: how many pieces of it are recorded, what runs between them and why, and why nothing
    of it is recorded."""

    label: str
    pieces: int
    cuts: tuple[Cut, ...]
    refused: str | None

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.label}: nothing is recorded: {self.refused}"
        lines = [f"{self.label}: {self.pieces} {'piece' if self.pieces == 1 else 'pieces'}"]
        for cut in self.cuts:
            lines += [f"  cut by {cut.reason}: {', '.join(cut.ops)}", *_stack(cut.stack_trace, "    ")]
        return "\n".join(lines)


def _stack(trace: str | None, indent: str) -> list[str]:
    """The user's line at the end of a stack trace."""
    return [indent + line.strip() for line in (trace or "").strip().splitlines()[-2:]]


def graphs(codes: Iterable[RecordedCode]) -> tuple[GraphReport, ...]:
    """The account of compiled graphs, by label."""
    reports = [
        GraphReport(code.label, len(code.pieces), code.spec.cuts, code.refused) for code in codes if code.spec.devices
    ]
    return tuple(sorted(reports, key=lambda report: report.label))


def of(tree: Tree) -> DeviceReport:
    """The account of one tree, now."""
    with tree.lock:
        nodes = [node for node in tree.root.below() if node.keyed is not None]
        pools, taken = memory.of_pools(tree), memory.of_recordings(tree)
        given_up = [node for node, found in taken.items() if found.given_up]
        return DeviceReport(
            device=tree.device.index,
            recordings=tree.size,
            pool_bytes=sum(pool.held for pool in pools),
            moved=tree.counts["clones"],
            again=tree.counts["recorded again"],
            failed=tree.counts["failed"],
            evicted=tree.counts["evicted"],
            gave_way=tree.counts["gave way"],
            unprofitable=tree.counts["not worth it"],
            shared=tree.counts["shared"],
            copies=tree.shared,
            pieces=tuple(_piece(piece, nodes) for piece in sorted(tree.pieces, key=lambda piece: piece.spec.label)),
            tree=(
                *(f"{'  ' * (node.depth - 1)}{_line(node, taken[node])}" for node in nodes),
                *(f"given up, with outputs alive: {_line(node, taken[node])}" for node in given_up),
            ),
            nodes=tuple(memory_map.of(node, memory.label(node)) for node in nodes),
            pools=pools,
            memory=tuple(taken.values()),
            graph_bytes=tree.device.graph_bytes(),
            calls="native" if tree.calls is not None else native.state(),
        )


def _line(node: Node, taken: RecordingMemory) -> str:
    kept = f"keeps {readable(taken.kept)}" + (f" ({readable(taken.alive)} alive)" if taken.alive else "")
    peak = f"peak {readable(taken.peak)}" + (f" ({readable(taken.shared)} shared)" if taken.shared else "")
    grown = f", made the pool {readable(taken.grown)} larger" if taken.grown else ""
    return f"{taken.label}: {node.calls} replays; {kept}, {peak}{grown}"


@dataclass(frozen=True)
class CodeMemory:
    """What the recordings of some compiled code take, added up: of `peak`, the largest is meant.  `constants`: bytes of
    tensors that the code holds itself, outside of any pool."""

    recordings: int = 0
    kept: int = 0
    alive: int = 0
    peak: int = 0
    constants: int = 0

    def __str__(self) -> str:
        parts = []
        if self.recordings:
            parts.append(f"{self.recordings} {'recording' if self.recordings == 1 else 'recordings'}")
            parts.append(f"keeps {readable(self.kept)}" + (f" ({readable(self.alive)} alive)" if self.alive else ""))
            parts.append(f"peak {readable(self.peak)}")
        if self.constants:
            parts.append(f"constants {readable(self.constants)}")
        return ", ".join(parts)


def of_pieces(trees: Iterable[Tree]) -> dict[PieceState, list[RecordingMemory]]:
    """What each recording of each piece takes, also of those that were given up and have outputs alive."""
    found: dict[PieceState, list[RecordingMemory]] = {}
    for tree in trees:
        with tree.lock:
            for node, taken in memory.of_recordings(tree).items():
                assert node.keyed is not None
                found.setdefault(node.keyed.piece, []).append(taken)
    return found


def of_code(codes: Iterable[RecordedCode], of_piece: Mapping[PieceState, Sequence[RecordingMemory]]) -> CodeMemory:
    """What the recordings of `codes` take, and their constants."""
    codes = list(codes)
    taken = [entry for code in codes for piece in code.pieces for entry in of_piece.get(piece, ())]
    constants = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes() for code in codes for value in code.constants()
    }
    return CodeMemory(
        recordings=len(taken),
        kept=sum(entry.kept for entry in taken),
        alive=sum(entry.alive for entry in taken),
        peak=max((entry.peak for entry in taken), default=0),
        constants=sum(constants.values()),
    )


def _piece(piece: PieceState, nodes: list[Node]) -> PieceReport:
    mine = [node for node in nodes if node.keyed is not None and node.keyed.piece is piece]
    reasons: Counter[str] = Counter(piece.reasons)
    for keyed in piece.by_key.values():
        reasons.update({why: count for why, count in keyed.reasons.items() if why != FIRST_CALL})
    newest, of_newest = (mine[-1].recording, mine[-1].keyed) if mine else (None, None)
    why_copied = {} if newest is None or of_newest is None else patching.why_copied(of_newest, newest.plan)
    return PieceReport(
        label=piece.spec.label,
        recordings=len(mine),
        replays=sum(node.calls for node in mine),
        copied_inputs=() if newest is None else tuple(piece.spec.names[index] for index in newest.plan.copied),
        copied_outputs=0 if newest is None else sum(slot.copied for slot in newest.slots),
        unrecorded=dict(reasons),
        refused=next((keyed.refused for keyed in piece.by_key.values() if keyed.refused), None),
        again={
            f"{name} at another address" if name in piece.spec.names else name: n for name, n in piece.again.items()
        },
        moved=piece.moved,
        stacks={why: stack for why, stack in piece.stacks.items() if why in reasons},
        patched_inputs=() if newest is None else tuple(piece.spec.names[index] for index in newest.plan.patched),
        told_kernels=0 if newest is None or newest.patches is None else len(newest.patches.told),
        unpatched={piece.spec.names[index]: why for index, why in why_copied.items()},
    )
