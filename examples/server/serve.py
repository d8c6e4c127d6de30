"""A small server: three language models in one process, continuous batching, one options file.

    pip install "multigraph[server]"
    MULTIGRAPH_OPTIONS=@models.json python serve.py --port 8000

    POST /generate  {"model": "chat", "prompt": [1, 2, 3], "new_tokens": 16}  ->  {"tokens": [...]}
    GET  /ready     200 once all that the options declare is compiled; 503 with what is missing before that
    GET  /metrics   counts for Prometheus: multigraph's, and this server's
    GET  /explain   multigraph's account, as a page

The options file names the models as `--models` does; without the variable, `models.json` beside this file is taken.
Ctrl-C or SIGTERM ends it: no new requests, the answers of those that are here, then the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from batching import Batcher, Conversations, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from slot_model import SlotModel, language_models
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import multigraph_backend

SLOTS, LENGTH = 8, 256


class Server:
    """The models, the thread that runs them, and what is asked about them."""

    def __init__(self, names: list[str], device: str, quick: bool, warm: bool) -> None:
        self.account: dict[str, Any] = {}
        self.failed: str | None = None
        self._warm = warm
        conversations = {}
        for name, model in language_models(device, quick).items():
            if name in names:
                slots = SlotModel(model, SLOTS, LENGTH)
                compiled = torch.compile(slots, backend="multigraph", dynamic=True, options={"name": name})
                conversations[name] = Conversations(name, slots, compiled, device)
        self.batcher = Batcher(conversations, self._prepare)
        self.registry = CollectorRegistry()
        self.registry.register(multigraph_backend.metrics.Collector())
        self.registry.register(self)

    def _prepare(self) -> None:
        """In the batcher's thread, before the first request: all that is declared is compiled, then sealed."""
        # torch's settings hold for the thread that makes them
        torch._dynamo.config.recompile_limit = 64  # Dynamo counts graphs by the code: all models here have the same
        torch._dynamo.config.specialize_float = True  # what a model's configuration holds is no input
        for name, model in self.batcher.models.items():
            if not self._warm:
                continue
            try:
                self.account[name] = multigraph_backend.warmup(model.compiled, model.examples())
                logging.info("%s: %s", name, self.account[name])
            except Exception as error:  # requests are served all the same; /ready says so
                logging.exception("%s: the warm-up failed", name)
                self.failed = f"{name}: {error}"
        if self._warm:
            multigraph_backend.seal("log")
            gc.collect()
            gc.freeze()  # what compiles have left is looked through no more, in the midst of a request

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        said = {
            name: "ready" if account.ready else {"missing": account.missing, "calls": [str(c) for c in account.calls]}
            for name, account in dict(self.account).items()
        }
        ready = (
            self.batcher.prepared.is_set() and self.failed is None and all(entry == "ready" for entry in said.values())
        )
        return ready, {"ready": ready, "models": said, **({"failed": self.failed} if self.failed else {})}

    def collect(self) -> Iterator[Any]:
        """What Prometheus asks of the server itself."""
        models = self.batcher.models.values()
        for family, values in (
            (CounterMetricFamily("server_tokens", "Tokens written", labels=["model"]), [m.tokens for m in models]),
            (CounterMetricFamily("server_steps", "Steps of decoding", labels=["model"]), [m.steps for m in models]),
            (GaugeMetricFamily("server_running", "Being decoded", labels=["model"]), [len(m.running) for m in models]),
            (GaugeMetricFamily("server_waiting", "Without a slot", labels=["model"]), [len(m.waiting) for m in models]),
        ):
            for model, value in zip(models, values, strict=True):
                family.add_metric([model.name], value)
            yield family

    # ---------------------------------------------------------------- addresses

    async def generate(self, http: HttpRequest) -> Response:
        try:
            asked = await http.json()
            model = self.batcher.models[asked["model"]]
            prompt = [int(token) for token in asked["prompt"]]
            request = Request(prompt, int(asked.get("new_tokens", 16)))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            return JSONResponse({"error": f"no request: {error!r}"}, status_code=400)
        wrong = model.too_long(request)
        if wrong is None and not all(0 <= token < model.model.model.config.vocab_size for token in prompt):
            wrong = "a token is none of the vocabulary"
        if wrong is not None:
            return JSONResponse({"error": wrong}, status_code=400)
        try:
            self.batcher.submit(model.name, request)
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        try:
            tokens = await asyncio.wrap_future(request.answer)
        except Exception as error:
            return JSONResponse({"error": repr(error)}, status_code=500)
        return JSONResponse({"tokens": tokens})

    async def ready(self, http: HttpRequest) -> Response:
        ready, said = self.readiness()
        return JSONResponse(said, status_code=200 if ready else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def explain(self, http: HttpRequest) -> Response:
        return HTMLResponse(await asyncio.to_thread(lambda: multigraph_backend.explain().to_html(title="server")))

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.batcher.start()
            yield
            await asyncio.to_thread(self.batcher.stop)

        routes = [Route("/generate", self.generate, methods=["POST"])]
        routes += [Route(f"/{name}", getattr(self, name)) for name in ("ready", "metrics", "explain")]
        return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve three small language models through multigraph.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--models", default="chat,draft,code", help="which, by name (default: all three)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="smaller models")
    parser.add_argument("--no-warmup", action="store_true", help="compile when a request needs it")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    os.environ.setdefault("MULTIGRAPH_OPTIONS", f"@{Path(__file__).with_name('models.json')}")
    server = Server(arguments.models.split(","), arguments.device, arguments.quick, not arguments.no_warmup)
    uvicorn.run(server.app(), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
