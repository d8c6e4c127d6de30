"""What a shell can ask of multigraph: whether it can work here (`doctor`), a program with it in place of Inductor
(`run`), what it did for a script (`explain`, and `report` as a page for a browser), and its caches as one file
(`cache`).

    python -m multigraph_backend doctor
    python -m multigraph_backend run [--options FILE] SCRIPT [args...]
    python -m multigraph_backend explain SCRIPT [args...]
    python -m multigraph_backend report SCRIPT [args...]
    python -m multigraph_backend cache save|load FILE

torch is imported by what needs it: by no `--help`, and by `explain` only if the script does.
"""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

from multigraph_backend import __version__, redirect
from multigraph_backend.environment import OptionsError
from multigraph_backend.region import registry


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` without the program's name.  Returns the exit status; wrong usage exits with 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command in ("explain", "report"):
        if not os.path.exists(arguments.script):
            parser.error(f"there is no file {arguments.script!r}")
        path = arguments.json if arguments.command == "explain" else arguments.output
        if path not in (None, "-") and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            parser.error(f"there is no folder for {path!r}")
        kind = _Account if arguments.command == "explain" else _Page
        kind(arguments.script, path, arguments.model).run(arguments.args)
        return 0
    if arguments.command == "run":
        _run(parser, arguments)
    if arguments.command == "cache":
        return _cache(arguments)
    from multigraph_backend import doctor

    diagnosis = doctor.diagnose(self_test=arguments.self_test, timeout=arguments.timeout)
    print(diagnosis.to_json() if arguments.json else diagnosis)
    return diagnosis.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m multigraph_backend", description="multigraph, a backend for torch.compile"
    )
    parser.add_argument("--version", action="version", version=f"multigraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and this environment",
        description="Checks versions, the backend's name, the C++ compiler, GPUs, caches and variables of the "
        "environment, then compiles a small function and compares it with eager.",
        epilog="exit status: 0 no error, 1 an error, 2 wrong usage",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--no-self-test", dest="self_test", action="store_false", help="compile nothing")
    doctor.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="SECONDS", help="for the self-test on each device (300)"
    )
    run = commands.add_parser(
        "run",
        help="run a program with multigraph in place of Inductor",
        usage="python -m multigraph_backend run [-h] [--options FILE] (SCRIPT | -m MODULE) [args ...]",
        description="Runs SCRIPT or MODULE as python does, with torch told to hand what asks for Inductor to "
        "multigraph (TORCH_COMPILE_OVERRIDE_BACKENDS), in this process and in those that it starts. Modes and options "
        "of Inductor that the program names are honoured. With several ranks: torchrun ... -m multigraph_backend run "
        "SCRIPT.",
        epilog="exit status: the program's; 2 wrong usage",
    )
    run.add_argument("--options", metavar="FILE", help="options by the names of models, as for MULTIGRAPH_OPTIONS")
    run.add_argument("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module and its arguments")
    run.add_argument("program", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    explain = commands.add_parser(
        "explain",
        help="run a script, then print what multigraph did for it",
        description="Runs SCRIPT as python does, and prints what multigraph compiled and ran in that process when the "
        "process ends, also by an exception or sys.exit. Graphs are kept in memory until then.",
        epilog="exit status: the script's; 2 wrong usage. A script that a signal or os._exit ends has no account.",
    )
    explain.add_argument("--json", metavar="PATH", help="write JSON to PATH (-: to stdout) in place of the text")
    report = commands.add_parser(
        "report",
        help="run a script, then write what multigraph did for it as a page for a browser",
        description="Runs SCRIPT as python does, and writes one page of HTML, which loads nothing from anywhere, when "
        "the process ends, also by an exception or sys.exit. Graphs are kept in memory until then.",
        epilog="exit status: the script's; 2 wrong usage. A script that a signal or os._exit ends has no page.",
    )
    report.add_argument(
        "--output", "-o", metavar="PATH", default="multigraph.html", help="the page (multigraph.html; -: to stdout)"
    )
    for command in (explain, report):
        command.add_argument("--model", metavar="GLOB", help="only graphs of module classes or functions of that name")
        command.add_argument("script", metavar="SCRIPT", help="a Python file")
        command.add_argument("args", metavar="args", nargs=argparse.REMAINDER, help="arguments of the script")
    cache = commands.add_parser(
        "cache",
        help="compiled code in one file, for the next machine",
        description="save: what earlier processes used, as their manifests say, goes out of torch's caches into FILE. "
        "load: back into torch's caches, from which later processes start. A FILE runs code where it is loaded: one of "
        "another user, torch or kind of machine, or that others may write to, is refused.",
        epilog="exit status: 0 done, 1 refused or failed, 2 wrong usage",
    )
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    save = actions.add_parser("save", help="write FILE")
    save.add_argument("--model", metavar="GLOB", help="only graphs of module classes or functions of that name")
    save.add_argument("file", metavar="FILE")
    actions.add_parser("load", help="read FILE").add_argument("file", metavar="FILE")
    return parser


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NoReturn:
    program = arguments.program if arguments.module is None else ["-m", *arguments.module]
    if not program or program == ["-m"]:
        parser.error("run takes a Python file, or -m and a module")
    if program[0] != "-m" and not os.path.exists(program[0]):
        parser.error(f"there is no file {program[0]!r}")
    try:
        environ = redirect.program_environment(os.environ, arguments.options)
    except (redirect.CannotRedirect, OptionsError) as problem:
        parser.error(str(problem))
    redirect.run(program, environ)


def _cache(arguments: argparse.Namespace) -> int:
    from multigraph_backend.region import warm_start

    try:
        if arguments.action == "save":
            print(f"saved {warm_start.save_cache(arguments.file, arguments.model)} in {arguments.file}")
        else:
            print(f"loaded {warm_start.load_cache(arguments.file)} from {arguments.file}")
    except (OSError, warm_start.CacheRefused) as problem:
        print(f"multigraph: {problem}", file=sys.stderr)
        return 1
    return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of seconds greater than 0, not {text!r}")
    return value


# ---------------------------------------------------------------- explain


class _Account:
    """Runs a script and gives account of it when the process ends.

    The account is given at exit, after the script's own exit functions and threads, so that the script's exit status
    and its traceback are left to Python.  Only the frames of this module are taken out of the traceback.
    """

    def __init__(self, script: str, path: str | None, model: str | None) -> None:
        self.script = script
        self.path = os.path.abspath(path) if path not in (None, "-") else path
        self.model = model
        self.process = os.getpid()
        self.interrupted = False
        self.globals: dict[str, Any] = {}  # kept: the script's threads and exit functions use what is in them

    def run(self, args: Sequence[str]) -> None:
        """Run the script in this process, as `python SCRIPT args...` does.  Raises what it raises."""
        path = os.path.abspath(self.script)
        sys.argv[:] = [path, *args]
        if not sys.flags.safe_path:  # else neither the current folder nor the script's is to be searched
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        registry.keep()  # regions end with their model, often before the script does
        sys.excepthook = _without_our_frames(sys.excepthook)
        atexit.register(self.give)
        try:
            self.globals = runpy.run_path(path, run_name="__main__")
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def give(self) -> None:
        """Write the account."""
        if os.getpid() != self.process:  # a fork of the script
            return
        text = self._text()
        registry.release()  # before the interpreter takes down what they stand on
        try:
            if self.path in (None, "-"):
                print(text, flush=True)
            else:
                assert self.path is not None
                self._write(text, self.path)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: no error at exit
        except OSError as error:
            print(f"multigraph: the account of {self.script} could not be written: {error}", file=sys.stderr)
        if self.interrupted:  # python ends so for a script, but not for a module
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(self.process, signal.SIGINT)

    def _write(self, text: str, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    def _text(self) -> str:
        if not registry.living():
            loaded = "multigraph_backend.region.region" in sys.modules
            return '{"regions": []}' if self.path is not None else "\n".join(self._nothing(loaded))
        from multigraph_backend.report import explain

        account = explain(self.model)
        if self.path is not None:
            return account.to_json()
        if not account.regions:
            functions = sorted({entry.function for entry in explain().regions})
            return f"multigraph: no graph of a model {self.model!r}; {self.script} has graphs of {', '.join(functions)}"
        return f"multigraph: what {self.script} compiled and ran\n{account}"

    def _nothing(self, loaded: bool) -> Iterator[str]:
        from multigraph_backend.doctor.settings import switches_in_force

        yield f"multigraph: {self.script} compiled nothing with multigraph"
        switches = switches_in_force(os.environ)
        for finding in switches:
            yield f"  {finding.text}\n  remedy: {finding.remedy}"
        if switches:
            return
        if "torch" not in sys.modules:
            yield "  it did not import torch in this process"
        elif not loaded:
            yield '  no call of what torch.compile(..., backend="multigraph") returned was traced'
        else:
            from multigraph_backend.report import explain

            yield "  the backend was loaded, but Dynamo handed it no graph"
            yield from (f"  {line}" for line in str(explain()).splitlines()[1:])
        yield (
            '  remedy: pass backend="multigraph" to torch.compile and call what it returns, or, where another one is '
            'named, set TORCH_COMPILE_OVERRIDE_BACKENDS=">=0:multigraph"; TORCH_LOGS=graph_breaks '
            "shows what Dynamo leaves to Python, and `python -m multigraph_backend doctor` checks the installation"
        )


class _Page(_Account):
    """The same, given as a page.  What became of it is said on stderr, so that stdout is the script's own."""

    def _write(self, text: str, path: str) -> None:
        super()._write(text, path)
        print(f"multigraph: what {self.script} compiled and ran is in {path}", file=sys.stderr)

    def _text(self) -> str:
        title = f"multigraph: what {self.script} compiled and ran"
        if not registry.living():
            said = list(self._nothing("multigraph_backend.region.region" in sys.modules))
            if "torch" not in sys.modules:
                from multigraph_backend import page

                return page.render({}, title=title, said=said)
        else:
            said = [f"There is no graph of a model {self.model!r}."] if self.model is not None else []
        from multigraph_backend.report import explain

        return explain(self.model).to_html(title=title, said=said)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _without_our_frames(hook: _Hook) -> _Hook:
    """Print a traceback from the script's first frame on."""
    ours = {__file__, runpy.run_path.__code__.co_filename}

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return show


if __name__ == "__main__":
    sys.exit(main())
