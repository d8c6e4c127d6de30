"""A small compile that is compared with eager, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multigraph_backend.doctor.findings import Finding, one_line
from multigraph_backend.doctor.settings import SWITCHES, cache_folders
from multigraph_backend.options import DISABLE_VARIABLE, VARIABLE

_MARK = "multigraph self-test: "


def run_self_test(
    device: str, compiler: str, environ: Mapping[str, str], timeout: float, python: str = sys.executable
) -> Iterator[Finding]:
    """Compile a small function with a variant in another process, on fresh random inputs, and compare with eager.

    The process has the environment `environ` less what the check of the environment judges, and a cache of its own, so
    that something is compiled; the cache lies beside the user's and is removed.  timeout: seconds.
    """
    folder = cache_folders(environ)["Inductor"]
    usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    root = str(Path(__file__).resolve().parents[2])
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from multigraph_backend.doctor import self_test; "
        f"self_test.self_test_here({device!r}, {compiler!r})"
    )
    with tempfile.TemporaryDirectory(dir=folder if usable else None, ignore_cleanup_errors=True) as cache:
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": os.path.join(cache, "triton")}
        judged = {VARIABLE, DISABLE_VARIABLE, "TORCH_LOGS", "TORCH_TRACE", *(row.variable for row in SWITCHES)}
        kept = {name: value for name, value in environ.items() if name not in judged}
        process = subprocess.Popen(
            [python, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**kept, **own, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, complaints = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            said = f"{compiler} on {device}: gave up after {timeout:g} seconds"
            remedy = "a compiler that hangs, or a slow disk or a busy machine: try again with a longer --timeout"
            yield Finding("self-test", "error", said, remedy)
            return
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
                process.communicate()
    result = next((line for line in output.splitlines() if line.startswith(_MARK)), None)
    if result is None:
        last = next((line for line in reversed(complaints.strip().splitlines()) if line), "nothing")
        how = f"exit status {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
        said = f"{compiler} on {device}: the process ended with {how}; its last words: {last}"
        yield Finding("self-test", "error", said, "run the same with a script of your own and TORCH_LOGS=dynamo")
        return
    facts: dict[str, Any] = json.loads(result.removeprefix(_MARK))
    if facts["problem"] is not None:
        remedy = 'see the checks above; TORCH_LOGS="+multigraph_backend" logs the whole traceback of a failed compile'
        yield Finding("self-test", "error", f"{compiler} on {device}: {facts['problem']}", remedy, facts)
    else:
        said = (
            f"{compiler} on {device}: a variant and the generic graph gave eager's numbers ({facts['seconds']:.1f} s)"
        )
        yield Finding("self-test", "ok", said, facts=facts)


def self_test_here(device: str, compiler: str) -> None:
    """The self-test, in the process that is made for it: prints what came out as one line of JSON."""
    started = time.perf_counter()
    try:
        problem = _self_test_problem(device, compiler)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if "difference" in line]
        problem = f"the numbers are not eager's: {lines[0] if lines else one_line(error)}"
    except Exception as error:
        problem = one_line(getattr(error, "inner_exception", error))  # Dynamo wraps what a backend raises
    facts = {"device": device, "compiler": compiler, "problem": problem, "seconds": time.perf_counter() - started}
    print(f"\n{_MARK}{json.dumps(facts)}", flush=True)


def _sample(x: Any) -> Any:
    return x.sin().sum(1) * x.shape[0]


def _self_test_problem(device: str, compiler: str) -> str | None:
    import torch

    from multigraph_backend.backend import multigraph
    from multigraph_backend.report import explain

    options: dict[str, Any] = {"specialize": [{"x[0]": 8}], "compiler": compiler}
    compiled = torch.compile(_sample, backend=multigraph, dynamic=True, options=options)
    for rows in (8, 5):
        x = torch.randn(rows, 3, device=device)
        torch.testing.assert_close(compiled(x), _sample(x))
    regions = explain().regions
    if len(regions) != 1:
        return f"torch gave multigraph {len(regions)} graphs where one was expected"
    for entry in (*regions[0].variants, regions[0].generic):
        if entry.state != "ready" or entry.calls != 1:
            return f"{entry.condition} did not run (it is {entry.state}): {entry.reason or 'no reason is known'}"
    return None
