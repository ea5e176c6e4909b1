"""`model`: a smaller model drafts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from forerun.checks import Named
from forerun.drafters.base import Drafter, DrafterSpec, Prompts, Step, Texts
from forerun.drafters.stepping import NO_PLACES, SteppedDrafter
from forerun.errors import ForerunWarning, ModelError
from forerun.lazy import torch
from forerun.runtime.attention import Parents
from forerun.runtime.base import Executor, Rows
from forerun.runtime.load import load_tokenizer
from forerun.runtime.runtimes import RuntimeSpec, Source, TorchRuntime

STAND_IN = 0  # what a draft reads for an id it lacks


class ModelDrafter(SteppedDrafter):
    """Steps a draft model in its own rows.

    Args:
        rows: the draft model.
        vocab_size: the target's vocabulary; draft logits are cut or padded (−inf) to it, so only
            ids both models know are ever drafted. Ids of the target that the draft lacks it reads
            as `STAND_IN`; that may cost acceptance, and changes no output.
    """

    def __init__(self, rows: Rows | Executor, vocab_size: int) -> None:
        self.rows = rows if isinstance(rows, Rows) else Rows(rows)
        self.limit, self.caches, self.model = self.rows.limit, (self.rows,), self.rows
        self._vocab = vocab_size

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        """Empty rows: a prompt is read when its row first drafts; sources are encoded now."""
        room += max(map(len, prompts))
        self.rows.join(len(prompts), room, None if sources is None else self.readable(sources))

    def readable(self, sources: Prompts) -> list[list[int]]:
        """Sources as far as the draft can read them."""
        known, limit = self.rows.vocab_size, self.rows.facts.source_limit
        return [[i if i < known else STAND_IN for i in source[:limit]] for source in sources]

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """Feed what each row's cache lacks; what comes next."""
        wanted = [int(text is not None) for text in texts]
        if greedy is not None and self.rows.vocab_size == self._vocab:
            return Step(best=self.rows.best(self._pieces(texts), wanted, greedy))
        return Step(self.branch(texts, wanted)[:, 0])

    def branch(
        self, texts: Texts, wanted: Sequence[int], parents: Parents = (),
        places: Mapping[int, Sequence[int]] = NO_PLACES,
    ) -> torch.Tensor:  # fmt: skip
        return fitted(self.rows.feed(self._pieces(texts), wanted, parents), self._vocab)

    def _pieces(self, texts: Texts) -> list[list[int]]:
        pieces, known = super()._pieces(texts), self.rows.vocab_size
        if known < self._vocab:
            return [[i if i < known else STAND_IN for i in piece] for piece in pieces]
        return pieces


def fitted(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """`(..., V)` logits of a draft, cut or padded (−inf) to a target's vocabulary of `vocab`."""
    if (more := vocab - logits.shape[-1]) == 0:
        return logits
    return torch.nn.functional.pad(logits, (0, more), value=-torch.inf)


@dataclass(frozen=True)
class ModelDraft(DrafterSpec):
    """A smaller model drafts token by token.

    Args:
        path: a folder or Hugging Face id. A vocabulary of the target's tokenizer that is padded to
            another size works on the shared ids.
        trust_remote_code: run modelling code that comes with the checkpoint.
        by: "text" or "tokens", what a draft of another tokenizer drafts by. Text has no holes:
            indentation that is one token to the target and several to the draft is drafted; a draft
            with a head of its own (`eagle` in its folder, or what ships for SmolLM2) writes a token
            a round, and the head goes on. Tokens have probabilities, for rules and policies that
            read them, and at least half of the draft's must be the target's, too.
        runtime: what runs it; that of the target.

    Reference: Leviathan et al. 2023 [leviathan2023]; Chen et al. 2023 [chen2023]. Other tokenizers:
    Timor et al. 2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
    Heterogeneous Vocabularies, Algorithms 2 and 4.
    """

    path: Annotated[str, Named("a folder or a Hugging Face id")]
    trust_remote_code: bool = False
    by: Literal["text", "tokens"] = "text"
    runtime: RuntimeSpec = field(default=TorchRuntime(), repr=False)

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """Load the draft beside the target, on its device and in its dtype."""
        from forerun.drafters.eagle import Eagle, known_head

        tokenizer, why = None, ""
        if target_tokenizer is not None:
            tokenizer = load_tokenizer(self.path, self.trust_remote_code)
            why = difference(target_tokenizer, tokenizer)
        head = known_head(self.path) if why and self.by == "text" else None
        depths = Eagle(head).depths(self.path) if head else ()
        # An executor with a precision of its own is not told the target's.
        dtype = None if target.facts.executor == "openvino" else target.facts.precision
        source = Source(self.path, target.device, dtype, self.trust_remote_code,
                        drafts=True, depths=depths)  # fmt: skip
        rows = self.runtime.load(source)
        if why:
            return self._retokenized(rows, target, (target_tokenizer, tokenizer), why, head)
        check_encoders(target, rows, self.path)
        return ModelDrafter(rows, target.vocab_size)

    def _retokenized(
        self, rows: Rows, target: Rows, tokenizers: tuple[Any, Any], why: str, head: str | None
    ) -> Drafter:
        from forerun.drafters.eagle import Eagle
        from forerun.drafters.retokenized import SharedTokensDrafter, TextDrafter

        def gives_back(tokenizer: Any) -> bool:
            ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
            return bool(tokenizer.decode(ids, clean_up_tokenization_spaces=False) == SAMPLE)

        what = f"the draft {self.path!r} has another tokenizer than the target: {why}"
        encodes = any(side.facts.source_limit is not None for side in (target, rows))
        if encodes or not all(map(gives_back, tokenizers)):
            why = "with an encoder" if encodes else "where one of them does not give back a text"
            raise ModelError(
                f"{what}; {why} they must be the same: use a draft of the same family, or the "
                "drafter lookup"
            )
        warnings.warn(
            f"{what}; it drafts by {self.by}, which costs acceptance", ForerunWarning, stacklevel=5
        )
        if self.by == "tokens":
            return SharedTokensDrafter(rows, target.vocab_size, *tokenizers)
        gives = type(rows.executor).tap is not Executor.tap
        own = Eagle(head).build(rows, tokenizers[1]) if head and gives else None
        return TextDrafter(rows, target.vocab_size, *tokenizers, own)


def check_encoders(target: Rows, draft: Rows, name: str) -> None:
    """Raise `ModelError` unless both models or neither of them read a source."""
    sides = target.facts.source_limit is not None, draft.facts.source_limit is not None
    if sides[0] != sides[1]:
        kinds = ["an encoder-decoder model" if side else "a decoder-only one" for side in sides]
        raise ModelError(
            f"the target is {kinds[0]} and the draft {name!r} {kinds[1]}; use a draft of the same "
            "kind, or the drafter lookup"
        )


SAMPLE = "Words, 123 words; äöü\n\tand MORE."  # two tokenizers that agree on this agree on the rest


def difference(target: Any, draft: Any) -> str:
    """Why two tokenizers are not the same; empty if they mean the same by every id they share."""
    target_ids = {i: t for t, i in target.get_vocab().items()}
    draft_ids = {i: t for t, i in draft.get_vocab().items()}
    shared = sorted(target_ids.keys() & draft_ids.keys())
    differing = [i for i in shared if target_ids[i] != draft_ids[i]]
    texts = [list(tokenizer.encode(SAMPLE)) for tokenizer in (target, draft)]
    if not shared:
        return "they share no token id"
    if len(differing) > 16:  # a few added special tokens may differ; a vocabulary may not
        first = differing[0]
        return (
            f"{len(differing)} of {len(shared)} shared ids differ, e.g. {first} is "
            f"{target_ids[first]!r} in the target and {draft_ids[first]!r} in the draft"
        )
    if texts[0] != texts[1]:
        at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
        here, there = (", ".join(map(str, ids[at : at + 4])) for ids in texts)
        return (
            f"the same text encodes differently: {SAMPLE!r} has the ids {here} … in the target and "
            f"{there} … in the draft from place {at} on"
        )
    return ""
