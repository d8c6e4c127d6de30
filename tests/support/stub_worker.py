"""A worker that does what the job says, in place of a compile: for tests of the processes alone, without torch.

sleep SECONDS | hang | exit STATUS | kill | raise | memory | child SECONDS | fine
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from multigraph_backend.lower.worker import Hello, Job, Outcome, serve


def hello() -> Hello:
    said = os.environ["STUB_HELLO"].split()
    return Hello(said[0], said[1])


def do(job: Job) -> Outcome:
    what, _, how = job.parcel.decode().partition(" ")
    if what == "sleep":
        time.sleep(float(how))
    elif what == "hang":
        threading.Event().wait()
    elif what == "exit":
        print("last words", flush=True)
        os._exit(int(how))
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        return Outcome("failed", reason="CompileError: no such thing", details="Traceback: ...")
    elif what == "child":
        subprocess.Popen(["sleep", how])
        threading.Event().wait()
    return Outcome("made", 0.5, reason=str(os.getpid()))


if __name__ == "__main__":
    serve(int(sys.argv[1]), hello, do)
