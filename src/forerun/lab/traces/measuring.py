"""Timing a pair of models and the engine around them, for a table of costs."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import TypeVar

import numpy as np

from forerun.checks import whole
from forerun.drafters.model import ModelDrafter
from forerun.engine.results import Completion, Round
from forerun.errors import SettingError, require
from forerun.lab import provenance
from forerun.lab.traces.costs import REPEATS, WIDTHS, Cell, CostTable, Spread, least_squares
from forerun.model import Model
from forerun.runtime.base import Rows

K = TypeVar("K")
Texts = Sequence[Sequence[int]]  # prompts, as token ids
WARM = 3  # warm-up turns, not counted
LIVE = (0, 1, 2, 4, 8)
"""Tokens drafted per round in the live runs from which the costs of draft steps and of the
engine's own work are fitted; of a row alone also those that fill a pass up to each level."""
LIVE_TOKENS = 48  # written per text in a live run
ASKED = "hf-threshold(threshold=0,length={})"  # drafts so many tokens, and is asked about each
TREE = (-1, -1, -1, -1, 1)  # three drafted tokens, and a second choice beside the second
THROWN_AWAY = "gammatune+(threshold=1,keep=False)"  # a token, thrown away unless it is certain
LIVE_TURNS = 10  # live runs of each draft length, the first a warm-up


def measure(
    model: Model,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (128,),
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[CostTable]:
    """Measure cell by cell: the table with each that is new, so that a caller may stop between.

    The target's passes at every width are timed in turns, so that a machine that gets slower
    favours none; medians count, brought to the level of live runs. The times of draft steps and of
    the engine's own work are lines fitted to these runs, by tokens drafted. A draft step on its own
    would mislead: a round's first finds the target's weights in the caches, later ones their own.

    Args:
        model: a target and a draft model, not generating.
        batches: rows, ≥ 1 each.
        contexts: tokens before those fed, ≥ 1 each.
        widths: tokens fed to the target per row; 1 is always among them.
        repeats: timings of each, ≥ 1.
        progress: called with the turns done, of `repeats` per cell.

    Raises:
        SettingError: no draft model, a number out of range, or a context that does not fit.
    """
    drafter, wide, count = model.drafter, sorted({1, *widths}), itertools.count(1)
    if not isinstance(drafter, ModelDrafter):
        raise SettingError(
            "measuring costs needs a draft model, and this model's drafter is a "
            f"{type(drafter).__name__}; name one as `draft`"
        )
    whole("repeats", repeats, 1)
    _check(model, batches, contexts, wide)
    for rows in (model.target, drafter.rows):
        rows.executor.finish()
    about = {**provenance.of(model), "repeats": repeats}
    done: list[tuple[Cell, Spread]] = []
    for batch, context in product(batches, contexts):
        vocab = min(model.target.vocab_size, drafter.rows.vocab_size)
        # Rows cover `context` tokens and are fed the next.
        prompts = np.random.default_rng(0).integers(0, vocab, (batch, context + 1)).tolist()
        done.append(_cell(model, prompts, wide, repeats, lambda: progress(next(count))))
        cells, spread = zip(*done, strict=True)
        yield CostTable(cells, about, spread)


def _check(
    model: Model, batches: Sequence[int], contexts: Sequence[int], widths: Sequence[int]
) -> None:
    if model.target.lengths:
        raise SettingError("a stream of this model is still running; finish or close it first")
    for name, numbers in (("batch", batches), ("context", contexts), ("widths", widths)):
        require(bool(numbers), name, numbers, "at least one")
        for number in numbers:
            whole(name, number, 1)
    longest, room = max(contexts), min(model.target.limit, model.drafter.limit)
    more = max(widths[-1], LIVE_TOKENS) + 1
    if model.target.facts.source_limit is not None:  # an encoder reads the context
        require(longest < model.prompt_limit, "context", longest, f"below {model.prompt_limit}")
        longest = len(model.opening.prompt)
    if longest + more > room:
        raise SettingError(
            f"a context of {longest} and {more} tokens more do not fit the models' {room}; use a "
            "smaller `context` or `widths`"
        )


def _cell(
    model: Model, prompts: Texts, widths: Sequence[int], repeats: int, tell: Callable[[], None]
) -> tuple[Cell, Spread]:
    batch, context, target = len(prompts), len(prompts[0]) - 1, model.target
    turns = _passes(target, *model.contexts(prompts), widths, repeats, tell)
    levels = target.executor.levels if batch == 1 else ()
    live, asking = _live(
        model, prompts, sorted({*LIVE, *(n - 1 for n in levels if n <= widths[-1])})
    )
    verify = _as_live(
        turns, {n + 1: [r.verify_seconds for r in rounds] for n, rounds in live.items()}
    )
    other = {n: [r.other_seconds for r in rounds] for n, rounds in live.items()}
    draft = {n: [r.draft_seconds for r in rounds] for n, rounds in live.items() if n}
    # Rounds without a draft save more than one token's work, so they are not on the line.
    medians = {n: float(np.median(times)) for n, times in other.items()}
    fixed = medians.pop(0)
    more, work = line(medians)
    first, step = line({n: float(np.median(times)) for n, times in draft.items()})
    cell = Cell(
        step + work, tuple((w, float(np.median(verify[w]))) for w in widths), fixed, batch, context,
        first + max(more - fixed, 0.0), levels, _cold(model, prompts), asking=asking,
        tree=_tree(target, *model.contexts(prompts), repeats),
    )  # fmt: skip
    steps = [max(took - first, 0.0) / n for n, times in draft.items() for took in times]
    return cell, {
        "draft": _range(steps),
        "verify": [_range(verify[w]) for w in widths],
        "work": work,
        "other": [[n, float(np.median(times)), *_range(times)] for n, times in other.items()],
    }


def _passes(
    target: Rows,
    prompts: Texts,
    sources: Texts | None,
    widths: Sequence[int],
    repeats: int,
    tell: Callable[[], None],
) -> dict[int, list[float]]:
    """Seconds of the target's passes, by width."""

    def run(width: int) -> float:
        before = target.seconds
        target.feed([list(prompt[-1:]) * width for prompt in prompts])
        return target.seconds - before

    return _in_turns(target, (prompts, widths[-1], sources), widths, run, repeats, tell)


def _tree(target: Rows, prompts: Texts, sources: Texts | None, repeats: int) -> float:
    """Seconds that a second choice adds to a pass of as many tokens, one that is kept."""
    if not target.executor.trees:
        return 0.0
    pieces = [list(prompt[-1:]) * len(TREE) for prompt in prompts]
    covered = len(prompts[0]) - 1

    def run(leaf: bool) -> float:
        began = time.perf_counter()
        target.feed(pieces, None, [TREE] * len(prompts) if leaf else ())
        if leaf:
            target.move(0, covered + len(TREE) - 1, covered + TREE[-1] + 1)
        return time.perf_counter() - began

    seconds = _in_turns(target, (prompts, len(TREE), sources), (False, True), run, repeats)
    return max(float(np.median(seconds[True]) - np.median(seconds[False])), 0.0)


def _in_turns(
    target: Rows,
    reading: tuple[Texts, int, Texts | None],
    kinds: Sequence[K],
    run: Callable[[K], float],
    repeats: int,
    tell: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Seconds of passes of several kinds behind what the target reads, taken back after each."""
    seconds: dict[K, list[float]] = {kind: [] for kind in kinds}
    try:
        target.read(*reading)
        covered = list(target.lengths)
        for turn in range(WARM + repeats):
            for kind, times in seconds.items():
                took = run(kind)
                for row, length in enumerate(covered):
                    target.rollback(row, length)
                if turn >= WARM:
                    times.append(took)
            if turn >= WARM:
                tell()
    finally:
        target.keep([])
    return seconds


def _as_live(
    turns: dict[int, list[float]], passes: dict[int, list[float]]
) -> dict[int, list[float]]:
    """Passes timed in turns, as fast as live: there each comes after others of its own width."""
    medians = {width: float(np.median(times)) for width, times in turns.items()}
    live = sorted(passes)
    if not live:
        return turns
    expected = np.interp(live, list(medians), list(medians.values()))
    ratios = [float(np.median(passes[w])) / timed for w, timed in zip(live, expected, strict=True)]
    return {
        width: [seconds * float(np.interp(width, live, ratios)) for seconds in times]
        for width, times in turns.items()
    }


def _shared(drafted: int, done: Sequence[Completion]) -> Iterator[Round]:
    """The rounds, once each, of texts written together in which all drafted so many tokens."""
    # Rows that share a round report one clock; where some are missing prompts were read.
    shared: dict[tuple[float, float], list[Round]] = {}
    for seen in chain.from_iterable(c.rounds for c in done):
        shared.setdefault((seen.draft_seconds, seen.verify_seconds), []).append(seen)
    for rounds in shared.values():
        every = len(rounds) == len(done) and all(r.drafted == drafted for r in rounds)
        if every and rounds[0].verify_seconds:
            yield rounds[0]


def _live(
    model: Model, prompts: Texts, lengths: Sequence[int]
) -> tuple[dict[int, list[Round]], float]:
    """Live rounds by tokens drafted, and what each of these takes more if a controller is asked."""
    live: dict[int, list[Round]] = {n: [] for n in lengths}
    longest, asked = max(lengths), list[Round]()
    for turn in range(LIVE_TURNS):
        for n, rounds in live.items():
            done = _written(model, f"fixed({n})", prompts, plain=n == 0)
            rounds += _shared(n, done) if turn else ()  # the first is a warm-up
        done = _written(model, ASKED.format(longest), prompts)
        asked += _shared(longest, done) if turn else ()
    more = _outside(asked) - _outside(live[longest])
    return {n: rounds for n, rounds in live.items() if rounds}, max(more / longest, 0.0)


def _outside(rounds: Sequence[Round]) -> float:
    """The median outside the target; 0 if there was no such round."""
    return float(np.median([r.draft_seconds + r.other_seconds for r in rounds] or [0.0]))


def _written(
    model: Model, controller: str, prompts: Texts, plain: bool = False
) -> Sequence[Completion]:
    """Texts of a live run."""
    return model.generate(
        prompts,
        controller=controller,
        plain=plain,
        batch_size=len(prompts),
        max_new_tokens=LIVE_TOKENS,
        ignore_eos=True,
    )


def _cold(model: Model, prompts: Texts) -> float:
    """Seconds that a plain pass takes more behind a draft that was thrown away."""
    seconds: dict[str, list[float]] = {"fixed(0)": [], THROWN_AWAY: []}
    for _ in range(LIVE_TURNS // 2):
        for controller, times in seconds.items():
            done = _written(model, controller, prompts)
            rounds = [r for r in done[-1].rounds if not r.drafted and r.verify_seconds]
            times += [r.verify_seconds for r in rounds]
    plain, behind = (float(np.median(times or [0.0])) for times in seconds.values())
    return max(behind - plain, 0.0)


def line(points: dict[int, float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the least-squares line through `{x: y}`.

    >>> [round(value, 6) for value in line({0: 1.0, 2: 2.0, 4: 3.0})]
    [1.0, 0.5]
    >>> [round(value, 6) for value in line({0: 2.0, 2: 1.0})]
    [1.5, 0.0]
    """
    start, slope = least_squares([[1.0, x] for x in points], list(points.values()))
    return float(start), float(slope)


def _range(times: Sequence[float]) -> list[float]:
    return [float(end) for end in np.quantile(times, [0.1, 0.9])]
