"""Costs of the pieces of SpecBound on this machine, to turn counts into seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from forerun.drafters.specbound import SpecBoundDrafter
from forerun.engine import Completion, Sampling
from forerun.errors import PromptError
from forerun.lab.exits.exit_replay import ANNEALS, OwnText, Setting
from forerun.model import Model
from forerun.runtime.base import Rows
from forerun.runtime.cache import RowCache
from forerun.runtime.exits import Work, layers_of
from forerun.runtime.layers import ExitHeads
from forerun.types import FloatArray

REPEATS = 15
"""Timings of each piece."""
LIVE_TEXTS = 6
"""Texts that are decoded for the fixed costs."""
LIVE_TOKENS = 32
"""Most tokens of each."""


@dataclass(frozen=True)
class ExitCosts:
    """Seconds at batch size 1; lists are indexed by positions at once, from 0 on."""

    layer: list[float]
    """One layer."""
    project: list[float]
    """The last norm and the unembedding."""
    exit: float
    """One exit: its head, and whether its confidence suffices."""
    gather: float
    """One batch put together for some layers."""
    step: float
    """One token that climbs, beyond the above: the engine's work on it included."""
    round: float
    """One round, beyond the above."""
    plain: float
    """One token of plain decoding."""

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds by part of the work."""
        layers = {
            part: sum(self.layer[size] * n for (name, size), n in work.items() if name == part)
            for part in ("draft", "verify")
        }
        projected = (
            self.project[size] * n for (name, size), n in work.items() if name == "project"
        )
        return {
            "shallow layers": layers["draft"],
            "exit heads": self.exit * work.passes("exit"),
            "remaining layers": layers["verify"],
            "last projection": sum(projected),
            "everything else": self.gather * work.calls("gather")
            + self.step * work.passes("step")
            + self.round * work.calls("project"),
        }

    def seconds(self, work: Work) -> float:
        return sum(self.parts(work).values())

    def to_json(self) -> dict[str, Any]:
        """All fields; times in milliseconds."""
        return {
            name: [round(v * 1e3, 4) for v in value]
            if isinstance(value, list)
            else round(value * 1e3, 4)
            for name, value in asdict(self).items()
        }


def speculating(model: Model, rows: Rows, heads: ExitHeads, setting: Setting) -> Model:
    """`model` decoding with a setting of specbound; all such models may share `rows`."""
    drafter = SpecBoundDrafter(
        rows,
        heads,
        setting.layers,
        setting.threshold,
        setting.anneal,
        setting.width,
        setting.bonus,
    )
    speculative = Model(rows, drafter, model.tokenizer)
    speculative.eos = model.eos
    return speculative


@torch.inference_mode()
def measure(
    model: Model,
    rows: Rows,
    heads: ExitHeads,
    layers: Sequence[int],
    texts: Sequence[OwnText],
    width: int,
    tell: Callable[[int, int], None] | None = None,
) -> ExitCosts:
    """Time the pieces one by one, interleaved, and the remaining costs in live rounds.

    Args:
        model: decodes plainly.
        rows: a runtime for early exits of the same model, without rows.
        heads: of the exits.
        layers: exit layers to choose from.
        texts: outputs of the model; a few are decoded again.
        width: most tokens drafted per round.
        tell: called with the steps done and their number.
    """
    sample = [*texts[:: max(1, len(texts) // LIVE_TEXTS)]][:LIVE_TEXTS]
    context = int(np.median([len(t.prompt) + len(t.output) // 2 for t in texts]))
    layer, project, exit_ = _pieces(
        rows, heads, layers, width, min(max(context, 1), rows.limit - width - 2), tell
    )
    rough = ExitCosts(layer, project, exit_, 0.0, 0.0, 0.0, 0.0)
    return _with_rounds(model, rows, heads, layers, sample, width, rough)


def _pieces(
    rows: Rows,
    heads: ExitHeads,
    layers: Sequence[int],
    width: int,
    context: int,
    tell: Callable[[int, int], None] | None,
) -> tuple[list[float], list[float], float]:
    """Median seconds of a layer and of a projection by positions, and of an exit."""
    executor, device, cache = layers_of(rows), rows.device, RowCache()
    access = executor.access
    cache.reserve(1, context + width + 2)
    tokens = torch.arange(width + 2, device=device).unsqueeze(0) % rows.vocab_size
    positions = context + torch.arange(width + 2, device=device).unsqueeze(0)
    states = access.embed(tokens, positions)

    clock = _clock(device)

    def took(work: Callable[[], Any]) -> float:
        _wait(device)
        began = clock()
        work()
        _wait(device)
        return clock() - began

    def through(count: int) -> None:
        columns = cache.open([0], [context], count, device)
        mask = torch.zeros(1, 1, count, columns, dtype=executor.dtype, device=device)
        access.run(states[:, :count], 0, access.layers, mask, positions[:, :count], cache)

    def ask(depth: int) -> None:
        logits = heads.logits(depth, states[0, :1])
        (logits.float() / 1.1).softmax(-1).amax(-1).ge(0.5).tolist()

    sizes = range(1, width + 2)
    timings: list[tuple[list[float], list[float], float]] = []
    for repeat in range(REPEATS + 2):
        timings.append(
            (
                [took(lambda n=n: through(n)) / access.layers for n in sizes],  # type: ignore[misc]
                [took(lambda n=n: access.logits(states[:, :n])) for n in sizes],  # type: ignore[misc]
                float(np.mean([took(lambda d=d: ask(d)) for d in layers])),  # type: ignore[misc]
            )
        )
        if tell is not None:
            tell(repeat + 1, REPEATS + 2)
    timings = timings[2:]  # first calls are slow

    def middle(piece: int) -> list[float]:
        return [0.0, *np.median([f[piece] for f in timings], axis=0).tolist()]

    return middle(0), middle(1), float(np.median([f[2] for f in timings]))


def _with_rounds(
    model: Model,
    rows: Rows,
    heads: ExitHeads,
    layers: Sequence[int],
    texts: Sequence[OwnText],
    width: int,
    rough: ExitCosts,
) -> ExitCosts:
    """The costs of rounds beyond the pieces, from live rounds and what they ran."""
    beyond: list[tuple[list[float], float]] = []
    alone: list[float] = []
    for text in texts:
        sampling = replace(text.sampling, max_new_tokens=min(LIVE_TOKENS, len(text.output)))
        for setting in _varied(layers, width):
            done = timed(speculating(model, rows, heads, setting), text, setting, sampling)
            for work, seconds in [*zip(done.work, done.times, strict=True)][1:]:
                row = [float(work.calls("gather")), float(work.passes("step")), 1.0]
                beyond.append((row, seconds - rough.seconds(work)))
        alone += timed(model, text, None, sampling).times[1:]
    if not beyond or not alone:
        raise PromptError("the texts are too short to time; give more prompts or more tokens")
    gather, step, every = _fit(beyond)
    [plain] = _fit([([1.0], s) for s in alone])
    return replace(rough, gather=gather, step=step, round=every, plain=plain)


@dataclass(frozen=True)
class TimedText:
    """One generation; of each round, the first of which includes reading the prompt:"""

    completion: Completion
    times: list[float]
    """Seconds."""
    wall: list[float]
    """The same in wall time."""
    work: list[Work]
    """What it ran, if the model drafts for itself."""

    @property
    def pace(self) -> tuple[float, float] | None:
        """Seconds per token after the first round, also by the wall; None: there was no other."""
        tokens = sum(r.committed for r in self.completion.rounds[1:])
        return (sum(self.times[1:]) / tokens, sum(self.wall[1:]) / tokens) if tokens else None


def timed(
    model: Model, text: OwnText, setting: Setting | None, sampling: Sampling | None = None
) -> TimedText:
    """Decode a prompt with a model made by `speculating`, or plainly without a setting."""
    clock, counted = _clock(model.target.device), getattr(model.target.executor, "work", Work())
    times, wall, work = [clock()], [time.perf_counter()], [Work(counted)]
    completion = None
    for event in model.stream(
        [text.prompt],
        controller="fixed(0)" if setting is None else setting.controller,
        sampling=text.sampling if sampling is None else sampling,
        plain=setting is None,
    ):
        times.append(clock())
        wall.append(time.perf_counter())
        work.append(Work(counted))
        completion = event.completion
    assert completion is not None
    rounds = [Work(after - before) for before, after in pairwise(work)]
    return TimedText(completion, np.diff(times).tolist(), np.diff(wall).tolist(), rounds)


def _clock(device: torch.device) -> Callable[[], float]:
    """On one thread of a CPU its own time, which other processes disturb little; else the wall's.

    The engine reads what a GPU computed at the end of every round, so the wall needs no waiting.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _varied(layers: Sequence[int], width: int) -> Iterator[Setting]:
    """Settings that differ in how many tokens climb, how often they stop, and how far they go."""
    middle = layers[len(layers) // 2]
    yield Setting((layers[0],), 0.0, ANNEALS[0], min(4, width))
    yield Setting((middle,), 0.5, ANNEALS[0], width)
    yield Setting((layers[0],), 0.9, ANNEALS[0], width)
    yield Setting(tuple(n for n in layers if n <= middle), 0.5, ANNEALS[0], min(4, width))
    yield Setting(tuple(layers), 0.8, ANNEALS[0], width)


def _fit(samples: list[tuple[list[float], float]]) -> list[float]:
    """Least squares with no cost below 0, without outliers (from other processes).

    Args:
        samples: what was counted, and the seconds it took.

    Returns:
        Seconds per unit of each count.
    """
    columns: FloatArray = np.array([row for row, _ in samples], dtype=float)
    values: FloatArray = np.array([value for _, value in samples])
    keep = np.ones(len(values), dtype=bool)
    costs = np.zeros(columns.shape[1])
    for _ in range(4):
        costs = _positive(columns[keep], values[keep])
        off = np.abs(values - columns @ costs)
        keep = off <= 4 * max(float(np.median(off)), 1e-9)
    return [float(v) for v in costs]


def _positive(columns: FloatArray, values: FloatArray) -> FloatArray:
    """Non-negative least squares: the best of the few subsets of columns that need no other."""
    best, least = np.zeros(columns.shape[1]), float((values**2).sum())
    for mask in product((False, True), repeat=columns.shape[1]):
        if not any(mask):
            continue
        costs = np.linalg.lstsq(columns[:, mask], values, rcond=None)[0]
        error = float(((values - columns[:, mask] @ costs) ** 2).sum())
        if (costs >= 0).all() and error < least:
            best, least = np.zeros(columns.shape[1]), error
            best[list(mask)] = costs
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
