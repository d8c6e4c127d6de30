"""The state in which a graph was first compiled, restored around each later compile of it.

A late compile runs inside some request: another thread, another grad mode, inside `inference_mode`, under other
config patches.  What it compiles must not depend on that.  `CompileState.take()` is called once, in the backend call,
where Dynamo has restored the state that its guards will check; `restored()` re-creates it in the compiling thread.

Taken: overrides of torch's configuration, grad mode, autocast, hooks of saved tensors that are graph modules.
Not taken: the context variables of the program.  They are those of the request that compiles (`context()`): who logs or
traces there sees that one, and the first request's are let go of with it.
Switched off: inference mode, dispatch and function modes.  Preserved: random number generators.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.lower import cache_keys
from multigraph_backend.process import sources
from multigraph_backend.saved_tensors.hooks import SavedHook, stock_hooks

_CONFIGS = ("inductor_config", "dynamo_config", "functorch_config", "compiler_config")


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class CompileState:
    """See the module's text.  Immutable; shared by all compiles of a region."""

    overrides: Mapping[contextvars.ContextVar[Any], Any]  # of configuration, where they live in context variables
    configs: tuple[tuple[str, dict[str, Any]], ...]  # ... and where they do not
    grad: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    device: int | None
    hooks: SavedHook | None = None  # saved_tensors_hooks that are graph modules: part of what is compiled
    saved: bool = False  # what is compiled may be saved, with what its code is found by: it is kept as one

    @classmethod
    def take(cls) -> CompileState:
        """The state of the calling thread, now."""
        configs: tuple[tuple[str, dict[str, Any]], ...] = ()
        if not _compat.config_is_per_context():
            configs = tuple((name, getattr(_compat, name).get_config_copy()) for name in _CONFIGS)
        has_cuda = torch.cuda.is_available()
        return cls(
            overrides=_compat.config_overrides() if _compat.config_is_per_context() else {},
            configs=configs,
            grad=torch.is_grad_enabled(),
            autocast=tuple(
                _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in (("cpu", "cuda") if has_cuda else ("cpu",))
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.cuda.current_device() if has_cuda and torch.cuda.is_initialized() else None,
            hooks=stock_hooks(),
        )

    def portable(self) -> dict[str, Any]:
        """The same as plain data, for another process; configuration as far as it is not torch's own."""
        per_context = _compat.config_is_per_context()
        knobs = _compat.named_overrides(self.overrides) if per_context else _compat.changed_config(self.configs)
        return {
            "knobs": knobs,
            "grad": self.grad,
            "autocast": [dataclasses.astuple(entry) for entry in self.autocast],
            "autocast_cache": self.autocast_cache,
        }

    @classmethod
    def from_portable(cls, data: Mapping[str, Any]) -> CompileState:
        """The state that `portable` was asked of, on this process's device."""
        configs: tuple[tuple[str, dict[str, Any]], ...] = ()
        overrides: Mapping[contextvars.ContextVar[Any], Any] = {}
        if _compat.config_is_per_context():
            overrides = _compat.overrides_of(data["knobs"])
        else:
            configs = tuple((name, _compat.config_outside_of_loading(name)) for name in _CONFIGS)
            values = dict(configs)
            for (name, knob), value in data["knobs"].items():
                values[name][knob] = value
        return cls(
            overrides=overrides,
            configs=configs,
            grad=data["grad"],
            autocast=tuple(_Autocast(*entry) for entry in data["autocast"]),
            autocast_cache=data["autocast_cache"],
            device=torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        )

    def context(self) -> contextvars.Context:
        """The calling thread's context, with torch's configuration as it was taken."""
        context = contextvars.copy_context()
        if not self.configs:
            context.run(_compat.set_config_overrides, self.overrides)
        return context

    @contextlib.contextmanager
    def restored(
        self,
        process_wide: contextlib.ExitStack,
        cache_tag: str,
        autograd_cache: bool,
        bundled: bool = False,
        traces: bool = True,
    ) -> Iterator[None]:
        """Run the body in this state, in the calling thread, which must run inside a copy of `context()`.

        What has to be changed for the whole process is entered on `process_wide`, which the caller of the compile
        closes: it can do so even if this thread hangs.  `cache_tag` distinguishes cache keys of variants, beside the
        package's own files.  `bundled`: AOTAutograd's cache keeps what the compiler returned, not where Inductor's own
        cache has it.  `traces`: False where nothing is traced, and the program goes on meanwhile: then nothing is done
        that it would notice, such as to set its random number generators back.
        """
        functorch: dict[str, Any] = {"force_non_lazy_backward_lowering": True}
        if not autograd_cache:
            functorch["enable_autograd_cache"] = False
        if bundled:
            functorch["bundled_autograd_cache"] = True
        cache_keys.put_torch_first()
        with contextlib.ExitStack() as own:
            patches = own if _compat.config_is_per_context() else process_wide
            for name, values in self.configs:
                patches.enter_context(patch_back(getattr(_compat, name), values))
            patches.enter_context(_compat.functorch_config.patch(**functorch))
            patches.enter_context(cache_keys.told_apart(f"{sources.key()}:{cache_tag}"))
            if traces:
                process_wide.enter_context(_compat.compile_session())
            # one that hangs inside of Inductor leaves it begun, and each later compile would fail on that
            process_wide.callback(_compat.TritonBundler.end_compile)
            if traces:
                process_wide.enter_context(_compat.preserve_rng_state())
            own.enter_context(_compat.maybe_disable_inference_mode())
            own.enter_context(_compat.maybe_disable_inference_mode_for_fake_prop())
            own.enter_context(torch.set_grad_enabled(self.grad))
            for entry in self.autocast:
                own.enter_context(
                    torch.autocast(
                        entry.device_type,
                        dtype=entry.dtype,
                        enabled=entry.enabled,
                        cache_enabled=self.autocast_cache,
                    )
                )
            if self.device is not None:
                own.enter_context(torch.cuda.device(self.device))
            own.enter_context(_compat.PreserveDispatchKeyGuard())
            own.enter_context(_compat.disable_current_modes())
            own.enter_context(_compat.revert_all_patches())
            yield


def patch_back(config: Any, values: dict[str, Any]) -> Any:
    """A patch that gives every knob its value of then; only knobs that differ are touched."""
    current = config.get_config_copy()
    changed = {name: value for name, value in values.items() if name in current and current[name] != value}
    return config.patch(changed) if changed else contextlib.nullcontext()
