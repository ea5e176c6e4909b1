"""Which vLLM was tested, and what its requests may ask for, checked where they enter."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.forerun")
CONTROLLER, RULE = "forerun_controller", "forerun_rule"
"""Names in `vllm_xargs` of a request's body, `extra_args` of `SamplingParams`."""
TESTED = "0.32"


def setting(config: Any, name: str) -> str | None:
    """What `--additional-config`, or else the environment, says to forerun; None if nothing."""
    extra = config.additional_config
    extra = extra.get("forerun", {}) if isinstance(extra, dict) else {}
    return extra.get(name) or os.environ.get(f"FORERUN_{name.upper()}")


def unsupported() -> str | None:
    """Why this vLLM is left as it is; None if it was tested."""
    from vllm.version import __version__ as version

    good = version.startswith(f"{TESTED}.")
    return None if good else f"vLLM {version} was not tested, only {TESTED}"


def differs(method: Callable[..., Any], ours: Callable[..., Any]) -> str | None:
    """Why a method of vLLM is not the one that ours was tested on; None if it is."""
    known, wanted = (", ".join(inspect.signature(f).parameters) for f in (method, ours))
    return None if known == wanted else f"{method.__qualname__} takes {known}, not {wanted}"


def check_requests() -> None:
    """Let `SamplingParams` refuse what cannot be served: 400, for that request alone.

    The entry point `vllm.general_plugins`, called in every process of vLLM.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    before = SamplingParams._verify_extra_args

    def verify(self: Any) -> None:
        before(self)
        for name in (CONTROLLER, RULE):
            spec = self.extra_args.get(name)
            if spec is not None and (reason := refusal(name, spec)):
                raise VLLMValidationError(reason, parameter=name, value=spec)

    if reason := unsupported() or differs(before, verify):
        logger.warning("forerun: requests are not checked: %s", reason)
    elif not hasattr(before, "checks_forerun"):
        verify.checks_forerun = True  # type: ignore[attr-defined]
        SamplingParams._verify_extra_args = verify


def refusal(name: str, spec: Any) -> str | None:
    """Why a request may not ask for this controller or rule; None if it may."""
    from forerun.errors import ForerunError
    from forerun.hosts.batch_lengths import controller_of

    if name == RULE:
        return f"{RULE}: vLLM judges drafts by its own sampler; rules run in forerun, transformers"
    try:
        controller_of(spec)
    except (ForerunError, TypeError) as error:
        return str(error)
    return None
