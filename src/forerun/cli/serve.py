"""`forerun serve`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import clean, note, stderr
from forerun.cli.shared.models import Models
from forerun.cli.shared.options import MODELS, SPECULATION, Fields, option
from forerun.errors import MissingExtraError

if TYPE_CHECKING:
    from forerun.model import Model
    from forerun.serve.app import Server
    from forerun.serve.config import Config

LISTENING = "Listening"
LIMITS = "Limits"
KEY = "FORERUN_API_KEY"


@options.command
def serve(
    models: Annotated[Models, Fields(Models)],
    exits: options.Exits = None,
    remember: options.Remember = None,
    served_model_name: Annotated[
        str | None,
        option("NAME", "What clients call it. Default: the folder's name.", panel=MODELS),
    ] = None,
    controller: options.Controller = None,
    rule: Annotated[
        str | None,
        option("SPEC", "What to keep, for requests that do not say.", panel=SPECULATION),
    ] = None,
    settings: options.SettingsFile = None,
    allow_rule: Annotated[
        list[str] | None,
        option(
            "NAME",
            "A lossy rule that requests may ask for, or all; repeatable. Default: none.",
            panel=SPECULATION,
        ),
    ] = None,
    host: Annotated[
        str, option("ADDRESS", "Address to listen on; this machine only.", panel=LISTENING)
    ] = "127.0.0.1",
    port: Annotated[int, option("N", "Port; 0 takes a free one.", panel=LISTENING)] = 8000,
    api_key: Annotated[
        list[str] | None,
        option(
            "KEY",
            f"Requests need one of these keys; repeatable. Also from {KEY}.",
            panel=LISTENING,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option("URL", "A web origin whose pages may call; repeatable.", panel=LISTENING),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        option("NAME", "Another name of this machine; repeatable.", panel=LISTENING),
    ] = None,
    metrics_prefix: Annotated[
        str,
        option("PREFIX", "Of metric names; vllm: for tools that read vLLM's.", panel=LISTENING),
    ] = "forerun:",
    max_rows: Annotated[int, option("N", "Texts decoded together.", panel=LIMITS)] = 16,
    queue: Annotated[
        int, option("N", "Texts that may wait; more get status 429.", panel=LIMITS)
    ] = 256,
    memory: Annotated[
        str | None,
        option(
            "SIZE",
            "For caches and logits of running texts, like 8GB. Default: no bound but --max-rows.",
            panel=LIMITS,
        ),
    ] = None,
    prefix_cache: Annotated[
        str,
        option("SIZE", "For texts read before, not to read them again; 0 is off.", panel=LIMITS),
    ] = "512MB",
    max_tokens: Annotated[
        int | None, option("N", "Most tokens a request may ask for.", panel=LIMITS)
    ] = None,
    max_body: Annotated[str, option("SIZE", "Largest request body.", panel=LIMITS)] = "4MiB",
    grace: Annotated[
        float,
        option("SECONDS", "For running requests to finish after a signal.", panel=LIMITS),
    ] = 30.0,
) -> None:
    """Serve a model over HTTP: OpenAI's API, a page that shows it think, metrics.

    Runs until interrupted; a second interrupt does not wait for running requests.
    """
    _require_extra()
    from forerun.checks import size
    from forerun.serve.config import Config

    keys = [*(api_key or []), *filter(None, [os.environ.get(KEY)])]
    chosen: dict[str, Any] = {
        "name": served_model_name or _name(models.target),
        "allowed_rules": frozenset(allow_rule or []),
        "api_keys": tuple(keys),
        "host": host,
        "port": port,
        "origins": tuple(allow_origin or []),
        "hosts": tuple(allow_host or []),
        "metrics_prefix": metrics_prefix,
        "max_rows": max_rows,
        "queue": queue,
        "memory": None if memory is None else size(memory),
        "prefix_cache": size(prefix_cache),
        "max_tokens": max_tokens,
        "max_body": size(max_body),
        "grace": grace,
    }
    first = Config(**chosen)  # mistakes that need no model are told before one is loaded

    from forerun.serve.run import serve as run
    from forerun.settings import resolve

    models = models.with_exits(exits)
    about: dict[str, Any] = {}

    def load() -> tuple[Model, Config]:
        job = models.load(
            resolve(settings, controller=controller, rule=rule),
            max_rows,
            remember=len(keys) < 2 if remember is None else remember,
        )
        about.update(job.about)
        config = Config(**chosen, controller=job.about["controller"], rule=job.about["rule"])
        return job.model, config

    run(first, load, lambda url, server: _announce(url, server, server.config, about))


def _require_extra() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingExtraError.of(package, "serve") from error


def _name(target: str | None) -> str:
    return "forerun" if target is None else os.path.basename(os.path.normpath(target)) or "model"


def _announce(url: str, server: Server, config: Config, about: dict[str, Any]) -> None:
    """Say where it is, what it does, and what may surprise."""
    out = stderr()
    facts = server.facts
    note(out, clean(f"{facts.name} at {url}/v1 · watch it think at {url}/"))
    note(
        out,
        clean(
            f"draft {about['draft']}, controller {about['controller']}, rule {about['rule']} · "
            f"{config.max_rows} rows, {config.queue} may wait, {facts.limit} tokens of context"
        ),
    )
    defaults = ", ".join(f"{name} {value:g}" for name, value in facts.defaults.items())
    most = server.memory.bytes([facts.limit] * config.max_rows)
    bound = f"at most {most / 1e9:.2g} GB of caches" if config.memory is None else ""
    prefixes = "" if server.prefixes else "no prefix cache: this executor cannot copy its cache"
    parts = [f"requests that do not say: {defaults}", bound, prefixes]
    note(out, " · ".join(filter(None, parts)))
    if not config.local and not config.api_keys:
        note(out, f"warning: anyone who reaches {config.host} may use it; set --api-key")
