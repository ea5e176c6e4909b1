"""A smaller model drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from forerun.drafters.base import Drafter, DrafterSpec, Proposal
from forerun.errors import ModelError, require
from forerun.runtime.base import Runtime
from forerun.runtime.load import load_model, load_tokenizer
from forerun.runtime.model import PREFILL_CHUNK, RowModel

BEHIND = 8
"""Tokens that a step may feed on top of the newest one."""
STAND_IN = 0
"""What a draft reads for an id it lacks."""


class ModelDrafter(Drafter):
    """Steps a draft model in its own row cache.

    Args:
        rows: the draft model.
        vocab_size: the target's vocabulary; draft logits are cut or padded (−inf) to it, so only
            ids both models know are ever drafted. Ids of the target that the draft lacks it reads
            as `STAND_IN`; that may cost acceptance, and changes no output.
    """

    def __init__(self, rows: Runtime, vocab_size: int) -> None:
        self.rows = rows
        self.limit = rows.limit
        self._vocab, self._known = vocab_size, rows.vocab_size

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Wall time in the draft model's forward passes."""
        return self.rows.seconds

    def ratio(self, target: Any) -> float:
        """Weights that a pass of the target reads over those of a pass of the draft."""
        sizes = [_weights(getattr(m, "model", None)) for m in (target, self.rows)]
        return sizes[0] / sizes[1] if all(sizes) else 5.0

    def join(self, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Empty rows: a prompt is read when its row first drafts (`prepare`)."""
        longest = max(map(len, prompts))
        starts = [self._readable(prompt[:1]) for prompt in prompts]
        self.rows.join(starts, min(longest + room, self.limit))

    def prepare(self, contexts: Sequence[Sequence[int] | None]) -> bool:
        """Feed what is more than a few tokens behind, in chunks and without logits.

        The end of a lone row is left to its first step, which spares a pass.
        """
        lone = len(contexts) == 1
        while True:
            pieces: list[list[int]] = []
            for context, covered in zip(contexts, self.rows.lengths, strict=True):
                behind = 0 if context is None else len(context) - 1 - covered
                if lone and BEHIND < behind < PREFILL_CHUNK:
                    return True
                upto = covered + min(behind, PREFILL_CHUNK) if behind > BEHIND else covered
                pieces.append(self._readable((context or ())[covered:upto]))
            if not any(pieces):
                return False
            self.rows.feed(pieces, want="none")

    def keep(self, rows: Sequence[int]) -> None:
        """Reorder the cache."""
        self.rows.keep(rows)

    def rollback(self, row: int, length: int) -> None:
        """Move the row's length."""
        self.rows.rollback(row, length)

    def step(self, contexts: Sequence[Sequence[int] | None]) -> Proposal:
        """Feed what each row's cache lacks and return the next-token logits."""
        covered = self.rows.lengths
        pieces = [
            [] if c is None else self._readable(c[n:])
            for c, n in zip(contexts, covered, strict=True)
        ]
        logits = self.rows.feed(pieces, want="last")
        width = logits.shape[-1]
        if width > self._vocab:
            logits = logits[:, : self._vocab]
        elif width < self._vocab:
            logits = torch.nn.functional.pad(logits, (0, self._vocab - width), value=-torch.inf)
        return Proposal(logits=logits)

    def _readable(self, ids: Sequence[int]) -> list[int]:
        """The ids as the draft can read them: a target of more ids may know some that it lacks."""
        known = self._known
        return list(ids) if known >= self._vocab else [i if i < known else STAND_IN for i in ids]


def _weights(model: Any) -> int:
    """Parameters but for a table of embeddings, of which a pass reads a row; 0 if unknown."""
    if model is None:
        return 0
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every = sum(p.numel() for p in model.parameters())
    return every if table is head else every - table.numel()


@dataclass(frozen=True)
class ModelDraft(DrafterSpec):
    """A smaller model of the same tokenizer drafts token by token.

    When it helps: when the draft agrees with the target often and costs a fraction of it. When it
    hurts: when it is nearly as slow as the target, or disagrees.

    Args:
        path: a folder or Hugging Face id; same tokenizer as the target's. A vocabulary padded to
            another size works on the shared ids.
        trust_remote_code: run modelling code that comes with the checkpoint.

    Reference: Leviathan et al. 2023; Chen et al. 2023.
    """

    summary: ClassVar[str] = "a smaller model with the same tokenizer drafts"
    paper: ClassVar[str] = "Leviathan et al. 2023; Chen et al. 2023"

    path: str
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require(bool(self.path), "model path", self.path, "a folder or a Hugging Face id")

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        """Load the draft beside the target, on its device and in its dtype."""
        model = load_model(self.path, target.device, target.dtype, self.trust_remote_code)
        if target_tokenizer is not None:
            tokenizer = load_tokenizer(self.path, self.trust_remote_code)
            check_same_tokenizer(target_tokenizer, tokenizer, self.path)
        return ModelDrafter(RowModel(model), target.vocab_size)


SAMPLE = "Words, 123 words; äöü\n\tand MORE."
"""Two tokenizers that agree on this agree on the rest."""


def check_same_tokenizer(target: Any, draft: Any, name: str) -> None:
    """Raise `ModelError` unless both tokenizers mean the same by every id they share."""
    target_ids = {i: t for t, i in target.get_vocab().items()}
    draft_ids = {i: t for t, i in draft.get_vocab().items()}
    shared = sorted(target_ids.keys() & draft_ids.keys())
    differing = [i for i in shared if target_ids[i] != draft_ids[i]]
    texts = [list(tokenizer.encode(SAMPLE)) for tokenizer in (target, draft)]
    if not shared:
        why = "they share no token id"
    elif len(differing) > 16:  # a few added special tokens may differ; a vocabulary may not
        first = differing[0]
        why = (
            f"{len(differing)} of {len(shared)} shared ids differ, e.g. {first} is "
            f"{target_ids[first]!r} in the target and {draft_ids[first]!r} in the draft"
        )
    elif texts[0] != texts[1]:
        at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
        here, there = (", ".join(map(str, ids[at : at + 4])) for ids in texts)
        why = (
            f"the same text encodes differently: {SAMPLE!r} has the ids {here} … in the target and "
            f"{there} … in the draft from place {at} on"
        )
    else:
        return
    raise ModelError(
        f"the draft {name!r} has another tokenizer than the target: {why}; use a draft of the same "
        "family, or the drafter lookup"
    )
