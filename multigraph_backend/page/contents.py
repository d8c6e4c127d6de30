"""What the page says, in the order in which it is read: totals, what to look at first, graphs, recordings.

In:  the account as plain data, and the counts of the process.  Out: dicts and lists for the template; no markup.

Fields that this page does not know (later versions of the account have more) are shown by their names, those with
`bytes` in the name as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from multigraph_backend.cudagraphs import memory_map
from multigraph_backend.cudagraphs.memory_map import Block, RecordingReport
from multigraph_backend.page import drawing, figures

LONG = 64  # characters of a condition from which on it is folded
MOST_PATHS = 6  # of one device that are drawn

# what the page shows in its own way
_VARIANT = (
    "condition state calls compile_seconds reason forms opaque gain gain_calls user_stack saved collectives "
    "collective_bytes"
)
_DEVICE = "device recordings pool_bytes moved again failed evicted unprofitable shared copies pieces tree nodes"
_PIECE = (
    "label recordings replays copied_inputs copied_outputs unrecorded refused again moved stacks patched_inputs "
    "told_kernels unpatched"
)
_NODE = " ".join(entry.name for entry in fields(RecordingReport))

Data = Mapping[str, Any]


def arrange(account: Data, stats: Mapping[str, int]) -> dict[str, Any]:
    """Everything that the template needs."""
    graphs = [_graph(region) for region in account.get("regions", ())]
    devices = [_device(entry) for entry in account.get("recordings", ()) if entry["pieces"] or entry["recordings"]]
    findings = [*_of_process(account, stats), *_of_graphs(graphs), *_of_recordings(account)]
    order = ("bad", "look", "note")
    return {
        "rank": account.get("rank"),
        "world_size": account.get("world_size"),
        "totals": list(_totals(graphs, devices, stats)),
        "findings": sorted(findings, key=lambda finding: order.index(finding["level"])),
        "graphs": graphs,
        "devices": devices,
        "codes": list(account.get("graphs", ())),
        "stats": {name: count for name, count in stats.items() if count},
        "empty": not graphs and not devices,
    }


def more(entry: Data, known: str = "") -> list[tuple[str, str]]:
    """Single values under names that are not among `known`, with these as words; those of dicts in it too."""
    found = []
    for name, value in entry.items():
        if name in known.split():
            continue
        if isinstance(value, Mapping):
            found += [(f"{_words(name)}, {inner}", text) for inner, text in more(value)]
        elif isinstance(value, int | float | str) and value not in (0, "", False):
            text = figures.size(value) if "bytes" in name and not isinstance(value, str) else value
            text = figures.number(text) if isinstance(text, int | float) and not isinstance(text, bool) else str(text)
            found.append((_words(name), text))
    return found


def _words(name: str) -> str:
    return name.replace("_", " ")


# ---------------------------------------------------------------- graphs


def _graph(region: Data) -> dict[str, Any]:
    variants = [_variant(entry) for entry in (*region["variants"], region["generic"])]
    said = {entry["reason"] for entry in variants}
    most = max(entry["calls"] for entry in variants)
    slowest = max(entry["compile_seconds"] for entry in variants)
    for entry in variants:
        entry["calls_share"] = entry["calls"] / most if most else 0.0
        entry["seconds_share"] = entry["compile_seconds"] / slowest if slowest else 0.0
    return {
        **region,
        "variants": variants,
        "measured": any(entry["gain"] is not None for entry in variants),
        "notes": [*(note for note in region["notes"] if note not in said), *_of_padding(region.get("padding"))],
        "calls": sum(entry["calls"] for entry in variants),
        "compile_seconds": sum(entry["compile_seconds"] for entry in variants),
        "saved": [
            _saved(saved, entry["condition"], number, len(entry["saved"]))
            for entry in variants
            for number, saved in enumerate(entry["saved"])
        ],
    }


def _of_padding(entry: Data | None) -> Iterator[str]:
    """What became of the padding of a graph's calls."""
    if entry is None:
        return
    sizes = "; ".join(f"{name} to {sizes}" for name, sizes in entry["sizes"].items())
    if entry["state"] == "refused":
        yield f"calls are not padded ({sizes}): {entry['reason']}"
        return
    yield f"{entry['calls']} calls were padded ({sizes}; {entry['state']})"
    yield from (f"{name} is not padded: {why}" for name, why in entry["refused"].items())


def _variant(entry: Data) -> dict[str, Any]:
    return {
        **entry,
        "long": len(entry["condition"]) > LONG,
        "guards": [form for form in entry["forms"] if form != "True"],
        "more": more(entry, _VARIANT),
    }


def _saved(saved: Data, condition: str, number: int, forms: int) -> dict[str, Any]:
    tensors = sorted(saved["tensors"], key=lambda entry: -entry["bytes"])
    before, after = (sum(entry[name] for entry in tensors) for name in ("bytes", "bytes_saved"))
    largest = max((entry["bytes"] for entry in tensors), default=0)
    peaks = [
        {
            "name": name,
            "unpacked": saved[f"unpacked_{name}_peak"],
            "packed": saved[f"{name}_peak"],
            "stock": saved[f"stock_{name}_peak"],
            "order": order,
        }
        for name, order in zip(("forward", "backward"), saved["order"] or (), strict=False)
    ]
    return {
        **saved,
        "condition": condition if forms < 2 else f"{condition}, form {number + 1} of {forms}",
        "tensors": [
            {
                **entry,
                "before_share": entry["bytes"] / largest if largest else 0.0,
                "after_share": entry["bytes_saved"] / largest if largest else 0.0,
            }
            for entry in tensors
        ],
        "packed": sum(entry["packed"] is not None for entry in tensors),
        "before": before,
        "after": after,
        "after_share": after / before if before else 0.0,
        "peaks": peaks,
    }


# ---------------------------------------------------------------- recordings


def _device(entry: Data) -> dict[str, Any]:
    nodes = [_recording(node) for node in entry.get("nodes", ())]
    extra = {node["number"]: more(node, _NODE) for node in entry.get("nodes", ())}
    found = memory_map.paths(nodes)
    rare = {
        "outputs moved": entry["moved"],
        "recorded again": entry["again"],
        "failed": entry["failed"],
        "given up for others": entry["evicted"],
        "given up because they did not pay": entry["unprofitable"],
    }
    return {
        **entry,
        "rare": {name: count for name, count in rare.items() if count},
        "replays": sum(node.replays for node in nodes),
        "roots": _children(None, nodes, extra),
        "paths": [_path(path) for path in found[:MOST_PATHS]],
        "left_out": max(len(found) - MOST_PATHS, 0),
        "pieces": [{**piece, "more": more(piece, _PIECE)} for piece in entry["pieces"]],
        "more": more(entry, _DEVICE),
    }


def _recording(node: Data) -> RecordingReport:
    names = [entry.name for entry in fields(Block)]
    blocks = tuple(Block(**{name: block[name] for name in names}) for block in node["blocks"])
    return RecordingReport(**{**{name: node[name] for name in _NODE.split()}, "blocks": blocks})


def _children(
    parent: int | None, nodes: Sequence[RecordingReport], extra: Mapping[int, list[tuple[str, str]]]
) -> list[dict[str, Any]]:
    by_parent: dict[int | None, list[RecordingReport]] = {}
    for node in nodes:
        by_parent.setdefault(node.parent, []).append(node)

    def below(number: int | None) -> list[dict[str, Any]]:
        return [
            {
                "label": node.label,
                "replays": node.replays,
                "bytes": node.bytes,
                "more": extra[node.number],
                "children": below(node.number),
            }
            for node in by_parent.get(number, ())
        ]

    return below(parent)


def _path(path: Sequence[RecordingReport]) -> dict[str, Any]:
    picture = drawing.draw(memory_map.lifetimes(path), len(path))
    return {"recordings": path, "picture": picture, "title": " → ".join(entry.label for entry in path)}


# ---------------------------------------------------------------- what to look at first


def _finding(level: str, text: str, where: str = "", reason: str | None = None, stack: str | None = None,
             link: str | None = None) -> dict[str, Any]:  # fmt: skip
    return {"level": level, "text": text, "where": where, "reason": reason, "stack": stack, "link": link}


def _of_process(account: Data, stats: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    if stats.get("eager_calls"):
        text = f"{figures.number(stats['eager_calls'])} calls ran eagerly"
        yield _finding("look", text, reason="the reason of each graph is below, at its variants")
    if account.get("stance", "default") != "default":
        yield _finding("look", f"the stance {account['stance']} is in force", reason="torch.compiler.set_stance")
    if account.get("disabled"):
        yield _finding("look", f"MULTIGRAPH_DISABLE turns off {', '.join(account['disabled'])}")
    for place in account.get("unmet_marks", ()):
        why = "no trace has had that tensor: a clone or a slice of it, perhaps, or no call yet"
        yield _finding("note", "a mark has met no graph", place, why)


def _of_graphs(graphs: Sequence[Data]) -> Iterator[dict[str, Any]]:
    for graph in graphs:
        where, link = f"graph {graph['id']}, {graph['function']}", f"graph-{graph['id']}"
        for entry in graph["variants"]:
            condition = entry["condition"]
            if entry["state"] == "failed":
                text = f"{condition}: no compiled code"
                yield _finding("bad", text, where, entry["reason"], entry["user_stack"], link)
            elif entry["state"] == "inactive" and entry["reason"]:
                yield _finding("note", f"{condition} is inactive", where, entry["reason"], link=link)
            if entry["opaque"]:
                yield _finding("note", f"{condition} is checked at each call", where, entry["opaque"], link=link)
            gain = entry["gain"]
            if gain is not None and gain < 1:
                text = f"{condition} is slower than generic ({gain:.2f} times as fast)"
                yield _finding("look", text, where, link=link)
        for note in graph["notes"]:
            yield _finding("look", note, where, link=link)
        for saved in graph["saved"]:
            if saved["failed"]:
                text = f"{saved['condition']}: no saved tensor is packed"
                yield _finding("look", text, where, saved["failed"], link=link)
            for rule in saved["unmatched"]:
                yield _finding("note", f"{saved['condition']}: rule {rule} decides about nothing", where, link=link)


def _of_recordings(account: Data) -> Iterator[dict[str, Any]]:
    for code in account.get("graphs", ()):
        if code["refused"] is not None:
            yield _finding("look", "nothing of it is recorded", code["label"], code["refused"])
        for cut in code["cuts"]:
            text = f"cut by {cut['reason']}"
            yield _finding("note", text, code["label"], ", ".join(cut["ops"]), cut["stack_trace"])
    for device in account.get("recordings", ()):
        for piece in device["pieces"]:
            for why, count in sorted(piece["unrecorded"].items(), key=lambda entry: -entry[1]):
                refused = why == piece["refused"]
                calls = f"{figures.number(count)} {'call' if count == 1 else 'calls'}"
                yield _finding(
                    "look" if refused else "note",
                    f"not recorded any more, {calls} ran as code" if refused else f"{calls} ran unrecorded",
                    piece["label"],
                    why,
                    piece["stacks"].get(why),
                    f"device-{device['device']}",
                )


def _totals(
    graphs: Sequence[Data], devices: Sequence[Data], stats: Mapping[str, int]
) -> Iterator[tuple[str, str, str]]:
    """Name, figure, and what there is to say of it."""
    named = [entry for graph in graphs for entry in graph["variants"] if entry["condition"] != "generic"]
    ready = sum(entry["state"] == "ready" for entry in named)
    calls = sum(graph["calls"] for graph in graphs)
    by_variants = sum(entry["calls"] for entry in named)
    yield "graphs", figures.number(len(graphs)), ""
    yield "variants ready", f"{ready} of {len(named)}", ""
    yield "calls", figures.number(calls), f"{by_variants / calls:.0%} by variants" if calls else ""
    yield "compile time", figures.seconds(sum(graph["compile_seconds"] for graph in graphs)), ""
    eager = stats.get("eager_calls")
    if eager is not None:
        yield "eager calls", figures.number(eager), ""
    saved = [entry for graph in graphs for entry in graph["saved"]]
    if saved:
        before, after = (sum(entry[name] for entry in saved) for name in ("before", "after"))
        yield "saved tensors", figures.size(after), f"{figures.size(before)} before packing"
    if devices:
        count, replays = (sum(entry[name] for entry in devices) for name in ("recordings", "replays"))
        yield "recordings", figures.number(count), f"{figures.number(replays)} replays"
        yield "their pools", figures.size(sum(entry["pool_bytes"] for entry in devices)), ""
