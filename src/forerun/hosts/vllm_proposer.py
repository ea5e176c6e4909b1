"""Drafters without a model as vLLM's custom proposer; see `forerun.vllm.Proposer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.hosts.vllm_requests import setting

DEFAULT_DRAFT = "suffix"


class Proposer:
    """Drafts by `suffix`, or another drafter that needs neither a model nor a tokenizer, which
    `draft` names in `--additional-config`, or `FORERUN_DRAFT`: `lookup`, `rest(datastore='DIR')`.

    vLLM makes one: `speculative_config` {"method": "custom_class", "model":
    "forerun.vllm.Proposer", "num_speculative_tokens": 8}.

    Raises:
        SettingError: the drafter is another.
    """

    def __init__(self, vllm_config: Any) -> None:
        from forerun.drafters import DRAFTERS
        from forerun.drafters.lookup import Lookup
        from forerun.drafters.rest import REST
        from forerun.drafters.suffix import Suffix
        from forerun.errors import require

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
        """Drafts by row; none for rows that read a prompt, or have no room.

        Args:
            sampled_token_ids: what each row has got from this step.
            counts: `(rows,)`, tokens of each row's text.
            token_ids: `(rows, longest)`, the texts.
        """
        out: list[list[int]] = []
        for row, new in enumerate(sampled_token_ids):
            end = int(counts[row])
            text = token_ids[row, :end].tolist() if new else []
            most = min(self._most, self._longest - end - 1)
            out.append(self._drafted(row, text, most) if text and most > 0 else [])
        return out

    def _drafted(self, row: int, text: list[int], most: int) -> list[int]:
        """vLLM does not say when a row is another request's: its text then begins otherwise."""
        before, drafter = self._rows.get(row, ([], None))
        if drafter is None or text[: len(before)] != before:
            drafter = self._spec.build(None, None)
            drafter.join([text], 0)
        self._rows[row] = text, drafter
        tokens, _ = drafter.draft(0, text, most)
        return list(tokens)
