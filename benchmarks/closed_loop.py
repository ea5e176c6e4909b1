"""A client that costs next to nothing: it shares the machine with the server it measures.

Bytes are kept with the time they came, and read when the measurement is over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Body = dict[str, Any]


@dataclass
class Answer:
    """What became of one request, read from the bytes that came."""

    sent: float
    got: list[tuple[float, bytes]] = field(default_factory=list)
    index: int = 0
    """Which request it was."""

    @property
    def status(self) -> int:
        """Of HTTP; 0 if nothing came, 500 also for an error in mid-stream."""
        if not self.got:
            return 0
        status = int(self.got[0][1][9:12])
        return 500 if status == 200 and any("error" in f for _, f in self.frames()) else status

    @property
    def complete(self) -> bool:
        """Whether all of it came."""
        if not self.got:
            return False
        head, _, rest = self.got[0][1].partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            # A header may end like it, and its last bytes may come one by one.
            last = b"".join([rest, *(part for _, part in self.got[1:])][-3:])
            return last.endswith(b"0\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return len(rest) + sum(len(part) for _, part in self.got[1:]) >= length

    def document(self) -> dict[str, Any]:
        """Of an answer that is no stream."""
        whole = b"".join(part for _, part in self.got)
        return json.loads(whole.partition(b"\r\n\r\n")[2])

    def frames(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Of a stream, with the time each was there."""
        rest = b""
        for at, part in self.got:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield at, json.loads(line[6:])

    def stamps(self) -> list[tuple[float, int]]:
        """When how many tokens were there, by `continuous_usage_stats`."""
        return [(at, f["usage"]["completion_tokens"]) for at, f in self.frames() if f.get("usage")]


class Line(asyncio.Protocol):
    """A connection that carries one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """It is open."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Some of the answer."""
        assert self._answer is not None
        self._answer.got.append((time.perf_counter(), data))
        if self._answer.complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def ask(self, body: Body, index: int, limit: float | None = None) -> Answer:
        """Send a request, wait for the answer; after `limit` seconds hang up."""
        content = json.dumps(body).encode()
        self._answer = Answer(time.perf_counter(), index=index)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )
        await asyncio.wait({self._done}, timeout=limit)
        if not self._done.done():
            self.transport.abort()
        return self._answer


async def closed_loop(
    url: str, requests: Callable[[int], Body], clients: int, seconds: float
) -> tuple[float, list[Answer]]:
    """So many clients, each sending its next request when the last one is answered.

    After `seconds` all hang up. Returns when it began, and the answers, also those cut off.
    """
    order, answers = itertools.count(), list[Answer]()
    began = time.perf_counter()
    there = urlsplit(url)

    async def client() -> None:
        loop, line = asyncio.get_running_loop(), None
        while (left := began + seconds - time.perf_counter()) > 0:
            if line is None or line.transport.is_closing():  # some hang up after an answer
                _, line = await loop.create_connection(Line, there.hostname, there.port)
            index = next(order)
            answers.append(await line.ask(requests(index), index, left))
        if line is not None:
            line.transport.abort()

    await asyncio.gather(*(client() for _ in range(clients)))
    return began, answers


async def in_turn(
    url: str,
    requests: Iterable[tuple[int, Body, float | None]],
    clients: int,
    seconds: float,
    take: Callable[[Answer], None],
) -> None:
    """Requests that may hang up after a time of their own, until none is left or time is over."""
    order, began, there = iter(requests), time.perf_counter(), urlsplit(url)

    async def client() -> None:
        loop, line = asyncio.get_running_loop(), None
        for index, body, limit in order:
            if time.perf_counter() - began > seconds:
                break
            if line is None or line.transport.is_closing():
                _, line = await loop.create_connection(Line, there.hostname, there.port)
            take(await line.ask(body, index, limit))
        if line is not None:
            line.transport.close()

    await asyncio.gather(*(client() for _ in range(clients)))


def summary(runs: Sequence[tuple[float, float, list[Answer]]]) -> dict[str, Any]:
    """Of closed loops, each with its beginning and its seconds: throughput and latencies."""
    first, between, speeds, requests = list[float](), list[float](), list[float](), 0
    drafted = accepted = 0
    for began, seconds, answers in runs:
        tokens = 0
        for answer in answers:
            assert answer.status in (0, 200), answer.got
            stamps = answer.stamps()
            if not stamps:
                continue
            (start, n), (end, last) = stamps[0], stamps[-1]
            tokens += max((m for at, m in stamps if at <= began + seconds), default=0)
            first.append(start - answer.sent)
            if answer.complete:
                requests += 1
                if last > n:
                    between.append((end - start) / (last - n))
                for _, frame in answer.frames():
                    drafted += frame.get("timings", {}).get("draft_n", 0)
                    accepted += frame.get("timings", {}).get("draft_n_accepted", 0)
        speeds.append(tokens / seconds)
    return {
        "requests": requests,
        "turns": speeds,
        "first": first,
        "between": between,
        "acceptance": accepted / max(drafted, 1),
    }
