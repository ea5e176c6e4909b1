"""Search spaces of `forerun tune`: the values each parameter of a controller may take."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forerun.errors import SettingError, optional


@dataclass(frozen=True)
class Integer:
    """Whole numbers from `low` to `high`."""

    low: int
    high: int
    log: bool = False

    def suggest(self, trial: Any, name: str, depth: int) -> int:
        return int(trial.suggest_int(name, *self.ends(depth), log=self.log))

    def values(self, depth: int) -> list[Any] | None:
        """All of them; None if there is no end."""
        low, high = self.ends(depth)
        return list(range(low, high + 1))

    def ends(self, depth: int) -> tuple[int, int]:
        return self.low, self.high


@dataclass(frozen=True)
class Tokens(Integer):
    """Tokens of a draft, at most the depth of a trace: longer drafts replay alike."""

    def ends(self, depth: int) -> tuple[int, int]:
        return min(self.low, depth), min(self.high, depth)


@dataclass(frozen=True)
class Real:
    """Numbers from `low` to `high`, to three digits."""

    low: float
    high: float
    log: bool = False

    def suggest(self, trial: Any, name: str, depth: int) -> float:
        return float(f"{trial.suggest_float(name, self.low, self.high, log=self.log):.3g}")

    def values(self, depth: int) -> list[Any] | None:
        """None: there is no end of them."""
        return None


@dataclass(frozen=True)
class OneOf:
    """One value of a list."""

    choices: tuple[Any, ...]

    def suggest(self, trial: Any, name: str, depth: int) -> Any:
        return trial.suggest_categorical(name, self.choices)

    def values(self, depth: int) -> list[Any] | None:
        return list(self.choices)


Space = Mapping[str, Integer | Real | OneOf]  # the values each parameter may take

Answer = Callable[[float | None], None]  # gets the worth of values; None: refused
Trials = Iterable[tuple[dict[str, Any], Answer]]  # values to try
S = TypeVar("S")


class Search(Generic[S]):
    """A search over settings: each is scored once, by `worth`; higher is better."""

    def __init__(self, worth: Callable[[S], float]) -> None:
        self._worth = worth
        self.scores: dict[S, float] = {}
        self.trials = self.refused = 0

    def score(self, setting: S) -> float:
        if setting not in self.scores:
            self.scores[setting] = self._worth(setting)
        return self.scores[setting]

    @property
    def best(self) -> S:
        """The best so far; the first one of equals."""
        return max(self.scores, key=self.scores.__getitem__)

    def run(
        self, trials: Trials, make: Callable[[Mapping[str, Any]], S], tell: Callable[[int], None]
    ) -> None:
        """Score what is made of the values tried; `tell` gets how many there were. Values that are
        refused (`SettingError`) count in `refused`."""
        for values, answer in trials:
            try:
                answer(self.score(make(values)))
            except SettingError:
                self.refused += 1
                answer(None)
            self.trials += 1
            tell(self.trials)


def sampled(
    space: Space, depth: int, count: int, seed: int, starts: Sequence[Mapping[str, Any]] = ()
) -> Iterator[tuple[dict[str, Any], Answer]]:
    """`count` values that optuna's TPE chooses by the answers to those before, `starts` first."""
    optuna = optional("optuna", "lab")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for start in starts:
        study.enqueue_trial(dict(start))
    for _ in range(count):
        trial = study.ask()
        values = {name: parameter.suggest(trial, name, depth) for name, parameter in space.items()}

        def answer(value: float | None, trial: Any = trial) -> None:
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, value)

        yield values, answer


_SWITCH = OneOf((False, True))
_ETA, _DELTA = Real(0.02, 1), Real(0, 12)
COSTS: Space = {"cost": Real(1, 100, log=True), "slope": Real(0, 0.5)}
"""Costs of a draft step and of a wider pass, as settings of controllers."""
_LADDERS = OneOf(("1,3,5,7", "0,1,3,5,7", "1,2,3,5,8,12", "0,1,2,3,5,8,13,20", "1,5,9,13,17"))
SPACES: Mapping[str, Space] = {
    "fixed": {"length": Tokens(0, 64)},
    "hf-heuristic": {"length": Tokens(1, 32), "up": Integer(0, 8), "down": Integer(0, 8)},
    "hf-threshold": {"threshold": Real(0, 1), "dynamic": _SWITCH, "length": Tokens(1, 32)},
    "gammatune": {
        "length": Tokens(1, 8), "eta": _ETA, "delta": _DELTA, "high": Tokens(8, 32),
    },
    "gammatune+": {
        "length": Tokens(1, 8), "eta": _ETA, "delta": _DELTA, "high": Tokens(8, 32),
        "early_stop": OneOf(("expand", "update", "skip")), "threshold": Real(0, 1),
        "keep": _SWITCH,
    },
    "goodput": {**COSTS, "high": Tokens(4, 32)},
    "survival": {"threshold": Real(0, 1), "length": Tokens(1, 32)},
    "calibrated": {
        "threshold": Real(0, 1), "high": Tokens(4, 32), "acceptance": Real(0, 1),
        "damping": Real(1, 1000, True), "window": Real(5, 1000, True),
    },
    "bandit": {
        "policy": OneOf(("ucb", "thompson")), "reward": OneOf(("throughput", "blend")),
        "low": Tokens(1, 4), "high": Tokens(4, 32), "stride": Integer(1, 6), "explore": Real(0, 1),
    },
    "svip": {"threshold": Real(0.01, 1.5), "length": Tokens(1, 40), "keep": _SWITCH},
    "adaedl": {
        "threshold": Real(0, 1), "factor": Real(0.01, 2, True), "target": Real(0, 1),
        "epsilon": Real(0, 0.2), "beta1": Real(0, 0.99), "beta2": Real(0, 0.99),
        "length": Tokens(1, 32), "keep": _SWITCH,
    },
    "exllama-ema": {
        "length": Tokens(1, 4), "alpha_up": Real(0.05, 2), "alpha_down": Real(0.05, 1),
        "skip_ema": Real(0, 1), "probe": Tokens(1, 4), "probe_interval": Integer(4, 64, True),
        "high": Tokens(4, 32),
    },
    "exllama-confidence": {
        "confidence": Real(0, 1), "decay": Real(0.9, 1), "least": Real(1, 64, True),
        "burn_in": Integer(0, 256), "high": Tokens(4, 32),
    },
    "sglang-ema": {
        "candidate_steps": _LADDERS, "ema_alpha": Real(0.02, 1), "update_interval": Integer(1, 10),
        "warmup_batches": Integer(0, 20), "up_hysteresis": Real(-1, 1),
        "down_hysteresis": Real(-1, 1),
    },
    "cm-asd": {
        "alpha": Real(0.05, 1), "low": Tokens(1, 4), "high": Tokens(4, 32),
        "sharpness": Real(0.1, 10, True),
    },
}  # fmt: skip
"""Search spaces by controller: the settings that matter, in the part of their documented range
that can be of use. Left out are settings another one makes redundant (`factor` of svip), forms as
printed in a paper (`literal`) and seeds. A controller that is not here has nothing to search."""
