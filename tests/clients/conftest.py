"""Tests of libraries that people use: the extra `clients` installs them, and a file whose library is not installed is
not collected, so that no run is full of skips.  transformers comes with the extra `server` too, so CI has its file.

`test_LIBRARY.py` needs that library.  The models are the library's own, of random weights, and small; results are those
of eager.  Warnings of the libraries are theirs and no errors here.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

collect_ignore = [
    path.name for path in HERE.glob("test_*.py") if importlib.util.find_spec(path.stem.removeprefix("test_")) is None
]


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of eager and of Inductor in float32, by kernels that are not chosen anew."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
