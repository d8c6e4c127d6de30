"""How files of programs from outside run them: each in a process of its own, several at a time.

In:  what such a file has defined, functions `ordinary_00_...` and `hostile_00_...` that raise where something is wrong,
and `Skip` where a machine lacks something.  Out: a line for each, what failed in full, and the exit status.
"""

import argparse
import concurrent.futures
import os
import random
import re
import signal
import subprocess
import sys
import time

import torch

SKIPPED = 77
ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Failed|Asleep|Sealed|Unsupported|Stop)\b")


class Skip(Exception):
    """This machine cannot run the program: why."""


def run_one(program):
    """The exit status of a process that runs `program`."""
    torch.manual_seed(random.randrange(1 << 31))  # torch seeds devices when they start
    try:
        program()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Skip as reason:
        print(f"SKIP {reason}", flush=True)
        return SKIPPED
    return 0


def run_apart(file, name, seconds):
    """Run it in a process, and say how that went; its name and output where it failed."""
    began = time.monotonic()
    command = [sys.executable, os.path.abspath(file), "--one", name]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output, code = (output or "") + f"\ntimed out after {seconds} s", -1
    took = time.monotonic() - began
    lines = [line for line in output.splitlines() if line.strip()]
    if code == 0:
        print(f"ok {name} {took:.1f}", flush=True)
        return None
    if code == SKIPPED:
        reason = next((line[5:] for line in reversed(lines) if line.startswith("SKIP ")), "")
        print(f"skip {name} {reason}", flush=True)
        return None
    errors = [line for line in lines if ERROR.match(line)]
    last = f"exit status {code}; {lines[-1] if lines else 'no output'}" if code < 0 or not errors else errors[-1]
    print(f"FAIL {name} {last[:300]}", flush=True)
    return name, output


def main(file, found, alone=(), seconds=120):
    """`found`: what the file has defined; `alone`: names of programs that run beside nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.one:
        return run_one(found[arguments.one])
    every = [name for name in found if re.match(r"(ordinary|hostile)_\d\d_", name)]
    names = [
        name for name in every if not arguments.names or any(name.startswith(wanted) for wanted in arguments.names)
    ]
    with concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as workers:
        together = [name for name in names if name not in alone]
        results = list(workers.map(lambda name: run_apart(file, name, seconds), together))
    results += [run_apart(file, name, seconds) for name in names if name in alone]
    failures = [failure for failure in results if failure]
    for name, output in failures:
        print(f"\n===== {name}\n{output[-8000:]}")
    return 1 if failures else 0
