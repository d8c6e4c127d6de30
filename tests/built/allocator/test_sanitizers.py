"""The random programs and the threads of the allocator, built with the compiler's sanitizers."""

from __future__ import annotations

import pytest

from tests.support.allocator.extension import build, stress

# one file at a time would be compiled for most of the test's time
QUICK_BUILD = ("-DMULTIGRAPH_STRESS=ON", "-DCMAKE_BUILD_TYPE=", "-DCMAKE_UNITY_BUILD=ON")


@pytest.mark.slow
@pytest.mark.parametrize("operations", [4_000, 200_000])
def test_under_address_and_undefined_behaviour_sanitizers(
    operations: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sanitizers = "-DMULTIGRAPH_SANITIZE=address,undefined"
    # compiled as fast as without any optimization, and twice as fast then
    options = (*QUICK_BUILD, "-DCMAKE_CXX_FLAGS=-O1", sanitizers)
    folder = build(tmp_path_factory.mktemp("address"), *options, targets=("fuzz",))
    assert stress(folder / "fuzz", "--operations", str(operations))["wrong"] == ""
    assert stress(folder / "fuzz", "--operations", str(operations // 2), "--sleep")["wrong"] == ""
    assert stress(folder / "fuzz", "--operations", str(operations), "--length", "60", "--each-call")["wrong"] == ""


@pytest.mark.slow
def test_under_the_thread_sanitizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = build(
        tmp_path_factory.mktemp("thread"), *QUICK_BUILD, "-DMULTIGRAPH_SANITIZE=thread", targets=("threads",)
    )
    assert stress(folder / "threads", "--operations", "1000")["wrong"] == ""
