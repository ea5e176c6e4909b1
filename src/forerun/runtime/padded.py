"""Padded passes of a Hugging Face model: what executors share, with an encoder or not."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from forerun.runtime.attention import Parents, trees_of
from forerun.runtime.base import Facts, Pieces, identity
from forerun.runtime.cache import CachedExecutor, RowCache
from forerun.runtime.support import context_limit, end_of_text

TOGETHER = 32  # padded tokens per row that a pass may waste
Pick = Callable[[torch.Tensor], torch.Tensor]  # of `(rows, width, ...)` to `(rows, wanted, ...)`


class PaddedPass(NamedTuple):
    """What is fed to rows at once."""

    rows: list[int]
    starts: Sequence[int]  # per row the tokens it holds
    counts: list[int]  # and is fed
    ids: torch.Tensor  # `(rows, width)` what follows
    columns: int  # of the cache that attention sees
    tree: torch.Tensor | None  # as by `trees_of`; None: tokens follow each other
    pick: Pick


class PaddedExecutor(CachedExecutor):
    """Runs a Hugging Face model over rows of different lengths, padded to one width."""

    trees = True
    model: Any
    dtype: torch.dtype
    cache: RowCache

    def module(self) -> Any:
        return self.model

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        """One padded pass, or two where prompts are read beside rows that decode."""
        shape = len(pieces), max(wanted, default=0), self.facts.vocab_size
        out: torch.Tensor | None = None
        for rows in _by_width(pieces):
            begin, fed = [starts[row] for row in rows], [pieces[row] for row in rows]
            trees = [parents[row] for row in rows] if parents else ()
            counts, width = list(map(len, fed)), max(map(len, fed))
            columns = self.cache.open(rows, begin, width, self.device)
            padded = [[*piece, *[0] * (width - len(piece))] for piece in fed]
            ids = torch.tensor(padded, device=self.device)
            tree = trees_of(begin, counts, trees, width).to(self.device) if any(trees) else None
            pick = picker(counts, [wanted[row] for row in rows])
            logits = self._forward(PaddedPass(rows, begin, counts, ids, columns, tree, pick))
            if self.device.type == "cuda":  # the caller reads the result at once anyway
                torch.cuda.synchronize(self.device)
            if len(rows) == len(pieces):
                return logits
            if out is None:
                out = torch.zeros(shape, dtype=self.dtype, device=self.device)
            out[rows, : logits.shape[1]] = logits
        return torch.zeros(shape, dtype=self.dtype, device=self.device) if out is None else out

    def _note(self, now: PaddedPass, states: torch.Tensor) -> None:
        """Leave `(rows, width, ...)` states of a pass."""
        assert self.states is not None
        for row, start, count, own in zip(now.rows, now.starts, now.counts, states, strict=True):
            self.states.note(row, start, own[:count])

    @abstractmethod
    def _forward(self, now: PaddedPass) -> torch.Tensor:
        """`(rows, wanted, V)` logits of what the pass picks."""


@contextmanager
def seeing(head: Any, pick: Pick) -> Iterator[None]:
    """Let a module see what is picked alone."""
    if pick is every:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, args: (pick(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def every(hidden: torch.Tensor) -> torch.Tensor:
    """Picks all columns."""
    return hidden


def picker(counts: Sequence[int], wanted: Sequence[int]) -> Pick:
    """Takes of padded rows of so many tokens the last ones that are wanted."""
    most = max(wanted)
    skipped = [count - n for count, n in zip(counts, wanted, strict=True)]
    if min(counts) == most and not any(skipped):
        return every

    def pick(hidden: torch.Tensor) -> torch.Tensor:
        if min(skipped) == max(skipped):
            return hidden[:, skipped[0] : skipped[0] + most]
        at = torch.tensor(skipped, device=hidden.device)[:, None]
        at = (at + torch.arange(most, device=hidden.device)).clamp_(max=hidden.shape[1] - 1)
        return hidden[torch.arange(len(at), device=hidden.device)[:, None], at]

    return pick


def facts_of(model: Any) -> Facts:
    """What a Hugging Face causal language model says of itself."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every = sum(parameter.numel() for parameter in model.parameters())
    config = model.config.get_text_config(decoder=True)
    norm = getattr(model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    heads = getattr(config, "num_attention_heads", 0)
    pairs = getattr(config, "num_key_value_heads", None) or heads
    wide = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
    layers = int(getattr(config, "num_hidden_layers", 0))
    return Facts(
        vocab_size=int(head.shape[0]),
        limit=context_limit(model.config),
        layers=layers,
        weights=every if table is head else every - table.numel(),
        token_bytes=2 * layers * int(pairs) * int(wide) * model.dtype.itemsize,  # of full attention
        eos=end_of_text(getattr(model, "generation_config", None)),
        precision=str(model.dtype).removeprefix("torch."),
        executor="torch",
        name=str(getattr(model, "name_or_path", "") or ""),
        identity="" if weight is None else identity(weight.detach().float().cpu().numpy()),
    )


def _by_width(pieces: Pieces) -> list[list[int]]:
    """Rows with something to feed, those with much longer pieces apart."""
    fed = [row for row, piece in enumerate(pieces) if piece]
    shortest = min((len(pieces[row]) for row in fed), default=0)
    short = [row for row in fed if len(pieces[row]) <= shortest + TOGETHER]
    long = [row for row in fed if len(pieces[row]) > shortest + TOGETHER]
    return [rows for rows in (short, long) if rows]
