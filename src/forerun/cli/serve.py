"""`forerun serve`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import clean, remark
from forerun.cli.shared.models import Models, PolicyOptions
from forerun.cli.shared.options import MODELS, SPECULATION, Fields
from forerun.errors import optional
from forerun.serve.config import Config

if TYPE_CHECKING:
    from forerun.model import Model
    from forerun.serve.app import Server

LISTENING = ("host", "port", "api_keys", "origins", "hosts", "metrics_prefix")
LIMITS = (
    "max_rows", "queue", "memory", "prefix_cache", "max_tokens", "max_body", "grace",
)  # fmt: skip
"""Fields of `Config` by the panel of their options."""
KEY = "FORERUN_API_KEY"


@options.command
def serve(
    models: Annotated[Models, Fields(Models)],
    policies: Annotated[PolicyOptions, Fields(PolicyOptions)],
    naming: Annotated[dict[str, Any], Fields(Config, MODELS, ("name",), optional=True)],
    ruling: Annotated[dict[str, Any], Fields(Config, SPECULATION, ("allowed_rules",))],
    listening: Annotated[dict[str, Any], Fields(Config, "Listening", LISTENING)],
    limits: Annotated[dict[str, Any], Fields(Config, "Limits", LIMITS)],
) -> None:
    """Serve a model over HTTP: OpenAI's API, a page that shows it think, metrics.

    Runs until interrupted; a second interrupt does not wait for running requests.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        optional(package, "serve")
    chosen = {k: v for k, v in (naming | ruling | listening | limits).items() if v is not None}
    chosen.setdefault("name", _name(models.target))
    for name in ("allowed_rules", "api_keys", "origins", "hosts"):
        chosen[name] = tuple(chosen.get(name, ()))
    chosen["allowed_rules"] = frozenset(chosen["allowed_rules"])
    chosen["api_keys"] += tuple(filter(None, [os.environ.get(KEY)]))
    first = Config(**chosen)  # mistakes that need no model are told before one is loaded

    from forerun.serve.run import serve as run

    about: dict[str, Any] = {}

    def load() -> tuple[Model, Config]:
        job = models.load(
            policies.resolve(),
            first.max_rows,
            remember=len(first.api_keys) < 2 if policies.remember is None else policies.remember,
        )
        about.update(job.about)
        return job.model, replace(first, controller=job.about["controller"], rule=job.about["rule"])

    run(first, load, lambda url, server: _announce(url, server, server.config, about))


def _name(target: str | None) -> str:
    return "forerun" if target is None else os.path.basename(os.path.normpath(target)) or "model"


def _announce(url: str, server: Server, config: Config, about: dict[str, Any]) -> None:
    """Say where it is, what it does, and what may surprise."""
    planner = server.planner
    remark(clean(f"{config.name} at {url}/v1 · watch it think at {url}/"))
    remark(
        clean(
            f"draft {about['draft']}, controller {about['controller']}, rule {about['rule']} · "
            f"{config.max_rows} rows, {config.queue} may wait, {planner.limit} tokens of context"
        )
    )
    defaults = ", ".join(f"{name} {value:g}" for name, value in planner.defaults.items())
    most = server.worker.memory.bytes([planner.limit] * config.max_rows)
    bound = f"at most {most / 1e9:.2g} GB of caches" if config.memory is None else ""
    prefixes = (
        "" if server.worker.prefixes else "no prefix cache: this executor cannot copy its cache"
    )
    parts = [f"requests that do not say: {defaults}", bound, prefixes]
    remark(" · ".join(filter(None, parts)))
    if not config.local and not config.api_keys:
        remark(f"warning: anyone who reaches {config.host} may use it; set --api-key")
