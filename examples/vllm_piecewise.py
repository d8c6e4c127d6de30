"""multigraph as the compiler of vLLM's piecewise backend (compilation mode 3), from outside of vLLM's tree.

In mode 3 vLLM splits the model's graph at its attention operators, calls a compiler for each piece and each range of
token counts, and records the pieces itself.  A platform may bring that compiler: `MultigraphAdaptor` implements vLLM's
`CompilerInterface`, and `register` names a platform that is vLLM's own for CUDA and uses it.  In the `pyproject.toml`
of a package that is installed beside vLLM:

    [project.entry-points."vllm.platform_plugins"]
    multigraph = "vllm_piecewise:register"

then `vllm serve MODEL --compilation-config '{"mode": 3, "custom_ops": ["none"]}'`.  docs/how-to/vllm.md says what each
of vLLM's modes gives and costs.  Each piece is one generic graph here: sizes, ranges and recordings are vLLM's own.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.compiler_interface import CompilerInterface

import multigraph_backend


class MultigraphAdaptor(CompilerInterface):  # type: ignore[misc]
    """Compiles one piece for one range of token counts."""

    name = "multigraph"

    def compute_hash(self, vllm_config: object) -> str:
        """What of multigraph decides about the code: vLLM keeps its caches apart by it."""
        said = f"{multigraph_backend.__version__} {os.environ.get('MULTIGRAPH_OPTIONS', '')}"
        return hashlib.sha256(said.encode()).hexdigest()[:10]

    def compile(
        self,
        graph: torch.fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any],
        compile_range: object,
        key: str | None = None,
    ) -> tuple[Callable[..., Any], None]:
        """The compiled piece; no handle, as torch's own caches keep the code.

        vLLM calls this inside of Dynamo's trace with inputs of its own making, and uses the graph again for the next
        range: so the compile gets a copy, and does not see that trace.
        """
        options: dict[str, Any] = {"cudagraphs": False}  # vLLM records the pieces
        if compiler_config:
            options["inductor"] = dict(compiler_config)
        with torch._guards.tracing(None):
            compiled = multigraph_backend.multigraph(copy.deepcopy(graph), example_inputs, options=options)
        return compiled, None


def register() -> str:
    """What vLLM calls: the platform's class, by name, made where vLLM asks for it."""
    return "vllm_piecewise.MultigraphPlatform"


def __getattr__(name: str) -> Any:
    if name != "MultigraphPlatform":
        raise AttributeError(name)
    from vllm.platforms.cuda import CudaPlatform

    class MultigraphPlatform(CudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_compile_backend(cls) -> str:
            return f"{__name__}.MultigraphAdaptor"

    globals()[name] = MultigraphPlatform
    return MultigraphPlatform
