"""`python -m multigraph_backend run SCRIPT`: a program as it is, with multigraph in place of Inductor.

torch reads the variable `TORCH_COMPILE_OVERRIDE_BACKENDS` (2.11 on) and hands graphs to the backend that it names,
whatever a program or a library of it has given to `torch.compile`.  So nothing is patched, and what the program starts
itself (ranks, workers of data loaders) inherits it.

In:  the arguments of the command, the environment.  Out: this process runs the program, as `python` would run it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import NoReturn

from multigraph_backend import environment

OVERRIDE = "TORCH_COMPILE_OVERRIDE_BACKENDS"
EVERYTHING = ">=0:multigraph"  # graphs by their number, and the backend


class CannotRedirect(Exception):
    """The program cannot be run so; the message says why and what to do."""


def backends(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The backends that the variable names."""
    rules = [rule.partition(":") for rule in environ.get(OVERRIDE, "").split(";")]
    return tuple(dict.fromkeys(backend.strip() for _, colon, backend in rules if colon))


def in_force(environ: Mapping[str, str]) -> bool:
    """Whether the variable names multigraph and nothing else."""
    return backends(environ) == ("multigraph",)


def program_environment(environ: Mapping[str, str], options: str | None) -> dict[str, str]:
    """The environment of the program.  Raises CannotRedirect, and OptionsError for what is wrong in the file."""
    made = dict(environ)
    if environ.get(OVERRIDE) and not in_force(environ):
        raise CannotRedirect(f"{OVERRIDE}={environ[OVERRIDE]} names another backend; unset it")
    made.setdefault(OVERRIDE, EVERYTHING)
    if not made[OVERRIDE]:
        made[OVERRIDE] = EVERYTHING
    if not entry_points(group="torch_dynamo_backends", name="multigraph"):
        raise CannotRedirect("torch does not find multigraph by its name: install the package (pip install multigraph)")
    if options is not None:
        made[environment.VARIABLE] = f"@{os.path.abspath(os.path.expanduser(options))}"
        environment.entries(made)
    return made


def run(program: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become `python PROGRAM...` with this environment, and with the interpreter's own options."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *interpreter_options(sys.orig_argv, sys.argv), *program], environ)


def interpreter_options(given: Sequence[str], argv: Sequence[str]) -> list[str]:
    """What stands before `-m multigraph_backend`, or the path of it, in the command line `given`."""
    head = list(given[1 : len(given) - len(argv) + 1])
    if head[-1:] == ["multigraph_backend"] and head[-2:-1] and head[-2].startswith("-"):
        others = head[-2].removesuffix("m")  # of `-um`
        return [*head[:-2], *([others] if others != "-" else [])]
    return head[:-1]
