"""transformers' caches of keys and values, from and to columns of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from forerun.errors import SettingError
from forerun.runtime.base import Columns


def columns_of(cache: Any, kept: Sequence[torch.Tensor]) -> list[Columns | None]:
    """What a cache that `generate` was given holds of each row; None where that is nothing.

    Args:
        cache: filled by whoever decoded before.
        kept: per row `(n,)` bool, which places of its padded prompt are none of padding.

    Raises:
        SettingError: a cache that does not hold all tokens of all layers as they are.
    """
    count, layers = cache.get_seq_length(), getattr(cache, "layers", None) or ()
    if type(cache) is not DynamicCache or any(
        layer.keys is None or layer.keys.shape[2] != count for layer in layers
    ):
        raise SettingError(
            f"a filled {type(cache).__name__} cannot be continued: it must be a DynamicCache that "
            "holds every token of every layer; leave past_key_values out to read the text again"
        )
    out: list[Columns | None] = []
    for row, keep in enumerate(kept):
        # The last token of the prompt is read in any case: what follows it is asked for.
        places = keep[: min(count, len(keep) - 1)].nonzero()[:, 0]
        states = [s[row][:, places.to(s.device)] for c in layers for s in (c.keys, c.values)]
        out.append(Columns(tuple(states), len(places)) if len(places) else None)
    return out


def cache_of(rows: Sequence[Columns], padding: Sequence[int], given: Any) -> Any:
    """A `DynamicCache` of rows behind padding, all of one length; `given` itself, if it is one.

    What a shorter row lacks at its end is 0.
    """
    length = max(before + row.count for before, row in zip(padding, rows, strict=True))
    cache, whole = DynamicCache(), []
    for states in zip(*(row.states for row in rows), strict=True):
        heads, _, width = states[0].shape
        whole.append(states[0].new_zeros(len(rows), heads, length, width))
        for row, (before, part) in enumerate(zip(padding, states, strict=True)):
            whole[-1][row, :, before : before + part.shape[1]] = part
    for layer, (keys, values) in enumerate(zip(whole[::2], whole[1::2], strict=True)):
        cache.update(keys, values, layer)
    if type(given) is DynamicCache:
        given.layers = cache.layers
        return given
    return cache
