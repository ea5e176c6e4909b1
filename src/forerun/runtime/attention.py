"""Attention of passes over rows: grouped queries without copies of keys and values, windows, and
token trees: pieces of which not every token follows the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from forerun.errors import SettingError
from forerun.lazy import torch

Parents = Sequence[Sequence[int]]
"""Per row, for each token of its piece, the place in the piece of the token that it follows, an
earlier one; −1: the one before it. Rows without any are chains."""
FARTHEST = 63  # places before a token, the farther ones of which it sees, all of them
FOLDED = "forerun_folded"  # name of `folded_attention` in transformers' registry

Mask: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
"""Additive, of all layers or by the type of a layer as the configuration names it."""
Windows = dict[str, int | None] | int | None
"""Columns that a token sees, its own among them; None: all. Of all layers or by their type."""


def folded_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention where queries `(n, heads, width, dim)` that share keys and values, `(n, pairs,
    columns, dim)` each, are one longer query; taken and given as transformers does, which copies
    keys and values once per group of queries where a mask is given: over a cache of many columns
    that takes longer than all else. The mask may be as `folded_mask` makes it; with a bias or a
    soft cap it is transformers' own attention."""
    # Imported when models are: what transformers' attentions import takes longer than a start.
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups, width = query.shape[1] // key.shape[1], query.shape[2]
    own = dropout or more.get("softcap") is not None or more.get("position_bias") is not None
    if attention_mask is None or groups == 1 or own:
        mask = None if attention_mask is None else attention_mask[:, :, :width]
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **more
        )
    if attention_mask.shape[2] != groups * width:
        attention_mask = folded_mask(attention_mask[:, :, :width], groups)
    longer = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    out = torch.nn.functional.scaled_dot_product_attention(
        longer, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4).flatten(2, 3), None


def folded_mask(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """`(n, 1, groups · width, columns)` of a mask `(n, 1, width, columns)`, which begins it."""
    return mask.repeat(1, 1, groups, 1) if groups > 1 else mask


def groups_of(model: Any) -> int:
    """Queries that share keys and values, where the model's attention can be folded; else 1."""
    from transformers import AttentionInterface

    if FOLDED not in AttentionInterface():
        AttentionInterface.register(FOLDED, folded_attention)
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", 1)
    pairs = getattr(config, "num_key_value_heads", None) or heads
    able = config._attn_implementation == "sdpa" and type(model)._can_set_attn_implementation()
    able = able and getattr(config, "attn_logit_softcapping", None) is None
    return int(heads // pairs) if able and isinstance(pairs, int) else 1


@contextmanager
def folding(model: Any, groups: int) -> Iterator[None]:
    """Let the model's passes fold their queries, meanwhile; with one group, nothing changes."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = FOLDED if groups > 1 else before
    try:
        yield
    finally:
        config._attn_implementation = before


def windows_of(config: Any) -> Windows:
    """The sliding windows of a model's layers by its configuration; one where all are the same."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if kinds := set(getattr(config, "layer_types", None) or ()):
        windows = {k: window if k == "sliding_attention" else None for k in sorted(kinds)}
        return windows if len(set(windows.values())) > 1 else windows[min(kinds)]
    return window if getattr(config, "use_sliding_window", True) else None


def mask_of(windows: Windows, make: Callable[[int | None], torch.Tensor]) -> Mask:
    """What a forward takes as its mask, made for every window."""
    if isinstance(windows, dict):
        return {kind: make(window) for kind, window in windows.items()}
    return make(windows)


def hidden_columns(
    places: torch.Tensor, columns: int, window: int | None = None, tree: torch.Tensor | None = None
) -> torch.Tensor:
    """`(n, width, columns)` what tokens at places `(n, width)` do not see: columns behind their
    own, those beyond a window of so many, and what a tree, as by `trees_of`, leaves out."""
    column, place = torch.arange(columns, device=places.device), places.unsqueeze(-1)
    hidden = column > place
    if tree is not None:
        back = (place - column).clamp_(0, FARTHEST)
        hidden |= (tree[1].unsqueeze(-1) >> back) & 1 == 0
    if window is not None:
        newest = place if tree is None else tree[0].unsqueeze(-1)
        hidden |= positions_of_columns(places, columns, tree).unsqueeze(1) <= newest - window
    return hidden


def positions_of_columns(
    places: torch.Tensor, columns: int, tree: torch.Tensor | None
) -> torch.Tensor:
    """`(n or 1, columns)` positions in the text; arguments as of `hidden_columns`."""
    column = torch.arange(columns + 1, device=places.device).unsqueeze(0)
    if tree is not None:  # padding may write beyond what is shown
        column = column.repeat(len(places), 1).scatter_(1, places.clamp(max=columns), tree[0])
    return column[:, :columns]


def additive_mask(
    places: torch.Tensor,
    columns: int,
    window: int | None,
    dtype: torch.dtype,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Additive `(n, 1, width, columns)`, of `dtype`; arguments as of `hidden_columns`."""
    return additive(hidden_columns(places, columns, window, tree), dtype).unsqueeze(1)


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where something is seen, the most negative number where it is hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def branches(parents: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Where the `count` tokens of a row's piece stand in the text, and which of those before them
    they see; without `Parents` they are a chain.

    Returns:
        Per token how many of the piece precede it in the text; and an integer of 64 bits, of which
        bit n says whether it sees what is held n places before it, the last one also for all
        farther ones; `SettingError` if it would have to differ there.

    >>> branches([-1, -1, 0], 3)    # the third follows the first, as the second does
    ([0, 1, 1], [-1, -1, -3])
    """
    if not parents:
        return list(range(count)), [-1] * count
    depths: list[int] = []
    seen: list[int] = []
    for place, parent in enumerate(parents):
        parent = place - 1 if parent < 0 else parent
        word = -1 if parent < 0 else seen[parent] << (place - parent) | 1
        if word < -1 << FARTHEST:
            raise SettingError(
                f"token {place} of a tree lies more than {FARTHEST} places behind one that it does "
                "not follow; make the tree smaller"
            )
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        seen.append(word)
    return depths, seen


def trees_of(
    starts: Sequence[int], counts: Sequence[int], parents: Parents, width: int
) -> torch.Tensor:
    """`(2, rows, width)` positions in the text and what each token sees, as by `branches`, of rows
    that hold `starts` tokens and are fed `counts`, padded on the right to `width`."""
    out = torch.full((2, len(starts), width), -1)
    out[0] = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        depths, seen = branches(parents[row], count)
        out[0, row, :count] = start + torch.tensor(depths)
        out[1, row, :count] = torch.tensor(seen)
    return out
