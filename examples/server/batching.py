"""Continuous batching: requests join and leave a running batch between two steps.

A `Conversations` has the slots of one model.  A request waits for a free slot, is prefilled alone, and from then on
takes part in each step of decoding, until it has its tokens.  `Batcher` runs all models in one thread, in turns: one
device does one thing at a time, and recordings of CUDA graphs belong to the thread that calls.

Sizes of calls are those that the options file declares: a prompt is padded to the next of `PROMPTS` tokens, a batch to
the next of `BATCHES` rows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch
from slot_model import SlotModel
from torch import Tensor

log = logging.getLogger(__name__)

PROMPTS: tuple[int, ...] = (16, 32, 64, 128)
BATCHES: tuple[int, ...] = (1, 2, 4, 8)

Compiled = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Request:
    """Tokens to continue, and how many to write; `answer` gets what was written, or an error."""

    prompt: Sequence[int]
    new_tokens: int
    answer: Future[list[int]] = field(default_factory=Future)
    came: float = field(default_factory=time.monotonic)
    written: list[int] = field(default_factory=list)
    slot: int = -1

    @property
    def position(self) -> int:
        """Where its last token stands, which the next step reads."""
        return len(self.prompt) + len(self.written) - 1


class Conversations:
    """The requests of one model, and its slots."""

    def __init__(self, name: str, model: SlotModel, compiled: Compiled, device: str) -> None:
        self.name, self.model, self.compiled, self.device = name, model, compiled, device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free = list(range(model.slots))
        self.steps = self.tokens = 0

    def examples(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """A step of decoding and a prefill, the largest of each, for a warm-up."""
        rows, tokens = BATCHES[-1], PROMPTS[0]
        zeros = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        prompt = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
        places = torch.arange(tokens, device=self.device)[None]
        return [
            (zeros, zeros.clone(), torch.arange(rows, device=self.device)),
            (prompt, places, torch.zeros(1, dtype=torch.long, device=self.device)),
        ]

    def too_long(self, request: Request) -> str | None:
        """Why a request cannot be served, None if it can."""
        if not 1 <= len(request.prompt) <= PROMPTS[-1]:
            return f"a prompt has 1 to {PROMPTS[-1]} tokens, not {len(request.prompt)}"
        most = self.model.length - len(request.prompt)
        return None if 1 <= request.new_tokens <= most else f"new_tokens is 1 to {most}, not {request.new_tokens}"

    def advance(self) -> bool:
        """One prefill if a request waits and there is room, then one step for all; whether there was anything to do."""
        started = bool(self.waiting and self.free)
        if started:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            self._guarded([request], self._prefill)
        if self.running:
            self._guarded(self.running, self._step)
            started = True
        return started

    def _guarded(self, requests: list[Request], work: Callable[[list[Request]], None]) -> None:
        """An error is the answer of those that it came to; the others go on."""
        requests = list(requests)
        try:
            work(requests)
        except Exception as error:
            log.exception("%s: a step failed", self.name)
            for request in requests:
                self._end(request, error)

    def _prefill(self, requests: list[Request]) -> None:
        (request,) = requests
        length = len(request.prompt)
        padded = next(size for size in PROMPTS if size >= length)
        tokens = torch.zeros(1, padded, dtype=torch.long)
        tokens[0, :length] = torch.tensor(request.prompt)
        places, slot = torch.arange(padded)[None], torch.tensor([request.slot])
        logits = self.compiled(*(value.to(self.device) for value in (tokens, places, slot)))
        self.running.append(request)
        self._wrote(request, int(logits[0, length - 1].argmax()))

    def _step(self, requests: list[Request]) -> None:
        rows = next(size for size in BATCHES if size >= len(requests))
        tokens, places = torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 1, dtype=torch.long)
        slots = torch.full((rows,), self.model.slots)  # the one that nobody has
        for row, request in enumerate(requests):
            tokens[row, 0], places[row, 0], slots[row] = request.written[-1], request.position, request.slot
        logits = self.compiled(*(value.to(self.device) for value in (tokens, places, slots)))
        chosen = logits[:, -1].argmax(-1).tolist()
        self.steps += 1
        for row, request in enumerate(requests):
            self._wrote(request, chosen[row])

    def _wrote(self, request: Request, token: int) -> None:
        request.written.append(token)
        self.tokens += 1
        if len(request.written) == request.new_tokens:
            self._end(request, None)

    def _end(self, request: Request, error: Exception | None) -> None:
        if request in self.running:
            self.running.remove(request)
        if request.slot >= 0:
            self.free.append(request.slot)
            request.slot = -1
        with contextlib.suppress(InvalidStateError):  # who asked has gone
            if error is None:
                request.answer.set_result(request.written)
            else:
                request.answer.set_exception(error)


class Batcher:
    """The thread that runs all models; `prepare` runs in it first."""

    def __init__(self, models: dict[str, Conversations], prepare: Callable[[], None]) -> None:
        self.models, self._prepare = models, prepare
        self._changed, self._stopping = threading.Condition(), False
        self.prepared = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, name: str, request: Request) -> None:
        """Raises RuntimeError before the batcher is ready, and once it stops."""
        with self._changed:
            if self._stopping or not self.prepared.is_set():
                raise RuntimeError("the server is shutting down" if self._stopping else "the server is not ready yet")
            self.models[name].waiting.append(request)
            self._changed.notify()

    def stop(self) -> None:
        """Take no more requests, finish those that are here, end the thread; while it prepares it is not waited for."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self.prepared.is_set():
            self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            self._prepare()
            self.prepared.set()
            while True:
                busy = [model.advance() for model in self.models.values()]
                with self._changed:
                    if any(busy) or any(model.waiting for model in self.models.values()):
                        continue
                    if self._stopping:
                        return
                    self._changed.wait()
