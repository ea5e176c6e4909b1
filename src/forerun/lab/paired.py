"""Speculative beside plain decoding: same process, same engine, paired runs in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.controllers import Controller
from forerun.engine import Completion, Sampling
from forerun.errors import GenerationError
from forerun.lab.audit import Difference, explain
from forerun.model import Model
from forerun.rules import RULES, AcceptanceRule

PAIRS = 3  # runs of plain and of speculative decoding


@dataclass(frozen=True)
class TimedBatch:
    """Completions of one batch and the wall seconds they took together."""

    completions: list[Completion]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(c.stats.tokens for c in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """All output tokens over the whole time, prefill included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "completions": [c.to_json() for c in self.completions],
        }


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

    def run(plain: bool) -> TimedBatch:
        began = time.perf_counter()
        done = model.generate(
            prompts, controller=controller, rule=None if plain else keep, sampling=seeded,
            batch_size=batch_size, plain=plain,
        )  # fmt: skip
        timed = TimedBatch(done, time.perf_counter() - began)
        if wrong := next((c for c in done if c.error), None):
            raise GenerationError(wrong.error or "", wrong)
        return timed

    runs: dict[bool, list[TimedBatch]] = {False: [], True: []}
    for pair in range(PAIRS):
        for plain in (True, False) if pair % 2 == 0 else (False, True):
            kind = "plain" if plain else "speculative"
            tell(f"comparing: {kind} decoding, run {pair + 1} of {PAIRS}")
            runs[plain].append(run(plain))
    pairs = zip(runs[True], runs[False], strict=True)
    ratios = [fast.tokens_per_second / slow.tokens_per_second for slow, fast in pairs]
    plain_run, fast_run = _median(runs[True]), _median(runs[False])
    must = keep.lossless and (keep.gumbel_max or all(s.greedy for s in seeded))
    ours, theirs = [c.tokens for c in shown], [c.tokens for c in plain_run.completions]
    texts = zip(prompts, ours, theirs, seeded, strict=True)
    return {
        "identical": ours == theirs,
        "must_match": must,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "tokens_per_second": fast_run.tokens_per_second,
        "plain": plain_run.to_json(),
        "differences": [
            {"request": i, **_difference(explain(model, *text))}
            for i, text in enumerate(texts if must else ())
            if text[1] != text[2]
        ],
    }


def _difference(one: Difference) -> dict[str, Any]:
    return {"position": one.position, "near_tie": one.near_tie, "message": one.message}


def _median(runs: Sequence[TimedBatch]) -> TimedBatch:
    return sorted(runs, key=lambda run: run.tokens_per_second)[len(runs) // 2]
