"""Tests that need a browser: the extra `browser` (playwright) selects them, and where it is not installed they are not
collected, so that no run is full of skips.

With it, a browser must be there: Chromium of the system, or playwright's own.  Where there is none they fail.
"""

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("playwright") is not None else ["test_*"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        # the sandbox does not work for root, and the pages are our own
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()
