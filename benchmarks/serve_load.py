"""The server under load: throughput and latency by clients, overload, and a soak."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

import forerun
from benchmarks.common import RESULTS, Task, console, provenance, save, table, tasks

MODES: dict[str, Any] = {
    "plain": False,
    "auto": {"controller": "auto"},
    "fixed(4)": {"controller": "fixed(4)"},
}
LATENCIES = (50, 99)


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    """`forerun serve` in a process of its own, on a free port."""
    command = [sys.executable, "-m", "forerun.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://[0-9.:]+", line):
                yield Served(found[0], process)
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait(30)


@dataclass
class Answer:
    """What became of one request."""

    task: int
    status: int = 0
    text: str = ""
    tokens: int = 0
    first: float = 0.0
    """Seconds to the first token."""
    between: float = 0.0
    """Seconds per token after the first frame's."""
    drafted: int = 0
    accepted: int = 0
    stamps: list[tuple[float, int]] = field(default_factory=list)
    """When how many tokens were there."""


async def ask(http: httpx2.AsyncClient, index: int, task: Task, mode: Any) -> Answer:
    """One streamed request, greedy."""
    out, began = Answer(index), time.perf_counter()
    body = {
        "prompt": task.tokens,
        "max_tokens": task.max_new_tokens,
        "temperature": 0,
        "repetition_penalty": task.repetition_penalty,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
        "speculative": mode,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        out.status = answer.status_code
        async for line in answer.aiter_lines():
            if not line.startswith("data: {") or out.status != 200:
                continue
            frame = json.loads(line[6:])
            if "error" in frame:
                out.status = 500
                break
            out.text += frame["choices"][0]["text"]
            out.tokens = frame["usage"]["completion_tokens"]
            out.stamps.append((time.perf_counter(), out.tokens))
            if "timings" in frame:
                out.drafted = frame["timings"]["draft_n"]
                out.accepted = frame["timings"]["draft_n_accepted"]
    if out.stamps:
        (start, first), (end, last) = out.stamps[0], out.stamps[-1]
        out.first = start - began
        out.between = (end - start) / (last - first) if last > first else 0.0
    return out


async def closed_loop(
    url: str, work: Sequence[Task], clients: int, seconds: float, mode: Any
) -> dict[str, Any]:
    """So many clients, each sending its next request when the last one is answered."""
    order, done = itertools.count(), []
    began = time.perf_counter()
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as http:

        async def client() -> None:
            while time.perf_counter() - began < seconds:
                index = next(order) % len(work)
                done.append(await ask(http, index, work[index], mode))

        await asyncio.gather(*(client() for _ in range(clients)))
    # Tokens of the time when all clients were busy: the ends are no load.
    end = began + seconds
    tokens = sum(max((n for at, n in a.stamps if at <= end), default=0) for a in done)
    assert all(a.status == 200 for a in done), Counter(a.status for a in done)
    first, between = ([getattr(a, name) for a in done] for name in ("first", "between"))
    return {
        "requests": len(done),
        "tokens_per_second": tokens / seconds,
        "ttft_ms": {str(p): 1e3 * float(np.percentile(first, p)) for p in LATENCIES},
        "tpot_ms": {str(p): 1e3 * float(np.percentile(between, p)) for p in LATENCIES},
        "acceptance": sum(a.accepted for a in done) / max(sum(a.drafted for a in done), 1),
    }


def curve(work: Sequence[Task], clients: Sequence[int], seconds: float) -> dict[str, Any]:
    """Every mode at every number of clients, modes side by side on one server."""
    cells: dict[str, Any] = {}
    with serving("--prefix-cache", "0") as server:
        for mode in MODES.values():
            asyncio.run(closed_loop(server.url, work, 16, 2.0, mode))
        for count in clients:
            for name, mode in MODES.items():
                console.print(f"{count} clients, {name}")
                cell = asyncio.run(closed_loop(server.url, work, count, seconds, mode))
                cell["seconds"] = seconds
                cells.setdefault(str(count), {})[name] = cell
    return cells


def overload(model: forerun.Model, work: Sequence[Task], seconds: float) -> dict[str, Any]:
    """Ten times as many requests as it can serve; every answer is compared with the engine's."""
    wanted = [
        model.generate(
            [t.tokens], plain=True, max_new_tokens=t.max_new_tokens,
            repetition_penalty=t.repetition_penalty,
        )[0].text
        for t in work
    ]  # fmt: skip

    async def offered(url: str, rate: float) -> list[Answer]:
        coin, began, running = random.Random(1), time.perf_counter(), []
        async with httpx2.AsyncClient(base_url=url, timeout=300, limits=httpx2.Limits()) as http:
            for i in itertools.count():
                if time.perf_counter() - began > seconds:
                    break
                index = i % len(work)
                running.append(asyncio.create_task(ask(http, index, work[index], MODES["auto"])))
                await asyncio.sleep(coin.expovariate(rate))
            return await asyncio.gather(*running)

    with serving("--queue", "32") as server:
        before = asyncio.run(closed_loop(server.url, work, 16, 8.0, MODES["auto"]))
        rate = 10 * before["requests"] / 8.0
        memory = [server.megabytes]
        done = asyncio.run(offered(server.url, rate))
        memory.append(server.megabytes)
        after = asyncio.run(closed_loop(server.url, work, 16, 8.0, MODES["auto"]))
        memory.append(server.megabytes)
    taken = [a for a in done if a.status == 200]
    return {
        "seconds": seconds,
        "offered_per_second": rate,
        "offered": len(done),
        "statuses": {str(k): v for k, v in Counter(a.status for a in done).items()},
        "answered_per_second": len(taken) / seconds,
        "differing_from_plain": sum(a.text != wanted[a.task] for a in taken),
        "ttft_ms": {str(p): 1e3 * float(np.percentile([a.first for a in taken], p))
                    for p in LATENCIES},
        "tokens_per_second_before": before["tokens_per_second"],
        "tokens_per_second_after": after["tokens_per_second"],
        "megabytes": memory,
    }  # fmt: skip


def soak(work: Sequence[Task], requests: int) -> dict[str, Any]:
    """Many short requests, one after the other by 16 clients: memory and acceptance over time."""
    parts: list[dict[str, float]] = []

    async def part(url: str, count: int) -> list[Answer]:
        order = iter(range(count))
        done: list[Answer] = []
        async with httpx2.AsyncClient(base_url=url, timeout=300) as http:

            async def client() -> None:
                for i in order:
                    index = i % len(work)
                    done.append(await ask(http, index, work[index], MODES["fixed(4)"]))

            await asyncio.gather(*(client() for _ in range(16)))
        return done

    with serving("--prefix-cache", "100MB") as server:
        for _ in range(10):
            done = asyncio.run(part(server.url, requests // 10))
            good = [a for a in done if a.status == 200]
            drafted = sum(a.drafted for a in good)
            parts.append(
                {
                    "answered": len(good),
                    "acceptance": sum(a.accepted for a in good) / max(drafted, 1),
                    "megabytes": server.megabytes,
                }
            )
        idle = httpx2.get(f"{server.url}/metrics").text
    left = re.findall(r"num_requests_(?:running|waiting)\S* ([0-9.]+)", idle)
    return {"requests": requests, "parts": parts, "rows_left": sum(map(float, left))}


def prefix(model: forerun.Model, turns: int) -> dict[str, Any]:
    """Long prompts sent twice: time to the first token when it was read before, and when not."""
    pairs: list[tuple[float, float]] = []

    async def twice(url: str, task: Task) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=300) as http:
            cold, warm = [await ask(http, 0, task, MODES["auto"]) for _ in range(2)]
        assert cold.text == warm.text
        pairs.append((1e3 * cold.first, 1e3 * warm.first))

    story = model.encode("There was a dog who lived near a forest, and a cat. " * 60)[:700]
    with serving() as server:
        for turn in range(turns + 1):
            asyncio.run(twice(server.url, Task("", [turn + 50, *story], 8)))
    cold, warm = zip(*pairs[1:], strict=True)
    out = {"prompt_tokens": len(story) + 1, "turns": turns}
    for name, values in (("cold_ms", cold), ("warm_ms", warm)):
        out[name] = {str(p): float(np.percentile(values, p)) for p in LATENCIES}  # type: ignore[assignment]
    return out


def main(
    model: forerun.Model,
    parts: Sequence[str],
    prompts: int,
    tokens: int,
    seconds: float,
    clients: Sequence[int],
) -> None:
    """Measure some parts; what is known of the others is kept."""
    work = tasks(model, "test", prompts, tokens)
    random.Random(0).shuffle(work)
    file = RESULTS / "serve-load.json"
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.is_file() else {}
    made = provenance(model, prompts=prompts, tokens=tokens)
    if "curve" in parts:
        cells = results.get("curve", {}).get("cells", {}) | curve(work, clients, seconds)
        results["curve"] = {"made": made, "cells": dict(sorted(cells.items(), key=_clients))}
    if "prefix" in parts:
        results["prefix"] = {"made": made, **prefix(model, 12)}
    if "overload" in parts:
        results["overload"] = {"made": made, **overload(model, work, 60.0)}
    if "soak" in parts:
        short = [Task(t.family, t.tokens, 4, t.repetition_penalty) for t in work]
        results["soak"] = {"made": made, **soak(short, 2000)}
    save("serve-load", made, results, "\n\n".join(_texts(results)))


def _clients(cell: tuple[str, Any]) -> int:
    return int(cell[0])


def _texts(results: dict[str, Any]) -> Iterator[str]:
    def both(cell: dict[str, Any], name: str) -> str:
        return " / ".join(f"{cell[name][str(p)]:.0f}" for p in LATENCIES)

    if (part := results.get("curve")) is not None:
        rows = [
            [count, name, f"{cell['seconds']:.0f}", str(cell["requests"]),
             f"{cell['tokens_per_second']:.0f}",
             f"{cell['tokens_per_second'] / cells['plain']['tokens_per_second']:.2f}",
             both(cell, "ttft_ms"), both(cell, "tpot_ms"), f"{cell['acceptance']:.2f}"]
            for count, cells in part["cells"].items()
            for name, cell in cells.items()
        ]  # fmt: skip
        yield (
            "Closed loop over HTTP, 16 rows, no prefix cache; clients on the same machine; "
            "p50 / p99:\n\n"
        ) + table(
            [
                "clients",
                "controller",
                "seconds",
                "requests",
                "tokens/s",
                "of plain",
                "TTFT ms",
                "TPOT ms",
                "accepted",
            ],
            rows,
        )
    if (part := results.get("prefix")) is not None:
        yield (
            f"A prompt of {part['prompt_tokens']} tokens sent twice, {part['turns']} times: TTFT "
            f"p50 / p99 {both(part, 'cold_ms')} ms, the second time {both(part, 'warm_ms')} ms."
        )
    if (part := results.get("overload")) is not None:
        refused = part["statuses"].get("429", 0)
        megabytes = " → ".join(f"{m:.0f}" for m in part["megabytes"])
        yield (
            f"Overload: {part['offered']} requests in {part['seconds']:.0f} s, ten times what 16 "
            f"clients in turn had answered before. {part['statuses'].get('200', 0)} answered, "
            f"{refused} got status 429, "
            f"{part['offered'] - refused - part['statuses'].get('200', 0)} anything else; "
            f"{part['differing_from_plain']} of the answers differ from plain decoding alone. TTFT "
            f"p50 / p99 {both(part, 'ttft_ms')} ms. Tokens/s before and after: "
            f"{part['tokens_per_second_before']:.0f}, {part['tokens_per_second_after']:.0f}. "
            f"Memory before, after, later: {megabytes} MB."
        )
    if (part := results.get("soak")) is not None:
        yield (
            f"Soak: {part['requests']} requests by 16 clients, `fixed(4)`, prefix cache of 100 MB; "
            f"{part['rows_left']:.0f} rows left at its end. By tenths:\n\n"
        ) + table(
            ["", *(str(i + 1) for i in range(len(part["parts"])))],
            [
                ["answered", *(f"{p['answered']}" for p in part["parts"])],
                ["accepted / drafted", *(f"{p['acceptance']:.3f}" for p in part["parts"])],
                ["memory MB", *(f"{p['megabytes']:.0f}" for p in part["parts"])],
            ],
        )
