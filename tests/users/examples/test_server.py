"""The server as an operator runs it: a process of its own, asked over HTTP, driven by its load generator, and ended.

Needs the extra `server` (`pip install -e ".[server]"`).  The compiler is "aot_eager", from `quick.json`: what the
models write is compared with transformers' own `generate`, one request at a time.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "server"


class Running:
    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        environment = {**os.environ, "MULTIGRAPH_OPTIONS": f"@{FOLDER / 'quick.json'}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(FOLDER / "serve.py"), "--quick", "--device", "cpu", "--port", str(port)]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def get(self, address: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.url}{address}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ask(self, model: str, prompt: list[int], new_tokens: int) -> tuple[int, dict[str, Any]]:
        body = json.dumps({"model": model, "prompt": prompt, "new_tokens": new_tokens}).encode()
        asked = urllib.request.Request(f"{self.url}/generate", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_until_ready(self, seconds: float = 600) -> list[int]:
        """Answers of /ready until it says yes."""
        seen, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                status, said = self.get("/ready")
            except urllib.error.URLError:  # it does not listen yet
                time.sleep(0.2)
                continue
            seen.append(status)
            if status == 503 and len(seen) == 1:
                assert self.ask("chat", [1], 1) == (503, {"error": "the server is not ready yet"})
            if status == 200:
                return seen
            assert "failed" not in json.loads(said), said
            time.sleep(0.2)
        raise AssertionError(f"not ready: {said}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("server") / "log")
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("slot_model").language_models("cpu", quick=True)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("slot_model", None)


def expected(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    asked = torch.tensor([prompt])
    with torch.inference_mode():
        written = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),  # else a 0 in the prompt is taken for padding
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    tokens: list[int] = written[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_server_from_its_start_to_its_end(server: Running, models: dict[str, Any]) -> None:
    seen = server.wait_until_ready()
    assert seen[-1] == 200
    assert set(seen[:-1]) <= {503}  # not ready before all is compiled

    # more requests than slots, of all models, at once
    chance = torch.Generator().manual_seed(1)
    asked = []
    for number in range(24):
        length, new = (int(torch.randint(1, 30, (), generator=chance)) for _ in range(2))
        prompt = torch.randint(256, (length,), generator=chance).tolist()
        asked.append((("chat", "draft", "code")[number % 3], prompt, new))
    answers: dict[int, tuple[int, dict[str, Any]]] = {}
    threads = [
        threading.Thread(target=lambda at=at, said=said: answers.update({at: server.ask(*said)}))
        for at, said in enumerate(asked)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, (model, prompt, new) in enumerate(asked):
        assert answers[at] == (200, {"tokens": expected(models[model], prompt, new)}), (at, model)

    endless: Any = float("inf")
    wrong = (("chat", [], 4), ("chat", [1], 0), ("chat", [999], 4), ("none", [1], 4), ("chat", [1], endless))
    for model, prompt, new in wrong:
        status, said = server.ask(model, prompt, new)
        assert status == 400, said

    # what an operator sees
    status, text = server.get("/metrics")
    assert status == 200
    counts = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            counts[sample] = float(value)
    assert counts['server_tokens_total{model="chat"}'] == sum(new for model, _, new in asked if model == "chat")
    assert counts["multigraph_after_seal_total"] == 0  # nothing was compiled for a request
    assert counts["multigraph_eager_calls_total"] == counts["multigraph_failures_total"] == 0
    labelled = [sample for sample in counts if sample.startswith("multigraph_model_calls_total")]
    assert any("chat" in sample and "input_ids[0] == 8" in sample for sample in labelled), labelled
    assert {name for name in models if any(f'forward, {name}"' in sample for sample in labelled)} == set(models)
    status, page = server.get("/explain")
    assert (status, page.splitlines()[0]) == (200, "<!doctype html>")

    # the load generator
    command = [
        sys.executable,
        str(FOLDER / "load.py"),
        "--url",
        server.url,
        "--rate",
        "50",
        "--requests",
        "30",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    load = json.loads(done.stdout)
    assert (load["requests"], load["failed"]) == (30, 0)
    assert 0 < load["p50_seconds"] <= load["p99_seconds"]

    # a request that is here gets its answer after SIGTERM
    late: list[tuple[int, dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: late.append(server.ask("chat", [1, 2, 3], 120)))
    thread.start()
    until = time.monotonic() + 30
    while "server_running" not in (text := server.get("/metrics")[1]) or 'running{model="chat"} 1.0' not in text:
        assert time.monotonic() < until
        assert thread.is_alive(), late
    server.process.send_signal(signal.SIGTERM)
    thread.join(timeout=120)
    assert late == [(200, {"tokens": expected(models["chat"], [1, 2, 3], 120)})]
    assert server.process.wait(timeout=60) in (0, -signal.SIGTERM), server.log.read_text()[-3000:]
    log = server.log.read_text()
    assert "Traceback" not in log, log[-3000:]
