"""What Inductor needs of the machine: a C++ compiler for CPU code; a GPU, its driver and Triton for GPU code."""

from __future__ import annotations

import ctypes
import importlib
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from multigraph_backend.doctor.findings import Finding, Level, one_line

# ---------------------------------------------------------------- the C++ compiler

_PROGRAM = """\
#include <Python.h>
#include <omp.h>
#include <vector>
extern "C" int threads() { std::vector<int> all(omp_get_max_threads()); return static_cast<int>(all.size()); }
"""


def cpp_compiler(
    search: str | Sequence[str | None] | None, torch: tuple[int, int], environ: Mapping[str, str], *, has_gpu: bool
) -> Iterator[Finding]:
    """The compiler of Inductor's CPU code, tried on a library with what that code needs: Python's headers and OpenMP.

    search: Inductor's knob `cpp.cxx`: programs to try in order (None: conda's, which is not tried here)
    """
    check = "c++ compiler"
    level: Level = "warning" if has_gpu else "error"
    without = "graphs on the CPU run eagerly"
    names = [name for name in ((search,) if isinstance(search, str) else search or ()) if name]
    for name in names:
        # from torch 2.15 on it may have arguments, before that it is one name
        command = shlex.split(name) if torch >= (2, 15) else [name]
        said = _output([*command, "--version"], environ) if command else None
        if said is None:
            continue
        version = said.strip().partition("\n")[0]
        problem = _build_problem(command, "c++20" if torch >= (2, 13) else "c++17", environ)
        facts = {"command": name, "version": version, "works": problem is None}
        if problem is None:
            yield Finding(
                check, "ok", f"{name}: {version}; builds a library with Python's headers and OpenMP", facts=facts
            )
        else:
            remedy = "install a newer g++, or clang with libomp"
            if "Python.h" in problem:
                remedy = "install Python's headers (apt-get install python3-dev)"
            yield Finding(check, level, f"{name} is there but builds nothing: {problem}; {without}", remedy, facts)
        return
    tried = ", ".join(names) or "nothing"
    remedy = "install g++ or clang (apt-get install g++ python3-dev), or set CXX to a C++ compiler"
    if any(" " in name for name in names) and torch < (2, 15):
        remedy = "set CXX to one program, without arguments: torch before 2.15 takes all of it for a name"
    yield Finding(check, level, f"none found (tried: {tried}); {without}", remedy, {"works": False})


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=dict(environ), timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _build_problem(command: Sequence[str], standard: str, environ: Mapping[str, str]) -> str | None:
    """The compiler's first complaint about a small library, None if it builds it."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "check.cpp"), Path(folder, "check.so")
        source.write_text(_PROGRAM)
        flags = [f"-std={standard}", "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
        try:
            done = subprocess.run(
                [*command, *flags, "-o", str(library), str(source)],
                capture_output=True,
                text=True,
                errors="replace",
                env=dict(environ),
                timeout=120,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return one_line(error)
        if done.returncode == 0 and library.exists():
            return None
        lines = done.stderr.strip().splitlines()
        complaint = next((line for line in lines if "error" in line), lines[0] if lines else "no library came out")
        return complaint.replace(f"{source}:", "")


# ---------------------------------------------------------------- GPUs


@dataclass(frozen=True)
class GpuFacts:
    """What there is to know of this machine's GPUs.

    devices: name and compute capability of each that torch may use
    runtime: the CUDA version that torch was built with, None for a CPU build
    architectures: those torch has code for, such as "sm_90", "compute_120"
    driver: the newest CUDA version that the driver can run; None without a driver
    complaint: what torch said when it looked for GPUs
    triton: its version; None, and a problem, where it cannot be imported
    """

    devices: tuple[tuple[str, tuple[int, int]], ...] = ()
    runtime: str | None = None
    architectures: tuple[str, ...] = ()
    driver: str | None = None
    complaint: str | None = None
    triton: str | None = None
    triton_problem: str | None = None
    c_compiler: str | None = None
    visible: str | None = None


def gpu_facts(environ: Mapping[str, str]) -> GpuFacts:
    """Look at this machine; torch must be importable."""
    import torch

    triton: str | None = None
    problem: str | None = None
    try:
        triton = str(importlib.import_module("triton").__version__)
    except Exception as error:
        problem = one_line(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = tuple(
            (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)) for index in range(count)
        )
    complaints = [str(warning.message).strip().partition("\n")[0] for warning in caught]
    named = environ.get("CC")
    return GpuFacts(
        devices=devices,
        runtime=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if devices else (),
        driver=_driver(),
        complaint=complaints[0] if complaints else None,
        triton=triton,
        triton_problem=problem,
        c_compiler=named or next(filter(None, map(shutil.which, ("gcc", "clang"))), None),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _driver() -> str | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def gpu(found: GpuFacts) -> Iterator[Finding]:
    """The GPUs that graphs can run on, and what is missing for Inductor's code on them; none is no error."""
    build = f"torch is built for CUDA {found.runtime}" if found.runtime else "torch is built without CUDA"
    driver = f"the driver runs up to CUDA {found.driver}" if found.driver else "no NVIDIA driver"
    facts = asdict(found)
    if not found.devices:
        said = f"none: graphs run on the CPU ({build}; {driver})"
        if found.complaint:
            yield Finding("gpu", "warning", f"{said}; torch says: {found.complaint}", "update the driver", facts)
        elif found.driver and not found.runtime:
            yield Finding("gpu", "warning", said, "install a torch that is built for CUDA", facts)
        elif found.driver and found.visible is not None:
            remedy = "unset CUDA_VISIBLE_DEVICES, or let it name a GPU"
            yield Finding("gpu", "warning", f"{said}; CUDA_VISIBLE_DEVICES is {found.visible!r}", remedy, facts)
        else:
            yield Finding("gpu", "ok", said, facts=facts)
        return
    names = [f"{name} (capability {major}.{minor})" for name, (major, minor) in found.devices]
    counted = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    yield Finding("gpu", "ok", f"{', '.join(counted)}; {build}; {driver}", facts=facts)
    for name, capability in dict.fromkeys(found.devices):
        if found.architectures and not _has_code_for(capability, found.architectures):
            said = f"this torch has no code for {name} (it has {', '.join(found.architectures)})"
            yield Finding("gpu", "error", said, "install a torch that is built for this GPU")
        elif capability < (7, 0):
            said = f"Triton, which makes Inductor's GPU code, needs capability 7.0, and {name} is older"
            yield Finding("gpu", "error", said, "use the compiler 'aot_eager' on it")
    if found.triton is None:
        said = f"Triton, which makes Inductor's GPU code, cannot be imported: {found.triton_problem}"
        yield Finding("triton", "error", said, "pip install triton, in the version that torch asks for")
    elif found.c_compiler is None:
        yield Finding("triton", "error", "Triton found no C compiler", "install gcc or clang, or set CC")
    else:
        yield Finding("triton", "ok", f"triton {found.triton} can be imported")


def native_calls(compile_them: bool) -> Iterator[Finding]:
    """Whether calls of recordings are native on this machine.  `compile_them`: also compiles the module, where it is
    not there, as the first process that records would in the background; else only looks for what that takes."""
    from multigraph_backend import native
    from multigraph_backend.cudagraphs import runtime
    from multigraph_backend.native import building

    check, without = "native calls", "recorded calls go by way of Python, which takes more of the host's time"
    remedy = "install g++ and Python's headers (apt-get install g++ python3-dev)"
    try:
        command = building.command(Path("calls.so"))
    except building.NotBuilt as why:
        yield Finding(check, "warning", f"{why}; {without}", remedy, {"works": False})
        return
    if not native.wanted() or not compile_them:
        said = f"{' '.join(building.compiler())} and the headers of torch and Python are there"
        yield Finding(check, "ok", said if native.wanted() else f"{native.DISABLED}: {without}")
        return
    began = time.perf_counter()
    runtime.begin_native_calls()
    works = native.wait(building.SECONDS)
    seconds, facts = time.perf_counter() - began, {"works": works, "command": command}
    if works:
        folder = building.folder()
        yield Finding(check, "ok", f"compiled and checked ({seconds:.1f} s), in {folder}", facts=facts)
    else:
        yield Finding(check, "warning", f"{native.state()}; {without}", remedy, facts)


def _has_code_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Binary code of the same major version up to the minor one, or code of any older version to be translated."""
    for entry in architectures:
        match = re.match(r"(sm|compute)_(\d+)(\d)", entry)
        if match is None:
            continue
        built = (int(match.group(2)), int(match.group(3)))
        if built <= capability and (match.group(1) == "compute" or built[0] == capability[0]):
            return True
    return False
