"""An encoder-decoder Hugging Face model stepped over ragged rows by PyTorch, as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from forerun.errors import ForerunWarning, UnsupportedModelError
from forerun.runtime.attention import additive, hidden_columns, positions_of_columns
from forerun.runtime.base import Executor, Facts
from forerun.runtime.cache import RowCache, Store, cache_argument
from forerun.runtime.padded import PaddedExecutor, PaddedPass, seeing
from forerun.runtime.padded import facts_of as torch_facts
from forerun.runtime.probe import prove
from forerun.runtime.support import check_supported, decoder_limit

SIDE_BY_SIDE = 32  # padded tokens per source that a pass of the encoder may waste
ENCODED = 1 << 14  # most padded tokens of one pass of the encoder
Encoded = tuple[list[int], torch.Tensor]
"""Which of some sources, and their states `(sources, longest, d)`, padded on the right."""


class CrossAttention:
    """Reads sources, and makes the keys and values that a model's decoder attends to.

    Args:
        model: the model.
        first: that of a target, whose encoder is this model's, too: what it said of the last
            sources is not computed again.
    """

    def __init__(self, model: Any, first: CrossAttention | None = None) -> None:
        self._encoder, self._device, self._first = model.get_encoder(), model.device, first
        # M2M100 takes an encoder token's position from "not the padding id": pad with that id.
        self._pad = model.config.pad_token_id or 0
        self.layers = list(map(projections, _layers_of(model.get_decoder())))
        self._remembers = False  # whether somebody else asks for the states of the same sources
        self._last: tuple[list[list[int]], list[Encoded]] | None = None
        if first is not None:
            first._remembers = True

    @torch.inference_mode()
    def read(
        self, sources: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Sources of alike lengths together: which these are, and their keys and values in every
        layer. Both are `(sources, heads, columns, width)`; columns beyond a source mean nothing."""
        wanted = [list(source) for source in sources]
        known = self._first._last if self._first else None
        states = known[1] if known and known[0] == wanted else self._states(wanted)
        for places, x in states:
            yield places, [(_by_head(k(x), n), _by_head(v(x), n)) for k, v, n in self.layers]

    def _states(self, sources: list[list[int]]) -> list[Encoded]:
        out = []
        for places in _groups(list(map(len, sources))):
            group = [sources[place] for place in places]
            width = max(map(len, group))
            ids = [[*source, *[self._pad] * (width - len(source))] for source in group]
            seen = [[1] * len(source) + [0] * (width - len(source)) for source in group]
            states = self._encoder(
                input_ids=torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(seen, device=self._device),
            ).last_hidden_state
            out.append((places, states))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._last = (sources, out) if self._remembers else None
        return out


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Sources sorted by length, in passes that waste little."""
    out: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        wide = not out or lengths[place] > lengths[out[-1][0]] + SIDE_BY_SIDE
        if wide or lengths[place] * (len(out[-1]) + 1) > ENCODED:
            out.append([])
        out[-1].append(place)
    return out


def _by_head(states: torch.Tensor, width: int) -> torch.Tensor:
    """`(rows, heads, columns, width)` of `(rows, columns, heads · width)`."""
    return states.view(*states.shape[:2], -1, width).transpose(1, 2)


def _layers_of(decoder: Any) -> Any:
    return decoder.block if hasattr(decoder, "block") else decoder.layers


def projections(layer: Any) -> tuple[Any, Any, int]:
    """Key and value projections of a layer's cross-attention, and the size of a head."""
    attention = getattr(layer, "encoder_attn", None)
    if attention is not None:
        return attention.k_proj, attention.v_proj, attention.head_dim
    try:
        attention = layer.layer[1].EncDecAttention
        return attention.k, attention.v, attention.key_value_proj_dim
    except (AttributeError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"nobody knows where a {type(layer).__name__} attends to the source"
        ) from error


class SourceCache(Store):
    """Cross-attention keys and values: one source per row, written once, never rolled back."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = [SimpleNamespace(keys=None, values=None) for _ in range(layers)]
        self.lengths: list[int] = []  # tokens of each row's source

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    @torch.inference_mode()
    def write(
        self, rows: Sequence[int], layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Keep `(n, heads, columns, width)` states of these rows in a layer."""
        self.reserve(len(self.lengths), max(self.lengths))
        for store, new in zip(self._layer(layer, keys, values), (keys, values), strict=True):
            store[list(rows), :, : new.shape[2]] = new

    def show(self, rows: Sequence[int]) -> int:
        """Let the layers see these rows; how many columns they see."""
        index = list(rows)
        columns = max(self.lengths[row] for row in index)
        low, high = index[0], index[-1] + 1
        adjacent = high - low == len(index)
        for layer, pair in zip(self.layers, self._store.values(), strict=True):
            seen = [store[low:high] if adjacent else store[index] for store in pair]
            layer.keys, layer.values = (store[:, :, :columns] for store in seen)
        return columns


class Table:
    """A table of positions, learned or not: all families but T5's. It knows `limit` places.

    No encoder-decoder family takes positions from outside. What places the tokens is one module,
    and for one pass at a time its answer is replaced: by a forward hook on the table of positions,
    or in T5 by an attribute that hides the method which makes the relative bias. The model is left
    as it was given, also when the pass fails.
    """

    def __init__(self, decoder: Any, limit: int) -> None:
        self._module = decoder.embed_positions
        self._device, self._dtype = decoder.device, decoder.dtype
        self.limit = min(limit, len(self._table()))

    def _table(self) -> torch.Tensor:
        positions = self._module
        if hasattr(positions, "weights"):  # M2M100: a buffer
            return positions.weights[positions.padding_idx + 1 :]
        return positions.weight[getattr(positions, "offset", 0) :]  # BART skips two rows

    @contextmanager
    def placed(
        self, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Place the tokens of the passes within, `(rows, width)`, and what they attend to, `(rows
        or 1, columns)`, of which each must not see what is hidden, `(rows, width, columns)`. Yields
        the additive mask to hand to the decoder, 4-D."""
        # Padding may point past the end.
        with self.looked_up(queries.clamp(max=self.limit - 1)):
            yield additive(hidden, self._dtype)[:, None]

    @contextmanager
    def looked_up(self, places: torch.Tensor) -> Iterator[None]:
        """Let the module look up these places, `(rows, width)`."""
        looked = self._table()[places]
        handle = self._module.register_forward_hook(lambda module, args, out: looked.to(out.dtype))
        try:
            yield
        finally:
            handle.remove()


class RelativeBias:
    """T5's biases by distance: one table for all layers, or in umT5 one per layer."""

    def __init__(self, decoder: Any, limit: int) -> None:
        attentions = [block.layer[0].SelfAttention for block in decoder.block]
        self._attentions = [a for a in attentions if a.has_relative_attention_bias]
        self._dtype, self._device = decoder.dtype, decoder.device
        self._tables: list[torch.Tensor] = []
        self._open = torch.zeros(1, 1, 1, 1, device=self._device, dtype=self._dtype)
        self.limit = limit

    @contextmanager
    def placed(
        self, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """As a table does; hides the method that makes the bias, which also adds the mask."""
        distance = (queries[:, :, None] - keys[:, None, :]).clamp(min=0)
        mask = additive(hidden, self._dtype)[:, None]
        need = int(distance.shape[-1]) + int(distance.shape[-2])
        if not self._tables or len(self._tables[0]) < need:
            self._tables = self._made(2 * need + 64)
        try:
            for attention, table in zip(self._attentions, self._tables, strict=True):
                bias = table[distance].permute(0, 3, 1, 2) + mask
                attention.compute_bias = lambda *_, bias=bias, **__: bias
            yield self._open
        finally:
            for attention in self._attentions:
                attention.__dict__.pop("compute_bias", None)

    def _made(self, room: int) -> list[torch.Tensor]:
        """Tables `(distance, heads)` out of the model's own bias of its newest token."""
        rows = [
            attention.compute_bias(1, room, device=self._device, past_seen_tokens=room - 1)
            for attention in self._attentions
        ]
        return [row[0, :, 0].flip(-1).t().contiguous() for row in rows]


def placement_of(decoder: Any, limit: int) -> Table | RelativeBias:
    """What places the tokens of a decoder that knows `limit` places at most;
    `UnsupportedModelError` if it is none of the known ways."""
    if hasattr(decoder, "embed_positions"):
        return Table(decoder, limit)
    blocks = getattr(decoder, "block", None)
    if blocks and hasattr(blocks[0].layer[0], "SelfAttention"):
        return RelativeBias(decoder, limit)
    raise UnsupportedModelError(
        "nobody knows how this decoder places its tokens: it has neither a table of positions nor "
        "a relative bias"
    )


class EncoderDecoderExecutor(PaddedExecutor):
    """Runs the decoder of an encoder-decoder model over rows that each have a source.

    The encoder reads a source once, when its row joins; the cross-attention's keys are made then
    and kept. All lengths, limits and rollbacks are the decoder's.

    Args:
        model: `UnsupportedModelError` says why it cannot be served.
        first: that of a target, whose encoder is this model's, too.
        own_settings: whether the model's generation settings count; a `ForerunWarning` names what
            of them is not applied.
    """

    copies = False  # what a row holds depends on its source

    def __init__(
        self, model: Any, first: CrossAttention | None = None, own_settings: bool = True
    ) -> None:
        check_supported(model, encoders=True)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.cross = CrossAttention(model, first)
        decoder = model.get_decoder()
        self.placement = placement_of(decoder, decoder_limit(model.config))
        self.facts = facts_of(model)
        self.cache, self.sources = RowCache(), SourceCache(len(self.cross.layers))
        both = EncoderDecoderCache(self.cache, self.sources)
        both.is_updated = dict.fromkeys(range(len(self.cross.layers)), True)
        self._cached = {cache_argument(model): both, "use_cache": True}
        # Not None, so that layers attend to the source; never read, as the keys are cached.
        unread = torch.zeros(1, 1, model.config.d_model, device=self.device, dtype=self.dtype)
        self._unread = BaseModelOutput(last_hidden_state=unread)
        self.banned = banned(model, self.facts.vocab_size) if own_settings else []
        """Tokens that the model's generation settings rule out; their logits are −inf."""
        self._across: tuple[list[int], torch.Tensor] | None = None
        if first is None:
            prove(self, model)
            if own_settings:
                warn_of_settings(model)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().keep(rows, lengths)
        self.sources.lengths = [self.sources.lengths[row] for row in rows]
        self.sources.keep(rows, max(self.sources.lengths, default=0))
        self._across = None

    def attend(self, sources: Sequence[Sequence[int]]) -> None:
        read = list(self.cross.read(sources))  # an error of the encoder leaves all as it was
        first = len(self.sources.lengths)
        self.sources.lengths.extend(map(len, sources))
        self._across = None
        for places, pairs in read:
            rows = [first + place for place in places]
            for layer, (keys, values) in enumerate(pairs):
                self.sources.write(rows, layer, keys, values)

    def beside(self, model: Any) -> Executor:
        return EncoderDecoderExecutor(model, self.cross)

    def _forward(self, now: PaddedPass) -> torch.Tensor:
        begin = torch.tensor(now.starts, device=self.device)[:, None]
        places = begin + torch.arange(now.ids.shape[1], device=self.device)
        queries = places if now.tree is None else now.tree[0]
        keys = positions_of_columns(places, now.columns, now.tree)
        hidden = hidden_columns(places, now.columns, None, now.tree)
        across = self._open_sources(now.rows)
        # No token precedes, by what the cache says: hooks place the tokens. What looks up places
        # before its hook replaces them could look past the end of a learned table.
        self.cache.start = 0
        with (
            self.placement.placed(queries, keys, hidden) as mask,
            seeing(self.model.get_output_embeddings(), now.pick),
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
    stack = _layers_of(decoder)
    cross = {p for layer in stack for m in projections(layer)[:2] for p in m.parameters()}
    read = {*decoder.parameters(), head} - {table} - cross
    layers = len(stack)
    places = getattr(model.get_encoder(), "embed_positions", None)
    known = getattr(places, "weights", getattr(places, "weight", None))
    room = limit if known is None else len(known) - int(getattr(places, "offset", 0))
    heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    width = getattr(config, "d_kv", None) or config.d_model // heads
    return replace(
        torch_facts(model),
        limit=limit,
        layers=layers,
        weights=sum(p.numel() for p in read | {head}),
        token_bytes=2 * layers * heads * width * model.dtype.itemsize,
        source_limit=min(limit, room),
        start=start_of(model),
    )


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
