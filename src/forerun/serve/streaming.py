"""Answers that must not outlive their client."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

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
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request.receive))
    gone.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if gone.done():
            raise Gone from None
        raise
    finally:
        gone.cancel()


class EventStream(StreamingResponse):
    """Sends frames as they come, and closes their source when the client leaves or is `slow`.
    Nothing is made per frame, no task and no timer: while models run in another thread of this
    process, what the event loop does is time that thread may have to wait."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes], slow: asyncio.Event) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames, self._slow = frames, slow
        self._sending, self._sent, self._ended = asyncio.Lock(), time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(message: Message) -> None:
            async with self._sending:
                if not self._ended:  # else a comment that waited for the end
                    self._ended = not message.get("more_body", True)
                    await send(message)
            self._sent = time.monotonic()

        async def ending(work: Callable[..., Awaitable[None]], *args: Any) -> None:
            await work(*args)
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(ending, self.stream_response, write)
                group.start_soon(ending, until_gone, receive)
                group.start_soon(ending, self._late)
                group.start_soon(self._keep, write)
        finally:
            await self._frames.aclose()

    async def _late(self) -> None:
        """Return when a client too slow for its stream had a last chance to read why it ends."""
        await self._slow.wait()
        await asyncio.sleep(LINGER)

    async def _keep(self, write: Send) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        while True:
            silent = time.monotonic() - self._sent
            if silent >= SILENT:
                await write({"type": "http.response.body", "body": PING, "more_body": True})
            else:
                await asyncio.sleep(SILENT - silent)
