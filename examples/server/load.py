"""A load generator for serve.py: requests that come at random, of lengths as they are, and what became of them.

    python load.py --url http://127.0.0.1:8000 --rate 20 --requests 200

Arrivals are a Poisson process of `rate` requests a second; a request does not wait for the one before.  Lengths of
prompts and answers follow Zipf's law, between bounds: most are short, some are long.  The same seed gives the same
requests.  Prints throughput, and the 50th and 99th percentile of the seconds that a request took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


def zipf(chance: random.Random, least: int, most: int, exponent: float = 1.1) -> int:
    """A length between `least` and `most`: the k-th shortest is k**exponent times as rare as the shortest."""
    lengths = range(least, most + 1)
    return chance.choices(lengths, [1 / (rank + 1) ** exponent for rank in range(len(lengths))])[0]


@dataclass
class Load:
    """What became of the requests."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0
    took: float = 0.0

    def percentile(self, part: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")

    def to_dict(self) -> dict[str, float]:
        return {
            "requests": len(self.seconds),
            "failed": self.failed,
            "requests_per_second": len(self.seconds) / self.took,
            "tokens_per_second": self.tokens / self.took,
            "p50_seconds": self.percentile(0.5),
            "p99_seconds": self.percentile(0.99),
        }


def requests(count: int, models: list[str], seed: int, longest: int = 64, most_new: int = 32) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "model": chance.choice(models),
            "prompt": [chance.randrange(256) for _ in range(zipf(chance, 4, longest))],
            "new_tokens": zipf(chance, 4, most_new),
        }
        for _ in range(count)
    ]


async def drive(url: str, asked: list[dict[str, Any]], rate: float, seed: int) -> Load:
    load, chance = Load(), random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(request: dict[str, Any]) -> None:
            began = time.perf_counter()
            try:
                answer = await client.post("/generate", json=request)
                answer.raise_for_status()
                load.tokens += len(answer.json()["tokens"])
                load.seconds.append(time.perf_counter() - began)
            except httpx.HTTPError as error:
                print(f"failed: {error!r}", file=sys.stderr)
                load.failed += 1

        began, pending, at = time.perf_counter(), [], 0.0
        for request in asked:
            at += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            pending.append(asyncio.create_task(one(request)))
        await asyncio.gather(*pending)
        load.took = time.perf_counter() - began
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description="Drive serve.py with random requests.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second, on average")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--models", default="chat,draft,code")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    asked = requests(arguments.requests, arguments.models.split(","), arguments.seed)
    load = asyncio.run(drive(arguments.url, asked, arguments.rate, arguments.seed))
    said = load.to_dict()
    if arguments.json:
        print(json.dumps(said))
    else:
        print(f"{said['requests']} requests, {load.failed} failed, in {load.took:.1f} s")
        print(f"throughput: {said['requests_per_second']:.1f} requests/s, {said['tokens_per_second']:.0f} tokens/s")
        print(f"latency: p50 {1000 * said['p50_seconds']:.0f} ms, p99 {1000 * said['p99_seconds']:.0f} ms")
    return 1 if load.failed else 0


if __name__ == "__main__":
    sys.exit(main())
