"""The gate every model passes when it is loaded: rows in a batch against the model alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UnsupportedModelError
from forerun.lazy import torch
from forerun.runtime.base import LOGITS, Executor, Pieces
from forerun.runtime.support import PROVEN, PROVEN_ENCODER_DECODER

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, "int8": 0.25}
"""Largest difference of logits, relative to the largest of them, by precision; others are compared
with themselves, as float32 is. Rows that are mixed up, places that are off by one or tokens that
should be hidden differ by about 1."""
ROUNDING = 1e-4
"""Largest relative difference that another order of fp32 sums makes: 3e-6 over SmolLM2's 30 layers.
Inputs rounded to 8 bits in one kernel and not in another make 2e-2."""
_WIDTHS = 1, 2, 5, 8
_LENGTHS = (9, 40, 5)
"""Tokens of the three rows: the second needs two blocks of the cache. A source is as its text."""
_REJECTED = 2  # tokens fed and rolled back
_LAST = 4  # of each text, whose logits are compared

Logits = NDArray[np.float32]


def texts(vocab_size: int, limit: int) -> list[list[int]]:
    """Ids of the probe's rows; a short context makes them shorter."""
    lengths = [min(n, limit - 4) for n in _LENGTHS]
    return [[(7 * i + 3 + n) % vocab_size for i in range(n + 1)] for n in lengths]


def reference(model: Any, limit: int) -> Logits:
    """`(3, 4, V)` logits of a torch model after the last tokens of each text, which is alone."""
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    logits = []
    for text in texts(vocab_size, limit):
        ids = {"input_ids": torch.tensor([text], device=model.device)}
        if model.config.is_encoder_decoder:
            ids["decoder_input_ids"] = ids["input_ids"]
        with torch.inference_mode():
            logits.append(model(**ids).logits[0, -_LAST:].float().cpu().numpy())
    return np.stack(logits)


def _passed(
    executor: Executor, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int]
) -> Logits:
    """`(rows, max(wanted), V)` logits of a pass, a copy on the host."""
    own = executor.best(starts, pieces, wanted, frozenset({LOGITS})).signals[LOGITS]
    if isinstance(own, list):  # without torch, which a start may not have
        return np.stack([np.stack(row) for row in own])
    return own.float().cpu().numpy()


def reference_of(executor: Executor) -> Logits:
    """`(3, 4, V)` logits as of `reference`, of an executor itself, each text in one pass."""
    logits = []
    for text in texts(executor.facts.vocab_size, executor.facts.limit):
        logits.append(_passed(executor, [0], [text], [_LAST])[0])
        executor.keep([], [])
    return np.stack(logits)


def passes_agree(executor: Executor, rounds: bool) -> bool:
    """Whether passes compute the same whatever their widths and what is beside a row.

    Args:
        executor: with no rows.
        rounds: whether inputs of products are rounded. Sums in another order, which differ by 1e-7,
            may fall to two sides of a step then: passes must be equal to the last bit.
    """
    text = texts(executor.facts.vocab_size, executor.facts.limit)[1]
    start = max(len(text) - max(_WIDTHS), 1)
    executor.run([0, 0], [text[:start], text[:1]], [0, 0])
    first, *others = (
        _passed(executor, [start, 1], [text[start : start + n], beside], [n, 0])[0, 0]
        for beside in ([], text[1:2])
        for n in _WIDTHS
    )
    executor.keep([], [])
    most = 0 if rounds else ROUNDING * float(np.abs(first).max())
    return all(float(np.abs(first - other).max()) <= most for other in others)


def prove(executor: Executor, model: Any) -> None:
    """Probe an executor beside the model itself if its type is not proven; `UnsupportedModelError`
    if they differ, or it cannot be stepped at all."""
    kind = model.config.get_text_config(decoder=True).model_type
    if kind in PROVEN | PROVEN_ENCODER_DECODER:
        return
    try:
        with torch.inference_mode():
            executor.reserve(len(_LENGTHS), max(_LENGTHS))
            probe(executor, reference(model, executor.facts.limit))
    except Exception as error:  # whatever it is, this model cannot be stepped
        raise UnsupportedModelError(
            f"{kind} models are not proven here, and a probe of this one failed: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def probe(executor: Executor, expected: Logits) -> None:
    """Two ragged rows, a rollback, a row that joins, one that leaves, one that goes on alone;
    `UnsupportedModelError` if logits differ from the model's by more than the precision explains.
    """
    a, b, c = texts(executor.facts.vocab_size, executor.facts.limit)
    rejected = [1] * _REJECTED
    encodes = executor.facts.source_limit is not None
    if encodes:
        executor.attend([a, b])
    _passed(executor, [0, 0], [a[:-4] + rejected, b[:-3] + rejected], [1, 0])
    if encodes:
        executor.attend([c])
    starts, pieces = [len(a) - 4, len(b) - 3, 0], [a[-4:-1], b[-3:-1], c[:-1]]
    ragged = _passed(executor, starts, pieces, [3, 2, 1])
    executor.keep([2, 0], [len(c) - 1, len(a) - 1])
    after = _passed(executor, [len(c) - 1, len(a) - 1], [c[-1:], a[-1:]], [1, 1])[:, 0]
    alone = _passed(executor, [len(c) - 1, len(a) - 1], [[], a[-1:]], [0, 1])[1:, 0]
    executor.keep([], [])
    arrays = [ragged[0, :3], ragged[1, :2], ragged[2, :1], after, alone]
    first, second, joined = expected
    wanted = [first[:3], second[1:3], joined[2:3], expected[[2, 0], -1], first[-1:]]
    worst = max(
        float(np.abs(np.where(np.isneginf(x), 0, x - y)).max()) / (float(np.abs(y).max()) + 1e-6)
        for x, y in zip(arrays, wanted, strict=True)
    )
    most = TOLERANCE.get(executor.facts.precision, TOLERANCE["float32"])
    if not worst <= most:  # NaN is no number to be below
        raise UnsupportedModelError(
            f"a row in a batch on {executor.facts.executor} differs from the model alone by "
            f"{worst:.1e} of its largest logit"
        )
