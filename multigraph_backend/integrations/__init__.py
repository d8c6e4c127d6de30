"""Plugins for libraries that want an object of their own and refuse the name of a backend.

accelerate, and with it transformers' Trainer, takes backends from a list that multigraph is not on; what it asks of a
plugin is a set of arguments for `torch.compile`.  Nothing of these libraries is imported before it is asked for.

In:  what is to be given to `torch.compile`.  Out: an object of the library's own class.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def accelerate_plugin(options: Mapping[str, object] | None = None, **given: Any) -> Any:
    """A plugin for `accelerate.Accelerator(dynamo_plugin=...)` that compiles with multigraph.

    `options` as for `torch.compile`; `given` is what else accelerate's `TorchDynamoPlugin` takes: `mode`, `dynamic`,
    `fullgraph`, `use_regional_compilation`.  Raises ImportError without accelerate.
    """
    base: Any = importlib.import_module("accelerate.utils").TorchDynamoPlugin

    class MultigraphPlugin(base):  # type: ignore[misc]
        """Inductor for accelerate's eyes, multigraph for torch's."""

        def to_kwargs(self) -> dict[str, Any]:
            return {**super().to_kwargs(), "backend": "multigraph"}

    return MultigraphPlugin(backend="inductor", options=None if options is None else dict(options), **given)
