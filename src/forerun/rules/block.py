"""`block`: judge the draft as a whole; accepts no fewer than standard."""

from dataclasses import dataclass

from forerun.arrays import cast, library, one_hot, sample
from forerun.rules.base import AcceptanceRule, match_greedy
from forerun.rules.odds import Odds
from forerun.types import Array, Draft, Target, Verdict


@dataclass(frozen=True)
class Block(AcceptanceRule):
    """Block verification: the longest prefix that the joint probabilities allow.

    Reference: Sun et al. 2024 (block verification) [block2024], Algorithm 2.
    """

    lossless = True
    matches_greedy = True

    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Keep the longest prefix whose coin allows it, draw the next token."""
        if target.greedy.all():
            return match_greedy(draft, target.logits)
        odds = Odds(draft, target)
        lib, width, lengths, guess = odds.lib, odds.width, odds.lengths, odds.drawn
        row, place, goal = odds.row[:, 0], odds.place + 1, odds.whole
        if odds.some_greedy:
            goal = lib.where(odds.greedy[..., None], one_hot(target.logits), goal)

        joint = _joint(*(odds.of_tokens(probs, draft.tokens) for probs in (goal, guess)))
        residual = (joint[:, :width, None] * goal[:, :width] - guess).clip(0)
        mass = residual.sum(-1)
        whole = mass + 1 - joint[:, :width]
        # Where joint is 1 and nothing is left over, both models agree from here on.
        inner = lib.where(whole > 0, mass / whole, 1.0)
        last, inside = (place == lengths[:, None], place <= lengths[:, None])
        none = lib.zeros_like(lengths)[:, None]
        inner = lib.concatenate((inner[:, 1:], cast(none, inner.dtype)), -1)
        stop = lib.where(last, joint[:, 1:], inner) * inside

        kept = (uniforms[:, :width] < stop) * place
        accepted = lib.amax(lib.concatenate((none, kept), -1), -1)
        probs = goal[row, accepted]
        if width:
            at = accepted.clip(0, width - 1)
            use = (accepted < lengths) & (mass[row, at] > 0)
            drawn = residual[row, at] / mass[row, at][:, None]
            probs = lib.where(use[:, None], drawn, probs)
        chance = _reached(stop)
        if odds.some_greedy:  # as if alone: also behind what cannot be reached
            match = match_greedy(draft, target.logits).accept_prob
            chance = lib.where(odds.greedy, match, chance)
        return Verdict(accepted, sample(probs, uniforms[:, -1]), chance, probs)


def _joint(target: Array, draft: Array) -> Array:
    """`(rows, K + 1)` p_0 … p_K from `(rows, K)` probabilities of the drafted tokens."""
    lib, ratio = library(target), target / draft
    # One of 0 / 0 is none; an infinite one is of a token that only the target allows.
    ratio = lib.where(ratio >= 0, ratio.clip(None, lib.finfo(ratio.dtype).max), 0)
    joint = [lib.ones_like(ratio.sum(-1))]
    for i in range(ratio.shape[1]):
        joint.append((joint[-1] * ratio[:, i]).clip(None, 1))
    return lib.stack(joint, -1)


def _reached(stop: Array) -> Array:
    """`(rows, K)` probability of keeping token i given that those before it are kept."""
    lib = library(stop)
    reach = 1 - lib.flip(lib.flip(1 - stop, (-1,)).cumprod(-1), (-1,))
    before = lib.concatenate((lib.ones_like(stop[:, :1]), reach[:, :-1]), -1)
    return lib.where(before > 0, reach / before, 0)
