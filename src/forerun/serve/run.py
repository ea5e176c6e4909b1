"""Listening, by connections that may neither stay half open nor come in any number; leaving."""

import asyncio
import contextlib
import json
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.engine.meter import Meter
from forerun.model import Model
from forerun.runtime.timing import ROWS
from forerun.serve.app import Server, create_app
from forerun.serve.config import DEADLINE, Config
from forerun.serve.errors import ApiError

WARM = (1, 2, 3, 4)  # batch sizes that are warmed up
LINGER = 5  # seconds that connections have to close once nothing runs any more
CONNECTIONS = 1024  # that may be open at a time
IDLE = 75
"""Seconds that a connection may wait for its next request: longer than clients keep theirs, most
of them 5 to 60. Whoever closes first must be the client, or what it sends just then is lost."""
PATIENCE = 1.0  # seconds for the head of a request that is refused anyway


def refusal(message: str) -> bytes:
    """A whole answer of status 503, after which the connection closes."""
    body = json.dumps(ApiError(503, message).to_json())
    return (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


class Connection(H11Protocol):
    """uvicorn's protocol with bounds: `DEADLINE` seconds from the first byte of a head, or from the
    connection, to its last byte; `CONNECTIONS` may be open, a further one gets status 503."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.write(refusal("too many connections are open; try again later"))
            transport.close()
            return
        self._late = self.loop.call_later(DEADLINE, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        between = self.conn.their_state is h11.IDLE  # of a head, not all is here
        if between and self._late is None:
            self._late = self.loop.call_later(DEADLINE, self.transport.close)
        elif not between:
            self._clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear()
        super().connection_lost(exc)

    def _clear(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Listener(uvicorn.Server):
    """uvicorn that, told to stop, first lets running requests finish. The first signal: new
    requests get status 503 while those there have `Config.grace` seconds. The second ends at
    once."""

    def __init__(self, model: Model, config: Config) -> None:
        app, self.forerun = create_app(model, config)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                http=Connection,
                ws="none",
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=LINGER,
            )
        )
        self._grace, self._signals = config.grace, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self.should_exit, self.force_exit = True, self._signals > 1 and sig == signal.SIGINT

    async def main_loop(self) -> None:
        await super().main_loop()
        end = time.monotonic() + self._grace
        await self.forerun.worker.stop(lambda: self._signals < 2 and time.monotonic() < end)


def bind(config: Config) -> socket.socket:
    """The socket to listen on; `OSError` if the address is taken or is none of this machine's."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.create_server((config.host, config.port), family=family, backlog=512)
    # Connections inherit it. Without, an answer's body waits until its head is acknowledged: 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def warm_up(model: Model, rows: int, temperature: float = 0.0) -> None:
    """Take rounds of the batch sizes that come first at the temperature that most will have, so
    that no request pays for first uses: sampling imports torch."""
    for size in ROWS:  # time for each, as nobody waits
        model.meter.warm(min(size, rows))
    # First uses say nothing of what rounds cost.
    meter, model.meter = model.meter, Meter.of(model.target, model.drafter)
    prompt = [next(iter(sorted(model.eos)), 0)] * 4
    for count in WARM:
        model.generate(
            [prompt] * min(count, rows), controller="fixed(3)", rule="gumbel", batch_size=rows,
            max_new_tokens=4, ignore_eos=True, temperature=temperature,
        )  # fmt: skip
    model.meter = meter


def serve(
    config: Config, load: Callable[[], tuple[Model, Config]], ready: Callable[[str, Server], None]
) -> None:
    """Serve until a signal: with status 503 until the model is there, then with what `load` gives,
    `ready` once called with the address. Where that cannot be used (`OSError`) nothing is loaded.
    """
    with bind(config) as listening:
        with loading(listening):
            model, config = load()
            listener = Listener(model, config)
            warm_up(model, config.max_rows, listener.forerun.planner.defaults["temperature"])
        host, port = listening.getsockname()[:2]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", listener.forerun)
        listener.run(sockets=[listening])


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
