"""What `priced` gives away is what it reports, in the mean over drafts; and it follows a budget."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from forerun.rules import RULES
from rule_tools import TRANSFORMS, conditionals, keeps_last, never, outcomes, scene


@pytest.mark.parametrize("stop", [never, keeps_last])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("settings", ["start=0.5", "start=0.4", "start=0"])
def test_drift_is_the_distance_in_the_mean(settings, certain, stop):
    """At the first position, and at the second after every first token that was kept."""
    rule, vocab, window, lenient = RULES.make(f"priced({settings})"), 4, 3, 0.0
    for seed in range(5):
        target, draft = (
            conditionals(vocab, window + 1, 2 * seed + i, TRANSFORMS[0]) for i in (0, 1)
        )
        meta, verdict = outcomes(rule, target, draft, window, vocab, certain, stop)
        law, drift = defaultdict(float), defaultdict(float)
        for row, (path, weight, past) in enumerate(meta):
            accept = verdict.accept_prob[row]
            weight = weight * accept[:past].prod().item()
            if past >= min(2, len(path)) or weight == 0:
                continue
            emitted = torch.nn.functional.one_hot(torch.tensor(path[past]), vocab) * accept[past]
            if verdict.accepted[row] == past:
                emitted = emitted + (1 - accept[past]) * verdict.next_probs[row]
            law[path[:past]] += weight * emitted
            drift[path[:past]] += weight * verdict.drift[row, past].item()
        for prefix, emitted in law.items():
            mass = emitted.sum()
            away = (emitted / mass - target[prefix].softmax(-1)).abs().sum() / 2
            assert away.item() == pytest.approx(drift[prefix] / mass.item(), abs=1e-12)
            lenient += away.item()
    assert lenient > 0.1


def test_the_price_follows_what_was_spent():
    draft, target, coins = scene(200, 4, 6)
    rule = RULES.make("priced(drift=0.02,start=0.5,pace=1)")
    given = []
    for total in (1.0, 0.2, 0.0):  # above the budget, on it, below it
        spent = torch.tensor([[total, 10.0]], dtype=torch.float64).expand(200, 2)
        given.append(rule.judge(draft, replace(target, spent=spent), coins).accept_prob.sum())
    usual = RULES.make("standard").judge(draft, target, coins).accept_prob.sum()
    assert usual == given[0] < given[1] < given[2]
