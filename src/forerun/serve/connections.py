"""Connections that may neither stay half open nor come in any number."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.serve.errors import ApiError

PATIENCE = 1.0  # seconds for the head of a request that is refused anyway


def refusal(message: str) -> bytes:
    """A whole answer of status 503, after which the connection closes."""
    body = json.dumps(ApiError(503, message).to_json())
    return (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


def protocol(deadline: float, most: int) -> type[H11Protocol]:
    """uvicorn's protocol with bounds.

    Args:
        deadline: seconds from the first byte of a head, or from the connection, to its last byte.
        most: connections that may be open; a further one gets status 503.
    """

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(refusal("too many connections are open; try again later"))
                transport.close()
                return
            self._late = self.loop.call_later(deadline, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            between = self.conn.their_state is h11.IDLE  # of a head, not all is here
            if between and self._late is None:
                self._late = self.loop.call_later(deadline, self.transport.close)
            elif not between:
                self._clear()

        def connection_lost(self, exc: Exception | None) -> None:
            self._clear()
            super().connection_lost(exc)

        def _clear(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection


class _Refusing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):  # it is too slow, or gone
            self.request.settimeout(PATIENCE)
            self.request.recv(1 << 16)
            self.request.sendall(refusal("the model is being loaded"))


@contextlib.contextmanager
def loading(listening: socket.socket) -> Iterator[None]:
    """Answer 503 on a socket: what shall serve there is loaded meanwhile."""
    server = socketserver.TCPServer(("", 0), _Refusing, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    thread = threading.Thread(target=server.serve_forever, args=[0.1], daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
