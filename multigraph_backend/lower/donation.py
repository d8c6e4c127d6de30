"""What AOTAutograd is told of memory of saved tensors that a backward may write into.

torch donates to a backward what was saved for it alone, and then refuses every call after which the graph is to stay
(`retain_graph=True`), whatever the compiler made of the gift.  A compiler that writes into no saved tensor says so
here.  `retained` does that for code of Inductor's, which does write.
"""

from __future__ import annotations

from typing import Any

#: compilers of torch that write into no saved tensor: they run the graph, operator by operator
EAGER_COMPILERS = frozenset({"eager", "aot_eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner"})


def nothing_donated(metadata: Any) -> None:
    """Tell AOTAutograd that the backward writes into no saved tensor, for `metadata` of what it compiled."""
    donated = getattr(metadata, "bw_donated_idxs", None)
    if isinstance(donated, list):
        donated.clear()  # that of subclasses and the one that is asked at each call share the list
    elif metadata is not None:
        metadata.bw_donated_idxs = []
