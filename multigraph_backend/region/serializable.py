"""What Dynamo's code calls where `aot_compile` made it, as the class that torch saves and loads by name.

A process that loads a saved function begins here, and imports the rest of the package for it.  Both make so many
objects that Python would look through all that is alive, of which a server has much by then; so it waits with that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multigraph_backend import _compat
from multigraph_backend.process import garbage

if TYPE_CHECKING:
    from multigraph_backend.region.region import Region


class SerializableRegion(_compat.SerializableCallable):  # type: ignore[misc]
    """A region's dispatcher `run`.  `region` may be a text that says why it cannot be saved."""

    def __init__(self, region: Region | str, run: Callable[..., Any]) -> None:
        self._region, self._run = region, run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SerializableRegion) -> bytes:
        """The region as bytes; raises `CannotSave`."""
        from multigraph_backend.region import saved_region

        return saved_region.save(fn._region)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SerializableRegion:
        """The reverse; raises `CannotLoad`."""
        with garbage.paused():
            from multigraph_backend.region import saved_region

            region = saved_region.load(data)
            return cls(region, region.dispatcher())

    def finalize_loading(self, vllm_config: object) -> None:
        """What vLLM calls on all that it has loaded; nothing is left to do."""
