"""A device of CPU tensors over a real arena, which does what CUDA does, in that order, and fails where CUDA fails.

`device` is the device; `arena` hands out its memory; `memory` maps tensors over it; `capture` notes what runs while it
captures, and replays it; `running` runs code at once, with its memory in the pool; `loans` are what the pool has lent.
"""

from multigraph_backend.cudagraphs.devices.simulated.arena import Segments
from multigraph_backend.cudagraphs.devices.simulated.device import CALLS, SimulatedDevice

__all__ = ["CALLS", "Segments", "SimulatedDevice"]
