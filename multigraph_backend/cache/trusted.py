"""Which files are read at all, and how they are written.

torch's caches hold pickles: who can write one runs code in the process that reads it.  So a file is read only if nobody
else could have written it: it belongs to this user or to root, and neither its group nor others may write to it.  Files
are written whole or not at all, for this user alone.

In: paths and limits of bytes.  Out: bytes, or `Refused` with the reason.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


class Refused(ValueError):
    """A file is not what it should be, or somebody else could have written it; the message says which."""


def read(path: Path, most: int, *, shared_group: bool = False) -> bytes:
    """What is in `path`, at most `most` bytes of it.

    `shared_group`: its group may be able to write to it, as with files that torch wrote under a umask of 002.
    Raises `Refused`, and OSError where it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # what is no file must not be waited for
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("it is no regular file")
        if (problem := _foreign(found, shared_group)) is not None:
            raise Refused(problem)
        if found.st_size > most:
            raise Refused(f"it has {found.st_size} bytes, and at most {most} are read")
        with open(file, "rb", closefd=False) as stream:
            content = stream.read(most + 1)
        if len(content) > most:  # it grew
            raise Refused(f"it has more than {most} bytes")
        return content
    finally:
        os.close(file)


def own_folder(path: Path) -> Path:
    """`path` as a folder that only this user can write to, made where there is none.  Raises as `read` does."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (problem := _foreign(path.stat(), shared_group=False)) is not None:
        raise Refused(problem)
    return path


def _foreign(found: os.stat_result, shared_group: bool) -> str | None:
    """Why somebody else may have written it, None if nobody could."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
    if found.st_mode & (stat.S_IWOTH if shared_group else stat.S_IWOTH | stat.S_IWGRP):
        return (
            f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w where you trust what is in it"
        )
    return None


def write(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Put `content` into `path`, which others see whole or not at all.  Raises OSError, which names `path`.

    `durable`: also if the machine loses power; without, it is written faster, and its digest has to tell.
    """
    try:
        _write(path, content, durable)
    except OSError as problem:  # names the file beside it, which nobody asked for
        if problem.errno is None or problem.filename is None:
            raise
        raise OSError(problem.errno, problem.strerror, os.fspath(path)) from problem


def _write(path: Path, content: bytes, durable: bool) -> None:
    file, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)  # for this user alone
    try:
        with open(file, "wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
