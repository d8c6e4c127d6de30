"""What tells compiles of one graph apart in torch's caches, beside the graph itself.

Variants of a graph, what is padded and what is not, a backward whose inputs may be written over: the graph that torch
hashes can be the same one, and what has been compiled for one must not be found for another.

torch has a tag for that (`cache_key_tag`).  It is in the name, too, by which Inductor finds which configuration of a
kernel has won: there the processes that compile kernels, which are sent no tag, and this one, which has it in force,
look for different files, and each new process measures all kernels again in the calls that run them first (torch 2.11
to 2.15).  So the words stand in a knob of Inductor's that is part of its keys and of AOTAutograd's, and of nothing
else here: the metadata of packages that AOTInductor makes.  The tag stays the program's.

And two processes must have the same key for the same compile.  A key is a hash of a pickle, and a memory format is
pickled by the name of a module that has torch among its names: of the first in `sys.modules`.  That is torch's own but
where a module that imports torch has been entered before: one whose import is under way, or the main module, which
multiprocessing enters under a second name.
"""

from __future__ import annotations

import sys
from typing import Any

from multigraph_backend import _compat

_KNOB = "aot_inductor.metadata"
_OURS = "multigraph"
_FIRST = "torch._utils"  # of torch's modules that have torch among their names


def put_torch_first() -> None:
    """Let pickle find torch's names in torch's own modules: whoever else has them and was entered before is entered
    behind, as Python does it with each module whose import ends."""
    for name, module in list(sys.modules.items()):
        if name == _FIRST:
            return
        if name != "__main__" and "torch" in getattr(module, "__dict__", ()) and name in sys.modules:
            sys.modules[name] = sys.modules.pop(name)


def told_apart(words: str) -> Any:
    """A patch of Inductor's configuration in which what is compiled has keys of its own; one within another adds."""
    metadata = dict(_compat.inductor_config.aot_inductor.metadata)
    metadata[_OURS] = f"{metadata[_OURS]}|{words}" if _OURS in metadata else words
    return _compat.inductor_config.patch({_KNOB: metadata})
