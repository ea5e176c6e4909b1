"""An encoder-decoder Hugging Face model stepped over ragged rows by PyTorch, as it is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from forerun.errors import ForerunWarning, UnsupportedModelError
from forerun.runtime import padded
from forerun.runtime.attention import additive, hidden_columns, positions_of_columns
from forerun.runtime.base import Executor, Facts
from forerun.runtime.cache import RowCache, cache_argument
from forerun.runtime.placement import placement_of
from forerun.runtime.probe import prove
from forerun.runtime.sources import CrossAttention, Encoder, SourceCache, layers_of, projections
from forerun.runtime.support import check_supported, decoder_limit


class OwnCache(RowCache):
    """A row cache that says no token precedes: hooks place the tokens instead. The module of
    positions still looks up places from 0 on before its hook replaces them; from the true length
    on, padding could point past the end of a learned table."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class EncoderDecoderExecutor(padded.PaddedExecutor):
    """Runs the decoder of an encoder-decoder model over rows that each have a source.

    The encoder reads a source once, when its row joins; the cross-attention's keys are made then
    and kept. All lengths, limits and rollbacks are the decoder's.

    Args:
        model: `UnsupportedModelError` says why it cannot be served.
        encoder: that of another executor, whose states this model's decoder attends to.
        own_settings: whether the model's generation settings count; a `ForerunWarning` names what
            of them is not applied.
    """

    copies = False  # what a row holds depends on its source

    def __init__(
        self, model: Any, encoder: Encoder | None = None, own_settings: bool = True
    ) -> None:
        check_supported(model, encoders=True)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.cross = CrossAttention(model, encoder)
        decoder = model.get_decoder()
        self.placement = placement_of(decoder, decoder_limit(model.config))
        self.facts = facts_of(model)
        self.cache, self.sources = OwnCache(), SourceCache(len(self.cross.layers))
        self._both = EncoderDecoderCache(self.cache, self.sources)
        self._cached = {cache_argument(model): self._both, "use_cache": True}
        self._both.is_updated = dict.fromkeys(range(len(self.cross.layers)), True)
        # Not None, so that layers attend to the source; never read, as the keys are cached.
        unread = torch.zeros(1, 1, model.config.d_model, device=self.device, dtype=self.dtype)
        self._unread = BaseModelOutput(last_hidden_state=unread)
        self.banned = banned(model, self.facts.vocab_size) if own_settings else []
        """Tokens that the model's generation settings rule out; their logits are −inf."""
        self._across: tuple[list[int], torch.Tensor] | None = None
        if own_settings and encoder is None:
            warn_of_settings(model)
        if encoder is None:
            prove(self, model)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().keep(rows, lengths)
        self.sources.retain(rows)
        self._across = None

    def attend(self, sources: Sequence[Sequence[int]]) -> None:
        """Read the sources of the rows that join next, and make their keys."""
        read = list(self.cross.read(sources))  # an error of the encoder leaves all as it was
        first = len(self.sources.lengths)
        self.sources.lengths.extend(map(len, sources))
        self._across = None
        for states, pairs in read:
            rows = [first + place for place in states.places]
            for layer, (keys, values) in enumerate(pairs):
                self.sources.write(rows, layer, keys, values)

    def beside(self, model: Any) -> Executor:
        """The draft reads what this one's encoder read."""
        return EncoderDecoderExecutor(model, self.cross.encoder)

    def _forward(self, now: padded.PaddedPass) -> torch.Tensor:
        begin = torch.tensor(now.starts, device=self.device)[:, None]
        places = begin + torch.arange(now.ids.shape[1], device=self.device)
        queries = places if now.tree is None else now.tree[0]
        keys = positions_of_columns(places, now.columns, now.tree)
        hidden = hidden_columns(places, now.columns, None, now.tree)
        across = self._open_sources(now.rows)
        with (
            self.placement.placed(queries, keys, hidden) as mask,
            padded.seeing(self.model.get_output_embeddings(), now.pick),
        ):
            logits: torch.Tensor = self.model(
                encoder_outputs=self._unread,
                attention_mask=across,
                decoder_input_ids=now.ids,
                decoder_attention_mask=mask,
                **self._cached,
            ).logits
        if self.banned:
            ruled_out = torch.tensor(self.banned, device=self.device)
            logits = logits.index_fill(-1, ruled_out, -torch.inf)
        return logits

    def _open_sources(self, rows: list[int]) -> torch.Tensor:
        """Show these rows' sources; the additive mask `(rows, 1, 1, columns)` over them."""
        columns = self.sources.show(rows)
        if self._across is None or self._across[0] != rows:
            lengths = torch.tensor([self.sources.lengths[row] for row in rows], device=self.device)
            beyond = torch.arange(columns, device=self.device) >= lengths[:, None]
            self._across = rows, additive(beyond, self.dtype)[:, None, None]
        return self._across[1]


def facts_of(model: Any) -> Facts:
    """What an encoder-decoder model says of itself; a pass is one of its decoder."""
    config, decoder = model.config, model.get_decoder()
    limit = placement_of(decoder, decoder_limit(config)).limit
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    stack = layers_of(decoder)
    cross = {p for layer in stack for m in projections(layer)[:2] for p in m.parameters()}
    read = {*decoder.parameters(), head} - {table} - cross
    layers = len(stack)
    heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    width = getattr(config, "d_kv", None) or config.d_model // heads
    return replace(
        padded.facts_of(model),
        limit=limit,
        layers=layers,
        weights=sum(p.numel() for p in read | {head}),
        token_bytes=2 * layers * heads * width * model.dtype.itemsize,
        source_limit=source_limit(model, limit),
        start=start_of(model),
    )


def source_limit(model: Any, limit: int) -> int:
    """Most tokens of a source."""
    positions = getattr(model.get_encoder(), "embed_positions", None)
    weights = getattr(positions, "weights", getattr(positions, "weight", None))
    skipped = int(getattr(positions, "offset", 0))
    return limit if weights is None else min(limit, len(weights) - skipped)


def _settings(model: Any) -> dict[str, Any]:
    """The model's generation settings that say anything."""
    generation = getattr(model, "generation_config", None)
    given = generation.to_dict() if generation else {}
    return {name: value for name, value in given.items() if value is not None}


def start_of(model: Any) -> tuple[int, ...]:
    """What every text of the decoder begins with: its start token, and a forced first one."""
    given = _settings(model)
    names = ("decoder_start_token_id", "bos_token_id")
    known = [given.get(name, getattr(model.config, name, None)) for name in names]
    start = next((value for value in known if value is not None), None)
    if start is None:
        raise UnsupportedModelError(
            "its config.json and generation_config.json name no decoder_start_token_id"
        )
    first = start[0] if isinstance(start, (list, tuple)) else start
    forced = given.get("forced_bos_token_id")
    return (int(first),) if forced is None else (int(first), int(forced))


def banned(model: Any, vocab_size: int) -> list[int]:
    """Tokens that the model's generation settings rule out."""
    given = _settings(model)
    words = [word[0] for word in given.get("bad_words_ids", ()) if len(word) == 1]
    return sorted({i for i in (*words, *given.get("suppress_tokens", ())) if i < vocab_size})


_DEFAULTS: dict[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "do_sample": False,
    "begin_suppress_tokens": None,
}


def warn_of_settings(model: Any) -> None:
    """Name generation settings of the model that change its text elsewhere and not here."""
    given = _settings(model)
    odd = {k: given[k] for k, off in _DEFAULTS.items() if k in given and given[k] != off}
    if odd.get("num_beams", 1) == 1:
        odd.pop("length_penalty", None)
    several = [word for word in given.get("bad_words_ids", ()) if len(word) > 1]
    if several:
        odd["bad_words_ids"] = f"{len(several)} of several tokens"
    if odd:
        warnings.warn(
            "the model's generation settings hold what is not applied here: "
            f"{', '.join(f'{name}={value}' for name, value in odd.items())}; its text differs from "
            "transformers' unless they are switched off there",
            ForerunWarning,
            stacklevel=4,
        )
