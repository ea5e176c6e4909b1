"""Choosing SpecBound's settings: searched by exact counts, confirmed by the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.engine import Sampling
from forerun.errors import MissingExtraError, SettingError, require
from forerun.lab.exits.exit_costs import ExitCosts, Timed, speculating, timed
from forerun.lab.exits.exit_replay import ANNEALS, Counts, Exits, Setting, Text, total
from forerun.lab.traces.results import geometric
from forerun.model import Model
from forerun.runtime.base import Rows
from forerun.runtime.layers import ExitHeads

MOST_LAYERS = 12
"""Most exit layers that are tried; of more, evenly spaced ones."""
WIDTH = 12
"""Most tokens per round that are tried."""
GRID = tuple(round(0.05 * step, 2) for step in range(21))
"""Thresholds shown around the best setting."""
CHANGED = ("anneal", "depth", "width", "layers", "bonus")
"""What the local search changes beside the threshold."""
POLISHED = 40
"""Most steps of the local search from the best trial."""


@dataclass
class Search:
    """Settings tried on recorded texts, each at the cost of counting.

    Args:
        exits: of the texts.
        costs: of the counted work.
        width: most tokens per round that are tried.
    """

    exits: Exits
    costs: ExitCosts
    width: int = WIDTH
    scores: dict[Setting, float] = field(default_factory=dict, init=False)
    """Predicted speed-up over plain decoding: a geometric mean over the texts."""

    def predicted(self, setting: Setting) -> list[float]:
        """The speed-up of each text."""
        texts = self.exits.texts
        return [
            len(text.output)
            * self.costs.plain
            / self.costs.seconds(total(self.exits, number, setting))
            for number, text in enumerate(texts)
        ]

    def score(self, setting: Setting) -> float:
        """The geometric mean of them, once per setting."""
        if setting not in self.scores:
            ratios = self.predicted(setting)
            self.scores[setting] = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        return self.scores[setting]

    def counts(self, setting: Setting) -> Counts:
        every = (total(self.exits, number, setting) for number in range(len(self.exits.texts)))
        return sum(every, Counts.none(setting.width))

    def best(self) -> Setting:
        """The best so far; the first one of equals."""
        return max(self.scores, key=self.scores.__getitem__)

    def top(self, count: int) -> list[Setting]:
        """The best settings that differ in more than threshold and annealing, best first."""
        settings: dict[tuple[tuple[int, ...], int], Setting] = {}
        for setting in sorted(self.scores, key=self.scores.__getitem__, reverse=True):
            settings.setdefault((setting.layers, setting.width), setting)
        return list(settings.values())[:count]

    def run(
        self, budget: int, seed: int = 0, tell: Callable[[int, int], None] | None = None
    ) -> Setting:
        """`budget` trials of optuna's TPE, then single changes of the best while they help.

        Raises:
            MissingExtraError: optuna is not installed.
        """
        optuna = load_optuna()
        require(budget >= 1, "budget", budget, "≥ 1")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(10, budget // 8)),
        )
        for start in self._starts():
            study.enqueue_trial(start)
        for number in range(budget):
            trial = study.ask()
            study.tell(trial, self.score(self._suggest(trial)))
            if tell is not None:
                tell(number + 1, budget)
        best = self.best()
        for _ in range(POLISHED):
            better = max(self._around(best), key=self.score)
            if self.score(better) <= self.score(best):
                break
            best = better
        return best

    def _suggest(self, trial: Any) -> Setting:
        layers = self.exits.layers
        deepest = trial.suggest_int("deepest", 0, len(layers) - 1)
        used = [
            layer
            for layer in layers[:deepest]
            if trial.suggest_categorical(f"layer {layer}", [False, True])
        ]
        return Setting(
            (*used, layers[deepest]),
            round(trial.suggest_float("threshold", 0.0, 1.0, step=0.01), 2),
            ANNEALS[trial.suggest_int("anneal", 0, len(ANNEALS) - 1)],
            trial.suggest_int("width", 1, self.width),
            trial.suggest_categorical("bonus", [True, False]),
        )

    def _starts(self) -> Iterator[dict[str, Any]]:
        """One exit alone, at each layer in turn from the middle outwards."""
        layers = self.exits.layers
        middle = len(layers) // 2
        for deepest in sorted(range(len(layers)), key=lambda n: abs(n - middle)):
            alone = {f"layer {layer}": False for layer in layers[:deepest]}
            width = min(4, self.width)
            yield {"deepest": deepest, "threshold": 0.5, "anneal": 0, "width": width, **alone}

    def _around(self, of: Setting) -> list[Setting]:
        """Settings that differ in one parameter."""
        near = {round(of.threshold + step / 100, 2) for step in (-10, -5, -2, -1, 1, 2, 5, 10)}
        settings = [replace(of, threshold=t) for t in sorted(near) if 0 <= t <= 1]
        return settings + [s for name in CHANGED for _, s in self.changes(of, name)]

    def changes(self, of: Setting, name: str) -> list[tuple[float | int | str, Setting]]:
        """Values of one parameter with the rest as it is; of `layers`, each one left out or added.

        Raises:
            SettingError: no such parameter.
        """
        every = self.exits.layers
        if name == "threshold":
            return [(t, replace(of, threshold=t)) for t in sorted({*GRID, of.threshold})]
        if name == "anneal":
            return [(a, replace(of, anneal=a)) for a in ANNEALS]
        if name == "width":
            return [(w, replace(of, width=w)) for w in range(1, self.width + 1)]
        if name == "bonus":
            return [(b, replace(of, bonus=b)) for b in (True, False)]
        if name == "depth":
            return [
                (d, replace(of, layers=(*(n for n in of.layers[:-1] if n < d), d))) for d in every
            ]
        if name == "layers":
            out: list[tuple[float | int | str, Setting]] = []
            for layer in every:
                if layer not in of.layers:
                    added = tuple(sorted((*of.layers, layer)))
                    out.append((f"+{layer}", replace(of, layers=added)))
                elif len(of.layers) > 1:
                    removed = tuple(n for n in of.layers if n != layer)
                    out.append((f"-{layer}", replace(of, layers=removed)))
            return out
        raise SettingError(f"no parameter {name!r}")

    def sensitivity(self, of: Setting) -> dict[str, list[tuple[float | int | str, float]]]:
        """Per parameter its values and the predicted speed-up, the others as they are."""
        return {
            n: [(v, self.score(s)) for v, s in self.changes(of, n)] for n in ("threshold", *CHANGED)
        }


@dataclass(frozen=True)
class Confirmed:
    """A setting by the clock."""

    setting: Setting
    predicted: float
    speedup: dict[str, float]
    """Over plain decoding, as `lab.replay.geometric` over the texts; on one CPU thread by its own
    time, else by the wall."""
    wall: dict[str, float]
    per_round: float
    """Tokens committed per round."""
    same: int
    """Texts that equal plain decoding's."""

    def to_json(self, exits: str | None = None) -> dict[str, Any]:
        return {
            "draft": self.setting.spec(exits),
            "predicted": round(self.predicted, 4),
            "speedup": self.speedup,
            "wall": self.wall,
            "tokens_per_round": round(self.per_round, 4),
            "same": self.same,
        }


def confirm(
    model: Model,
    rows: Rows,
    heads: ExitHeads,
    search: Search,
    settings: Sequence[Setting],
    tell: Callable[[int, int], None] | None = None,
) -> list[Confirmed]:
    """Decode every text with every setting and plainly, side by side; the fastest first.

    Args:
        model: decodes plainly.
        rows: a runtime for early exits of the same model, without rows.
        heads: of the exits.
        search: where the settings come from.
        settings: those to time, a few.
        tell: called with the runs done and their number.

    Raises:
        SettingError: no text lasted for more than a round.
    """
    texts = search.exits.texts
    methods = [None, *settings]
    models = [model, *(speculating(model, rows, heads, s) for s in settings)]
    runs: list[list[Timed]] = []
    for number, text in enumerate(texts):
        row: list[Timed | None] = [None] * len(methods)
        for step in range(len(methods)):
            at = (step + number) % len(methods)  # no method always follows the same one
            row[at] = timed(models[at], text, methods[at])
            if tell is not None:
                tell(number * len(methods) + step + 1, len(texts) * len(methods))
        runs.append([done for done in row if done is not None])
    plain = [row[0].completion for row in runs]
    out = []
    for at, setting in enumerate(settings, start=1):
        pairs = [(row[0].pace, row[at].pace) for row in runs]
        paces = [(slow, own) for slow, own in pairs if slow is not None and own is not None]
        if not paces:
            raise SettingError("the texts end within a round; give prompts with longer answers")
        done = [row[at].completion for row in runs]
        out.append(
            Confirmed(
                setting,
                search.score(setting),
                geometric([slow[0] / own[0] for slow, own in paces]),
                geometric([slow[1] / own[1] for slow, own in paces]),
                sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done),
                sum(c.tokens == p.tokens for c, p in zip(done, plain, strict=True)),
            )
        )
    return sorted(out, key=lambda c: c.speedup["mean"], reverse=True)


def untuned(layers: Sequence[int], depths: int, trained: bool) -> Setting | None:
    """The setting of `specbound` without arguments.

    Args:
        layers: that have a head.
        depths: layers of the model.
        trained: whether the heads are.

    Returns:
        None if it refuses: no head is shallow enough.
    """
    depth = max(1, depths // 2)
    every = layers if trained else range(depth, 0, -2)
    used = tuple(sorted(n for n in every if n <= depth and n in layers))
    return Setting(used, 0.7, 0.5, 6) if used else None


def candidates(layers: Sequence[int]) -> tuple[int, ...]:
    """Exit layers to try: these, or of too many, evenly spaced ones.

    >>> candidates(range(1, 12)), candidates(range(1, 32))
    ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), (3, 6, 9, 12, 15, 18, 21, 24, 27, 30))
    """
    every = -(-len(layers) // MOST_LAYERS)
    return tuple(layers[every - 1 :: every])


def load_optuna() -> Any:
    """The module optuna.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError.of("optuna", "lab") from error
    return optuna


def written(model: Model, prompts: Iterable[tuple[list[int], Sampling]]) -> Iterator[Text]:
    """The model's own texts on prompts, given as token ids and sampling."""
    for ids, sampling in prompts:
        done = model.generate([ids], sampling=sampling, plain=True)[0]
        eos = model.eos if sampling.eos is None else frozenset(sampling.eos)
        sampling = replace(sampling, seed=done.seed)
        yield Text(ids, done.tokens, sampling, frozenset() if sampling.ignore_eos else eos)
