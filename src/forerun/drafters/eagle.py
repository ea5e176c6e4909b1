"""`eagle`: a layer on the target's hidden states drafts; made by train-draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forerun.arrays import library, padded
from forerun.drafters.base import Prompts, Proposal, Step, StepContext, Texts, TrainedDraft
from forerun.drafters.memory import fingerprint as tokens_of
from forerun.drafters.stepping import NO_PLACES, SteppedDrafter
from forerun.errors import SettingError
from forerun.lazy import torch
from forerun.runtime import gguf
from forerun.runtime.attention import Parents
from forerun.runtime.base import CHUNK, LOGITS, Best, Facts, Rows
from forerun.runtime.drafts import naming_target, own_draft, read_about, spread
from forerun.runtime.head_file import KIND, HeadWeights, read_head
from forerun.runtime.states import States
from forerun.runtime.support import check_decoder_only
from forerun.types import Array

HEADS = Path(__file__).parent / "heads"  # heads that ship, by the hashes of tokenizer and target


class EagleDrafter(SteppedDrafter):
    """Steps a head; made by `Eagle.build`, `Eagle3.build` and `MTP.build`.

    Its rows cover what was read with the target's states; what a draft adds, with the head's own
    outputs in their place, is rolled back after the round.

    Args:
        target: its executor leaves states; the engine verifies with it.
        states: those.
        head: what drafts, a `StateReader` of `runtime.eagle` or `HeadWeights`.
        tokens: `(V,)` ids of the tokens that it says.
        name: of the head.
    """

    def __init__(self, target: Rows, states: States, head: Any, tokens: Array, name: str) -> None:
        self.target: Rows = target
        self.rows = rows = head_rows(head, len(tokens), target, name)
        self.caches, self.limit = (rows,), target.limit
        self._states, self._head = states, head
        self._ids: list[int] = tokens.tolist()
        cut = np.arange(target.vocab_size)
        if head.reads < target.vocab_size:
            cut.fill(len(tokens))
            cut[self._ids] = np.arange(len(tokens))
        self._cut: list[int] = cut.tolist()
        self._executor: Any = rows.executor
        self.ahead = rows.executor.ahead
        self._newest: dict[int, Array] = {}
        """Rows under way in this round, and the head's output `(1, D)` of each one's last token; of
        a tree those of all its last pass."""
        self._true: dict[int, int] = {}
        """Rows whose newest tokens were read without the target's states, and how many with."""
        self._left_out: list[int] = []
        """Per row how many tokens its prompt has before those that are read. The prompt alone
        decides, so that replays are exact."""

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        super().join(prompts, room)
        self._left_out.extend(max(len(prompt) - self._head.span, 0) for prompt in prompts)

    def keep(self, rows: Sequence[int]) -> None:
        self._restore()
        self.rows.keep(rows)
        self._left_out = [self._left_out[row] for row in rows]

    def rollback(self, row: int, length: int) -> None:
        """To what stands and was read with the target's states."""
        length = max(length - self.rows.begins[row], 0)
        self.rows.rollback(row, min(length, self._true.pop(row, length)))

    def unread(self, row: int, text: Sequence[int]) -> int:
        return len(text) - max(self.rows.begins[row] + self.rows.lengths[row], self._left_out[row])

    def follow(self, texts: Texts) -> None:
        """Read along, as far as the target has come, where nothing of a prompt is left out; else
        its end is read when its row first drafts, and states before that may go."""
        along: list[list[int] | None] = [None for _ in texts]
        for row, (text, n) in enumerate(zip(texts, self.target.lengths, strict=True)):
            if text is not None and (first := self._left_out[row]):
                self._states.read(row, first, first)
            elif text is not None and n:
                along[row] = text[: n + 1]
        self._read(along, leave=0)

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """What was kept of the last draft is read again, with the target's states."""
        self._restore()
        return super().propose(texts, most, guide)

    def _read(self, texts: Texts, leave: int) -> None:
        """As if a text began where it is read from, which is where there are states."""
        rows = self.rows
        for row, (text, n) in enumerate(zip(texts, rows.lengths, strict=True)):
            first = self._left_out[row]
            if text is not None and (not n or rows.begins[row] + n <= first):
                known = self._states.read(row, min(first, len(text) - 1), len(text) - 1)
                rows.lengths[row], rows.begins[row] = 0, len(text) - 1 - len(known)
        super()._read(texts, leave)

    def likeliest(self, texts: Sequence[list[int]], most: Sequence[int]) -> list[list[int]]:
        """The head's own greedy text behind each row's, at most so many tokens."""
        self._restore()
        out: list[list[int]] = [[] for _ in texts]
        ahead = [list(t) if n > 0 else None for t, n in zip(texts, most, strict=True)]
        self._read(ahead, leave=CHUNK)
        while any(ahead):
            best = self.step(ahead, frozenset()).best
            assert best is not None
            for row, text in enumerate(ahead):
                if text is not None:
                    text.append(best.tokens[row][0])
                    out[row] = text[len(texts[row]) :]
                    ahead[row] = text if len(out[row]) < most[row] else None
        return out

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        wanted = [int(text is not None) for text in texts]
        if greedy is None or LOGITS in greedy:
            return Step(self.branch(texts, wanted)[:, 0])
        pieces = self._given(texts, NO_PLACES)
        best, ids = self.rows.best(pieces, wanted, greedy), self._ids
        self._keep_outputs(pieces, NO_PLACES)
        if "second" in greedy:
            best.signals["second"] = [[ids[int(i)] for i in t] for t in best.signals["second"]]
        tokens = [[ids[i] for i in t] for t in best.tokens]
        return Step(best=Best(tokens, best.signals, best.sound))

    def branch(
        self, texts: Texts, wanted: Sequence[int], parents: Parents = (),
        places: Mapping[int, Sequence[int]] = NO_PLACES,
    ) -> torch.Tensor:  # fmt: skip
        pieces = self._given(texts, places)
        logits = self.rows.feed(pieces, wanted, parents)
        self._keep_outputs(pieces, places)
        return spread(logits, self._tokens, self.target.vocab_size)

    @cached_property
    def _tokens(self) -> torch.Tensor:
        return torch.tensor(self._ids, device=self.target.device)

    def _given(self, texts: Texts, places: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """What a pass is fed, which is given what else it reads; `places` as of `branch`."""
        pieces = self._pieces(texts)
        for row in self._newest.keys() - places.keys():
            self._true.setdefault(row, self.rows.lengths[row])
        self._give(pieces, places)
        return pieces

    def _keep_outputs(self, pieces: Prompts, places: Mapping[int, Sequence[int]]) -> None:
        for row, n in enumerate(self.rows.lengths):
            if count := len(pieces[row]):
                first = n - count if row in places else n - 1
                self._newest[row] = self._executor.states.read(row, first, n)

    def _pieces(self, texts: Texts) -> list[list[int]]:
        begun = [t and t[n:] for t, n in zip(texts, self.rows.begins, strict=True)]
        return [[self._cut[i] for i in piece] for piece in super()._pieces(begun)]

    def _give(
        self, pieces: Sequence[Sequence[int]], places: Mapping[int, Sequence[int]] = NO_PLACES
    ) -> None:
        """What the head reads beside these tokens, of the token before each; of a text's last token
        and nodes behind it, by `places` in the pass before."""
        out = []
        for row, (n, piece) in enumerate(zip(self.rows.lengths, pieces, strict=True)):
            if not piece:
                continue
            own, nodes = self._newest.get(row), places.get(row, ())
            if own is not None and not nodes:
                out.append(own)
                continue
            begin, end = self.rows.begins[row], n + len(piece) - 1 - len(nodes)
            states = self._states.read(row, begin + max(n - 1, 0), begin + end)
            if self._executor.on_torch:  # others' passes project them
                states = torch.as_tensor(states).to(self.rows.device)
                states = self._head.fused(states, len(self._states.depths))
            # The first token has none before it, and what was copied into a row has none.
            if lacking := len(piece) - len(nodes) - len(states):
                states = padded(states, lacking, 0)
            if own is not None:
                states = padded(states, 0, own.shape[1] - states.shape[1])
                states = library(own).concatenate([states, own[list(nodes)]])
            out.append(states)
        self._executor.given = out

    def _restore(self) -> None:
        self._newest.clear()
        for row, length in self._true.items():
            self.rows.rollback(row, length)
        self._true.clear()


@dataclass(frozen=True)
class Eagle(TrainedDraft):
    """One layer on the target's hidden states drafts token by token, like EAGLE's.

    Args:
        path: a folder of `forerun train-draft eagle`, trained for this target. None: the folder
            `eagle` in the target's own, or what ships for it (SmolLM2-135M-Instruct, in whatever
            precision).

    Reference: Li et al. 2025 (EAGLE-3) [eagle32025], section 3.
    """

    def depths(self, target: str | Path) -> tuple[int, ...]:
        folder = self.path or known_head(target)
        return () if folder is None else _depths(folder)

    def folder(self, target: str | Path) -> str:
        return self.path or known_head(target) or super().folder(target)

    def build(self, target: Rows, target_tokenizer: Any) -> EagleDrafter:
        """The drafter, on the target's states.

        Raises:
            SettingError: no head comes with the target, or its runtime gives no states.
            ModelError: the head is damaged or another target's.
        """
        check_decoder_only(target, KIND)
        path = self.path or own_draft(target.facts.name, KIND)
        if path is None and hasattr(target_tokenizer, "get_vocab"):
            path = shipped_head(target.facts.identity, tokens_of(target_tokenizer))
        folder = path or self.folder(target.facts.name)
        with naming_target(folder):
            states = target.executor.tap(_depths(folder))
        model = target.executor.module()
        if target.facts.executor == "openvino":
            own = read_head(folder, states.width, model, target.vocab_size)
            return EagleDrafter(target, states, own, own.tokens, folder)
        from forerun.runtime.eagle import load_eagle

        head, tokens = load_eagle(folder, states.width, model, target.vocab_size)
        return EagleDrafter(target, states, head, tokens, folder)


def _depths(folder: str) -> tuple[int, ...]:
    """What a head reads; `SettingError` if its `draft.json` does not say."""
    depths = read_about(folder, KIND).settings.get("depths")
    if not isinstance(depths, list) or not all(isinstance(d, int) for d in depths):
        raise SettingError(f"the draft in {folder!r} names no depths; train it again")
    return tuple(depths)


def known_head(target: str | Path) -> str | None:
    """The folder of the head in a target's own, or of what ships for its GGUF file, if any."""
    file = gguf.locate(target)
    own = own_draft(target, KIND)
    return own or (shipped_head(gguf.read(file).identity) if file else None)


def shipped_head(identity: str, tokenizer: str = "*") -> str | None:
    """The folder of the head that ships for a target, if one does.

    Args:
        identity: of the target's `Facts`.
        tokenizer: fingerprint of its tokenizer; by default it is not asked.
    """
    folders = HEADS.glob(f"{tokenizer}-{identity}.*") if identity else ()
    return next(map(str, folders), None)


def head_rows(head: Any, vocab: int, target: Rows, name: str) -> Rows:
    """Rows of a head that says `vocab` tokens: of our own, on the kind of executor that runs its
    target."""
    facts = Facts(vocab, target.limit, layers=1, weights=head.weights, token_bytes=head.token_bytes,
                  executor="torch", name=name)  # fmt: skip
    if isinstance(head, HeadWeights):
        from forerun.runtime.openvino.eagle import openvino_head

        return Rows(openvino_head(head, facts, target.executor))
    from forerun.runtime.eagle import HeadExecutor

    return Rows(HeadExecutor(head, facts, target.device))
