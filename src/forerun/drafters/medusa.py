"""Heads on the target's last hidden state draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from forerun.checks import draft_path, whole
from forerun.drafters.base import Drafter, DrafterSpec, Proposal, StepContext, Texts
from forerun.drafters.stepping import ByPlace, step_by_step
from forerun.errors import SettingError
from forerun.runtime.base import Rows
from forerun.runtime.drafts import draft_folder, spread
from forerun.runtime.layers import LayerAccess
from forerun.runtime.medusa import KIND, MedusaHeads, load_medusa


class MedusaDrafter(Drafter):
    """One head per drafted token, all on the state of the token before the newest.

    That state is left over from the pass that chose the newest token, so drafting feeds nothing.

    Args:
        target: its executor leaves states; the engine verifies with it.
        access: its layers, whose final norm the heads read through.
        heads: the heads.
        width: how many of them are asked at most.
    """

    def __init__(self, target: Rows, access: LayerAccess, heads: MedusaHeads, width: int) -> None:
        self.target: Rows = target
        self._states = target.executor.tap([access.layers])
        self._access, self._heads, self._width = access, heads, width
        self.seconds = 0.0

    def ratio(self, target: Rows) -> float:
        """Weights that a pass of the target reads over those of one head."""
        own = sum(t.numel() for n, t in self._heads.weights.items() if n.startswith("0."))
        return target.facts.weights / own if target.facts.weights else 5.0

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """A token of each head in turn, as far as the controllers want."""
        states: dict[int, torch.Tensor] = {}
        for row, text in enumerate(texts):
            if text is not None and len(text) > 1:
                left = self._states.read(row, len(text) - 2, len(text) - 1)
                if len(left):
                    states[row] = self._access.norm(left[0])
        if not states:
            return Proposal.none(len(texts))
        known = [text if row in states else None for row, text in enumerate(texts)]
        most = [min(n, self._width) for n in most]

        def ask(head: int, texts: Texts) -> torch.Tensor:
            asked = {row: state for row, state in states.items() if texts[row] is not None}
            return self._ask(head, asked, len(texts))

        return step_by_step(ByPlace(ask), known, most, guide)

    def _ask(self, head: int, states: dict[int, torch.Tensor], rows: int) -> torch.Tensor:
        """`(rows, V)` logits of a head; −inf for what it cannot say, nothing in other rows."""
        began, where = time.perf_counter(), list(states)
        logits = self._heads.logits(head, torch.stack(list(states.values())))
        out = spread(logits, self._heads.tokens, self.target.vocab_size)
        if len(where) < rows:
            asked, out = out, out.new_zeros(rows, self.target.vocab_size)
            out[where] = asked
        self.seconds += time.perf_counter() - began
        return out


@dataclass(frozen=True)
class Medusa(DrafterSpec):
    """Medusa: heads on the target's last hidden state say the tokens after the next; no model.

    Args:
        path: a folder of `forerun train-draft medusa`, trained for this target; None: the
            folder `medusa` in the target's own.
        heads: how many are asked at most, ≥ 1; None: all (the paper trains 5, and so do we unless
            told otherwise).

    Reference: Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with Multiple
    Decoding Heads.
    """

    summary: ClassVar[str] = "heads on the target's last hidden state draft; made by train-draft"
    paper: ClassVar[str] = "Cai et al. 2024 (Medusa)"
    bibtex: ClassVar[str] = "medusa2024"
    on_torch: ClassVar[bool] = True

    path: str | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        draft_path("medusa", self.path)
        if self.heads is not None:
            whole("medusa heads", self.heads, 1)

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """The drafter, on the target's states.

        Raises:
            SettingError: the target's runtime gives no hidden states, or there are no heads.
            ModelError: heads that are damaged or another target's.
            UnsupportedModelError: the target's final norm cannot be called.
        """
        if target.facts.source_limit is not None:
            raise SettingError(
                "medusa is for decoder-only targets, and this one has an encoder; use lookup, or "
                "what forerun train-draft makes for it (shared, block)"
            )
        model, kind = target.executor.module(), target.facts.executor
        if model is None or kind != "torch":
            raise SettingError(
                f"medusa reads the target's last hidden states; runtime {kind} does not give them; "
                "choose runtime torch, or a draft without heads (lookup, a draft model)"
            )
        heads = load_medusa(model, draft_folder(target.facts.name, KIND, self.path))
        count = heads.count if self.heads is None else min(self.heads, heads.count)
        return MedusaDrafter(target, LayerAccess(model), heads, count)
