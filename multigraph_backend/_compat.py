"""Every private torch symbol that multigraph uses, and nothing else touches one.

torch's compiler stack has no public seam for what a backend with late compiles needs: symbolic shapes, tracing
contexts, the compile lock.  Each such symbol is a row of `SYMBOLS`: where it lives, in which torch versions it
was seen, which feature needs it, and what must be true of it (parameters or attributes that are used).  Names are
resolved at first use as attributes of this module (`_compat.ShapeEnv`); a missing one raises `MissingSymbol`,
and `missing("variants")` tells beforehand, so that the feature is turned off with one line and nothing else.

Importing this module loads nothing of torch's compiler; asking for a symbol loads the module that it lives in.  Whoever
has no compile by Inductor before him asks with `inductor=False`: then no module of Inductor's is loaded.

The functions below the table hide what differs between versions.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

SEEN = ("2.11", "2.13", "2.15")


class MissingSymbol(RuntimeError):
    """A private torch symbol is not where it was seen: this torch version differs from those tested."""


@dataclass(frozen=True)
class PrivateSymbol:
    """One private symbol: `module.attribute`, the feature that needs it, and the names it must carry.

    `shape` lists parameters (of a callable) or attributes (of a class or object) that multigraph relies on, `carried`
    what only an instance has: `made` makes one of the symbol.
    """

    name: str
    module: str
    attribute: str
    feature: str = "variants"
    shape: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    made: Callable[[Any], Any] | None = None
    seen: tuple[str, ...] = SEEN

    @property
    def of_inductor(self) -> bool:
        """Whether only a compile by Inductor needs it."""
        return self.feature in BY_INDUCTOR or self.name in _BY_INDUCTOR

    def load(self) -> Any:
        value: Any = importlib.import_module(self.module)
        for part in self.attribute.split("."):
            value = getattr(value, part)
        return value

    def problem(self) -> str | None:
        """Why the symbol cannot be used, or None."""
        try:
            value = self.load()
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.attribute} is missing ({error})"
        lacking = [part for part in self.shape if not _carries(value, part)]
        if self.made is not None and not lacking:
            try:
                instance = self.made(value)
            except Exception as error:
                return f"{self.module}.{self.attribute} is used in another way ({type(error).__name__}: {error})"
            lacking = [part for part in self.carried if not hasattr(instance, part)]
        return f"{self.module}.{self.attribute} lacks {', '.join(lacking)}" if lacking else None


def _carries(value: Any, part: str) -> bool:
    if hasattr(value, part) or (isinstance(value, type) and part in getattr(value, "__annotations__", ())):
        return True
    try:
        return part in inspect.signature(value).parameters
    except (TypeError, ValueError):
        return False


def _marked(mark_dynamic: Callable[..., object]) -> torch.Tensor:
    tensor = torch.empty(2)
    mark_dynamic(tensor, 0, specialize_on=[bool])
    return tensor


#: features that only compiles by Inductor have
BY_INDUCTOR = frozenset({
    "changed inputs", "saved tensors", "retained graphs", "modes", "messages", "cudagraphs", "cudagraphs on CUDA",
    "recordings in the extension on CUDA", "saved graphs", "warm start", "workers", "rests", "eager's numbers",
    "kernels together", "rows of packs",
})  # fmt: skip
_BY_INDUCTOR = frozenset({"compile_fx", "force_stride_order"})  # ... and symbols of features that others have, too

_SHAPES = "torch.fx.experimental.symbolic_shapes"
_SYMPY = "torch.utils._sympy"
_TREES = "torch._inductor.cudagraph_trees"
_S = PrivateSymbol

SYMBOLS: dict[str, PrivateSymbol] = {
    row.name: row
    for row in (
        # symbolic shapes
        _S("ShapeEnv", _SHAPES, "ShapeEnv", shape=("create_symbol", "create_symintnode", "create_symfloatnode",
           "create_unbacked_symint", "evaluate_expr", "ignore_fresh_unbacked_symbols", "_constrain_range_for_size",
           "_update_var_to_range", "replace"),
           carried=("settings", "guards", "replacements", "var_to_range", "var_to_sources", "specializations",
           "unbacked_inputs", "deferred_runtime_asserts"), made=lambda cls: cls()),
        _S("create_symbol", _SHAPES, "ShapeEnv.create_symbol",
           shape=("val", "source", "dynamic_dim", "constraint_dim", "positive", "do_not_specialize_zero_one")),
        _S("ShapeGuard", _SHAPES, "ShapeGuard", shape=("expr",)),
        _S("Specialization", _SHAPES, "Specialization", shape=("source", "check_fn")),
        _S("SymNode", "torch.fx.experimental.sym_node", "SymNode", shape=("expr", "hint", "has_hint")),
        _S("DimDynamic", _SHAPES, "DimDynamic", shape=("DYNAMIC", "STATIC", "UNBACKED", "INFER_STRIDE")),
        _S("StatefulSymbolicContext", _SHAPES, "StatefulSymbolicContext",
           shape=("tensor_source", "shape_env_to_source_to_symbol_cache", "view_base_context")),
        _S("StatelessSymbolicContext", _SHAPES, "StatelessSymbolicContext",
           shape=("dynamic_sizes", "dynamic_strides", "constraint_sizes", "constraint_strides")),
        _S("StrictMinMaxConstraint", _SHAPES, "StrictMinMaxConstraint", shape=("vr", "warn_only")),
        _S("SYMPY_INTERP", _SHAPES, "SYMPY_INTERP"),
        _S("SymTypes", "torch.fx.experimental.sym_node", "SymTypes"),
        _S("PythonPrinter", f"{_SYMPY}.printers", "PythonPrinter", shape=("doprint",)),
        _S("SymT", f"{_SYMPY}.symbol", "SymT", shape=("UNBACKED_INT", "UNBACKED_FLOAT", "FLOAT", "SIZE")),
        _S("symbol_is_type", f"{_SYMPY}.symbol", "symbol_is_type"),
        _S("ValueRanges", f"{_SYMPY}.value_ranges", "ValueRanges"),
        _S("Mod", f"{_SYMPY}.functions", "Mod"),
        _S("sympy_interp", f"{_SYMPY}.interp", "sympy_interp", feature="size assertions",
           shape=("analysis", "env", "expr")),
        _S("ReferenceAnalysis", f"{_SYMPY}.reference", "OptimizedPythonReferenceAnalysis", feature="size assertions"),
        _S("CallMethodKey", _SHAPES, "CallMethodKey", feature="size assertions", shape=("name",)),
        _S("int_oo", f"{_SYMPY}.numbers", "int_oo"),
        # sources and tracing
        _S("TensorProperty", "torch._dynamo.source", "TensorProperty", shape=("SIZE", "STRIDE", "STORAGE_OFFSET")),
        _S("TensorPropertySource", "torch._dynamo.source", "TensorPropertySource", shape=("base", "prop", "idx")),
        _S("ConstantSource", "torch._dynamo.source", "ConstantSource", shape=("source_name",)),
        _S("FloatTensorSource", "torch._dynamo.source", "FloatTensorSource", shape=("base",)),
        _S("TracingContext", "torch._guards", "TracingContext", shape=("fake_mode", "try_get"),
           carried=("fake_mode", "tensor_to_context", "guards_context", "fw_metadata", "output_strides"),
           made=lambda cls: cls(None)),
        _S("GuardsContext", "torch._guards", "GuardsContext", carried=("aotautograd_guards",), made=lambda cls: cls()),
        _S("Source", "torch._guards", "Source", shape=("name",)),
        _S("tracing", "torch._guards", "tracing", shape=("context",)),
        _S("DuplicateInputs", "torch._guards", "DuplicateInputs", shape=("input_source_a", "input_source_b")),
        _S("StorageOverlap", "torch._guards", "StorageOverlap",
           shape=("overlapping_sources", "non_overlapping_sources")),
        _S("compute_overlapping_tensors", "torch._C._dynamo.guards", "compute_overlapping_tensors"),
        _S("InstructionTranslator", "torch._dynamo.symbolic_convert", "InstructionTranslator",
           feature="names", shape=("current_tx",)),
        _S("backend_override", "torch._dynamo.graph_id_filter", "get_backend_override_for_compile_id",
           feature="redirect", shape=("compile_id", "config_str")),
        _S("overrides", "torch._dynamo", "config", feature="redirect", shape=("debug_backend_override",)),
        _S("innermost_backend", "torch._dynamo.eval_frame", "innermost_backend", feature="redirect", shape=("fn",)),
        _S("InductorWrapper", "torch", "_TorchCompileInductorWrapper", feature="redirect",
           shape=("apply_options", "get_compiler_config")),
        _S("BackendWrapper", "torch", "_TorchCompileWrapper", feature="redirect",
           carried=("compiler_fn", "kwargs"), made=lambda cls: cls("eager", None, None, None)),
        _S("install_guard", "torch._dynamo.guards", "install_guard", feature="instances", shape=("guards",)),
        _S("GuardBuilder", "torch._dynamo.guards", "GuardBuilder", feature="instances",
           shape=("EQUALS_MATCH", "NOT_PRESENT_IN_GENERIC_DICT")),
        _S("LocalSource", "torch._dynamo.source", "LocalSource", feature="instances",
           shape=("local_name", "is_input", "is_derefed_cell_contents", "make_guard")),
        _S("AttrSource", "torch._dynamo.source", "AttrSource", feature="instances",
           shape=("base", "member", "make_guard")),
        _S("FakeTensorMode", "torch._subclasses.fake_tensor", "FakeTensorMode", shape=("shape_env", "from_tensor"),
           carried=("shape_env", "allow_non_fake_inputs"), made=lambda cls: cls()),
        _S("from_tensor", "torch._subclasses.fake_tensor", "FakeTensorMode.from_tensor",
           shape=("symbolic_context", "source", "trace")),
        _S("FakeTensor", "torch._subclasses.fake_tensor", "FakeTensor"),
        _S("FakeTensorConverter", "torch._subclasses.fake_tensor", "FakeTensorConverter", "boundaries",
           carried=("tensor_memo",), made=lambda cls: cls(copy_data=False)),
        _S("HigherOrderOperator", "torch._ops", "HigherOrderOperator", shape=("name",)),
        _S("invoke_subgraph", "torch._higher_order_ops.invoke_subgraph", "invoke_subgraph", "repeated blocks"),
        _S("below_autograd", "torch._C", "_AutoDispatchBelowAutograd", "repeated blocks"),
        _S("force_stride_order", "torch._inductor.inductor_prims", "force_stride_order", "repeated blocks"),
        _S("enter_autocast", "torch.amp.autocast_mode", "_enter_autocast", "repeated blocks"),
        _S("exit_autocast", "torch.amp.autocast_mode", "_exit_autocast", "repeated blocks"),
        _S("enter_inference_mode", "torch.autograd.grad_mode", "_enter_inference_mode", "repeated blocks"),
        _S("exit_inference_mode", "torch.autograd.grad_mode", "_exit_inference_mode", "repeated blocks"),
        _S("log_api_usage_once", "torch._C", "_log_api_usage_once", "repeated blocks"),
        _S("OpOverload", "torch._ops", "OpOverload", shape=("overloadpacket",), carried=("_schema", "_overloadname"),
           made=lambda cls: torch.ops.aten.add.Tensor),
        _S("OpOverloadPacket", "torch._ops", "OpOverloadPacket", shape=("overloads",)),
        # the state around a compile
        _S("compile_lock", "torch._dynamo.convert_frame", "compile_lock",
           shape=("acquire", "release", "_is_owned", "_release_save")),
        _S("clear_fake_mode_weakrefs", "torch._dynamo.convert_frame", "_clear_fake_mode_weakrefs",
           feature="moved parameters"),
        _S("compile_flag", "torch.compiler", "_is_compiling_flag"),
        _S("_stance", "torch._dynamo.eval_frame", "_stance", feature="stances", shape=("stance",)),
        _S("innermost_fn", "torch._dynamo.eval_frame", "innermost_fn"),
        _S("maybe_disable_inference_mode", "torch._dynamo.utils", "maybe_disable_inference_mode"),
        _S("maybe_disable_inference_mode_for_fake_prop", "torch._dynamo.utils",
           "maybe_disable_inference_mode_for_fake_prop"),
        _S("preserve_rng_state", "torch._dynamo.utils", "preserve_rng_state"),
        _S("disable_current_modes", "torch.utils._python_dispatch", "_disable_current_modes"),
        _S("is_traceable_wrapper_subclass", "torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
        _S("is_functorch_wrapped_tensor", "torch._C._functorch", "is_functorch_wrapped_tensor"),
        _S("get_unwrapped", "torch._C._functorch", "get_unwrapped"),
        _S("PreserveDispatchKeyGuard", "torch._C", "_PreserveDispatchKeyGuard"),
        _S("revert_all_patches", "torch.fx._symbolic_trace", "_maybe_revert_all_patches"),
        _S("inductor_config", "torch._inductor", "config", shape=("patch", "get_config_copy", "aot_inductor")),
        _S("dynamo_config", "torch._dynamo", "config", shape=("patch", "get_config_copy")),
        _S("functorch_config", "torch._functorch", "config",
           shape=("patch", "get_config_copy", "force_non_lazy_backward_lowering", "enable_autograd_cache",
           "ban_recompute_not_in_allowlist", "aggressive_recomputation", "activation_memory_budget")),
        _S("TritonBundler", "torch._inductor.triton_bundler", "TritonBundler", shape=("begin_compile", "end_compile")),
        _S("compiler_config", "torch.compiler", "config", shape=("patch", "get_config_copy")),
        _S("TensorifyState", "torch._dynamo.symbolic_convert", "TensorifyState", shape=("force_specializations",)),
        _S("TensorifyScalarRestartAnalysis", "torch._dynamo.exc", "TensorifyScalarRestartAnalysis"),
        _S("ConfigModule", "torch.utils._config_module", "ConfigModule", shape=("_config",)),
        _S("ConfigEntry", "torch.utils._config_module", "_ConfigEntry", shape=("user_override",)),
        _S("Tensor", "torch", "Tensor", shape=("_base", "_is_view", "_version")),
        _S("UntypedStorage", "torch", "UntypedStorage", shape=("_cdata",)),
        # compilers
        _S("compile_fx", "torch._inductor.compile_fx", "compile_fx",
           shape=("model_", "example_inputs_", "inner_compile", "config_patches", "ignore_shape_env")),
        # what Inductor gets wrong around changed inputs
        _S("compile_fx_inner", "torch._inductor.compile_fx", "compile_fx_inner", feature="changed inputs"),
        _S("BypassAOTAutogradCache", "torch._functorch._aot_autograd.autograd_cache", "BypassAOTAutogradCache",
           feature="changed inputs"),
        _S("CustomPartitionerFn", "torch._inductor.custom_graph_pass", "CustomPartitionerFn",
           feature="changed inputs", shape=("uuid",)),
        _S("get_hash_for_files", "torch._inductor.custom_graph_pass", "get_hash_for_files", feature="changed inputs"),
        _S("partitioner_config", "torch._inductor", "config", feature="changed inputs",
           shape=("custom_partitioner_fn",)),
        _S("min_cut_rematerialization_partition", "torch._functorch.partitioners",
           "min_cut_rematerialization_partition", feature="changed inputs", shape=("joint_module", "num_fwd_outputs")),
        _S("aot_autograd", "torch._dynamo.backends.common", "aot_autograd", feature="changed inputs"),
        _S("boxed_nop", "torch._dynamo.backends.debugging", "boxed_nop", feature="changed inputs",
           shape=("fx_g", "example_inputs")),
        _S("default_partition", "torch._functorch.partitioners", "default_partition", feature="changed inputs",
           shape=("joint_module", "num_fwd_outputs", "static_lifetime_input_indices")),
        # operators of which Inductor has other numbers than eager
        _S("offsets_to_indices", "torch._inductor.inductor_prims", "_low_memory_max_pool_offsets_to_indices",
           feature="eager's numbers", carried=("_schema",), made=lambda operator: operator),
        # saved tensors
        _S("force_stride_order", "torch._inductor.inductor_prims", "force_stride_order", feature="saved tensors"),
        _S("free_symbols", _SHAPES, "free_symbols", feature="saved tensors", shape=("val",)),
        _S("select_decomp_table", "torch._inductor.decomposition", "select_decomp_table", feature="saved tensors"),
        _S("replace_random_passes", "torch._inductor.fx_passes.replace_random", "replace_random_passes",
           feature="saved tensors", shape=("gm",)),
        _S("virtualized", "torch._inductor.virtualized", "V", feature="saved tensors", shape=("set_fake_mode",)),
        _S("top_saved_tensors_hooks", "torch._C._autograd", "_top_saved_tensors_default_hooks",
           feature="saved tensors"),
        _S("hooks_disabled_because", "torch._C._autograd", "_saved_tensors_hooks_get_disabled_error_message",
           feature="saved tensors"),
        _S("disable_hooks", "torch._C._autograd", "_saved_tensors_hooks_disable", feature="saved tensors"),
        _S("enable_hooks", "torch._C._autograd", "_saved_tensors_hooks_enable", feature="saved tensors"),
        # backward code that runs again
        _S("keeps_graph", "torch._C._autograd", "_get_current_graph_task_keep_graph", feature="retained graphs"),
        _S("lookup_backend", "torch._dynamo.backends.registry", "lookup_backend"),
        _S("InvalidCxxCompiler", "torch._inductor.exc", "InvalidCxxCompiler", feature="messages"),
        _S("list_mode_options", "torch._inductor", "list_mode_options", feature="modes"),
        _S("make_fx", "torch.fx.experimental.proxy_tensor", "make_fx", feature="saved tensors",
           shape=("f", "decomposition_table", "tracing_mode")),
        # padding
        _S("functional_trace", "torch.fx.experimental.proxy_tensor", "make_fx", feature="padding",
           shape=("f", "tracing_mode")),
        _S("python_dispatcher", "torch._dispatch.python", "enable_python_dispatcher", feature="padding"),
        _S("preserve_node_meta", "torch.fx.traceback", "preserve_node_meta", feature="padding"),
        _S("dispatch_functionalize", "torch._subclasses.functional_tensor", "dispatch_functionalize", feature="padding",
           shape=("func", "mode")),
        _S("FunctionalTensorMode", "torch._subclasses.functional_tensor", "FunctionalTensorMode", feature="padding"),
        _S("schema_of", "torch._C", "FunctionSchema", feature="padding",
           shape=("is_mutable", "arguments", "overload_name")),
        # recordings
        _S("weak_storage", "torch", "UntypedStorage", feature="cudagraphs", shape=("_new_with_weak_ptr",)),
        _S("storage_use_count", "torch._C", "_storage_Use_Count", feature="cudagraphs"),
        _S("saved_tensors_hooks", "torch._C._autograd", "_top_saved_tensors_default_hooks", feature="cudagraphs"),
        _S("same_addresses", "torch._C", "_tensors_data_ptrs_at_indices_equal", feature="cudagraphs on CUDA"),
        _S("OutputCode", "torch._inductor.output_code", "OutputCode", feature="cudagraphs",
           shape=("post_compile", "prepare_for_serialization", "set_triton_bundle")),
        _S("CompiledFxGraph", "torch._inductor.output_code", "CompiledFxGraph", feature="cudagraphs",
           shape=("partition_maps", "recursively_apply_fns", "compiled_fn_runner", "current_callable", "constants",
                  "mutated_input_idxs", "device_idxs", "source_code")),
        _S("FxGraphCache", "torch._inductor.codecache", "FxGraphCache", feature="cudagraphs",
           shape=("cache_hit_post_compile",)),
        _S("lowerings", "torch._inductor.lowering", "lowerings", feature="cudagraphs"),
        _S("fallbacks", "torch._inductor.lowering", "fallbacks", feature="cudagraphs"),
        _S("BoxedBool", "torch._inductor.utils", "BoxedBool", feature="cudagraphs"),
        _S("MarkStepBox", _TREES, "MarkStepBox", feature="cudagraphs",
           shape=("mark_step_counter",)),
        _S("foreach_copy", "torch", "_foreach_copy_", feature="cudagraphs"),
        _S("dispatch_table", "torch._C", "_dispatch_dump_table", feature="cudagraphs"),
        _S("set_grad_enabled", "torch._C", "_set_grad_enabled", feature="cudagraphs"),
        _S("without_torch_function", "torch._C", "DisableTorchFunctionSubclass", feature="cudagraphs"),
        _S("is_capturing", "torch._C", "_cuda_isCurrentStreamCapturing", feature="cudagraphs on CUDA"),
        _S("current_device", "torch._C", "_cuda_getDevice", feature="cudagraphs on CUDA"),
        _S("raw_stream", "torch._C", "_cuda_getCurrentRawStream", feature="cudagraphs on CUDA"),
        _S("make_cuda_tensor", "torch._C", "_construct_CUDA_Tensor_From_Storage_And_Metadata",
           feature="cudagraphs on CUDA"),
        _S("tensor_like", "torch._C._dynamo.guards", "_reinterpret_tensor", feature="cudagraphs on CUDA"),
        _S("storage_at", "torch._C", "_construct_storage_from_data_pointer", feature="cudagraphs on CUDA"),
        _S("pool_state", "torch._C", "_cuda_getCheckpointState", feature="cudagraphs on CUDA"),
        _S("set_pool_state", "torch._C", "_cuda_setCheckpointPoolState", feature="cudagraphs on CUDA"),
        _S("pool_holds_only", "torch._C", "_cuda_checkPoolLiveAllocations", feature="cudagraphs on CUDA"),
        _S("free_block", "torch._C", "_cuda_cudaCachingAllocator_raw_delete", feature="cudagraphs on CUDA"),
        _S("stop_allocating_to_pool", "torch._C", "_cuda_endAllocateToPool", feature="cudagraphs on CUDA"),
        _S("release_pool", "torch._C", "_cuda_releasePool", feature="cudagraphs on CUDA"),
        _S("raw_snapshot", "torch._C", "_cuda_memorySnapshot", feature="cudagraphs on CUDA"),
        _S("free_and_detach", "torch._C", "_free_And_Remove_DeleterFn", feature="recordings in the extension on CUDA"),
        _S("clear_cublas_workspaces", "torch._C", "_cuda_clearCublasWorkspaces", feature="cudagraphs on CUDA"),
        # the allocator extension
        _S("set_allocator_settings", "torch._C", "_accelerator_setAllocatorSettings", feature="allocator"),
        _S("TorchDispatchMode", "torch.utils._python_dispatch", "TorchDispatchMode", feature="simulation"),
        _S("memory_snapshot", "torch.cuda.memory", "_snapshot", feature="allocator", shape=("device",)),
        _S("record_memory_history", "torch.cuda.memory", "_record_memory_history", feature="stacks of allocations"),
        _S("skip_code", "torch._dynamo.eval_frame", "skip_code", feature="stacks of allocations", shape=("code",)),
        _S("raw_alloc", "torch._C", "_cuda_cudaCachingAllocator_raw_alloc", feature="allocator on CUDA"),
        _S("custom_allocator", "torch._C", "_cuda_customAllocator", feature="allocator on CUDA"),
        # graphs that are compiled ahead of time, and saved
        _S("SerializableCallable", "torch._dynamo.aot_compile_types", "SerializableCallable", feature="saved graphs",
           shape=("serialize_compile_artifacts", "deserialize_compile_artifacts")),
        # several processes
        _S("resolve_process_group", "torch.distributed.distributed_c10d", "_resolve_process_group",
           feature="distributed"),
        _S("ProcessGroup", "torch.distributed", "ProcessGroup", feature="watchdog",
           shape=("_get_backend", "_device_types")),
        _S("cache_dir", "torch._inductor.runtime.cache_dir_utils", "cache_dir", feature="one compile"),
        # warm start
        _S("CacheArtifactManager", "torch.compiler._cache", "CacheArtifactManager", feature="warm start",
           shape=("_seen_artifacts", "with_fresh_cache", "record_artifact", "deserialize")),
        _S("AOTAutogradCache", "torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache",
           feature="warm start", shape=("_get_tmp_dir_for_key",)),
        _S("GraphCache", "torch._inductor.codecache", "FxGraphCache", feature="warm start",
           shape=("_get_tmp_dir_for_key",)),
        _S("CppBindings", "torch._inductor.codecache", "CppPythonBindingsCodeCache", feature="warm start",
           shape=("cache",)),
        _S("decompositions", "torch._inductor.compile_fx", "compile_fx", feature="warm start",
           shape=("decompositions",)),
        # code that is loaded past Inductor
        _S("StoredResults", "torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache",
           feature="stored code", shape=("_lookup", "iterate_over_candidates")),
        _S("StoredResult", "torch._functorch._aot_autograd.aot_autograd_result", "BundledAOTAutogradResult",
           feature="stored code", shape=("wrap_post_compile", "compiled_fw", "compiled_bw", "sanitized_aot_config")),
        _S("StoredGraph", "torch._inductor.output_code", "CompiledFxGraph", feature="stored code",
           shape=("after_deserialization", "cache_key", "source_code", "_triton_bundle")),
        _S("torch_key", "torch._inductor.codecache", "torch_key", feature="stored code", shape=("set",)),
        _S("BoxedDeviceIndex", "torch._inductor.cudagraph_utils", "BoxedDeviceIndex", feature="stored code"),
        _S("CppKernels", "torch._inductor.codecache", "CppPythonBindingsCodeCache", feature="stored code",
           shape=("load_pybinding", "_load_library")),
        _S("StoredKernels", "torch._inductor.triton_bundler", "TritonBundler", feature="stored code",
           shape=("read_and_emit",)),
        _S("extract_tensor_metadata", "torch._subclasses.fake_tensor", "extract_tensor_metadata",
           feature="stored code"),
        # rows of packs
        _S("inductor_choices", "torch._inductor.virtualized", "_choices", feature="rows of packs",
           shape=("_set_handler", "_get_handler")),
        _S("InductorChoices", "torch._inductor.choices", "InductorChoices", feature="rows of packs",
           shape=("should_use_persistent_reduction",)),
        _S("ReductionHint", "torch._inductor.runtime.hints", "ReductionHint", feature="rows of packs",
           shape=("INNER",)),
        _S("KernelFeatures", "torch._inductor.codegen.simd_kernel_features", "SIMDKernelFeatures",
           feature="rows of packs", shape=("get_reduction_hint", "scheduler_nodes")),
        # kernels together
        _S("CustomGraphPass", "torch._inductor.custom_graph_pass", "CustomGraphPass", feature="kernels together",
           shape=("uuid",)),
        _S("debug_handler", "torch._inductor.virtualized", "V", feature="kernels together",
           shape=("set_debug_handler",)),
        _S("load_cpp_kernel", "torch._inductor.codecache", "CppPythonBindingsCodeCache.load_pybinding_async",
           feature="kernels together", shape=("argtypes", "main_code", "submit_fn")),
        _S("compile_threads", "torch._inductor.async_compile", "get_compile_threads", feature="kernels together"),
        # workers
        _S("GraphPickler", "torch.fx._graph_pickler", "GraphPickler", feature="workers", shape=("dumps", "loads")),
        _S("GraphPicklerOptions", "torch.fx._graph_pickler", "Options", feature="workers",
           shape=("ops_filter", "node_metadata_key_filter")),
        _S("LazyGraphModule", "torch.fx._lazy_graph_module", "_LazyGraphModule", feature="workers"),
        _S("Benchmarker", "torch._inductor.runtime.benchmarking", "InductorBenchmarker", feature="rests",
           shape=("benchmark_gpu",)),
        _S("abort_process_group", "torch.distributed.distributed_c10d", "_abort_process_group", feature="endings",
           shape=("group",)),
        # torch's own instruments
        _S("counters", "torch._dynamo.utils", "counters", feature="instruments"),
        _S("dynamo_timed", "torch._dynamo.utils", "dynamo_timed", feature="instruments",
           shape=("key", "phase_name", "metadata")),
        _S("trace_structured", "torch._logging._internal", "trace_structured", feature="instruments",
           shape=("name", "metadata_fn", "payload_fn", "compile_id", "expect_trace_id")),
        _S("CompileContext", "torch._guards", "CompileContext", feature="instruments",
           shape=("current_compile_id", "compile_id")),
        _S("compile_context", "torch._guards", "compile_context", feature="instruments", shape=("context",)),
        _S("profiler", "torch.autograd", "profiler", feature="instruments", shape=("_is_profiler_enabled",)),
        # marks
        _S("mark_dynamic", "torch._dynamo.decorators", "mark_dynamic", feature="marks",
           shape=("specialize_on", "min", "max")),
        _S("mark_unbacked", "torch._dynamo.decorators", "mark_unbacked", feature="marks", shape=("specialize_on",)),
        _S("marked_tensor", "torch._dynamo.decorators", "mark_dynamic", feature="marks",
           carried=("_specialize_on", "_dynamo_dynamic_indices"), made=_marked),
    )
}  # fmt: skip


def __getattr__(name: str) -> Any:
    row = SYMBOLS.get(name)
    if row is None:
        raise AttributeError(f"multigraph_backend._compat knows no torch symbol {name!r}")
    try:
        value = row.load()
    except (ImportError, AttributeError) as error:
        raise MissingSymbol(
            f"torch {torch.__version__} has no {row.module}.{row.attribute}, which {row.feature} needs "
            f"(seen in torch {', '.join(row.seen)})"
        ) from error
    if name not in _CHANGING:
        globals()[name] = value
    return value


# rebound by torch at run time, so never kept
_CHANGING = frozenset({"_stance", "compile_flag"})


def expected() -> dict[str, PrivateSymbol]:
    """Rows that this build of torch should have: one for CPUs alone has none of what only CUDA needs."""
    cuda = torch.version.cuda is not None
    return {name: row for name, row in SYMBOLS.items() if cuda or not row.feature.endswith("on CUDA")}


#: what `missing` has found, by feature and whether Inductor may be asked
lacking: dict[tuple[str, bool], tuple[str, ...]] = {}


def missing(feature: str, inductor: bool = True) -> tuple[str, ...]:
    """What `feature` lacks in this torch, one line a symbol; empty when it can be used.

    `inductor`: whether a compile by Inductor is to use it; if not, Inductor is neither asked nor loaded.
    """
    found = lacking.get((feature, inductor))
    if found is None:
        rows = [row for row in SYMBOLS.values() if row.feature == feature and (inductor or not row.of_inductor)]
        found = lacking[feature, inductor] = tuple(filter(None, [row.problem() for row in rows]))
    return found


def without(*names: str) -> str | None:
    """What this torch lacks of the symbols of these rows; None if they can be used."""
    return next((problem for name in names if (problem := SYMBOLS[name].problem())), None)


_PACKED = "nothing that is saved for backward is packed"
_AGAIN = "torch refuses calls with retain_graph where it donates buffers"

#: what is off in plain words where this torch lacks a symbol of the feature; what is said elsewhere is not here
OFF = {
    "names": "sizes go by Dynamo's names, and options by no name of a model",
    "instances": "instances of one class share options and reports, whatever their names",
    "stances": "torch's stances do not hold",
    "redirect": "what redirected programs ask of Inductor is ignored, and who names another backend gets multigraph",
    "instruments": "torch's own instruments hear nothing",
    "modes": "the mode is ignored",
    "padding": "no call is padded",
    "marks": "mark() marks nothing",
    "saved tensors": _PACKED,
    "boundaries": "inputs of blocks that FSDP2 shards are not packed",
    "changed inputs": f"graphs that change inputs run eagerly, others have Inductor's numbers, {_PACKED}, and {_AGAIN}",
    "retained graphs": _AGAIN,
    "eager's numbers": "max pooling over windows of minus infinity has Inductor's indices",
    "cudagraphs": f"nothing is recorded in CUDA graphs, {_PACKED}, and {_AGAIN}",
    "cudagraphs on CUDA": "nothing is recorded in CUDA graphs",
    "messages": "a missing C++ compiler is not explained",
    "simulation": "recordings cannot be simulated on the CPU",
    "repeated blocks": "blocks that come again are compiled as they stand",
    "distributed": "collectives are not recorded",
    "saved graphs": "torch's aot_compile is refused",
    "one compile": "every rank compiles for itself",
    "warm start": "nothing is loaded ahead of calls, and caches are not carried to other machines",
    "stored code": "saved functions ask Inductor for their code, which takes a process longer to begin with",
    "kernels together": "each C++ kernel is compiled by itself",
    "rows of packs": "packs with a scale for a long row read it twice",
    "workers": "variants are compiled in calls, and not in worker processes",
    "rests": "workers tune kernels of a GPU without rests, which slows calls down",
    "endings": "recorded collectives are not ended for you",
    "watchdog": "nothing says in which collective a rank waits",
    "stacks of allocations": "allocations have no stacks",
    "allocator": "the allocator extension is off",
    "allocator on CUDA": "the allocator extension is off",
    "recordings in the extension on CUDA": "nothing is recorded where the allocator extension is installed",
    "size assertions": "graphs that assert something of sizes that they compute have no variants",
    "moved parameters": "Module.to() may refuse to move a compiled model whose parameters are tensor subclasses",
}


@functools.cache
def switched_off(inductor: bool = True) -> tuple[tuple[str, str], ...]:
    """Features that this torch lacks a symbol for, each with one line that says so.

    `inductor`: also those that only a compile by Inductor has; if not, Inductor is neither asked nor loaded.
    """
    found = []
    rows = [row for row in expected().values() if inductor or not row.of_inductor]
    for feature, consequence in OFF.items():
        problems = [row.problem() for row in rows if row.feature == feature]
        problem = next(filter(None, problems), None)
        if problem is not None and problem not in missing("variants", inductor):  # that is said with each graph
            found.append((feature, f"torch {torch.__version__} differs: {problem}; {consequence}"))
    return tuple(found)


class CarriedSymbol(NamedTuple):
    """What only a trace shows: an attribute or an entry of `meta` of what Dynamo hands to a backend."""

    of: str
    seen: tuple[str, ...] = SEEN


CARRIED = {
    "_dynamo_source": CarriedSymbol("placeholder"),
    "_param_name_to_source": CarriedSymbol("graph"),
    "example_value": CarriedSymbol("meta of a placeholder"),
    "tensor_dict": CarriedSymbol("meta of a parameter's placeholder"),
    "grapharg": CarriedSymbol("meta of a placeholder"),  # stands in for _dynamo_source, where a graph was copied
}


def missing_in_trace(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """What of `CARRIED` Dynamo did not hand over though it handed over what comes with it; None if nothing."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    sourced = [hasattr(node, "_dynamo_source") for node in placeholders]
    if all(sourced) and not hasattr(gm, "_param_name_to_source"):
        return "graphs have no _param_name_to_source"
    if hasattr(gm, "_param_name_to_source") and placeholders and not any(sourced):
        return "placeholders have no _dynamo_source"
    if not any(sourced):
        return None  # no graph as Dynamo made it
    for node, example in zip(placeholders, example_inputs, strict=False):
        if "example_value" not in node.meta:
            return "placeholders have no example_value"
        if isinstance(example, torch.nn.Parameter) and "tensor_dict" not in node.meta:
            return "placeholders of parameters have no tensor_dict"
    return None


def trace_shape_env(example_inputs: Sequence[Any]) -> Any:
    """The ShapeEnv of the trace in progress, from its context or from a symbolic input; None where there is none."""
    try:
        found = getattr(getattr(__getattr__("TracingContext").try_get(), "fake_mode", None), "shape_env", None)
    except (MissingSymbol, AttributeError):
        found = None
    symbolic = (value.node for value in example_inputs if isinstance(value, torch.SymInt | torch.SymFloat))
    return found if found is not None else next((getattr(node, "shape_env", None) for node in symbolic), None)


# ---------------------------------------------------------------- differences between versions


# Inductor may change an input before it has read all of its old values; seen in 2.11, gone in 2.13
INDUCTOR_CHANGES_EARLY = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)

# Inductor's `expm1` on the CPU is `exp(x) - 1`; seen in 2.11 and 2.13, gone in 2.15
EXPM1_CANCELS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)

# what a thread has stashed in torch is let go of when it ends, though it was never held; seen in 2.11, gone in 2.13
STASH_HOLDS_NOTHING = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
_held_for_stash: set[int] = set()


def signature_ahead_of_time(function: object) -> inspect.Signature | None:
    """Of what `aot_compile` has made; its own says nothing.  None of anything else."""
    found = getattr(getattr(function, "_artifacts", None), "signature", None)
    return found if isinstance(found, inspect.Signature) else None


class StepMarks:
    """torch's count of marks that a step begins.  Who has set none has not loaded the module that counts them, which
    brings all of Inductor with it."""

    @property
    def mark_step_counter(self) -> int:
        trees = sys.modules.get(_TREES)
        return 0 if trees is None else trees.MarkStepBox.mark_step_counter


def step_marks() -> Any:
    """What has `mark_step_counter`; the shortest way to it that loads nothing."""
    return __getattr__("MarkStepBox") if _TREES in sys.modules else StepMarks()


def hold_stashed() -> None:
    """Before the calling thread ends: hold what Inductor has stashed in it, if it was the first to import that.

    Else that memory is freed while others use it, and the process dies or has objects in each other's place.
    """
    trees = sys.modules.get(_TREES) if STASH_HOLDS_NOTHING else None
    for name in ("tree_manager_containers", "tree_manager_locks"):
        stashed = getattr(getattr(trees, "local", None), name, None)
        if stashed is not None and id(stashed) not in _held_for_stash:
            _held_for_stash.add(id(stashed))  # it is alive from here on
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(stashed))


# an index below 0 of `gather` and `embedding` counts from the end in Inductor; seen in 2.11, gone in 2.13
GATHERS_FROM_THE_END = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)

# decompositions of `softshrink` and `multilabel_margin_loss` are wrong; seen in 2.11 and 2.13, gone in 2.15
DECOMPOSES_WRONGLY = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)


def source_name(source: Any) -> str:
    """The name of a Dynamo source: a method up to some version, a property after it."""
    name = source.name
    return str(name() if callable(name) else name)


def sympy_expr(value: Any) -> Any:
    """A size, stride, offset or symbolic number as a sympy expression."""
    import sympy

    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return sympy.Integer(value) if isinstance(value, int) and not isinstance(value, bool) else value


def plain_size(value: Any) -> Any:
    """A size or stride as an expression, for tensors that are not empty: torch writes strides as `Max(1, size)`."""
    import sympy

    if isinstance(value, int):
        return sympy.Integer(value)
    # torch has a `Max` of its own, which is none of sympy's
    return sympy_expr(value).replace(
        lambda part: type(part).__name__ == "Max" and sympy.S.One in part.args,
        lambda part: functools.reduce(type(part), (entry for entry in part.args if entry != 1)),
    )


def hint(value: Any, unknown: int) -> int:
    """A size as it is for the inputs that the compile began with; `unknown` where only a run can tell."""
    if isinstance(value, int):
        return value
    node = value.node
    return int(node.hint) if node.has_hint() else unknown


def activations(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of fake inputs of a joint graph that need gradients and are no parameters: what others have computed.

    AOTAutograd hands out detached ones.  Their fake mode still knows those that they were made of, in the same memory.
    """
    mode = next((mode for value in inputs if (mode := getattr(value, "fake_mode", None)) is not None), None)
    if mode is None or without("FakeTensorConverter"):
        return ()
    known: dict[int, list[torch.Tensor]] = {}
    for fake in mode.fake_tensor_converter.tensor_memo.values():
        if fake.layout is torch.strided and not __getattr__("is_traceable_wrapper_subclass")(fake):
            known.setdefault(fake.untyped_storage()._cdata, []).append(fake)
    found = []
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            made_of = known.get(value.untyped_storage()._cdata, ())  # with what it is a view of
            parameter = any(isinstance(fake, torch.nn.Parameter) for fake in made_of)
            if not parameter and any(fake.requires_grad for fake in made_of):
                found.append(index)
    return tuple(found)


def set_fake_mode(mode: Any) -> Any:
    """A context in which Inductor's passes make fake values under `mode`."""
    return __getattr__("virtualized").set_fake_mode(mode)


def stance() -> str:
    """torch's current stance (`torch.compiler.set_stance`)."""
    return str(__getattr__("_stance").stance)


def config_is_per_context() -> bool:
    """Whether config overrides live in context variables (2.13 on) rather than in the process (2.11)."""
    entry = next(iter(__getattr__("inductor_config")._config.values()))
    return isinstance(getattr(entry, "user_override", None), contextvars.ContextVar)


def _config_modules() -> list[Any]:
    """torch's configuration modules, and those of others that are made like them."""
    kind = __getattr__("ConfigModule")
    return [module for module in list(sys.modules.values()) if isinstance(module, kind)]


def config_overrides() -> dict[contextvars.ContextVar[Any], Any]:
    """Overrides of configuration that are in force in the calling context."""
    context = contextvars.copy_context()
    variables = (entry.user_override for module in _config_modules() for entry in module._config.values())
    return {variable: context[variable] for variable in variables if variable in context}


def configurations() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each configuration module's name, its values in the calling context, and its defaults."""
    for module in _config_modules():
        yield module.__name__, module.get_config_copy(), {key: entry.default for key, entry in module._config.items()}


def set_config_overrides(overrides: Mapping[contextvars.ContextVar[Any], Any]) -> None:
    """Let these, as `config_overrides` told them, be the only ones in the calling context."""
    empty = contextvars.Context()
    present = config_overrides()
    for module in _config_modules():  # what a module has made of its overrides, for its hash
        caches = (value for value in vars(module).values() if isinstance(value, contextvars.ContextVar))
        present.update((variable, variable) for variable in caches)
    for variable in present:
        if variable not in overrides:
            variable.set(empty.run(variable.get))  # what it is by default: there is no other way to unset it
    for variable, value in overrides.items():
        if present.get(variable, present) is not value:
            variable.set(value)


@contextlib.contextmanager
def compile_session() -> Iterator[None]:
    """Mark the process as compiling.

    Up to 2.13 `make_fx` sets a process-wide tracing flag, and calls of compiled functions in other threads raise
    while it is set, unless this one is set too.
    """
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


def owns_compile_lock() -> bool:
    """Whether the calling thread is inside one of Dynamo's compiles."""
    return bool(__getattr__("compile_lock")._is_owned())


def caches_are_on() -> bool:
    """Whether torch keeps compiled code for other processes, with what AOTAutograd made of it."""
    inductor = __getattr__("inductor_config")
    if inductor.force_disable_caches or not inductor.fx_graph_cache:
        return False
    return bool(__getattr__("functorch_config").enable_autograd_cache)


def compile_lock_is_free() -> bool:
    """Whether no other thread is inside one of Dynamo's compiles."""
    lock = __getattr__("compile_lock")
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


def noted_artifacts() -> int:
    """How many artifacts torch has noted for `save_cache_artifacts` so far; under the compile lock."""
    return len(__getattr__("CacheArtifactManager")._seen_artifacts)


def artifact_keys(start: int = 0) -> tuple[tuple[str, str], ...]:
    """Kind and key of what torch noted after the first `start` artifacts; under the compile lock."""
    noted = __getattr__("CacheArtifactManager")._seen_artifacts
    further = itertools.islice(noted, start if start <= len(noted) else 0, None)  # a program may clear them
    return tuple(dict.fromkeys((artifact.type(), artifact.key) for artifact in further))


def kernel_libraries() -> tuple[str, ...]:
    """What the C++ compiler made of kernels that this process has, as paths below Inductor's folder."""
    return tuple(f"{key[1:3]}/{key}.main.so" for key in list(__getattr__("CppBindings").cache))


def cache_entry(kind: str, key: str) -> Path:
    """Where torch's caches have what an artifact of that kind and key is made of."""
    if kind == "aot_autograd":
        return Path(__getattr__("AOTAutogradCache")._get_tmp_dir_for_key(key))
    if kind == "inductor":
        return Path(__getattr__("GraphCache")._get_tmp_dir_for_key(key))
    return Path(__getattr__("cache_dir")(), key)


def take_over_compile_lock() -> None:
    """Free Dynamo's compile lock from a thread that hangs and will never release it.

    The caller knows that it is that thread that holds it.  An `RLock` knows its owner, so a late release by that
    thread raises there and disturbs nobody.
    """
    with contextlib.suppress(RuntimeError):
        __getattr__("compile_lock")._release_save()


@contextlib.contextmanager
def own_float_specializations() -> Iterator[None]:
    """Keep what this compile finds out about Python floats from other compiles, and theirs from it.

    The pass that turns floats into tensors notes by symbol name, process-wide, which floats it could not turn, for
    Dynamo to trace them anew as constants; noted names are then specialized without a word.
    """
    noted: set[str] = __getattr__("TensorifyState").force_specializations
    before = set(noted)
    noted.clear()
    try:
        yield
    finally:
        noted.clear()
        noted.update(before)


def inductor_config_names() -> Mapping[str, object]:
    """Inductor's knobs and their current values, with those that stand for a knob of another module."""
    config = __getattr__("inductor_config")
    elsewhere = {name: getattr(config, name) for name, entry in config._config.items() if getattr(entry, "alias", None)}
    return {**config.get_config_copy(), **elsewhere}


def inductor_config_type(name: str) -> type | None:
    """The declared type of one of Inductor's knobs, None where it has none that can be checked."""
    kind = __getattr__("inductor_config").get_type(name)
    return kind if isinstance(kind, type) else None


def inductor_modes() -> Mapping[str, Mapping[str, object]]:
    """The modes of torch.compile and the Inductor knobs each stands for."""
    modes: Mapping[str, Mapping[str, object]] = __getattr__("list_mode_options")()
    return modes


def root_frame() -> tuple[Any, Mapping[str, Any]] | None:
    """Code object and locals of the user's function that Dynamo is compiling, None outside of a trace."""
    try:
        translator = __getattr__("InstructionTranslator").current_tx()
    except Exception:  # not inside a trace: torch raises an AttributeError of its own thread-local
        return None
    return None if translator is None else (translator.f_code, translator.f_locals)  # None: 2.11, after a trace


def overridden() -> Any:
    """The backend that `TORCH_COMPILE_OVERRIDE_BACKENDS` names for the trace in progress, None where it names none."""
    rules = __getattr__("overrides").debug_backend_override
    if not rules:
        return None
    return __getattr__("backend_override")(__getattr__("CompileContext").current_compile_id(), rules)


def asked_backend() -> Any:
    """What the program gave to `torch.compile` for the trace in progress, as Dynamo calls it; None outside of one."""
    try:
        translator = __getattr__("InstructionTranslator").current_tx()
    except Exception:  # as in `root_frame`
        return None
    return getattr(getattr(translator, "output", None), "compiler_fn", None)


# what torch's aot_compile changes for its own backends: they would make a late compile go past the caches
_OF_AOT_COMPILE = (
    "strict_autograd_cache",
    "bypass_autograd_cache_key",
    "bundled_autograd_cache",
    "force_autograd_cache",
)


def ahead_of_time() -> bool:
    """Whether torch's `aot_compile` is calling: it traces first, and calls the backend when the trace has ended."""
    return _ahead_of_time() is not None


def _ahead_of_time() -> FrameType | None:
    if without("functorch_config") or not getattr(__getattr__("functorch_config"), "bypass_autograd_cache_key", False):
        return None
    file = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "aot_compile.py")
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("aot_compile_fullgraph", file):
        frame = frame.f_back
    return frame


def ordinary_caching() -> Any:
    """A context in which AOTAutograd's cache is used as in a call of a compiled function, also in `aot_compile`."""
    return __getattr__("functorch_config").patch(dict.fromkeys(_OF_AOT_COMPILE, False))


def frame_ahead_of_time() -> tuple[Any, Mapping[str, Any]] | None:
    """Code object and locals of the user's function that torch's `aot_compile` is compiling, None outside of one."""
    frame = _ahead_of_time()
    if frame is None:
        return None
    model, function = frame.f_locals.get("model"), frame.f_locals.get("fn")
    if not inspect.isfunction(function):
        return None
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    found = {name: cell.cell_contents for name, cell in cells}
    with contextlib.suppress(TypeError, ValueError):  # the arguments do not fit: torch says so
        args, kwargs = frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})
        bound = inspect.Signature.from_callable(function, follow_wrapped=False).bind(
            *(() if owner is None else (owner,)), *args, **kwargs
        )
        bound.apply_defaults()
        found.update(bound.arguments)
    return function.__code__, found


def changed_config(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[tuple[str, str], Any]:
    """Which of these values of configuration, by the module's row and the knob, are not torch's own."""
    changed = {}
    for row, values in configs:
        entries = __getattr__(row)._config
        for name, value in values.items():
            entry = entries.get(name)
            if entry is not None and entry.alias is None and value is not entry.default and value != entry.default:
                changed[row, name] = value
    return changed


def config_outside_of_loading(row: str) -> dict[str, Any]:
    """Values of configuration as they are, but for what torch changes while it loads a compiled function."""
    module = __getattr__(row)
    values: dict[str, Any] = module.get_config_copy()
    if "enable_autograd_for_aot" in values:
        values["enable_autograd_for_aot"] = module._config["enable_autograd_for_aot"].default
    return values


_NOT_SAID = object()


def named_overrides(overrides: Mapping[contextvars.ContextVar[Any], Any]) -> dict[tuple[str, str], Any]:
    """Overrides, as `config_overrides` told them, by the configuration's module and the knob."""
    named = {}
    for module in _config_modules():
        for name, entry in module._config.items():
            value = overrides.get(entry.user_override, _NOT_SAID)
            if type(value) is not object:  # torch marks by one what was overridden, and is so no more
                named[module.__name__, name] = value
    return named


def overrides_of(named: Mapping[tuple[str, str], Any]) -> dict[contextvars.ContextVar[Any], Any]:
    """The reverse of `named_overrides`; raises KeyError or ImportError for a knob that is not there."""
    entries = {key: importlib.import_module(key[0])._config[key[1]] for key in named}
    return {entries[key].user_override: value for key, value in named.items()}


def guard_attribute(local: str, within: tuple[str, ...], attribute: str, value: str | None, free: bool = False) -> None:
    """Let the code of the trace in progress run only where an object has this attribute, or none in its `__dict__`.

    The object is a local of the traced frame, or reached from it by the attributes `within`; `free`: the local is a
    variable of an enclosing function.
    """
    source = __getattr__("LocalSource")(local, is_input=True, is_derefed_cell_contents=free)
    for name in within:
        source = __getattr__("AttrSource")(source, name)
    builder = __getattr__("GuardBuilder")
    if value is None:
        guard = source.make_guard(functools.partial(builder.NOT_PRESENT_IN_GENERIC_DICT, attr=attribute))
    else:
        guard = __getattr__("AttrSource")(source, attribute).make_guard(builder.EQUALS_MATCH)
    __getattr__("install_guard")(guard)


def traced_from_user_code() -> bool:
    """Whether the frame that Dynamo is tracing was called by the user's code, not by what `torch.compile` returned.

    Reads the Python stack: Dynamo's conversion, the caller of the traced frame, and further down the entry.
    """
    package = os.path.dirname(torch.__file__)
    conversion, entry = (os.path.join(package, "_dynamo", file) for file in ("convert_frame.py", "eval_frame.py"))
    frame: FrameType | None = sys._getframe()
    converting = False
    while frame is not None and (file := frame.f_code.co_filename) != entry:
        converting = converting or file == conversion
        if converting and not file.startswith(package + os.sep):
            return True
        frame = frame.f_back
    return False


def group_timeout(name: str) -> float | None:
    """Seconds after which collectives of the process group of that name are given up; None where it does not tell."""
    try:
        group = __getattr__("resolve_process_group")(name)
        kinds = sorted({kind.type for kind in group._device_types}, reverse=True)  # cuda before cpu
        return float(group._get_backend(torch.device(kinds[0])).options._timeout.total_seconds())
    except Exception:  # another kind of group, or none of that name any more
        return None


def kernels_timed() -> int:
    """How often Inductor has timed a kernel in this process, to choose among several; 0 where that is not counted."""
    if without("counters"):
        return 0
    counts = __getattr__("counters")["inductor"]
    return sum(count for name, count in list(counts.items()) if name.startswith("benchmarking."))


def benchmarking_code() -> frozenset[CodeType]:
    """The code of Inductor's functions that time one kernel on a GPU; none where this torch differs."""
    if missing("rests"):
        return frozenset()
    module = sys.modules[__getattr__("Benchmarker").__module__]
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    methods = [vars(value).get("benchmark_gpu") for value in classes]
    functions = [inspect.unwrap(method) for method in methods if callable(method)]
    return frozenset(function.__code__ for function in functions if isinstance(function, FunctionType))


def replay_hooks(graph: object) -> tuple[object, ...]:
    """Mappings that hold what is called around each replay of `graph`, a `torch.cuda.CUDAGraph`, while there is any:
    from torch 2.15 on.  Who replays by the driver's own functions has to look at these."""
    names = ("_replay_start_hooks", "_replay_end_hooks")
    everywhere = [getattr(torch.cuda.graphs, f"_global{name}", None) for name in names]
    return tuple(found for found in (*everywhere, *(getattr(graph, name, None) for name in names)) if found is not None)


def torch_build() -> tuple[str, str | None, Path]:
    """This torch's version, the commit that it was built of, and the folder that it lies in."""
    return torch.__version__, torch.version.git_version, Path(torch.__file__).parent


def lookup_compiler(compiler: str | Callable[..., Any]) -> Callable[..., Any]:
    """A torch.compile backend by name; a callable is returned as it is."""
    found: Callable[..., Any] = __getattr__("lookup_backend")(compiler)
    return found


class TritonLaunch(NamedTuple):
    """How a compiled Triton kernel is launched: `run(x, y, z, stream, *handles, *arguments)`, constants included; or by
    the driver: `function`, its `threads` in a block, and bytes of `shared` memory."""

    run: Callable[..., object]
    handles: tuple[Any, ...]
    function: int = 0
    threads: int = 0
    shared: int = 0
    compiled: Any = None  # whoever launches `function` keeps it loaded


def triton_launch(compiled: Any) -> TritonLaunch:
    """The way that `kernel[grid](...)` of Triton 3.6 to 3.9 goes in the end, loaded, without its hooks."""
    run, metadata = compiled.run, compiled.metadata  # in this order: it is loaded when `run` is asked for
    threads = metadata.num_warps * getattr(metadata, "warp_size", 32)
    handles = (compiled.function, compiled.packed_metadata, None, None, None)
    # Triton's launcher finds memory for these, where tools have it compile with some
    scratch = any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size"))
    function = 0 if scratch or getattr(metadata, "num_ctas", 1) != 1 else compiled.function
    return TritonLaunch(run, handles, function, threads, metadata.shared, compiled)
