"""What a worker is told of torch's settings is what it then has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from multigraph_backend.lower import parcel


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    flags = parcel._flags()
    yield
    apply(flags)
    assert parcel._flags() == flags


def apply(flags: dict[str, object]) -> None:
    for name, value in flags.items():
        parcel._set_flag(name, value)


def old_names(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.deterministic = True


def new_names(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision


def for_all(precision: str) -> None:
    torch.backends.fp32_precision = precision


SETTINGS: dict[str, Callable[[], None]] = {
    "old names, off": lambda: old_names(False),
    "old names, on": lambda: old_names(True),
    "matmul high": lambda: torch.set_float32_matmul_precision("high"),
    "matmul medium": lambda: torch.set_float32_matmul_precision("medium"),
    "new names, tf32": lambda: new_names("tf32"),
    "new names, ieee": lambda: new_names("ieee"),
    "one for all": lambda: for_all("ieee"),
    "one for all, tf32": lambda: for_all("tf32"),
    "reduced": lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
}


@pytest.mark.parametrize("before", SETTINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_a_program_are_those_of_its_workers(setting: str, before: str) -> None:
    """Also in a worker that compiled for other settings before; keys of torch's caches depend on all of them."""
    default = parcel._flags()
    SETTINGS[setting]()
    sent = parcel._flags()
    apply(default)
    assert parcel._flags() == default
    SETTINGS[before]()  # the worker
    apply(sent)
    now = parcel._flags()
    assert {name: now.get(name) for name in sent} == sent  # of old names it may know more than the program can read
