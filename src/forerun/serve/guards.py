"""What stands before every route: size, host, key, and an answer whatever happens."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.config import DEADLINE, LOOPBACK, Config
from forerun.serve.errors import ApiError

log = logging.getLogger("forerun.serve")

FAILED = "the server failed; its log says why"
ALIASES = frozenset({"/completions", "/chat/completions", "/responses", "/models"})
"""Paths that are there without /v1, too, as llama.cpp has them."""
OPEN = frozenset({"/", "/health", "/metrics", "/version", "/openapi.json"})  # that need no key


def error_response(error: ApiError) -> JSONResponse:
    """What is sent of an error."""
    return JSONResponse(error.to_json(), error.status, error.headers)


class Guard:
    """ASGI middleware; `refused` is called with a word for every request it turns away. A body is
    read as a whole before a route sees it, so that its size is bounded whatever the client says of
    it."""

    def __init__(self, app: ASGIApp, config: Config, refused: Callable[[str], None]) -> None:
        self._app, self._config, self._refused = app, config, refused
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self._hosts = {h.lower() for h in (*LOOPBACK, config.host, *config.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in ALIASES:
            scope = {**scope, "path": f"/v1{scope['path']}"}
        if scope["method"] == "HEAD":  # the listener leaves the body away
            scope = {**scope, "method": "GET"}
        try:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""))
            self._check_key(scope, headers.get("authorization", ""))
            try:
                async with asyncio.timeout(DEADLINE):
                    body = await self._read(receive, headers.get("content-length", ""))
            except TimeoutError:
                raise ApiError(408, f"the body was not here after {DEADLINE:g} s") from None
            await self._app(scope, _replay(body, receive), send)
        except ApiError as error:
            self._refused("unauthorized" if error.status in (401, 403) else "invalid")
            await error_response(error)(scope, receive, send)
        except Exception:  # the application has answered; the listener has, where it has not
            log.exception("a request failed")

    def _check_host(self, host: str) -> None:
        """A page elsewhere whose name was made to point here must not read this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = host
        if self._config.local and host and name not in self._hosts:
            raise ApiError(
                403, f"this server is not called {name!r:.80}; allow the name with --allow-host"
            )

    def _check_key(self, scope: Scope, header: str) -> None:
        if not self._keys or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Every key is compared, however the first ones fare.
        known = [hmac.compare_digest(given, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def _read(self, receive: Receive, length: str) -> bytes | None:
        """The body; None if the client left."""
        most = self._config.max_body
        too_large = ApiError(413, f"the body is larger than the {most} bytes this server takes")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        parts, total = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            total += len(parts[-1])
            if total > most:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes | None, receive: Receive) -> Receive:
    """Hand out the body once, then whatever else comes."""
    first: list[Any] = [{"type": "http.request", "body": body or b"", "more_body": False}]
    if body is None:
        first = [{"type": "http.disconnect"}]

    async def again() -> Message:
        return first.pop(0) if first else await receive()

    return again
