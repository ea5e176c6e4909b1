"""What an operator decides."""

import re
from dataclasses import dataclass

from forerun.checks import Bytes
from forerun.errors import require

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ALL_RULES = "all"  # as an allowed rule: every rule
DEADLINE = 30.0  # seconds that the head of a request may take, and its body


@dataclass(frozen=True)
class Config:
    """Settings of the server that no request can change.

    Args:
        name (--served-model-name NAME): what clients call it; on the command line by default the
            folder's name.
        controller: spec of requests that name none.
        rule: what to keep, for requests that do not say. Always allowed.
        allowed_rules (--allow-rule NAME): a lossy rule that requests may ask for, or all; by
            default none.
        api_keys (--api-key KEY): requests need one of these keys, on the command line also from
            FORERUN_API_KEY. None: open to all who reach the port.
        host (ADDRESS): address to listen on; this machine only. Others by their address, or
            0.0.0.0.
        port: to listen on; 0 takes a free one.
        max_rows: texts decoded together. At least 1.
        queue: texts that may wait; more get status 429. At least 0.
        memory: for caches and logits of running texts, like 8GB; by default no bound but the rows'.
        prefix_cache: for texts read before, not to read them again; 0 is off. Besides `memory`.
        max_tokens: most tokens a request may ask for. None: as many as the context holds.
        max_body: largest request body.
        grace (SECONDS): for running requests to finish after a signal.
        origins (--allow-origin URL): a web origin whose pages may call.
        hosts (--allow-host NAME): another name of this machine. Besides `host` and loopback.
        metrics_prefix (PREFIX): of metric names; vllm: for tools that read vLLM's.
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
    memory: Bytes | None = None
    prefix_cache: Bytes = 512 * 10**6
    max_tokens: int | None = None
    max_body: Bytes = 4 * 2**20
    grace: float = 30.0
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    metrics_prefix: str = "forerun:"

    def __post_init__(self) -> None:
        require(bool(self.name), "served model name", self.name, "some text")
        require(0 <= self.port < 65536, "port", self.port, "between 0 and 65535")
        require(self.max_rows >= 1, "max rows", self.max_rows, "≥ 1")
        require(self.queue >= 0, "queue", self.queue, "≥ 0")
        require(self.prefix_cache >= 0, "prefix cache", self.prefix_cache, "≥ 0 bytes")
        require(self.max_body >= 1024, "max body", self.max_body, "at least 1024 bytes")
        limit = self.max_tokens
        require(limit is None or limit >= 1, "max tokens", limit, "≥ 1")
        require(self.grace >= 0, "grace", self.grace, "≥ 0 seconds")
        require(all(self.api_keys), "api key", "", "some text")
        good = re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*[:_]", self.metrics_prefix)
        require(bool(good), "metrics prefix", self.metrics_prefix, "like 'forerun:'")

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in LOOPBACK
