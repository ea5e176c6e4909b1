"""A Hugging Face model stepped over ragged rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

from forerun.errors import PromptError
from forerun.runtime.cache import RowCache
from forerun.runtime.support import PROVEN, check_supported, context_limit, probe

PREFILL_CHUNK = 512
"""Prompt tokens fed in one forward pass."""
CACHED_MASKS = 64
"""Widest pass whose mask is kept: wider ones read prompts, hardly any two of one length."""


class RowModel:
    """Runs a decoder-only Hugging Face model over rows of different lengths.

    One invariant: the cache of row `r` covers `context[:lengths[r]]`, and the next forward feeds
    `context[lengths[r]:]`. Rolling back is setting `lengths[r]`. That is all the engine asks of a
    runtime: rows that join and leave, `prefill`, `feed`, and a length to move.

    Args:
        model: any supported causal language model, on its device, in its dtype.

    Raises:
        UnsupportedModelError: a row cache cannot serve this architecture; says why.
    """

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.limit: int = context_limit(model.config)
        """Most tokens of context, prompt and output together."""
        self.cache = RowCache()
        self.seconds = 0.0
        """Wall time spent in forward passes so far."""
        self.forwards = 0
        self._masks: dict[int, torch.Tensor] = {}
        self._places = torch.arange(0, device=self.device)
        if model.config.get_text_config(decoder=True).model_type not in PROVEN:
            probe(self, self.model)

    @property
    def lengths(self) -> list[int]:
        """Tokens covered per row."""
        return self.cache.lengths

    @property
    def vocab_size(self) -> int:
        """Columns of the logits (may exceed the tokenizer's vocabulary: padding)."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def join(
        self, prompts: Sequence[Sequence[int]], room: int = 0, leave_end: bool = False
    ) -> None:
        """Add a row per prompt and cover each but for its last token, in chunks.

        Args:
            prompts: token ids, each at least one.
            room: tokens each row is expected to grow by (memory is reserved once).
            leave_end: leave the last chunk to the next `feed`, which spares a pass.
        """
        first = len(self.lengths)
        columns = min(max(map(len, prompts)) + room, self.limit) + 1
        self.cache.reserve(first + len(prompts), columns)
        self.cache.lengths.extend([0] * len(prompts))
        done, longest = 0, max(map(len, prompts)) - (PREFILL_CHUNK if leave_end else 1)
        while done < longest:
            upto = done + PREFILL_CHUNK
            self.feed([list(p[done : min(upto, len(p) - 1)]) for p in prompts], first, "none")
            done = upto

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; drop the others."""
        self.cache.keep(rows)

    def rollback(self, row: int, length: int) -> None:
        """Forget what row `row` holds beyond `length` tokens."""
        self.cache.lengths[row] = min(self.cache.lengths[row], length)

    @torch.inference_mode()
    def feed(
        self,
        pieces: Sequence[Sequence[int]],
        first: int = 0,
        want: Literal["all", "last", "none"] = "all",
        skip: int = 0,
    ) -> torch.Tensor:
        """Feed each row its next tokens and cover them.

        Args:
            pieces: token ids per row from `first` on; lengths may differ, empty ones are allowed.
            first: the row `pieces[0]` belongs to.
            want: logits after every token, after each row's last token, or none.
            skip: with "all", leading tokens of every piece whose logits nobody wants; fewer than
                the longest piece has.

        Returns:
            `(rows, width - skip, V)` for "all" (columns beyond a row's piece are meaningless),
            `(rows, V)` for "last" (meaningless where the piece was empty), an empty tensor for
            "none".
        """
        began = time.perf_counter()
        counts = [len(piece) for piece in pieces]
        width = max(counts)
        if width == 0:
            return torch.empty(0, device=self.device)
        starts = self.lengths[first : first + len(pieces)]
        if max(n + c for n, c in zip(starts, counts, strict=True)) > self.limit:
            longest = max(n + c for n, c in zip(starts, counts, strict=True))
            raise PromptError(f"{longest} tokens do not fit the model's context of {self.limit}")
        padded = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
        columns = self.cache.begin(first, counts, width, self.device)
        ragged = min(counts) < width
        keep = width - skip if skip else 0  # 0: all
        output = self.model(
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=self._positions(starts, width),
            attention_mask=self._mask(starts, width, columns),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1 if want == "none" or (want == "last" and not ragged) else keep,
        )
        self.cache.commit(counts)
        logits: torch.Tensor = output.logits
        if want == "last":
            if ragged:
                ends = torch.tensor([max(c, 1) - 1 for c in counts], device=self.device)
                logits = logits[torch.arange(len(counts), device=self.device), ends]
            else:
                logits = logits[:, -1]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the caller reads the result at once anyway
        self.seconds += time.perf_counter() - began
        self.forwards += 1
        return logits

    def _positions(self, starts: Sequence[int], width: int) -> torch.Tensor:
        if (end := max(starts) + width) > len(self._places):
            # Padding may point past the end, which learned position tables do not have.
            self._places = torch.arange(2 * end, device=self.device).clamp_(max=self.limit - 1)
        rows = [self._places[start : start + width] for start in starts]
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def _mask(self, starts: Sequence[int], width: int, columns: int) -> torch.Tensor:
        """Additive `(rows, 1, width, columns)`: query `i` of a row sees columns ≤ start + i."""
        if len(starts) == 1 and width <= CACHED_MASKS:
            # A lower-right corner of one fixed triangle per width: no arithmetic per step.
            full = self._masks.get(width)
            if full is None or full.shape[-1] < columns:
                room = max(self.cache.columns, columns) + 256
                full = self._build_mask([room - width], width, room)
                self._masks[width] = full
            return full[..., -columns:]
        return self._build_mask(starts, width, columns)

    def _build_mask(self, starts: Sequence[int], width: int, columns: int) -> torch.Tensor:
        begin = torch.tensor(starts, device=self.device).view(-1, 1, 1, 1)
        query = begin + torch.arange(width, device=self.device).view(1, 1, -1, 1)
        hidden = torch.arange(columns, device=self.device) > query
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, torch.finfo(self.dtype).min)
