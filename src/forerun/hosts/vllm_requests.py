"""What vLLM finds by name: which was tested, what its requests may ask for, a proposer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from forerun.drafters import DRAFTERS
from forerun.drafters.lookup import Lookup
from forerun.drafters.rest import REST
from forerun.drafters.suffix import Suffix
from forerun.errors import ForerunError, require
from forerun.hosts.batch_lengths import controller_of, logger

CONTROLLER, RULE = "forerun_controller", "forerun_rule"
"""Names in `vllm_xargs` of a request's body, `extra_args` of `SamplingParams`."""
TESTED, DEFAULT_DRAFT = "0.32", "suffix"


def setting(config: Any, name: str) -> str | None:
    """What `--additional-config`, or else the environment, says to forerun; None if nothing."""
    extra = config.additional_config
    extra = extra.get("forerun", {}) if isinstance(extra, dict) else {}
    return extra.get(name) or os.environ.get(f"FORERUN_{name.upper()}")


def unsupported() -> str | None:
    """Why this vLLM is left as it is; None if it was tested."""
    from vllm.version import __version__ as version

    tested = version.startswith(f"{TESTED}.")
    return None if tested else f"vLLM {version} was not tested, only {TESTED}"


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
    if name == RULE:
        return f"{RULE}: vLLM judges drafts by its own sampler; rules run in forerun, transformers"
    try:
        controller_of(spec)
    except (ForerunError, TypeError) as error:
        return str(error)
    return None


class Proposer:
    """Drafts by `suffix`, or another drafter that needs neither a model nor a tokenizer, which
    `draft` names in `--additional-config`, or `FORERUN_DRAFT`: `lookup`, `rest(datastore='DIR')`.

    vLLM makes one: `speculative_config` {"method": "custom_class", "model":
    "forerun.vllm.Proposer", "num_speculative_tokens": 8}.

    Raises:
        SettingError: the drafter is another.
    """

    def __init__(self, vllm_config: Any) -> None:
        named = setting(vllm_config, "draft") or DEFAULT_DRAFT
        self._spec = DRAFTERS.make(named)
        good = isinstance(self._spec, Suffix | Lookup | REST)
        require(good, "draft", named, "suffix, lookup or rest")
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        self._rows: dict[int, tuple[list[int], Any]] = {}

    def load_model(self, target: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], counts: Any, token_ids: Any, **more: Any
    ) -> list[list[int]]:
        """Drafts by row, none for rows that got no token from this step or have no room;
        `token_ids` are `(rows, longest)` texts with `(rows,)` `counts` of tokens."""
        return [
            self._draft(row, token_ids[row, : counts[row]].tolist()) if new else []
            for row, new in enumerate(sampled_token_ids)
        ]

    def _draft(self, row: int, text: list[int]) -> list[int]:
        if (most := min(self._most, self._longest - len(text) - 1)) <= 0:
            return []
        # vLLM does not say when a row is another request's: its text then begins otherwise.
        before, drafter = self._rows.get(row, ([], None))
        if drafter is None or text[: len(before)] != before:
            drafter = self._spec.build(None, None)
            drafter.join([text], 0)
        self._rows[row] = text, drafter
        return list(drafter.draft(0, text, most)[0])
