"""Python programs in processes that begin with torch and its compilers imported, and with nothing compiled.

A new interpreter imports for four seconds before a program compiles anything, and asks the C++ compiler once more what
it can. `run` is `subprocess.run([sys.executable, *arguments], ...)` without that: this file as a program, started once
for each process of the tests, imports all of it, and forks for each program that it is told of. A program has its own
arguments, folder, variables and session, is `__main__`, and ends as the interpreter ends it. Nothing of this package is
loaded when it begins. What it found imported is not freed one by one when it ends, which would take longer than many
programs do.

Where a program gets other values of variables that are read when something is imported, it gets an interpreter of its
own as well. So does everything where `FORKED` is 0 in the environment, to see whether a failure comes from here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

CHECKOUT = Path(__file__).resolve().parents[2]

_EARLY = re.compile(
    "TORCH|PYTORCH|AOT_|MULTIGRAPH_ALLOCATOR|ATEN|TRITON|CUDA|OMP_|KMP_|MKL_|PYTHON|LD_|CXX$|CC$|CPP|CFLAGS"
)
_LATE = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"}

_OTHERS = ("torch.", "sympy.", "setuptools", "distutils", "packaging", "multiprocessing.")  # imported by a compile


def early(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read by an import."""
    return {name: value for name, value in environ.items() if _EARLY.match(name) and name not in _LATE}


NOTHING = 'extern "C" void kernel(float* x) {}'

#: a process that ends without having freed what it found imported hears this from triton's library
_NOT_FREED = re.compile(r"^nanobind: leaked .*?^See \S+\n?", re.MULTILINE | re.DOTALL)

# ---------------------------------------------------------------- in the process of the tests


class Server:
    def __init__(self) -> None:
        self.environ = early(os.environ)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self.close)

    def ask(self, **asked: Any) -> list[int | None]:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            statuses: list[int | None] = json.loads(self._process.stdout.readline())
        return statuses

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_servers: list[Server] = []
_starting = threading.Lock()


def _server() -> Server:
    with _starting:
        if not _servers:
            _servers.append(Server())
        return _servers[0]


def run(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 300,
    merged: bool = False,
    nested: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` does; what it says is kept, on one stream if `merged`.

    If `nested`, the scripts that it starts by `sys.executable` are forked as well: from itself, so with all that it has
    imported and done until then.
    """
    (done,) = run_together([arguments], env=env, cwd=cwd, timeout=timeout, merged=merged, nested=nested)
    if done.returncode is None:
        raise subprocess.TimeoutExpired(done.args, timeout, done.stdout, done.stderr)
    return done


def run_together(
    programs: Sequence[Sequence[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 300,
    merged: bool = False,
    nested: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Several programs at the same time; the exit status of one that had to be killed is None."""
    environ = dict(os.environ if env is None else env)
    folder = os.fspath(cwd or Path.cwd())
    with tempfile.TemporaryDirectory() as logs:
        names = [
            (f"{logs}/{index}.out", f"{logs}/{index}.{'out' if merged else 'err'}") for index in range(len(programs))
        ]
        if os.environ.get("FORKED") != "0" and early(environ) == _server().environ:
            asked = [{"arguments": list(words), "logs": log} for words, log in zip(programs, names, strict=True)]
            how = {"environ": environ, "folder": folder, "seconds": timeout, "nested": nested}
            statuses = _server().ask(programs=asked, **how)
        else:
            statuses = _interpreted(programs, names, environ, folder, timeout)
        return [
            subprocess.CompletedProcess(
                [sys.executable, *words],
                status,  # type: ignore[arg-type]
                _NOT_FREED.sub("", Path(out).read_text(errors="replace")),
                "" if merged else _NOT_FREED.sub("", Path(err).read_text(errors="replace")),
            )
            for words, status, (out, err) in zip(programs, statuses, names, strict=True)
        ]


def _interpreted(
    programs: Sequence[Sequence[str]],
    names: list[tuple[str, str]],
    environ: Mapping[str, str],
    folder: str,
    seconds: float,
) -> list[int | None]:
    started = []
    for words, (out, err) in zip(programs, names, strict=True):
        with open(out, "ab") as said, open(err, "ab") as complained:
            started.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=complained,
                    env=environ,
                    cwd=folder,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + seconds
    statuses: list[int | None] = []
    for process in started:
        try:
            statuses.append(process.wait(max(deadline - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            statuses.append(None)
    return statuses


# ---------------------------------------------------------------- as a program


def load() -> None:
    """Import what a compile imports, which one in a fork of this process tells."""
    import torch._inductor.compile_fx

    torch._inductor.cpu_vec_isa.pick_vec_isa()
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        before = set(sys.modules)
        compiled = torch.compile(lambda x: (x.sin() + 1).softmax(-1), dynamic=True)
        compiled(torch.ones(5, 9, requires_grad=True)).sum().backward()
        os.write(write, "\n".join(name for name in sys.modules if name not in before).encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        names = told.read().split()
    assert os.waitpid(process, 0)[1] == 0
    for name in names:
        if name.startswith(_OTHERS) and "compile_tasks" not in name:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    prepare()
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot be forked"
    gc.collect()
    gc.freeze()


def prepare() -> None:
    """What the first compile of a process makes for all others, whatever they are: keys of files, headers, patterns."""
    import torch
    from torch._inductor import codecache
    from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad

    codecache.torch_key()
    codecache.CacheBase.get_system()
    codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], NOTHING)
    bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)  # would start a thread
    with mock.patch.object(bar, "monitor_interval", 0) if bar else contextlib.nullcontext():
        pre_grad.lazy_init()
        joint_graph.lazy_init(torch.device("cpu"))
        post_grad.lazy_init()


def serve() -> dict[str, Any] | None:
    """Until there is no further line. In a forked process: what it is to be."""
    for line in sys.stdin:
        asked = json.loads(line)
        running: dict[int, int] = {}
        for index, program in enumerate(asked["programs"]):
            process = os.fork()
            if process == 0:
                return {**asked, **program}
            running[process] = index
        print(json.dumps(ended(running, asked["seconds"])), flush=True)
    return None


def ended(running: dict[int, int], seconds: float) -> list[int | None]:
    """The exit status of each program, None where it had to be killed."""
    statuses: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for process, index in running.items():
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                statuses[index] = None
            running.clear()
        else:
            time.sleep(0.01)
    return [statuses[index] for index in sorted(statuses)]


def become(asked: dict[str, Any], own: Sequence[str]) -> None:
    """This process as the one that was asked for."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in zip((1, 2), asked["logs"], strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(asked["folder"])
    if asked["nested"]:
        fork_scripts(own)
    run_here(asked["arguments"], asked["environ"], own)


def run_here(arguments: Sequence[str], environ: Mapping[str, str], own: Sequence[str]) -> None:
    random.seed()
    os.environ.clear()
    os.environ.update({"OMP_NUM_THREADS": "1", **environ})
    if os.environ["OMP_NUM_THREADS"] != "1":
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    first, *rest = map(str, arguments)
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *own]
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        main.__file__ = first
        sys.path.insert(0, str(Path(first).parent.resolve()))
        sys.argv = [first, *rest]
        code = compile(Path(first).read_text(), first, "exec")
    exec(code, vars(main))


def fork_scripts(own: Sequence[str]) -> None:
    """From here on, scripts that this process starts by `sys.executable` are forks of it, while it may be forked."""
    plain: Any = subprocess.Popen

    class Popen(plain):  # type: ignore[misc]
        def __init__(self, args: Any, *more: Any, env: Mapping[str, str] | None = None, **how: Any) -> None:
            environ = dict(os.environ if env is None else env)
            script = not isinstance(args, str) and args[0] == sys.executable and str(args[1]).endswith(".py")
            if script and early(environ) == early(os.environ) and len(os.listdir("/proc/self/task")) <= 2:
                how["preexec_fn"] = lambda: instead(args[1:], environ, own)
                sys.stdout.flush()
            super().__init__(args, *more, env=env, **how)

    setattr(subprocess, "Popen", Popen)  # noqa: B010


def instead(arguments: Sequence[str], environ: Mapping[str, str], own: Sequence[str]) -> None:
    """In a process that has just been forked to be another program: this one instead; does not return."""
    os.closerange(3, 1 << 12)  # whoever started this process waits for the other program to begin
    atexit._clear()
    finalize: Any = weakref.finalize
    finalize._registry.clear()  # what that one removes when it ends: its folders
    finalize._registered_with_atexit = False
    status: object = 0
    try:
        run_here(arguments, environ, own)
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else bool(status))


if __name__ == "__main__":
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own_path = [entry for entry in sys.path[1:] if entry not in {*given}]
    load()
    program = serve()
    if program is None:
        os._exit(0)
    become(program, own_path)
