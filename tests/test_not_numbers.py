"""What is no number is never accepted: every rule, every kind of damage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from marks import spread
from rule_tools import TRANSFORMS, conditionals, emitted, joint, make, scene, tensors
from test_rules import ENUMERATED, GREEDY_ONLY, SPECS, family

NAN, INF = math.nan, math.inf
V, WIDTH = 7, 3
KINDS = ["greedy", "sampled", "mixed"]


def at(*places_and_values):
    def damage(logits):
        for place, value in places_and_values:
            logits[..., place] = value

    return damage


DAMAGE = {
    "all NaN": at((slice(None), NAN)),
    "one NaN": at((2, NAN)),
    "+inf": at((2, INF)),
    "all -inf": at((slice(None), -INF)),
    "NaN and inf": at((0, -INF), (1, NAN), (2, INF)),
}
"""What makes logits those of no distribution."""
ONE_LEFT = at((slice(1, None), -INF))
"""Not damage: a distribution like any other."""
ROWS = 2 * (len(DAMAGE) + 2)
"""Per pair of rows one kind of damage, then `ONE_LEFT`, then nothing."""
BROKEN = torch.arange(ROWS) < 2 * len(DAMAGE)


def damaged(logits, place):
    """A copy with every kind of damage, each in its rows."""
    out = logits.clone()
    for i, damage in enumerate([*DAMAGE.values(), ONE_LEFT]):
        damage(out[2 * i : 2 * i + 2, place])
    return out


def fit(spec, kind, certain=False):
    """Full drafts of the target's favourites, which every rule likes, and coins that say yes."""
    if family(spec) in GREEDY_ONLY and kind != "greedy":
        pytest.skip("greedy requests only")
    greedy = {"greedy": True, "sampled": False, "mixed": [True, False] * (ROWS // 2)}[kind]
    draft, target, coins = scene(rows=ROWS, width=WIDTH, vocab=V, greedy=greedy, certain=certain)
    tokens = target.logits[:, :-1].argmax(-1)
    probs = None if certain else target.logits[:, :-1].softmax(-1)
    draft = replace(
        draft, tokens=tokens, lengths=torch.full((ROWS,), WIDTH), probs=probs,
        raw=target.raw[:, :-1],
    )  # fmt: skip
    return draft, target, coins * 0


def assert_numbers(verdict):
    assert not any(t.isnan().any() for t in tensors(verdict).values() if t.is_floating_point())


@pytest.mark.parametrize(("spec", "kind"), spread(3, SPECS, KINDS))
def test_a_draft_that_is_no_distribution_ends_there(spec, kind):
    draft, target, coins = fit(spec, kind)
    rule = make(spec)
    for place in range(WIDTH):
        raw = damaged(target.raw[:, :-1], place)
        probs = damaged(target.logits[:, :-1], place).softmax(-1)
        verdict = rule.judge(replace(draft, probs=probs, raw=raw), target, coins)
        # As if the draft had ended there: the token is the target's own.
        lengths = torch.where(BROKEN, place, WIDTH)
        shorter = rule.judge(replace(draft, lengths=lengths), target, coins)
        for name, values in tensors(shorter).items():
            if name != "accept_prob":
                assert torch.equal(tensors(verdict)[name][BROKEN], values[BROKEN]), name
        assert (verdict.accepted[BROKEN] <= place).all()
        assert (verdict.accept_prob.cumprod(-1)[BROKEN, place:] == 0).all()
        assert not verdict.failed.any()
        assert_numbers(verdict)


@pytest.mark.parametrize(("spec", "certain", "kind"), spread(3, SPECS, [True, False], KINDS))
def test_a_target_that_is_no_distribution_fails_its_row_alone(spec, certain, kind):
    draft, target, coins = fit(spec, kind, certain)
    rule = make(spec)
    sound = rule.judge(draft, target, coins)
    assert not sound.failed.any()
    for place in range(WIDTH + 1):
        logits, raw = damaged(target.logits, place), damaged(target.raw, place)
        verdict = rule.judge(draft, replace(target, logits=logits, raw=raw), coins)
        assert (verdict.accepted[BROKEN] <= place).all()
        assert torch.equal(verdict.failed, BROKEN & (verdict.accepted == place))
        if rule.lossless:
            assert verdict.failed[BROKEN].any()
        assert (verdict.accept_prob.cumprod(-1)[BROKEN, place:] == 0).all()
        assert not verdict.accept_prob.isnan().any()
        assert verdict.drift is None or not verdict.drift.isnan().any()
        for name, values in tensors(verdict).items():
            assert torch.equal(values[-2:], tensors(sound)[name][-2:]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_plain_decoding_fails_alike(spec, kind):
    draft, target, coins = fit(spec, kind)
    bare = replace(
        draft, tokens=draft.tokens[:, :0], lengths=draft.lengths * 0, probs=None,
        raw=target.raw[:, :0],
    )  # fmt: skip
    logits = damaged(target.logits[:, :1], 0)
    verdict = make(spec).judge(bare, replace(target, logits=logits, raw=logits), coins[:, :1])
    assert torch.equal(verdict.failed, BROKEN)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("spec", ENUMERATED)
def test_lossless_rules_stay_lossless_with_a_damaged_draft(spec, damage):
    """By enumeration, wherever in the draft the damage is."""
    vocab, window = 3, 2
    for seed in range(3):
        target = conditionals(vocab, window + 1, 2 * seed, TRANSFORMS[0])
        draft = conditionals(vocab, window + 1, 2 * seed + 1, TRANSFORMS[0])
        for places in ([()], [(0,)], [(1,), (2,)], [p for p in draft if len(p) == 1]):
            broken = dict(draft)
            for place in places:
                broken[place] = draft[place].clone()
                DAMAGE[damage](broken[place])
            got = emitted(make(spec), target, broken, window, vocab)
            want = joint(target, (), window + 1, vocab)
            assert max(abs(got[seq] - want[seq]) for seq in want) < 1e-12
