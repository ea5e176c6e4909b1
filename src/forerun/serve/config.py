"""What an operator decides."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.errors import require

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ALL_RULES = "all"
"""As an allowed rule: every rule."""


@dataclass(frozen=True)
class Config:
    """Settings of the server that no request can change.

    Args:
        name: what the model is called; clients send it back.
        controller: spec of requests that name none.
        rule: likewise; always allowed.
        allowed_rules: names of lossy rules that requests may ask for.
        api_keys: a request needs one of them; none: open to all who reach the port.
        host: address to listen on.
        port: 0 takes a free one.
        max_rows: requests decoded together, ≥ 1.
        queue: requests that may wait for a row, ≥ 0; more get status 429.
        memory: bytes that key-value caches and logits of running requests may take; None: no bound
            but `max_rows`.
        prefix_cache: bytes that copies of texts read before may take, in addition; 0 keeps none.
        max_tokens: most tokens a request may ask for; None: as many as the context holds.
        max_body: bytes of a request's body.
        buffer: rounds that may wait for a slow reader of a stream, ≥ 1; then it is cancelled.
        deadline: seconds that the head of a request may take, and its body.
        connections: open at a time; more get status 503.
        grace: seconds that running requests have to finish after a signal to stop.
        ping: seconds after which a silent stream gets a comment line, so that proxies keep it.
        origins: web origins whose pages may call the server.
        hosts: names by which it may be called, besides `host` and loopback.
        metrics_prefix: of Prometheus names.
    """

    name: str = "forerun"
    controller: str = "auto"
    rule: str = "gumbel"
    allowed_rules: frozenset[str] = frozenset()
    api_keys: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    max_rows: int = 16
    queue: int = 256
    memory: int | None = None
    prefix_cache: int = 512 * 10**6
    max_tokens: int | None = None
    max_body: int = 4 * 2**20
    buffer: int = 1024
    deadline: float = 30.0
    connections: int = 1024
    grace: float = 30.0
    ping: float = 15.0
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    metrics_prefix: str = "forerun:"

    def __post_init__(self) -> None:
        require(bool(self.name), "served model name", self.name, "some text")
        require(0 <= self.port < 65536, "port", self.port, "between 0 and 65535")
        require(self.max_rows >= 1, "max rows", self.max_rows, "≥ 1")
        require(self.queue >= 0, "queue", self.queue, "≥ 0")
        require(self.prefix_cache >= 0, "prefix cache", self.prefix_cache, "≥ 0 bytes")
        require(self.buffer >= 1, "buffer", self.buffer, "≥ 1")
        require(self.max_body >= 1024, "max body", self.max_body, "at least 1024 bytes")
        limit = self.max_tokens
        require(limit is None or limit >= 1, "max tokens", limit, "≥ 1")
        require(self.deadline > 0, "deadline", self.deadline, "> 0 seconds")
        require(self.connections >= 1, "connections", self.connections, "≥ 1")
        require(self.grace >= 0, "grace", self.grace, "≥ 0 seconds")
        require(all(self.api_keys), "api key", "", "some text")
        good = re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*[:_]", self.metrics_prefix)
        require(bool(good), "metrics prefix", self.metrics_prefix, "like 'forerun:'")

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in LOOPBACK
