"""Which of several processes this one is.

In:  torch.distributed, as the program has set it up; nothing is set up here.  Out: rank and size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist


class Rank(NamedTuple):
    """This process among others."""

    rank: int
    world_size: int


def current() -> Rank | None:
    """Rank and size of the default group; None where the program runs no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return Rank(dist.get_rank(), dist.get_world_size())


def live() -> bool:
    """Whether other ranks may wait for this one."""
    where = current()
    return where is not None and where.world_size > 1
