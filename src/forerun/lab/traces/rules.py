"""What an acceptance rule would keep of recorded runs.

A trace holds what rules read of both models at every drafted token, on and off the text
(`Trace.judged`), so a rule judges a recorded run as it judges a live one. What follows is the
text's own, whatever was kept: a lenient rule's live text has other contexts. How far that moves
tokens a round is in docs/papers.md.
"""

import numpy as np
import torch

from forerun.errors import SettingError
from forerun.lab.traces.results import Kept
from forerun.lab.traces.trace import SIGNALS, Trace
from forerun.rules import RULES, AcceptanceRule
from forerun.rules.base import PositionRule, drift_of
from forerun.rules.odds import Odds, View
from forerun.types import Draft, FloatArray, IntArray, Target

ROUNDED = 1e-3  # how far two ways of computing an acceptance ratio may differ


class RecordedRule:
    """A rule that decides position by position, over a trace of this schema; `seed` is of its
    coins. `SettingError` if rule or trace do not allow it."""

    def __init__(self, trace: Trace, rule: str | AcceptanceRule, seed: int = 0) -> None:
        self.rule = RULES.make(rule)
        name = RULES.text(self.rule)
        good = isinstance(self.rule, PositionRule) and not np.isnan(trace.judged["ratio"]).any()
        if not good:
            raise SettingError(
                f"rule {name!r} cannot be replayed: it judges drafts as a whole, or the trace "
                "lacks what rules read; record with a draft model, or take another rule"
            )
        sampled, has_draft = trace.sampled, trace.knows("top5_overlap")
        if _noisy(trace) and has_draft:
            raise SettingError(
                f"rule {name!r} tosses coins and these texts were drawn by noise, which their "
                "signals hold; record them by the rule `standard`"
            )
        if self.rule.reads_draft and not has_draft:
            raise SettingError(
                f"rule {name!r} reads the draft's distribution and this trace's drafter has none"
            )
        self._untempered = _untempered(trace)
        self.has_bonus = self.rule.has_bonus
        self._depth, self._random = trace.depth, np.random.default_rng(seed)
        self._greedy = np.repeat(~sampled, trace.tokens.shape[1])
        flat = {**trace.judged, **trace.signals, "tokens": trace.draft_tokens}
        self._values = {n: values.reshape(-1, trace.depth) for n, values in flat.items()}
        try:  # what it reads beyond that is not there
            self.judge(np.zeros(1, np.int64), np.full(1, trace.depth), np.zeros((1, 2)))
        except SettingError:
            raise
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise SettingError(
                f"rule {name!r} reads more of the two models than a trace holds: run it live"
            ) from error
        self._random = np.random.default_rng(seed)

    def judge(self, here: IntArray, lengths: IntArray, spent: FloatArray) -> Kept:
        """Judge a round.

        Args:
            here: `(rows,)` flat positions, `prompt · T + position`.
            lengths: `(rows,)` tokens drafted.
            spent: `(rows, 2)` each request's drift and tokens so far.
        """
        assert isinstance(self.rule, PositionRule)
        odds = self._odds(here, lengths, spent)
        weighed = self.rule.weigh(odds)
        accept = torch.where(odds.inside, weighed.accept, 0).double()
        coins = torch.from_numpy(self._random.random((len(here), self._depth)))
        accepted = (coins < accept).cumprod(-1).sum(-1)
        drift = drift_of(odds, weighed, accepted).sum(-1)
        chances = accept.numpy()
        return Kept(accepted.numpy(), lambda depth: chances[:, depth], drift.double().numpy())

    def _odds(self, here: IntArray, lengths: IntArray, spent: FloatArray) -> Odds:
        """The odds of recorded runs: of both models the numbers that rules read, and no logits."""
        value = {n: torch.from_numpy(values[here]) for n, values in self._values.items()}
        greedy = torch.from_numpy(self._greedy[here])
        tokens = value.pop("tokens")
        nothing = torch.empty(len(here), self._depth + 1, 0, dtype=torch.float64)
        drafted = torch.from_numpy(lengths.astype(np.int64))
        target = Target(nothing, greedy, None, torch.from_numpy(spent))
        shown = {name: value[name] for name in (*SIGNALS, "top5_overlap")}
        odds = Odds(Draft(tokens, drafted), target, recorded=shown)
        ratio, logits = value["ratio"], -value["gap"].unsqueeze(-1)
        chance = value["target_top1"] * torch.exp(-value["gap"])
        chance = torch.where(greedy.unsqueeze(-1), ratio, chance)
        drawn = torch.where(ratio > 0, chance / ratio, 1)
        # Of distributions that were tempered or cut, only those at temperature 1 are known.
        processed = {
            name: torch.where(greedy.unsqueeze(-1), 0, value[column]) if self._untempered else None
            for name, column in (("target_entropy", "target_entropy"), ("draft_entropy", "entropy"))
        }
        if (own := processed["target_entropy"]) is not None:
            processed["target_entropy"] = own.unsqueeze(-1)
        odds.__dict__.update(
            lengths=drafted,
            match=value["rank"] == 0,
            ratio=ratio,
            top=value["target_top1"].unsqueeze(-1),
            tokens=View(chance.unsqueeze(-1), drawn.unsqueeze(-1), ratio.unsqueeze(-1), logits),
            best_logit=torch.zeros_like(logits),
            raw_entropy=value["target_entropy"],
            raw_draft_entropy=value["entropy"],
            overlap=1 - value["variation"],
            rank=value["rank"],
            open=torch.ones_like(ratio, dtype=torch.bool),
            **processed,
        )
        return odds


def _noisy(trace: Trace) -> bool:
    """Whether a token that coins would have judged was not judged by them."""
    ratio, depth = trace.judged["ratio"], np.arange(trace.depth)
    place = np.arange(ratio.shape[1])[:, None] + depth
    judged = (depth <= trace.matches[..., None]) & (place < trace.sizes[:, None, None])
    return bool((judged & (np.abs(trace.accept_prob - ratio) > ROUNDED)).any())


def _untempered(trace: Trace) -> bool:
    """Whether all sampled texts were drawn at temperature 1 from all tokens."""
    how = trace.about.get("sampling", {})
    heat = how.get("temperature", 0.0)
    heats = heat.values() if isinstance(heat, dict) else [heat]
    return set(heats) <= {0.0, 1.0} and not {"top_k", "top_p", "min_p"} & how.keys()
