"""What one client waits while others send requests that are small and cost much.

The probe asks for two tokens, again and again, beside every attack; then ten times too much of
mixed work. Everything stays on this machine, and every loop ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

import forerun
from benchmarks.common import provenance, save, table
from benchmarks.serve_load import Served, serving

PATH = "/v1/completions"
AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z ]/"
SCORED = {"prompt": [5] * 1000, "echo": True, "logprobs": 5, "max_tokens": 0}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}


@dataclass
class Outcome:
    """What the probe saw beside an attack."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    """Of the attack's own requests; 0 where the client left."""
    left: float = 0.0
    """Seconds until nothing ran or waited, after the attack."""

    def row(self, name: str) -> list[Any]:
        """Of the table."""
        at = np.percentile(self.seconds, [50, 99, 100])
        answers = ", ".join(f"{n} × {status or 'left'}" for status, n in self.statuses.items())
        return [name, len(self.seconds), *(round(float(t), 3) for t in at), answers,
                round(self.left, 2)]  # fmt: skip


Attack = Callable[[httpx2.AsyncClient, Outcome], Awaitable[Any]]


async def post(http: httpx2.AsyncClient, out: Outcome, body: Any, timeout: float = 120.0) -> None:
    """One request of an attack."""
    try:
        answer = await http.post(PATH, json=body, timeout=timeout)
        out.statuses[answer.status_code] += 1
    except (httpx2.TimeoutException, httpx2.TransportError):
        out.statuses[0] += 1


def copies(count: int, body: Any, timeout: float = 120.0) -> Attack:
    """The same request so many times at once."""

    async def attack(http: httpx2.AsyncClient, out: Outcome) -> None:
        await asyncio.gather(*(post(http, out, body, timeout) for _ in range(count)))

    return attack


async def half_open(http: httpx2.AsyncClient, out: Outcome) -> None:
    """Two hundred connections with half a head."""
    address = http.base_url.host, http.base_url.port
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(b"POST /v1/compl")
        await asyncio.sleep(2)


def grammar(text: str) -> dict[str, Any]:
    """A request that a grammar holds."""
    return {"prompt": "Once", "max_tokens": 200, "guided_grammar": text}


ATTACKS: dict[str, Attack] = {
    "nothing": lambda http, out: asyncio.sleep(3),
    "an ambiguous grammar": copies(1, grammar(AMBIGUOUS)),
    "8 ambiguous grammars": copies(8, grammar(AMBIGUOUS)),
    "1,024 prompts × 128": copies(8, {"prompt": ["a"] * 1024, "n": 128, "max_tokens": 2}),
    "100 scorings of 1,000 tokens": copies(100, SCORED),
    "40 scorings, left after 1 s": copies(40, SCORED, timeout=1.0),
    "2,000 optional properties": copies(1, {"prompt": "x", "max_tokens": 64, "guided_json": WIDE}),
    "a schema 2,000 deep": copies(8, {"prompt": "x", "guided_json": "[" * 2000}),
    "prompts of 4 MB": copies(4, {"prompt": "a b " * 1_000_000}),
    "200 half heads": half_open,
}


async def probe(url: str, out: Outcome, ended: asyncio.Event) -> None:
    """Ask for two tokens, a tenth of a second after each answer."""
    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        while not ended.is_set():
            began = time.perf_counter()
            answer = await http.post(PATH, json={"prompt": "Once", "max_tokens": 2})
            if answer.status_code != 429:
                answer.raise_for_status()
                out.seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)


async def busy(http: httpx2.AsyncClient) -> bool:
    """Whether anything runs or waits."""
    lines = (await http.get("/metrics")).text.splitlines()
    counts = (float(line.split()[-1]) for line in lines if ":num_requests_" in line
              and not line.startswith("#"))  # fmt: skip
    return any(counts)


async def beside(url: str, attack: Attack) -> Outcome:
    """The probe beside an attack, and how long its work outlives it."""
    out, ended = Outcome(), asyncio.Event()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=limits) as http:
        probing = asyncio.ensure_future(probe(url, out, ended))
        await asyncio.sleep(0.5)
        await attack(http, out)
        ended.set()
        await probing
        began = time.perf_counter()
        while await busy(http):
            await asyncio.sleep(0.02)
            assert time.perf_counter() - began < 120, "work is left"
        out.left = time.perf_counter() - began
    return out


def mixed() -> Iterator[dict[str, Any]]:
    """A third scores, a third is held to a schema, a third just writes."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds = (
        SCORED,
        {"prompt": "Once", "max_tokens": 32, "guided_json": schema},
        {"prompt": "Once upon a time", "max_tokens": 64},
    )
    return itertools.cycle(kinds)


async def overload(http: httpx2.AsyncClient, out: Outcome) -> None:
    """Ten times what rows and queue hold, at once."""
    bodies = itertools.islice(mixed(), 10 * (4 + 16))
    await asyncio.gather(*(post(http, out, body, 300.0) for body in bodies))


def measure(server: Served, names: list[str]) -> dict[str, Outcome]:
    """The attacks one after the other."""
    return {name: asyncio.run(beside(server.url, ATTACKS[name])) for name in names}


def main(model: forerun.Model, names: list[str]) -> None:
    """Measure, save and show."""
    with serving() as server:
        outcomes = measure(server, names or list(ATTACKS))
    if not names:
        with serving("--max-rows", "4", "--queue", "16") as server:
            outcomes["10 × overload, mixed"] = asyncio.run(beside(server.url, overload))
        assert set(outcomes["10 × overload, mixed"].statuses) <= {200, 429}
    rows = [outcome.row(name) for name, outcome in outcomes.items()]
    head = ["beside", "probes", "median s", "99 % s", "most s", "its answers", "left after s"]
    results = [dict(zip(head, row, strict=True)) for row in rows]
    save("fairness", provenance(model), results, table(head, rows))


if __name__ == "__main__":
    main(forerun.load(), sys.argv[1:])
