"""Whether multigraph can work on this machine, in this environment, and what to do where it cannot.

`python -m multigraph_backend doctor` prints it.  Each check is a function of what it is given (a table of symbols, an
environment, facts of the GPUs) and returns findings; `diagnose` collects what they are given and calls them in the
order in which a compile would meet them.

    findings.py       Finding, Diagnosis
    installation.py   versions, the backend's name, private symbols of torch
    machine.py        the C++ compiler, GPUs
    allocator.py      the allocator extension
    settings.py       caches, variables of the environment
    self_test.py      a small compile, in a process of its own

Importing this package is light: a torch that is broken or not there is a finding and no traceback.  Nothing of the
environment is shown but the variables that are named here, and no name of host or home folder.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping

from multigraph_backend.doctor.allocator import allocator, allocator_facts
from multigraph_backend.doctor.findings import Diagnosis, Finding, Level, one_line
from multigraph_backend.doctor.installation import (
    INSTALL_TORCH,
    entry_point,
    installed_versions,
    private_symbols,
    registered,
    release,
    versions,
)
from multigraph_backend.doctor.machine import cpp_compiler, gpu, gpu_facts, native_calls
from multigraph_backend.doctor.self_test import run_self_test
from multigraph_backend.doctor.settings import cache_switches, caches, environment, user_name, warm_start

__all__ = ["Diagnosis", "Finding", "Level", "diagnose"]


def diagnose(environ: Mapping[str, str] | None = None, *, self_test: bool = True, timeout: float = 300.0) -> Diagnosis:
    """Check this machine.  Raises nothing: what a check trips over is a finding.

    environ: the environment to judge, `os.environ` if None; torch has read its own variables when it was imported
    self_test: compile a small function in another process and compare it with eager; seconds, up to a minute
    timeout: seconds that the self-test may take, on each device
    """
    environ = os.environ if environ is None else environ
    findings = _contained("versions", lambda: versions(installed_versions()))
    try:
        torch = importlib.import_module("torch")
        from multigraph_backend import _compat
    except Exception as error:
        said = f"torch cannot be imported, so nothing else was checked: {one_line(error)}"
        return Diagnosis((*findings, Finding("torch", "error", said, INSTALL_TORCH)))
    version = str(torch.version.__version__)
    findings += _contained("entry point", lambda: entry_point(registered(), _backend()))
    findings += _contained("private symbols", lambda: private_symbols(_compat.expected(), version))
    gpus = _contained("gpu", lambda: gpu(gpu_facts(environ)))
    has_gpu = any(finding.facts.get("devices") for finding in gpus)
    compiler = _contained(
        "c++ compiler",
        lambda: cpp_compiler(_compat.inductor_config.cpp.cxx, release(version), environ, has_gpu=has_gpu),
    )
    findings += [*compiler, *gpus]
    if has_gpu:
        findings += _contained("native calls", lambda: native_calls(self_test))
    findings += _contained("allocator", lambda: allocator(allocator_facts(environ)))
    findings += _contained("caches", lambda: caches(environ, cache_switches(), user_name()))
    findings += _contained("warm start", lambda: warm_start(environ))
    findings += _contained("environment", lambda: environment(environ))
    if not self_test:
        return Diagnosis((*findings, Finding("self-test", "ok", "not run, as asked")))
    # without a C++ compiler Inductor makes no CPU code, which is told already: the rest is tested without it
    builds = any(finding.facts.get("works") for finding in compiler)
    findings += _contained(
        "self-test", lambda: run_self_test("cpu", "inductor" if builds else "aot_eager", environ, timeout)
    )
    if has_gpu:
        findings += _contained("self-test", lambda: run_self_test("cuda", "inductor", environ, timeout))
    return Diagnosis(tuple(findings))


def _backend() -> object:
    from multigraph_backend.backend import multigraph

    return multigraph


def _contained(check: str, find: Callable[[], Iterable[Finding]]) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(find())
    except Exception as error:
        found.append(Finding(check, "error", f"could not be checked to the end: {one_line(error)}"))
    return found
