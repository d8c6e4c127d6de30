"""Which saved tensors are packed, and as what: the plan before anything is traced.

In: a `Partition`, the rules.  Out: units to pack, and the tensors that are kept, each with the reason.  The graph is
read once, into candidates; what any list of rules says of these is a question to plain data.

    h = mm(x, w);  q, k, v = split(h);  t = h.t()      the forward saves q, k, v and t:
                                                       one candidate, source h, members q, k, v, t
    a = mm(x, w);  b = a[:2]                           it saves b, which is less than a:
                                                       one candidate, source b, member b

Saved tensors that share memory are one unit: a transpose, a view and the three parts of a projection that attention
reads lie in one buffer, which is packed once; each of them is a view of what is unpacked.  A unit is packed as its
elements lie in memory, so that a transpose is scaled along the rows of what it is a transpose of.

Invariant: every saved tensor is in one candidate, and then in one unit or among the kept ones, never in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import graphs, masks, rematerialize, statistics
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.rules import Described, Keep, Role, Rule, decide
from multigraph_backend.saved_tensors.units import Kept, Unit

MODULES = "it is a parameter, which its module holds: a pack would only add to it"
#: who else may hold what is packed; only a run can tell
HELD_BY_MAKER = "an input that needs no gradient: where the caller holds it, as data or a table, the pack adds to it"
HELD_BETWEEN = "an input: its memory is free once nobody else holds it"
HELD_BY_CALLER = "an output: its memory is free once the caller and the next block hold it no more"
GATHERED = "FSDP2 is at work, which frees what it has gathered and gathers it again before the backward"


@dataclass(frozen=True)
class Candidate:
    """A buffer, or a part of one, that rules decide about as a whole: `source`, and the saved views `members` of it.

    `described`: what rules may ask of it.  `alone`: each member, described without the others.  `refused`: why it is
    kept, whatever rules say.  `activation`: that it is an input, and no parameter for certain.
    """

    source: Node
    members: tuple[Node, ...]
    described: Described
    alone: tuple[Described, ...]
    refused: str | None = None
    activation: bool = False

    @property
    def held(self) -> str | None:
        """Who else may hold its memory."""
        return {"input": HELD_BETWEEN, "data": HELD_BY_MAKER, "output": HELD_BY_CALLER}.get(self.described.role)

    @functools.cached_property
    def gaps(self) -> bool:
        """Whether other bytes lie between its elements."""
        value = graphs.tensor(self.source)
        return value is None or graphs.memory_order(value) is None

    @functools.cached_property
    def empty(self) -> bool:
        """Whether it has no element, at whatever size."""
        value = graphs.tensor(self.source)
        return value is not None and 0 in [_compat.plain_size(size) for size in value.shape]

    def kept(self, reason: str) -> list[Kept]:
        return [Kept(node, described, reason) for node, described in zip(self.members, self.alone, strict=True)]


@dataclass
class Choice:
    """`deciding`: the rules that decide about a candidate, once for each."""

    units: list[Unit] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    deciding: list[Rule] = field(default_factory=list)


def candidates(partition: Partition, pointwise: bool = True) -> list[Candidate]:
    """Every saved tensor of `partition`, in one candidate each; `pointwise`: whether a rule asks what is pointwise."""
    forward = partition.forward
    families: dict[Node, list[Node]] = {}
    for node in partition.saved_tensors():
        families.setdefault(graphs.root(node), []).append(node)
    roles = _roles(partition)
    placeholders = forward.graph.find_nodes(op="placeholder")
    activations = {placeholders[index] for index in partition.activations if index < len(placeholders)}
    special: dict[Role, Callable[[GraphModule], set[Node]]] = {"statistic": _statistics, "mask": masks.of}
    for special_role, of in special.items():
        for node in (*of(forward), *_of_subgraphs(forward, families, of)):
            if graphs.root(node) in families:
                roles.setdefault(graphs.root(node), special_role)
    odd = {
        **dict.fromkeys(
            _sharing_in_other_ways(forward), "it shares memory with another value in a way no view explains"
        ),
        **dict.fromkeys(_saved_twice(forward, families), "it shares memory with what else is saved of its region"),
        **dict.fromkeys(graphs.changed(forward.graph), "the graph changes it in place"),
    }
    follows: set[Node] = set()
    if pointwise:
        parameters = {node for node, role in roles.items() if role == "parameter"}
        known = {root: members for root, members in families.items() if root not in odd}
        follows = rematerialize.following(forward.graph, known, parameters)
    found: list[Candidate] = []
    for root, members in families.items():
        role = roles.get(root, "intermediate")
        if root in odd:
            alone = tuple(describe(node, node, role, forward) for node in members)
            found.append(Candidate(members[0], tuple(members), alone[0], alone, odd[root]))
            continue
        for source, views in _sources(root, members):
            described = replace(describe(source, views[0], role, forward), pointwise=root in follows)
            alone = tuple(describe(node, node, role, forward) for node in views)
            activation = graphs.owner(forward, root)[0] in activations
            found.append(Candidate(source, tuple(views), described, alone, activation=activation))
    return found


def choose(found: Sequence[Candidate], rules: Sequence[Rule], gathered: bool = False) -> Choice:
    """What the first rule that matches says of each candidate.

    `gathered`: what is given to the graph may be a parameter that is freed and gathered again; a pack would hold it.
    An activation is none.
    """
    choice = Choice()
    for candidate in found:
        rule = decide(rules, candidate.described) if candidate.refused is None else candidate.refused
        if isinstance(rule, Rule):
            choice.deciding.append(rule)
        role = candidate.described.role
        if gathered and role in ("parameter", "data", "input") and not candidate.activation:
            choice.kept += candidate.kept(GATHERED)
        elif isinstance(rule, str):
            choice.kept += candidate.kept(rule)
        elif isinstance(rule.pack, Keep):
            choice.kept += candidate.kept(f"rule: {rule}")
        elif role == "parameter" and not isinstance(rule.pack, SavedHook):
            choice.kept += candidate.kept(MODULES)
        elif candidate.empty:
            choice.kept += candidate.kept("it has no element")
        elif candidate.gaps:
            choice.kept += candidate.kept(
                "it is a part of a larger buffer, with gaps between its elements, and the rest is not saved"
            )
        else:
            made = (candidate.source, candidate.members, candidate.described, rule.pack, str(rule), candidate.held)
            choice.units.append(Unit(*made))
    return choice


def held(partition: Partition) -> list[str]:
    """Saved tensors whose memory is the caller's anyway: inputs, parameters and outputs of the graph."""
    roles = _roles(partition)
    return [node.name for node in partition.saved_tensors() if graphs.root(node) in roles]


def _sources(root: Node, members: Sequence[Node]) -> list[tuple[Node, list[Node]]]:
    """What to pack for views of one buffer: the whole of it where they need that much, else each on its own."""
    value = graphs.tensor(root)
    values = [entry for node in members if (entry := graphs.tensor(node)) is not None]
    if value is not None and graphs.memory_order(value) is not None:
        needed = sum(graphs.tensor_bytes(entry) for entry in values)
        if graphs.tensor_bytes(value) <= needed:
            return [(root, list(members))]
    return [(node, [node]) for node in members]


def _roles(partition: Partition) -> dict[Node, Role]:
    forward = partition.forward
    placeholders = forward.graph.find_nodes(op="placeholder")
    parameters, data = frozenset(partition.static), graphs.without_gradient(partition)
    roles: dict[Node, Role] = {
        node: "parameter" if index in parameters else "data" if index in data else "input"
        for index, node in enumerate(placeholders)
    }
    for value in graphs.results(forward.graph)[: partition.outputs]:
        if isinstance(value, Node):
            roles.setdefault(graphs.root(value), "output")
    by_memory = {graphs.owner(forward, node): role for node, role in reversed(roles.items())}
    for node in map(graphs.root, partition.saved_tensors()):
        if graphs.subgraph_result(forward, node) is not None and (role := by_memory.get(graphs.owner(forward, node))):
            roles.setdefault(node, role)
    return roles


def _statistics(forward: GraphModule) -> set[Node]:
    return statistics.of(forward.graph)


def _of_subgraphs(
    forward: GraphModule, families: Mapping[Node, Sequence[Node]], of: Callable[[GraphModule], set[Node]]
) -> list[Node]:
    """Roots that are, in the subgraph that they come from, among those that `of` finds there."""
    known: dict[GraphModule, set[Node]] = {}
    found = []
    for node in families:
        of_subgraph = graphs.subgraph_result(forward, node)
        if of_subgraph is None or of_subgraph.operand is not None:
            continue
        inside = of_subgraph.inside
        if inside not in known:
            known[inside] = {graphs.root(entry) for entry in of(inside)}
        if of_subgraph.made in known[inside]:
            found.append(node)
    return found


def _saved_twice(forward: GraphModule, families: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Roots that are results of subgraphs and lie in the memory of another one, which is saved too, or is changed."""
    by_memory: dict[tuple[Node, Node | None], list[Node]] = {}
    for node in families:
        by_memory.setdefault(graphs.owner(forward, node), []).append(node)
    written = {graphs.owner(forward, node) for node in graphs.changed(forward.graph)}
    return {
        node
        for memory, nodes in by_memory.items()
        for node in nodes
        if (len(nodes) > 1 or memory in written) and graphs.subgraph_result(forward, node) is not None
    }


def _sharing_in_other_ways(forward: GraphModule) -> set[Node]:
    """Roots whose fake storage another root has too."""
    by_storage: dict[int, Node] = {}
    odd: set[Node] = set()
    for node in forward.graph.nodes:
        value = graphs.tensor(node)
        if value is None or value.layout is not torch.strided:
            continue
        if graphs.subgraph_result(forward, graphs.root(node)) is not None:  # its fake values are those of other calls
            continue
        first = by_storage.setdefault(value.untyped_storage()._cdata, graphs.root(node))
        if first is not graphs.root(node):
            odd |= {first, graphs.root(node)}
    return odd


def describe(source: Node, shown: Node, role: Role, forward: GraphModule | None = None) -> Described:
    """What rules may ask of `source`; the module is where it, or else the saved view of it, was made.

    With the graph `forward` that it is in, a result of a subgraph is what made it there.
    """
    value = graphs.tensor(source)
    assert value is not None
    of_subgraph = graphs.subgraph_result(forward, source) if forward is not None else None
    made = None
    if of_subgraph is not None:
        made = of_subgraph.made if of_subgraph.operand is None else graphs.root(of_subgraph.operand)
    if of_subgraph is not None and made is not None and graphs.tensor(made) is not None:
        inside = describe(made, made, role, forward)
        nearest = min if graphs.FIRST_STEP in source.meta else max
        module = _of_this_call(inside.module, of_subgraph.inside, module_path(source.meta), nearest)
        return replace(inside, bytes=graphs.tensor_bytes(value), module=module)
    names = [_operator(source.target), _operator(source.meta.get("original_aten"))]
    if source.target.__class__.__name__ == "builtin_function_or_method" and isinstance(source.args[0], Node):
        names[0] = _operator(source.args[0].target)  # getitem: the operator that made the tuple
    return Described(
        ops=tuple(dict.fromkeys(name for name in names if name)) or (source.op,),
        dtype=str(value.dtype).removeprefix("torch."),
        number=value.dtype.is_floating_point or value.dtype.is_complex,
        bytes=graphs.tensor_bytes(value),
        module=module_path(source.meta) or module_path(shown.meta),
        role=role,
    )


def _of_this_call(path: str, inside: GraphModule, around: str, nearest: Callable[[Iterable[int]], int]) -> str:
    """The path of a module in a subgraph that stands for several, in the call that ends in `around`, where `nearest` is
    `max`, or begins in it (`min`).

    The subgraph of "layers.0" and "layers.1" that is called for "layers.2" and "layers.3": what it says of
    "layers.0.mlp" is there of "layers.2.mlp".
    """
    theirs, here = path.split("."), around.split(".")
    place = next((place for place, part in enumerate(theirs) if part.isdigit()), None)
    if place is None or len(here) <= place or not here[place].isdigit() or here[:place] != theirs[:place]:
        return path or around
    known = (module_path(node.meta).split(".") for node in inside.graph.nodes)
    beside = [parts[place] for parts in known if parts[:place] == here[:place] and len(parts) > place]
    there = nearest(int(part) for part in beside if part.isdigit())
    theirs[place] = str(int(theirs[place]) + int(here[place]) - there)
    return ".".join(theirs)


def _operator(target: object) -> str:
    """`namespace::name` of an operator."""
    packet = getattr(target, "overloadpacket", None)
    schema = getattr(target, "_schema", None)
    return str(schema.name) if packet is not None and schema is not None else ""


def module_path(meta: Mapping[str, object]) -> str:
    """The path of the module in which a node was traced, from the model down: "layers.0.attention"."""
    stack = meta.get("nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return ""
    path = graphs.innermost_module(stack)
    for wrapper in ("L['self'].", "L['fn'].", "L['self']", "L['fn']"):
        path = path.removeprefix(wrapper)
    path = path.replace("._modules['", ".").replace("_modules['", "").replace("']", "")
    return path.replace("L['", "").lstrip(".")
