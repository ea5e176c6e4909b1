"""The draft's run at every position of some texts: recorded once, replayed under any controller.

On disk a trace is one Parquet file, a row per committed position (docs/trace.md). This module
imports neither torch nor, before a file is touched, pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.cache import replacing
from forerun.errors import SettingError, optional
from forerun.types import SIGNALS as SIGNALS
from forerun.types import BoolArray, FloatArray, IntArray

SCHEMA = 2
KEY = b"forerun.trace"  # key in the file's metadata of a JSON object with `schema` and `about`

_PER_PROMPT = {"budget": "budgets", "prompt_tokens": "prompt_tokens"}  # column: field
_INTS = {"token": "tokens", "matches": "matches", "ends": "ends"}  # column: field, per position
_RUNS = {"length": "lengths", "stopped_by": "stops"}  # likewise, since schema 2
_BY_POSITION = {n: n for n in ("draft_tokens", "accept_prob")} | _INTS | _RUNS
_FIRST = ("target_top1", "target_entropy", "top5_overlap")
"""Of `JUDGED` those that schema 1 has, of a run's first token only."""
JUDGED = ("ratio", *_FIRST, "gap", "rank", "variation", "target_rank")
"""What both models say of a drafted token, on and off the text, as rules read it."""


@dataclass(frozen=True)
class Trace:
    """The draft's run at every position of some texts. Arrays are padded with 0 to T positions.

    Position p of a text is where its token p is still to come: what is drafted there continues the
    prompt and `tokens[:p]`. Drafted token i is on the true path while i ≤ matches: for
    i < matches it equals `tokens[p + i]`. Real numbers carry float32 precision.
    """

    families: tuple[str, ...]  # per prompt
    ids: tuple[str, ...]  # per prompt
    sizes: IntArray  # `(prompts,)` committed tokens of each text, 1 ≤ sizes ≤ T
    budgets: IntArray  # `(prompts,)` tokens each text was allowed
    prompt_tokens: IntArray  # `(prompts,)` tokens of the prompt
    tokens: IntArray  # `(prompts, T)` the target's own output
    draft_tokens: IntArray  # `(prompts, T, K)` the run drafted from each true prefix
    matches: IntArray  # `(prompts, T)` how many tokens of the run the target keeps, 0..K
    ends: IntArray  # `(prompts, T)` tokens drafted up to the first end of text; K + 1 if none
    lengths: IntArray  # `(prompts, T)` tokens of the run, 0..K; the drafter proposed no more
    stops: IntArray  # `(prompts, T)` why a run is shorter than K, a value of `Stop`
    accept_prob: FloatArray
    """`(prompts, T, K)` probability under the rule `standard` of keeping the token given that all
    before it were kept; 0 beyond the first miss and beyond the text."""
    signals: dict[str, FloatArray]  # `(prompts, T, K)` by name; NaN without distribution
    judged: dict[str, FloatArray]
    """Every one of `JUDGED`, `(prompts, T, K)` (docs/trace.md); NaN where schema 1 has none."""
    about: dict[str, Any] = field(default_factory=dict)  # models, hashes, settings, date

    @property
    def prompts(self) -> int:
        return len(self.sizes)

    @property
    def depth(self) -> int:
        """K, the tokens drafted from each position."""
        return int(self.draft_tokens.shape[2])

    @property
    def sampled(self) -> BoolArray:
        """`(prompts,)` which texts were drawn at a temperature."""
        fractions: BoolArray = _fractions(self.judged["ratio"]) | self.tossed
        return fractions

    @property
    def tossed(self) -> BoolArray:
        """`(prompts,)` which texts were judged by coins."""
        return _fractions(self.accept_prob)

    @property
    def valid(self) -> BoolArray:
        """`(prompts, T)` which positions are text and not padding."""
        inside: BoolArray = np.arange(self.tokens.shape[1]) < self.sizes[:, None]
        return inside

    @property
    def second_kept(self) -> BoolArray:
        """`(prompts, T)` whether the text goes on with the draft's second choice where the run from
        there leaves it; False where that is not known."""
        first = np.minimum(self.matches, self.depth - 1)[..., None]
        rank = np.take_along_axis(self.judged["target_rank"], first, -1)[..., 0]
        left = self.sizes[:, None] - np.arange(self.tokens.shape[1])
        right: BoolArray = (self.matches < np.minimum(self.lengths, left)) & (rank == 1)
        return right

    def knows(self, name: str) -> bool:
        """Whether the drafter has a signal, or a column of `JUDGED`, of any token."""
        values = (self.signals | self.judged)[name][self.valid]
        return not bool(np.isnan(values).all())

    def take(self, index: Sequence[int] | IntArray | BoolArray) -> Trace:
        """A selection of the prompts: their numbers, in the wanted order, or a mask."""
        chosen = np.arange(self.prompts)[index if isinstance(index, np.ndarray) else list(index)]
        return replace(
            self,
            families=tuple(self.families[i] for i in chosen),
            ids=tuple(self.ids[i] for i in chosen),
            **_merged([self], lambda arrays: arrays[0][chosen]),
        )

    def write(self, path: str | Path) -> None:
        """Save as Parquet; the file appears whole or not at all.

        Raises:
            MissingExtraError: pyarrow is not installed.
            OSError: the file cannot be written.
        """
        arrow, parquet = pyarrow_modules()
        inside, file = self.valid, Path(path)
        prompt, position = np.nonzero(inside)
        whose = arrow.array(prompt)
        named = {
            "family": arrow.array(self.families).dictionary_encode().take(whose),
            "prompt_id": arrow.array(self.ids).take(whose),
        }
        texts = {name: getattr(self, attr)[prompt] for name, attr in _PER_PROMPT.items()}
        runs = {name: getattr(self, attr) for name, attr in _BY_POSITION.items()}
        runs |= self.signals | self.judged
        values = {"prompt": prompt, "position": position, **texts}
        values |= {name: own[inside] for name, own in runs.items()}
        columns = {
            name: named[name] if name in named else _column(arrow, values[name], kind)
            for name, kind in _schema(arrow, self.depth, SCHEMA).items()
        }
        head = json.dumps({"schema": SCHEMA, "about": self.about}, ensure_ascii=False)
        table = arrow.table(columns).replace_schema_metadata({KEY: head.encode()})
        with replacing(file) as beside:
            parquet.write_table(table, beside, compression="zstd", write_page_checksum=True)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Load what `write` saved.

        Raises:
            MissingExtraError: pyarrow is not installed.
            SettingError: not a trace, of another schema, or damaged.
            OSError: the file cannot be read.
        """
        arrow, parquet = pyarrow_modules()
        source = arrow.BufferReader(Path(path).read_bytes())
        try:
            table = parquet.read_table(source, page_checksum_verification=True)
            table.validate(full=True)
            names = table.column_names
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise SettingError(f"{path} is not a readable Parquet file: {reason}") from error
        version, about = _about(path, table)
        depth = _check_columns(path, arrow, table, names, version)
        runs = _RUNS if version > 1 else {}
        single = ("prompt", "position", *_PER_PROMPT, *_INTS, *runs)
        flat = {name: table[name].to_numpy() for name in single}
        starts, sizes = _texts(path, flat["prompt"], flat["position"])
        inside = np.arange(sizes.max()) < sizes[:, None]

        def spread(values: Any, kind: Any) -> Any:
            out = np.zeros((*inside.shape, *values.shape[1:]), dtype=kind)
            out[inside] = values
            return out

        def deep(name: str, kind: Any = np.float64) -> Any:
            return spread(_inner(table[name]).to_numpy().reshape(-1, depth), kind)

        first = arrow.array(starts)
        ints = {attr: spread(flat[name], np.int64) for name, attr in (_INTS | runs).items()}
        accept = deep("accept_prob")
        if version > 1:
            judged = {name: deep(name) for name in JUDGED}
        else:
            ints |= {"lengths": np.where(inside, depth, 0), "stops": np.zeros_like(ints["ends"])}
            own = {name: spread(table[name].to_numpy(), np.float64) for name in _FIRST}
            judged = _on_the_text(own, ints["matches"], sizes, accept)
        return cls(
            families=tuple(table["family"].take(first).to_pylist()),
            ids=tuple(table["prompt_id"].take(first).to_pylist()),
            sizes=sizes,
            draft_tokens=deep("draft_tokens", np.int64),
            accept_prob=accept,
            signals={name: deep(name) for name in SIGNALS},
            judged=judged,
            about=about,
            **{attr: flat[name][starts].astype(np.int64) for name, attr in _PER_PROMPT.items()},
            **ints,
        )


def _merged(traces: Sequence[Trace], make: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """The arrays of a trace, each made of those of some traces."""
    names = ("sizes", *_PER_PROMPT.values(), *_BY_POSITION.values())
    out = {name: make([getattr(trace, name) for trace in traces]) for name in names}
    for name in ("signals", "judged"):
        held = [getattr(trace, name) for trace in traces]
        out[name] = {key: make([values[key] for values in held]) for key in held[0]}
    return out


def _fractions(chances: FloatArray) -> BoolArray:
    """`(prompts,)` whether any chance is neither 0 nor 1."""
    return np.asarray(((chances > 0) & (chances < 1)).any((1, 2)))


def _on_the_text(
    first: dict[str, FloatArray], matches: IntArray, sizes: IntArray, accept: FloatArray
) -> dict[str, FloatArray]:
    """`JUDGED` as far as a file of schema 1 says it: where a run is on the text."""
    positions, depth = accept.shape[1:]
    place = np.arange(positions)[:, None] + np.arange(depth)
    known = (np.arange(depth) <= matches[..., None]) & (place < sizes[:, None, None])
    place = np.minimum(place, positions - 1)
    out = dict.fromkeys(JUDGED, np.full(accept.shape, np.nan))
    out["ratio"] = np.where(known, accept, np.nan)
    return out | {name: np.where(known, own[:, place], np.nan) for name, own in first.items()}


def compared(
    text: Sequence[int], drafts: Sequence[Sequence[int]], depth: int
) -> dict[str, IntArray | FloatArray]:
    """The drafts made before each token of a text beside what came: fields of its `Trace`, `(T,)`
    and `(T, K)`, K = `depth`, the most tokens of a draft."""
    size, lengths = len(text), np.array([len(draft) for draft in drafts])
    tokens = np.array([[*draft, *[-1] * (depth - len(draft))] for draft in drafts])
    ahead = np.array([[*text[p : p + depth], *[-2] * (p + depth - size)] for p in range(size)])
    kept = (tokens == ahead).cumprod(-1)
    return {
        "draft_tokens": np.maximum(tokens, 0),
        "matches": kept.sum(-1),
        "accept_prob": kept.astype(float),
        "lengths": lengths,
    }


def text_trace(
    names: tuple[str, str],
    counts: tuple[int, int],
    text: Sequence[int],
    runs: Mapping[str, Any],
    ends: Collection[int] = (),
) -> Trace:
    """One text with its runs.

    Args:
        names: family and id.
        counts: tokens of the prompt, and those that the text was allowed.
        text: its tokens.
        runs: fields of a `Trace`, `(T,)` and `(T, K)`; without `signals` and `judged` neither is
            known of any token.
        ends: tokens at which drafts end.
    """
    own = {name: values[None] for name, values in runs.items() if isinstance(values, np.ndarray)}
    sizes, depth = np.array([len(text)]), own["draft_tokens"].shape[-1]
    over = np.isin(own["draft_tokens"], list(ends))
    over &= np.arange(depth) < own["lengths"][..., None]
    unknown = dict.fromkeys(SIGNALS, np.full(over.shape, np.nan))
    judged = _on_the_text({}, own["matches"], sizes, own["accept_prob"])
    for known, name in ((unknown, "signals"), (judged, "judged")):
        known |= {key: _single(values[None]) for key, values in runs.get(name, {}).items()}
    return Trace(
        families=names[:1],
        ids=names[1:],
        sizes=sizes,
        prompt_tokens=np.array(counts[:1]),
        budgets=np.array(counts[1:]),
        tokens=np.array([text]),
        ends=np.where(over.any(-1), over.argmax(-1) + 1, depth + 1),
        signals=unknown,
        judged=judged,
        **own | {"accept_prob": _single(own["accept_prob"])},
    )


def _single(values: Any) -> Any:
    """Float64 with the precision that a file keeps."""
    return values.astype(np.float32).astype(np.float64)


def concatenate(traces: Sequence[Trace]) -> Trace:
    """The prompts of several traces of one depth in one; `about` is the first one's."""
    if not traces:
        raise SettingError("no traces to put together")
    depths = sorted({trace.depth for trace in traces})
    if len(depths) > 1:
        raise SettingError(f"traces of different depths cannot be put together: {depths}")
    longest = max(trace.tokens.shape[1] for trace in traces)

    def joined(values: list[Any]) -> Any:
        return np.concatenate([_padded(v, longest) for v in values])

    return replace(
        traces[0],
        families=tuple(name for trace in traces for name in trace.families),
        ids=tuple(name for trace in traces for name in trace.ids),
        **_merged(traces, joined),
    )


def families(trace: Trace) -> dict[str, dict[str, Any]]:
    """Family by family: `prompts`, `tokens`, and how much of the draft is accepted."""
    out = {}
    for family in dict.fromkeys(trace.families):
        part = trace.take([i for i, name in enumerate(trace.families) if name == family])
        matches = part.matches[part.valid]
        out[family] = {
            "prompts": part.prompts,
            "tokens": len(matches),
            "first_kept": round(float((matches > 0).mean()), 4),
            "run_kept": round(float(matches.mean()), 3),
        }
    return out


def _padded(values: Any, longest: int) -> Any:
    """`(prompts, T, ...)` with T made `longest`; `(prompts,)` as it is."""
    if values.ndim == 1:
        return values
    return np.pad(values, [(0, 0), (0, longest - values.shape[1]), *[(0, 0)] * (values.ndim - 2)])


def pyarrow_modules() -> tuple[Any, Any]:
    """pyarrow and its `parquet`; `MissingExtraError` if they are not installed."""
    return optional("pyarrow", "lab"), optional("pyarrow.parquet", "lab")


def _about(path: str | Path, table: Any) -> tuple[int, dict[str, Any]]:
    """The schema and the provenance in a file's metadata."""
    head = (table.schema.metadata or {}).get(KEY)
    if head is None:
        raise SettingError(f"{path} is not a trace; make one with forerun record")
    try:
        document = json.loads(head)
        schema, about = document["schema"], dict(document["about"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} is a damaged trace: its provenance cannot be read") from error
    if schema not in range(1, SCHEMA + 1):
        raise SettingError(
            f"{path} has trace schema {schema!r} and this forerun reads 1 to {SCHEMA}; record it "
            "again"
        )
    return schema, about


def _schema(arrow: Any, depth: int, version: int) -> dict[str, Any]:
    """The columns and their types, as docs/trace.md describes them."""
    integer, real = arrow.int32(), arrow.float32()
    return {
        "family": arrow.dictionary(integer, arrow.string()),
        "prompt_id": arrow.string(),
        **dict.fromkeys(("prompt", "position", *_PER_PROMPT, *_INTS), integer),
        **(dict.fromkeys(_RUNS, integer) if version > 1 else dict.fromkeys(_FIRST, real)),
        "draft_tokens": arrow.list_(integer, depth),
        **dict.fromkeys(("accept_prob", *SIGNALS), arrow.list_(real, depth)),
        **(dict.fromkeys(JUDGED, arrow.list_(real, depth)) if version > 1 else {}),
    }


def _column(arrow: Any, values: Any, kind: Any) -> Any:
    """A column of a type; values `(rows, K)` for a list."""
    if values.ndim == 1:
        return arrow.array(values.astype(kind.to_pandas_dtype()))
    flat = arrow.array(values.astype(kind.value_type.to_pandas_dtype()).reshape(-1))
    return arrow.FixedSizeListArray.from_arrays(flat, type=kind)


def _texts(path: str | Path, prompt: IntArray, position: IntArray) -> tuple[IntArray, IntArray]:
    """Where each text of a file begins, and how many positions it has."""
    starts = np.flatnonzero(position == 0)
    sizes = np.diff([*starts, len(position)]).astype(np.int64)
    order = np.repeat(np.arange(len(sizes)), sizes)
    ordered = len(position) > 0 and np.array_equal(prompt, order)
    if not (ordered and np.array_equal(position, np.arange(len(order)) - starts[order])):
        raise SettingError(f"{path} is a damaged trace: its positions are not in order")
    return starts, sizes


def _inner(column: Any) -> Any:
    """The numbers in a column of lists; any other column itself."""
    return column.combine_chunks().flatten() if hasattr(column.type, "list_size") else column


def _check_columns(
    path: str | Path, arrow: Any, table: Any, names: Sequence[str], version: int
) -> int:
    """Raise `SettingError` unless the columns are those of a trace; K."""
    first = table.schema.field("draft_tokens").type if "draft_tokens" in names else None
    depth = getattr(first, "list_size", 1)
    for name, kind in _schema(arrow, depth, version).items():
        fault = None
        if name not in names:
            fault = "is missing"
        elif table[name].type != kind:
            fault = f"is of type {table[name].type}, not {kind}"
        elif table[name].null_count or _inner(table[name]).null_count:
            fault = "has gaps"
        if fault:
            raise SettingError(f"{path} is a damaged trace: column {name!r} {fault}")
    return int(depth)
