"""How far a long phase is: tqdm's bar on a terminal where tqdm is installed, else a plain line now and then."""

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any

EVERY = 5.0  # seconds between plain lines


class Progress:
    """`at(done, note)` as often as one likes; shows itself on standard error."""

    def __init__(self, phase: str, total: float, unit: str) -> None:
        self.phase, self.total, self.unit = phase, total, unit
        self.began = time.monotonic()
        self.said = -EVERY
        self.note = ""
        self.bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            shape = "{desc} {percentage:3.0f}%|{bar:30}| {n:.0f}/{total:.0f} " + unit + " [{elapsed}]{postfix}"
            self.bar = tqdm(desc=phase, total=total, bar_format=shape)

    def at(self, done: float, note: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(min(done, self.total) - self.bar.n)
            # what may take long must be on the screen before it begins
            if "compile" in note and note != self.note:
                self.bar.refresh()
        else:
            now = time.monotonic() - self.began
            if now - self.said >= EVERY or ("compile" in note and note != self.note) or done >= self.total:
                if note != self.note or done < self.total:
                    shown = f"{min(done, self.total):.0f}/{self.total:.0f} {self.unit}"
                    print(f"{self.phase}: {shown}, {note} [{now:.0f} s]", file=sys.stderr, flush=True)
                self.said = now
        self.note = note

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
