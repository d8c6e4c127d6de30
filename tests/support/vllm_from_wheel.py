"""A model in vLLM's mode 2, by vLLM's own `wrapper.py`, `decorators.py` and `counter.py`, from an unpacked wheel.

    python vllm_from_wheel.py WHEEL SHAPES ROWS...

WHEEL is where a wheel of vLLM was unpacked, SHAPES its type of dynamic shapes.  What these modules import beside torch
(configuration, logging, platforms: most of vLLM, which needs a GPU) is stood in for.  VLLM_CACHE_ROOT is where vLLM
keeps what it compiles ahead of time; a second process with the same finds it there.

Prints one line of JSON: vLLM's counters, the largest difference from eager, and what multigraph ran.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import torch

import multigraph_backend


class CompilationMode(enum.IntEnum):
    NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, VLLM_COMPILE = range(4)


class CUDAGraphMode(enum.Enum):
    NONE = 0

    def has_piecewise_cudagraphs(self) -> bool:
        return False


class DynamicShapesType(enum.StrEnum):
    BACKED, UNBACKED, BACKED_SIZE_OBLIVIOUS = "backed", "unbacked", "backed_size_oblivious"


def configuration(shapes: str) -> types.SimpleNamespace:
    compilation = types.SimpleNamespace(
        mode=CompilationMode.DYNAMO_TRACE_ONCE,
        backend="multigraph",
        init_backend=lambda config, **said: "multigraph",  # what it returns in modes 1 and 2 for torch's own backends
        dynamic_shapes_config=types.SimpleNamespace(
            type=DynamicShapesType(shapes), evaluate_guards=False, assume_32_bit_indexing=True
        ),
        traced_files=set(),
        cudagraph_mode=CUDAGraphMode.NONE,
        use_inductor_graph_partition=False,
        local_cache_dir="",
    )
    return types.SimpleNamespace(
        compile_debug_dump_path=lambda: None,
        compilation_config=compilation,
        observability_config=types.SimpleNamespace(enable_layerwise_nvtx_tracing=False),
        parallel_config=types.SimpleNamespace(rank=0, data_parallel_index=0),
    )


def newer(version: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit()]

    return numbers(torch.__version__) >= numbers(version)


def stand_in(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def stand_in_for_the_rest(wheel: Path) -> None:
    nothing = contextlib.nullcontext
    logger = logging.getLogger("vllm")
    stand_in("vllm", __path__=[str(wheel / "vllm")], __version__="unpacked")
    stand_in("vllm.compilation", __path__=[str(wheel / "vllm" / "compilation")])
    stand_in("vllm.utils", __path__=[])
    stand_in(
        "vllm.config",
        __path__=[],
        CompilationMode=CompilationMode,
        CUDAGraphMode=CUDAGraphMode,
        VllmConfig=object,
        get_current_vllm_config=lambda: None,
        set_current_vllm_config=lambda config: nothing(),
    )
    stand_in("vllm.config.compilation", DynamicShapesType=DynamicShapesType)
    stand_in("vllm.logger", init_logger=lambda name: logger)
    stand_in("vllm.forward_context", get_forward_context=None, is_forward_context_available=lambda: False)
    stand_in("vllm.sequence", IntermediateTensors=type("IntermediateTensors", (), {}))
    stand_in("vllm.utils.import_utils", resolve_obj_by_qualname=None)
    stand_in("vllm.utils.torch_utils", is_torch_equal_or_newer=newer)
    stand_in("vllm.utils.torch_version", is_torch_equal_or_newer=newer)
    stand_in("vllm.utils.nvtx_pytorch_hooks", layerwise_nvtx_marker_context=None)
    stand_in("vllm.env_override", _apply_constrain_to_fx_strides_patch=lambda: None)
    stand_in("vllm.compilation.backends", model_tag="backbone")
    stand_in(
        "vllm.compilation.monitor",
        monitor_profiling_run=lambda **said: nothing(),
        monitor_torch_compile=lambda *said, **more: nothing(),
    )
    stand_in(
        "vllm.compilation.caching",
        aot_compile_hash_factors=lambda config: ["one model"],
        _compute_code_hash=lambda files: "same",
        _compute_code_hash_with_content=lambda contents: "same",
    )


def main(wheel: str, shapes: str, *rows: str) -> None:
    stand_in_for_the_rest(Path(wheel))
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.decorators import support_torch_compile

    @support_torch_compile(dynamic_arg_dims={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}})
    class Decoder(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.embed, self.mix = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16)

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids) + positions[:, None].sin()
            return x + torch.relu(self.mix(x))

    torch.manual_seed(0)
    config = configuration(shapes)
    vars(sys.modules["vllm.compilation.wrapper"])["get_current_vllm_config"] = lambda: config
    model = Decoder(vllm_config=config)
    differences = []
    with torch.inference_mode():
        for count in map(int, rows):
            ids, positions = torch.randint(32, (count,)), torch.arange(count)
            differences.append(float((model(ids, positions) - model.forward(ids, positions)).abs().max()))
    regions = multigraph_backend.explain().to_dict()["regions"]
    calls = [
        {entry["condition"]: entry["calls"] for entry in region["variants"]} | {"generic": region["generic"]["calls"]}
        for region in regions
    ]
    counts = {name: value for name, value in vars(compilation_counter).items() if value}
    print(json.dumps({"counts": counts, "difference": max(differences), "calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
