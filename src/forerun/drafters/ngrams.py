"""A table of n-grams: which token followed the last one to four, 8 bytes an entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.cache import replacing
from forerun.errors import ModelError

SCHEMA = "1"
ORDER = 4  # tokens of the longest context
TOKEN_BITS, COUNT_BITS = 18, 5  # of an entry; the other 36 are a hash of its context
VALUE_BITS = TOKEN_BITS + 2 * COUNT_BITS
MOST_TOKENS, MOST_COUNT = 1 << TOKEN_BITS, (1 << COUNT_BITS) - 1
MULTIPLIER, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Of multiplicative hashing: 2⁶⁴ over the golden ratio."""
PRIOR = (0.0, 5.0, 2.1, 1.4, 0.8)
"""By order: how many further tokens a context is taken to have been followed by something else."""
MISS_WEIGHT = 1.6
"""Hits that a miss outweighs; with `PRIOR` fitted to texts that a table was not made from."""
UNSEEN, OTHER = 0.01, 0.1
"""Probability of a token without any context, and share of what a context leaves to others that one
of them gets; only for what to keep."""
RECENT = 8.0  # hits that being the newest entry makes up for, where room is short

Column = NDArray[np.uint64]


class Guess(NamedTuple):
    """What is expected to come next."""

    token: int
    probability: float  # estimated from counts, in (0, 1)


class NGrams:
    """For contexts of 1 to `ORDER` tokens the token that follows most often, and how often it did.

    An entry is `hash of the context (36 bits), token (18), hits (5), misses (5)`; counts beyond 31
    are halved together. Ids from 2¹⁸ on are not held. In memory it is a dictionary from hash to the
    other three, oldest entry first.
    """

    def __init__(self, entries: dict[int, int] | None = None) -> None:
        self.entries = {} if entries is None else entries

    def __len__(self) -> int:
        return len(self.entries)

    @classmethod
    def load(
        cls, path: str | Path, tokenizer: str | None = None, vocab_size: int = MOST_TOKENS
    ) -> NGrams:
        """From a file that `save` wrote.

        Args:
            path: the file.
            tokenizer: fingerprint of the tokenizer that its ids must be of; None does not ask.
            vocab_size: entries with ids from this on are left out.

        Raises:
            ModelError: it is none, cannot be read, or is of another tokenizer.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "np") as file:
                about = file.metadata() or {}
                if about.get("ngrams") != SCHEMA:
                    raise KeyError
                packed = file.get_tensor("entries").astype(np.uint64).ravel()
        except (OSError, SafetensorError, KeyError) as error:
            raise ModelError(
                f"{path} is no table of n-grams; make one with forerun build-memory"
            ) from error
        if tokenizer is not None and about.get("tokenizer") != tokenizer:
            raise ModelError(
                f"{path} was made with another tokenizer than the target's; make one with "
                "forerun build-memory for this target"
            )
        tokens = packed >> np.uint64(2 * COUNT_BITS) & np.uint64(MOST_TOKENS - 1)
        return cls(_entries(packed[tokens < vocab_size]))

    def save(
        self, path: str | Path, tokenizer: str, about: Mapping[str, str] | None = None
    ) -> None:
        """Write it, whole or not at all; `OSError` if that fails."""
        from safetensors.numpy import save

        packed = [context << VALUE_BITS | value for context, value in self.entries.items()]
        about = {"ngrams": SCHEMA, "tokenizer": tokenizer, **(about or {})}
        with replacing(Path(path)) as beside:
            beside.touch(0o600)  # it tells what was written here
            beside.write_bytes(save({"entries": np.array(packed, dtype=np.uint64)}, about))

    def learn(self, text: Sequence[int], given: int) -> None:
        """Count the tokens of a text from index `given` on; what stands before is only context.

        A longer context enters once the shorter one is known, so that a token adds at most one.
        """
        entries = self.entries
        for place in range(max(given, 1), len(text)):
            token = text[place]
            if token >= MOST_TOKENS:
                continue
            for context in contexts_of(text[max(place - ORDER, 0) : place]):
                value = entries.pop(context, None)
                if value is None:
                    entries[context] = pack(token, 1, 0)
                    break
                entries[context] = _counted(value, token)

    def trim(self, most: int) -> None:
        """Above so many entries: only the three quarters of these with most hits stay, of which
        newer ones need fewer."""
        count = len(self.entries)
        if count <= most:
            return
        values = np.fromiter(self.entries.values(), np.int64, count)
        hits = values >> COUNT_BITS & MOST_COUNT
        worth = hits + RECENT * np.arange(count) / count
        stay = np.sort(np.argsort(-worth, kind="stable")[: most * 3 // 4])
        keys = np.fromiter(self.entries, np.int64, count)
        self.entries = dict(zip(keys[stay].tolist(), values[stay].tolist(), strict=True))

    @classmethod
    def build(cls, texts: Iterable[tuple[Sequence[int], int]], most: int) -> NGrams:
        """Of the tokens of texts behind their first `given`, the entries that say most.

        Entries are ranked by how much likelier they make the texts than the next shorter context
        does (relative-entropy pruning, Stolcke 1998); those seen once are left out.

        Args:
            texts: token ids, and how many of them were given.
            most: entries to keep, ≥ 1.
        """
        packed, gains, shorter = [], [], None
        for order, column in enumerate(_columns(texts), 1):
            counted = _most_frequent(*column)
            likely = probability(order, counted.hits, counted.misses)
            expected: Any = UNSEEN
            if shorter is not None:
                at = np.searchsorted(shorter.contexts, counted.shorter)
                share = probability(order - 1, shorter.hits[at], shorter.misses[at])
                same = shorter.tokens[at] == counted.tokens
                expected = np.where(same, share, OTHER * (1 - share))
            gain = counted.hits * np.log(likely / expected)
            gain += counted.misses * np.log((1 - likely) / (1 - expected))
            good = (counted.hits > 1) & (gain > 0)
            packed.append(_packed(counted)[good])
            gains.append(gain[good])
            shorter = counted
        best = np.argsort(-np.concatenate(gains), kind="stable")[:most]
        return cls(_entries(np.concatenate(packed)[best]))


def follow(tables: Sequence[NGrams], text: Sequence[int]) -> Guess | None:
    """What follows the longest context at the end of a text that any table knows; None if none.

    Counts of several tables add up: hits of one token are misses of another.
    """
    for order, context in reversed(list(enumerate(contexts_of(text), 1))):
        known = [table.entries[context] for table in tables if context in table.entries]
        if known:
            hits, misses = Counter[int](), 0
            for token, hit, missed in map(unpack, known):
                hits[token] += hit
                misses += missed
            token, most = hits.most_common(1)[0]
            return Guess(token, probability(order, most, misses + hits.total() - most))
    return None


def contexts_of(text: Sequence[int]) -> list[int]:
    """Hashes of the last 1 to `ORDER` tokens."""
    out, state = [], 0
    for token in reversed(text[-ORDER:]):
        state = ((state ^ (token + 1)) * MULTIPLIER) & MASK
        out.append(state >> VALUE_BITS)
    return out


def probability(order: int, hits: Any, misses: Any) -> Any:
    """That the token follows a context of so many tokens again; also elementwise on arrays."""
    return hits / (hits + MISS_WEIGHT * misses + PRIOR[order])


def pack(token: int, hits: int, misses: int) -> int:
    """An entry without its context."""
    return token << 2 * COUNT_BITS | hits << COUNT_BITS | misses


def unpack(value: int) -> tuple[int, int, int]:
    """Token, hits and misses."""
    return value >> 2 * COUNT_BITS, value >> COUNT_BITS & MOST_COUNT, value & MOST_COUNT


def _counted(value: int, token: int) -> int:
    """An entry after its context was followed by a token: a hit, or a miss; with more misses than
    hits, the newest token takes the place."""
    held, hits, misses = unpack(value)
    if token == held:
        hits += 1
    elif misses < hits:
        misses += 1
    else:
        held, hits, misses = token, 1, misses // 2
    if max(hits, misses) > MOST_COUNT:
        hits, misses = hits // 2, misses // 2
    return pack(held, hits, misses)


def _entries(packed: Column) -> dict[int, int]:
    """From hash to the rest, of whole entries."""
    values = packed & np.uint64((1 << VALUE_BITS) - 1)
    contexts = packed >> np.uint64(VALUE_BITS)
    return dict(zip(contexts.tolist(), values.tolist(), strict=True))


class _Counts(NamedTuple):
    """Contexts of one length, ascending, and their most frequent followers."""

    contexts: Column
    shorter: Column  # the contexts without their first token
    tokens: Column
    hits: NDArray[np.float64]
    misses: NDArray[np.float64]


def _columns(
    texts: Iterable[tuple[Sequence[int], int]],
) -> Iterator[tuple[Column, Column, Column]]:
    """By order, of every written token with so many before it: its context, the next shorter one,
    and the token."""
    parts, depths, firsts = [], [], []
    for text, given in texts:
        cut = max(given - ORDER, 0)
        parts.append(np.array(text[cut:], dtype=np.uint64))
        depths.append(np.arange(len(parts[-1])))
        firsts.append(np.full(len(parts[-1]), given - cut))
    ids, depth = np.concatenate(parts), np.concatenate(depths)
    places = np.flatnonzero((depth >= np.concatenate(firsts)) & (ids < MOST_TOKENS))
    shift, one = np.uint64(VALUE_BITS), np.uint64(1)
    state = np.zeros(len(places), dtype=np.uint64)
    for order in range(1, ORDER + 1):
        deep = depth[places] >= order
        places, shorter = places[deep], state[deep]
        state = (shorter ^ (ids[places - order] + one)) * np.uint64(MULTIPLIER)
        yield state >> shift, shorter >> shift, ids[places]


def _most_frequent(contexts: Column, shorter: Column, tokens: Column) -> _Counts:
    """The most frequent follower of every context; of several, the lowest id."""
    pairs = contexts << np.uint64(TOKEN_BITS) | tokens
    _, index, counts = np.unique(pairs, return_index=True, return_counts=True)
    contexts, shorter, tokens = contexts[index], shorter[index], tokens[index]
    first = np.flatnonzero(np.diff(contexts, prepend=contexts[:1] + np.uint64(1)))
    group = np.repeat(np.arange(len(first)), np.diff(first, append=len(contexts)))
    best = np.lexsort((-counts, group))[first]  # every group stays where it is
    hits = counts[best].astype(float)
    misses = np.add.reduceat(counts, first) - hits
    return _Counts(contexts[best], shorter[best], tokens[best], hits, misses)


def _packed(counted: _Counts) -> Column:
    """Whole entries; counts beyond what one holds are made smaller together."""
    scale = np.maximum(np.maximum(counted.hits, counted.misses) / MOST_COUNT, 1)
    out = counted.contexts
    for bits, part in (
        (TOKEN_BITS, counted.tokens),
        (COUNT_BITS, np.maximum(counted.hits / scale, 1)),
        (COUNT_BITS, counted.misses / scale),
    ):
        out = out << np.uint64(bits) | part.astype(np.uint64)
    return out
