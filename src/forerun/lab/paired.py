"""Speculative beside plain decoding: same process, same engine, paired runs in turns."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from forerun.controllers import Controller
from forerun.engine import Completion, Sampling
from forerun.errors import GenerationError
from forerun.lab.audit import explain
from forerun.model import Model
from forerun.rules import RULES, AcceptanceRule

PAIRS = 3  # runs of plain and of speculative decoding


def paired(
    model: Model,
    prompts: Sequence[list[int]],
    samplings: Sequence[Sampling],
    shown: Sequence[Completion],
    *,
    controller: str | Controller = "auto",
    rule: str | AcceptanceRule = "gumbel",
    batch_size: int = 16,
    tell: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Run `PAIRS` pairs in turns and judge the outputs against those already `shown`. Both sides
    use the seeds of `shown`. The order alternates from pair to pair, so that a machine that gets
    slower or faster favours neither.

    Returns:
        `compare` of the document of `generate --json`; speeds are of the runs of median speed.
        Outputs must match where the rule is lossless, and every request greedy or drawn by its
        seed's noise (`gumbel`); coins promise the distribution only. Then `differences` say where
        they do not. One that is no near-tie is a bug.
    """
    keep = RULES.make(rule)
    seeded = [replace(s, seed=done.seed) for s, done in zip(samplings, shown, strict=True)]

    def run(plain: bool) -> dict[str, Any]:
        """`plain` of the document, but for its texts; the time is the wall's, prefill included."""
        began = time.perf_counter()
        done = model.generate(
            prompts, controller=controller, rule=None if plain else keep, sampling=seeded,
            batch_size=batch_size, plain=plain,
        )  # fmt: skip
        seconds, tokens = time.perf_counter() - began, sum(c.stats.tokens for c in done)
        if wrong := next((c for c in done if c.error), None):
            raise GenerationError(wrong.error or "", wrong)
        speed = {"tokens_per_second": tokens / seconds, "seconds": seconds, "tokens": tokens}
        return {**speed, "completions": done}

    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for pair in range(PAIRS):
        for plain in (True, False) if pair % 2 == 0 else (False, True):
            kind = "plain" if plain else "speculative"
            tell(f"comparing: {kind} decoding, run {pair + 1} of {PAIRS}")
            runs[plain].append(run(plain))
    pairs = zip(runs[True], runs[False], strict=True)
    ratios = [fast["tokens_per_second"] / slow["tokens_per_second"] for slow, fast in pairs]
    plain_run, fast_run = _median(runs[True]), _median(runs[False])
    written = plain_run["completions"]
    must = keep.lossless and (keep.gumbel_max or all(s.greedy for s in seeded))
    ours, theirs = [c.tokens for c in shown], [c.tokens for c in written]
    texts = zip(prompts, ours, theirs, seeded, strict=True)
    return {
        "identical": ours == theirs,
        "must_match": must,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "tokens_per_second": fast_run["tokens_per_second"],
        "plain": plain_run | {"completions": [c.to_json() for c in written]},
        "differences": _differences(model, texts) if must else [],
    }


def _differences(model: Model, texts: Iterable[Any]) -> list[dict[str, Any]]:
    """Of texts that are not alike, each with its prompt, plain's and settings."""
    apart = ((i, explain(model, *text)) for i, text in enumerate(texts) if text[1] != text[2])
    names = "position", "near_tie", "message"
    return [{"request": i, **{n: getattr(one, n) for n in names}} for i, one in apart]


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=itemgetter("tokens_per_second"))[len(runs) // 2]
