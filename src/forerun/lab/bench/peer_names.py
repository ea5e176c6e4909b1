"""Peers by name, for the command line: ``transformers``, ``vllm-draft(tokens=5)``, ..."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.errors import SettingError, UnknownNameError
from forerun.lab.bench.peers import (
    Peer,
    TransformersAssisted,
    TransformersBeam,
    TransformersEarlyExit,
    TransformersPlain,
)
from forerun.lab.bench.remote import Remote
from forerun.registry import Spec, parse

if TYPE_CHECKING:
    from forerun.model import Model

ASSISTED = (
    {"schedule": "constant", "tokens": 5},
    {"schedule": "constant", "tokens": 10, "threshold": 0.4},
    {"schedule": "heuristic", "tokens": 5},
    {"schedule": "dynamic"},
)
"""Settings measured when ``transformers-assisted`` is asked for without any."""

REMOTE: dict[str, dict[str, Any]] = {
    "vllm": {"memory": 0.3},
    "vllm-draft": {"tokens": 5, "memory": 0.3},
    "openvino-genai": {},
    "openvino-genai-draft": {"tokens": 4, "threshold": 0.0},
    "llama-cpp": {"rows": 1},
    "llama-cpp-draft": {"tokens": 4, "threshold": 0.0, "rows": 1},
}
"""Peers with a Python of their own and their settings, with defaults: tokens drafted per round; the
top probability below which no more are drafted (GenAI: instead of a number of tokens); the share of
a device's memory; texts decoded together at most."""
ENGINES = ("vllm", "openvino-genai", "llama-cpp")
NAMES = (
    "transformers",
    "transformers-assisted",
    "transformers-beam",
    "transformers-early-exit",
    *REMOTE,
)


def check(text: str, pythons: Mapping[str, str]) -> Spec:
    """Read a peer's name and settings, without a model.

    Raises:
        UnknownNameError, SettingError: it cannot be read, or there is no such peer.
    """
    spec = parse(text)
    if spec.name not in NAMES:
        raise UnknownNameError.among("peer", spec.name, NAMES)
    for name in pythons:
        if name not in REMOTE:
            raise UnknownNameError.among("peer with a Python of its own", name, ENGINES)
    return spec


def make(
    spec: Spec, model: Model, target: str, draft: str | None, pythons: Mapping[str, str]
) -> list[tuple[Peer, int | None]]:
    """The peers a spec means, each with the most prompts it decodes together.

    Args:
        spec: from `check`.
        model: whose weights are used.
        target: folder or id of the target, for peers that load it themselves.
        draft: likewise of the draft model; None if the drafter is no model.
        pythons: interpreters of peers with an environment of their own.
    """
    if spec.name == "transformers":
        return [(_build(TransformersPlain, spec, model), None)]
    if spec.name == "transformers-beam":
        return [(_build(TransformersBeam, spec, model), None)]
    if spec.name == "transformers-early-exit":
        return [(_build(TransformersEarlyExit, spec, model), 1)]
    if spec.name == "transformers-assisted":
        bare = not spec.args and not spec.kwargs
        specs = [Spec(spec.name, (), s) for s in ASSISTED] if bare else [spec]
        return [(_build(TransformersAssisted, s, model), 1) for s in specs]
    return [_remote(spec, model, target, draft, pythons)]


def _remote(
    spec: Spec, model: Model, target: str, draft: str | None, pythons: Mapping[str, str]
) -> tuple[Peer, int | None]:
    """A peer in its own environment, with as many threads as torch has here."""
    speculative = spec.name.endswith("-draft")
    engine = spec.name.removesuffix("-draft")
    if speculative and draft is None:
        raise SettingError(f"{spec.name} needs a draft model; name one as `draft`")
    precision = model.target.facts.precision
    settings = REMOTE[spec.name] | _settings(spec, list(REMOTE[spec.name]))
    first = {
        "engine": engine,
        "model": target,
        "draft": draft if speculative else None,
        "dtype": precision if precision.startswith(("float", "bfloat")) else "auto",
        "threads": torch.get_num_threads(),
        "context": model.target.limit,
        "eos": sorted(model.eos),
        "tokens": 0,
        "threshold": 0.0,
        **settings,
    }
    shown = {k: v for k, v in settings.items() if k in ("tokens", "threshold") and v}
    if engine == "openvino-genai" and "threshold" in shown:
        del shown["tokens"]  # it has the one or the other
    name = spec.name + (f"({','.join(f'{k}={v:g}' for k, v in shown.items())})" if shown else "")
    python = pythons.get(spec.name, pythons.get(engine))
    prepare = _for_genai if engine == "openvino-genai" else None
    return Remote(name, python, first, prepare=prepare), settings.get("rows")


def _for_genai(first: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The models as GenAI reads them."""
    import forerun.runtime.openvino  # noqa: F401 - first: it keeps openvino's telemetry off
    from forerun.lab.bench.genai_model import write

    roles = [role for role in ("model", "draft") if first[role] is not None]
    return {role: str(write(first[role], folder / role)) for role in roles}


def _settings(spec: Spec, known: list[str]) -> dict[str, Any]:
    """What the spec sets, every wrong name named."""
    for key in spec.kwargs:
        if key not in known:
            raise UnknownNameError.among(f"setting of peer {spec.name!r}", key, known)
    if len(spec.args) > len(known):
        raise SettingError(f"{spec.name!r} takes at most {len(known)} settings, got {spec}")
    settings = dict(zip(known, spec.args, strict=False)) | dict(spec.kwargs)
    return {k: str(v) if isinstance(v, Spec) else v for k, v in settings.items()}


def _build(make: Callable[..., Peer], spec: Spec, *given: Any) -> Peer:
    """Call with the settings of the spec."""
    known = [p for p in inspect.signature(make).parameters if p != "model"]
    try:
        return make(*given, **_settings(spec, known))
    except TypeError as error:
        raise SettingError(f"cannot build {spec}: {error}") from error
