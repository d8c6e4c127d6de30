"""What tells compiles of one graph apart in torch's caches, beside the graph itself.

Variants of a graph, what is padded and what is not, a backward whose inputs may be written over: the graph that torch
hashes can be the same one, and what has been compiled for one must not be found for another.

torch has a tag for that (`cache_key_tag`).  It is in the name, too, by which Inductor finds which configuration of a
kernel has won: there the processes that compile kernels, which are sent no tag, and this one, which has it in force,
look for different files, and each new process measures all kernels again in the calls that run them first (torch 2.11
to 2.15).  So the words stand in a knob of Inductor's that is part of its keys and of AOTAutograd's, and of nothing
else here: the metadata of packages that AOTInductor makes.  The tag stays the program's.
"""

from __future__ import annotations

from typing import Any

from multigraph_backend import _compat

_KNOB = "aot_inductor.metadata"
_OURS = "multigraph"


def told_apart(words: str) -> Any:
    """A patch of Inductor's configuration in which what is compiled has keys of its own; one within another adds."""
    metadata = dict(_compat.inductor_config.aot_inductor.metadata)
    metadata[_OURS] = f"{metadata[_OURS]}|{words}" if _OURS in metadata else words
    return _compat.inductor_config.patch({_KNOB: metadata})
