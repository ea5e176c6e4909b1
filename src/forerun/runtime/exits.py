"""A target whose shallow layers draft: one cache, and the hidden states of unfinished tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from forerun.errors import PromptError, SettingError
from forerun.runtime.attention import Mask, Parents
from forerun.runtime.base import Pieces, Rows
from forerun.runtime.layers import LayerAccess, Placed
from forerun.runtime.padded import picker
from forerun.runtime.torch_executor import TorchExecutor

Leave = Callable[[int, list[int], torch.Tensor], list[bool]]
"""`(depth, rows, hidden (n, H) of each row's newest token)` to which of the rows leave there."""


class Work(Counter[tuple[str, int]]):
    """What decoding ran, prompts left out, by part and by the positions it was run for at once.

    Parts are layers in "draft" and in "verify" (what drafting had left to do), "exit" and "project"
    (hidden states of shallow layers, and of the last one, turned into logits) and "step" (tokens
    that began to climb). A token decoded plainly is L times ("verify", 1) and once ("project", 1).
    """

    def calls(self, *parts: str) -> int:
        """How often these parts ran, for however many positions: how often weights were read."""
        return sum(count for (part, _), count in self.items() if part in parts)

    def passes(self, *parts: str) -> int:
        """Positions that these parts ran for, each as often as it was among them."""
        return sum(count * size for (part, size), count in self.items() if part in parts)


@dataclass(slots=True)
class _Pending:
    """A token beyond what its row's cache covers, and how deep it has come. Depths never rise along
    a row: whatever runs deeper takes all earlier tokens along."""

    token: int
    depth: int = 0
    state: Any = None  # `(H,)` at its depth, if that is not 0


Span = tuple[int, int, int]  # `(row, first pending token, how many)`


@dataclass
class Batch:
    """Hidden states on their way through the layers together."""

    spans: list[Span]
    at: Placed
    hidden: torch.Tensor  # `(n, width, H)`, padded on the right


class LayersExecutor(TorchExecutor):
    """A target that also drafts: SpecBound's bounded speculation with cached states.

    `climb` takes each row's newest token through the first layers and leaves it where it exits.
    Its hidden state stays *pending*, the only extra memory: keys and values go where they belong,
    in the one cache. A later token that goes deeper takes the pending ones along, for it needs
    their keys there. `run` recognises pending tokens, brings all to the same depth and then through
    the remaining layers together, so that each token it is fed passes each layer exactly once. With
    nothing pending, it is a plain `TorchExecutor`. `UnsupportedModelError` if it has no layers, or
    a row cache cannot serve it.

    With an `adapter` it drafts from that one's depth: whatever passes there passes the adapter,
    too, prompts, drafts, and what is verified.

    Reference: Wen and Feng 2026, SpecBound, section 2.3.
    """

    trees = False
    timeable = False

    def __init__(self, model: Any, adapter: Adapter | None = None) -> None:
        self.access, self.adapter = LayerAccess(model.eval()), adapter and adapter.eval()
        self._adapted = torch.empty(0)
        self.work = Work()
        self.draft_seconds = 0.0  # wall time spent in `climb` so far
        self.counts: list[list[int]] = []
        """Per row, since it joined and without its prompt: positions × layers, and hidden states of
        shallow layers turned into logits."""
        self._pending: list[list[_Pending]] = []
        self._starts: Sequence[int] = ()
        self._batch: Batch | None = None
        super().__init__(model)
        if adapter is not None:
            layer = self.facts.token_bytes // self.access.layers
            self.facts = replace(self.facts, token_bytes=self.facts.token_bytes + layer)

    def reserve(self, rows: int, columns: int) -> None:
        super().reserve(rows, columns)
        self._grow(rows)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Reorder the cache; pending tokens are dropped (between rounds: none)."""
        super().keep(rows, lengths)
        self._batch = None
        self._grow(max(rows, default=-1) + 1)
        self._pending = [[] for _ in rows]
        self.counts = [list(self.counts[row]) for row in rows]

    def _grow(self, rows: int) -> None:
        """Rows that joined since the last pass have nothing pending."""
        self._pending.extend([] for _ in range(rows - len(self._pending)))
        self.counts.extend([0, 0] for _ in range(rows - len(self.counts)))

    @torch.inference_mode()
    def climb(
        self,
        starts: Sequence[int],
        contexts: Sequence[Sequence[int] | None],
        depths: Sequence[int],
        leave: Leave,
    ) -> None:
        """Take the newest token of each row up from the embedding until it leaves; `PromptError` if
        a context is longer than the model's.

        Args:
            starts: per row the tokens that have passed all layers.
            contexts: per row all its tokens; None leaves the row alone.
            depths: where it may leave, rising; beyond the last nothing goes. The last may be all
                layers: such a token is decoded, and verification only judges it.
            leave: asked at each of these depths about the rows still climbing; see `Leave`.
        """
        began = time.perf_counter()
        self._starts = starts
        self._grow(len(starts))
        rows = [row for row, context in enumerate(contexts) if context is not None]
        pieces = [list((contexts[row] or ())[starts[row] :]) for row in rows]
        longest, limit = max((len(text or ()) for text in contexts), default=0), self.facts.limit
        if longest > limit:
            raise PromptError(f"{longest} tokens do not fit the model's context of {limit}")
        self._take(rows, pieces, fresh=1)
        self.work["step", len(rows)] += 1
        at = 0
        for depth in depths if rows else ():
            self._sweep(rows, at, depth, "draft")
            at, batch = depth, self._batch
            assert batch is not None
            assert [span[0] for span in batch.spans] == rows
            last = picker([count for *_, count in batch.spans], [1] * len(rows))
            shallow = depth < self.access.layers
            self.work["exit" if shallow else "project", len(rows)] += 1
            for row in rows:
                self.counts[row][1] += shallow
            shown = batch.hidden if self.adapter is None else self._adapted
            gone = leave(depth, rows, last(shown)[:, 0])
            rows = [row for row, exits in zip(rows, gone, strict=True) if not exits]
            if not rows:
                break
        self.draft_seconds += time.perf_counter() - began

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        """As `TorchExecutor.run`, but for trees; pending tokens of the pieces are only finished.
        Pending tokens that are not fed are dropped."""
        self._starts = starts
        self._grow(len(starts))
        if counted := sum(wanted):
            self.work["project", counted] += 1
        if not any(self._pending):
            for row, count in enumerate(wanted):
                self.counts[row][0] += self.access.layers * count
            if counted:
                self.work["verify", counted] += self.access.layers
            return super().run(starts, pieces, wanted)
        self._take(list(range(len(pieces))), [list(piece) for piece in pieces])
        rows = [row for row, pending in enumerate(self._pending) if pending]
        # Tokens whose logits are not wanted are a prompt's; they are not counted.
        uncounted = [len(piece) - n for piece, n in zip(pieces, wanted, strict=True)]
        self._sweep(rows, 0, self.access.layers, "verify", uncounted)
        shape = len(wanted), max(wanted, default=0), self.facts.vocab_size
        logits = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if rows:
            spans = [(row, 0, len(self._pending[row])) for row in rows]
            hidden = self._gather(spans, self.access.layers).hidden
            picked = picker([len(pieces[row]) for row in rows], [wanted[row] for row in rows])
            logits[rows] = self.access.logits(picked(hidden))
        self._batch = None
        for row in rows:
            self._pending[row].clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return logits

    def _take(self, rows: list[int], pieces: list[list[int]], fresh: int = 0) -> None:
        """Make each row's pending tokens its piece: known tokens keep their depth. The last `fresh`
        tokens start anew even if they are known."""
        for row, piece in zip(rows, pieces, strict=True):
            held = self._pending[row]
            most, common = min(len(held), len(piece) - fresh), 0
            while common < most and held[common].token == piece[common]:
                common += 1
            if common < max(len(held), len(piece)):
                self._batch = None
                held[common:] = map(_Pending, piece[common:])

    def _sweep(
        self, rows: list[int], first: int, last: int, part: str, uncounted: Sequence[int] = ()
    ) -> None:
        """Take all pending tokens of these rows that lie between the depths to depth `last`. Tokens
        lie at different depths; the deeper ones wait until the others have reached them.
        `uncounted` is how many of each row's do not belong to the `part` of the work."""
        at = first
        while at < last:
            spans, until = [], last
            for row in rows:
                depths = [token.depth for token in self._pending[row]]
                if count := depths.count(at):
                    # Depths never rise: all tokens at the smallest depth stand at the end.
                    spans.append((row, len(depths) - count, count))
                until = min([until, *(depth for depth in depths if depth > at)])
            if spans:
                batch = self._gather(spans, at)
                batch.hidden = self._through(batch.hidden, at, until, batch.at)
                layers, positions = until - at, 0
                for states, (row, begin, count) in zip(batch.hidden, spans, strict=True):
                    for token, state in zip(self._pending[row][begin:], states, strict=False):
                        token.depth, token.state = until, state
                    counted = count - (uncounted[row] if uncounted else 0)
                    self.counts[row][0] += counted * layers
                    positions += counted
                if positions:
                    self.work[part, positions] += layers
            at = until

    def _gather(self, spans: list[Span], depth: int) -> Batch:
        """The batch of these tokens at `depth`: the one under way if it is the same, else new."""
        if self._batch is not None and self._batch.spans == spans:
            return self._batch
        rows, begins, counts = ([span[i] for span in spans] for i in range(3))
        width = max(counts)
        starts = [self._starts[row] + begin for row, begin in zip(rows, begins, strict=True)]
        mask = self._mask(starts, width, self.cache.open(rows, starts, width, self.device))
        assert isinstance(mask, torch.Tensor), "layer access refuses sliding windows"
        positions = self._positions(starts, width)
        held = [self._pending[row][begin : begin + n] for row, begin, n in spans]
        # Zeros in padding: left-overs may overflow, and a masked NaN still spoils attention.
        padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        if depth == 0:
            ids = padded([torch.tensor([token.token for token in own]) for own in held])
            hidden = self.access.embed(ids.to(self.device), positions)
        else:
            hidden = padded([torch.stack([token.state for token in own]) for own in held])
        self._batch = Batch(spans, Placed(mask, positions, self.cache), hidden)
        return self._batch

    def _through(self, hidden: torch.Tensor, first: int, last: int, at: Placed) -> torch.Tensor:
        """As `LayerAccess.run`, and through the adapter."""
        if self.adapter is not None and first < (depth := self.adapter.depth) <= last:
            hidden = self.access.run(hidden, first, depth, at)
            self._adapted, first = self.adapter(self.access, hidden, at), depth
        return self.access.run(hidden, first, last, at)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        if self.adapter is None:
            return super()._logits(ids, positions, mask)
        assert isinstance(mask, torch.Tensor), "layer access refuses sliding windows"
        hidden, at = self.access.embed(ids, positions), Placed(mask, positions, self.cache)
        return self.access.logits(self._through(hidden, 0, self.access.layers, at))


def layers_of(rows: Rows) -> LayersExecutor:
    """The executor of rows of a model that also drafts."""
    assert isinstance(rows.executor, LayersExecutor), "these rows run whole models only"
    return rows.executor


class Adapter(torch.nn.Module):
    """Kangaroo's `norm₂(h + attention(norm₁(h)))` of hidden states `h` at depth ℓ, 1 ≤ ℓ < L (else
    `SettingError`), which take the place of the last layer's.

    It shares all else with the target, its head included. Its keys and values stand in the target's
    own cache, as one layer more, so that they are kept, copied and rolled back with the rest. It is
    begun as the attention of the target's next layer and its final norm.

    Reference: Liu et al. 2024, Kangaroo, section 3.1.
    """

    def __init__(self, access: LayerAccess, depth: int) -> None:
        if not 1 <= depth < access.layers:
            raise SettingError(
                f"layers must be between 1 and {access.layers - 1} for kangaroo, whose adapter "
                f"stands below the target's {access.layers}, got {depth}"
            )
        super().__init__()
        self.depth = depth
        self.layer, self.norm = access.bare(depth)

    def forward(self, access: LayerAccess, hidden: torch.Tensor, at: Placed) -> torch.Tensor:
        """`(n, width, H)` states for `LayerAccess.unembed`; as `LayerAccess.run`."""
        return self.norm(access.call([self.layer], hidden, at))
