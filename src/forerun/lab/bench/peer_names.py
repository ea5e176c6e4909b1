"""Peers by name, for the command line: ``transformers``, ``vllm-draft(tokens=5)``, ..."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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

NAMES = (
    "transformers",
    "transformers-assisted",
    "transformers-beam",
    "transformers-early-exit",
    "vllm",
    "vllm-draft",
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
        if name not in ("vllm", "vllm-draft"):
            raise UnknownNameError.among("peer with a Python of its own", name, ("vllm",))
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
    python = pythons.get(spec.name, pythons.get("vllm"))
    dtype = str(getattr(model.target, "dtype", "auto")).removeprefix("torch.")
    peer = _build(
        lambda **settings: _vllm(spec.name, python, target, draft, dtype, **settings), spec
    )
    return [(peer, None)]


def _vllm(
    name: str,
    python: str | None,
    target: str,
    draft: str | None,
    dtype: str,
    tokens: int = 5,
    memory: float = 0.3,
) -> Peer:
    speculative = name == "vllm-draft"
    if speculative and draft is None:
        raise SettingError("vllm-draft needs a draft model; name one as `draft`")
    first = {
        "model": target,
        "draft": draft if speculative else None,
        "tokens": tokens,
        "dtype": dtype,
        "memory": memory,
    }
    return Remote(f"{name}(tokens={tokens})" if speculative else name, python, first)


def _build(make: Callable[..., Peer], spec: Spec, *given: Any) -> Peer:
    """Call with the settings of the spec, every wrong name named."""
    known = [p for p in inspect.signature(make).parameters if p not in ("model", "settings")]
    if spec.name.startswith("vllm"):
        known = ["tokens", "memory"] if spec.name == "vllm-draft" else ["memory"]
    for key in spec.kwargs:
        if key not in known:
            raise UnknownNameError.among(f"setting of peer {spec.name!r}", key, known)
    settings = dict(zip(known, spec.args, strict=False)) | dict(spec.kwargs)
    if len(spec.args) > len(known):
        raise SettingError(f"{spec.name!r} takes at most {len(known)} settings, got {spec}")
    plain = {k: str(v) if isinstance(v, Spec) else v for k, v in settings.items()}
    try:
        return make(*given, **plain)
    except TypeError as error:
        raise SettingError(f"cannot build {spec}: {error}") from error
