"""Answers that must not outlive their client."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

LINGER = 1.0  # seconds that a client too slow for its stream has to read the error
PING = b": ping\n\n"  # a comment: keeps proxies from closing a silent stream, and
SILENT = 15.0  # seconds after which one gets it
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client left."""


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def dumps(value: Any) -> bytes:
    """JSON as it is sent: no infinities, and no half surrogate pairs."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


async def until_gone(receive: Receive) -> None:
    """Return when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_client(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then `Gone` is raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


class EventStream(Response):
    """Sends frames as they come, and closes their source when the client leaves or is `slow`.
    Nothing is made per frame, no task and no timer: while models run in another thread of this
    process, what the event loop does is time that thread may have to wait."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes], slow: asyncio.Event) -> None:
        self._frames, self._slow = frames, slow
        self._sending, self._sent, self._ended = asyncio.Lock(), time.monotonic(), False
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send(send))
        pinging = asyncio.ensure_future(self._keep(send))
        gone = asyncio.ensure_future(until_gone(receive))
        slow = asyncio.ensure_future(self._slow.wait())
        try:
            await asyncio.wait({sending, gone, slow}, return_when=asyncio.FIRST_COMPLETED)
            if slow.done():  # a last chance to read why it ends
                await asyncio.wait({sending}, timeout=LINGER)
            if sending.done():
                sending.result()
        finally:
            for future in (pinging, sending, gone, slow):
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await future
            await self._frames.aclose()

    async def _send(self, send: Send) -> None:
        async for body in self._frames:
            await self._write(send, body)
        await self._write(send, b"", last=True)

    async def _write(self, send: Send, body: bytes, last: bool = False) -> None:
        async with self._sending:
            if self._ended:  # a comment that waited for the end
                return
            self._ended = last
            await send({"type": "http.response.body", "body": body, "more_body": not last})
        self._sent = time.monotonic()

    async def _keep(self, send: Send) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        while True:
            silent = time.monotonic() - self._sent
            if silent >= SILENT:
                await self._write(send, PING)
            else:
                await asyncio.sleep(SILENT - silent)
