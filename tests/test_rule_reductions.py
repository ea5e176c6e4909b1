"""Rules that must come down to others, closed forms of the drift, and details of the papers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.confidence import Confidence
from forerun.rules.budget import Budget
from forerun.rules.cm_asd import CMASDRule
from forerun.rules.odds import Odds
from forerun.signals import measure
from forerun.types import Draft, Target
from rule_tools import (
    LAST,
    NEG,
    TRANSFORMS,
    assert_close,
    conditionals,
    drops_last,
    make,
    never,
    outcomes,
    scene,
    tensors,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
KINDS = {"sampling": False, "greedy": True, "mixed": [True, False] * 3}


def scenes(kinds=KINDS, dtypes=DTYPES, seeds=4, **kwargs):
    """Scenes of 6 rows of every kind; the last has little to say about any token."""
    for kind, certain, dtype, seed in itertools.product(kinds, [True, False], dtypes, range(seeds)):
        yield scene(6, 4, 7, seed=seed, greedy=KINDS[kind], certain=certain, dtype=dtype, **kwargs)


def same(one: str, other: str, but=(), **kwargs) -> None:
    """Two rules give the same verdict, bit for bit; a lossless one has no drift to compare."""
    first, second = make(one), make(other)
    if first.lossless or second.lossless:
        but = {*but, "drift"}
    for case in scenes(**kwargs):
        a, b = first.judge(*case), second.judge(*case)
        if (a.next_probs is None) != (b.next_probs is None):
            but = {*but, "next_probs"}
        assert_close(a, b, but=but)
        for v in (a, b):
            assert v.drift is None or not second.lossless or (v.drift == 0).all()


# --- reductions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ears(beta=0)", "standard"),
        ("ensemble(weight=1)", "standard"),
        ("easd(entropy=inf,correction=residual)", "standard"),
        ("cm-asd(gamma=0,tau=0.7)", "spec-verification(tau=0.7)"),
        ("cm-asd(gamma=0,tau=0.7,top=2,mode=formula)", "spec-verification(tau=0.7,top=2)"),
        ("cm-asd(gamma=0,tau=0.7,literal=true)", "spec-verification(tau=0.7)"),
        ("budget(ears(beta=0.5),drift=1)", "ears(beta=0.5)"),
        ("budget(ensemble(weight=0.2),drift=1)", "ensemble(weight=0.2)"),
        ("budget(cm-asd,drift=1)", "cm-asd"),
        ("budget(easd(entropy=0.3,overlap=0),drift=1)", "easd(entropy=0.3,overlap=0)"),
        ("budget(fly(entropy=0.1,window=0),drift=1)", "fly(entropy=0.1,window=0)"),
    ],
)
def test_comes_down_to_another_rule(one, other):
    same(one, other)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        *[("fly(entropy=0,window=0)", "sampling"), ("fly(entropy=0,window=5)", "greedy")],
        *[(f"{r}", "greedy") for r in ("standard", "block", "ears", "typical", "ensemble")],
        *[("easd(entropy=inf)", "greedy"), ("spec-verification(tau=0)", "greedy")],
        *[("spec-verification(top=1,tau=100)", "greedy"), ("easd(entropy=1.9)", "greedy")],
    ],
)
def test_comes_down_to_standard_for_some_requests(one, kind):
    # bfloat16 logits tie; then `spec-verification` keeps either.
    dtypes = DTYPES[:2] if one.startswith("spec") else DTYPES
    same(one, "exact" if kind == "greedy" else "standard", kinds=[kind], dtypes=dtypes)


def test_easd_without_a_penalty_keeps_the_same_tokens():
    """And with `correction=target` only what replaces a rejected token differs."""
    rule, standard = make("easd(entropy=inf,correction=target)"), make("standard")
    differs = False
    for draft, target, coins in scenes():
        one, other = rule.judge(draft, target, coins), standard.judge(draft, target, coins)
        assert_close(one, other, but={"next_token", "next_probs", "drift"})
        kept = (one.accepted == draft.lengths) | target.greedy
        assert torch.equal(one.next_token[kept], other.next_token[kept])
        if one.next_probs is not None:
            assert torch.equal(one.next_probs[kept], other.next_probs[kept])
            differs |= bool((one.next_probs[~kept] != other.next_probs[~kept]).any())
    assert differs


@pytest.mark.parametrize("inner", ["ears(beta=0.5)", "cm-asd(gamma=2)", "typical", "ensemble"])
def test_a_budget_of_nothing_is_standard(inner):
    rule, free, standard = make(f"budget({inner},drift=0)"), make(inner), make("standard")
    for case in scenes():
        case = (case[0], replace(case[1], spent=None), case[2])
        one, other, inside = (r.judge(*case) for r in (rule, standard, free))
        assert (one.drift == 0).all()
        place = torch.arange(inside.drift.shape[1])
        judged = place <= inside.accepted.unsqueeze(-1)  # others have no drift
        lossy = inside.drift > 0
        assert torch.equal(one.accept_prob[lossy], other.accept_prob[lossy])
        assert torch.equal(one.accept_prob[~lossy & judged], inside.accept_prob[~lossy & judged])


def test_the_reductions_are_not_empty():
    """What was shown equal is different at other settings."""
    for one, other in [
        ("ears(beta=0.01)", "standard"),
        ("ensemble(weight=0.99)", "standard"),
        ("cm-asd(gamma=0.4,tau=0.7)", "spec-verification(tau=0.7)"),
        ("easd(entropy=0.5,overlap=0,correction=residual)", "standard"),
        ("budget(ears(beta=0.5),drift=0.01)", "ears(beta=0.5)"),
        ("fly(entropy=0,window=0)", "exact"),
    ]:
        with pytest.raises(AssertionError, match="Tensor-likes are not"):
            same(one, other, kinds=["greedy"] if "fly" in one else ["sampling"], dtypes=DTYPES[:1])


# --- closed forms -------------------------------------------------------------------------------


def every_token(seed: int, vocab: int, keep=TRANSFORMS[0]):
    """One position, judged for every drafted token; and both distributions."""
    target = conditionals(vocab, 2, 2 * seed, keep)
    guess = conditionals(vocab, 2, 2 * seed + 1, keep)
    t, d = (table[()].softmax(-1) for table in (target, guess))

    def judged(spec):
        meta, verdict = outcomes(make(spec), target, guess, 1, vocab)
        return {path[0]: verdict.accept_prob[row, 0] for row, (path, _, _) in enumerate(meta)}, (
            0.0 if verdict.drift is None else verdict.drift[0, 0].item()
        )

    return judged, t, d


@pytest.mark.parametrize("keep", TRANSFORMS, ids=str)
@pytest.mark.parametrize("vocab", [2, 3, 6])
def test_closed_forms_of_the_drift(vocab, keep):
    for seed in range(4):
        judged, t, d = every_token(seed, vocab, keep)
        away = (t - d).abs().sum().item() / 2
        usual, _ = judged("standard")
        for beta in (0.05, 0.2, 1):
            accept, drift = judged(f"ears(beta={beta})")
            assert drift <= beta * (1 - t.max().item()) + 1e-15
            extra = sum(d[x] * (accept[x] - usual[x]) for x in accept).item()
            assert math.isclose(drift, extra, abs_tol=1e-14)
        for weight in (0, 0.3, 0.9, 1):
            accept, drift = judged(f"ensemble(weight={weight})")
            extra = sum(d[x] * (accept[x] - usual[x]) for x in accept).item()
            assert math.isclose(drift, extra, abs_tol=1e-14)
            if ((t > 0) | (d == 0)).all():  # the target allows whatever may be drafted
                assert math.isclose(drift, (1 - weight) * away, abs_tol=1e-14)
            else:
                assert drift <= (1 - weight) * away + 1e-14
        # Everything that the target allows is kept: the draft's own distribution is emitted.
        _, drift = judged("spec-verification(top=9,tau=100)")
        if ((t > 0) | (d == 0)).all():
            assert math.isclose(drift, away, abs_tol=1e-14)


@pytest.mark.parametrize(
    "spec",
    [
        "ears(beta=1)",
        "ensemble(weight=0)",
        "typical(epsilon=0)",
        "spec-verification(top=50,tau=100)",
        "easd(entropy=0,overlap=0)",
        "easd(entropy=0,overlap=0,correction=residual)",
        "budget(ensemble(weight=0),drift=1)",
    ],
)
def test_float32_drift_is_at_most_one(spec):
    """Also where both models are sure of different tokens."""
    g = torch.Generator().manual_seed(0)
    for vocab, scale in itertools.product((2, 5, 300), (1, 5, 30)):
        target, guess = scale * torch.randn(2, 200, 1, vocab, generator=g)
        tokens, both = guess.argmax(-1), target.expand(200, 2, vocab)
        draft = Draft(tokens, torch.ones(200).long(), (guess / 0.3).softmax(-1), guess)
        given = Target(both / 0.3, torch.zeros(200, dtype=torch.bool), both)
        drift = make(spec).judge(draft, given, torch.zeros(200, 2).double()).drift
        assert ((drift >= 0) & (drift <= 1)).all()


# --- block --------------------------------------------------------------------------------------


def expected(spec: str, target, draft, window, vocab, stop) -> float:
    """Accepted tokens per round, over all drafts."""
    meta, verdict = outcomes(make(spec), target, draft, window, vocab, stop=stop)
    length = verdict.accept_prob.cumprod(-1).sum(-1).tolist()
    return math.fsum(mass * length[row] for row, (_, mass, n) in enumerate(meta) if n == 0)


@pytest.mark.parametrize("stop", [never, drops_last])
def test_block_accepts_no_fewer_than_standard(stop):
    gains = {}
    for vocab, window, keep in itertools.product((2, 3), (1, 2, 3), TRANSFORMS[:5]):
        for seed in range(6):
            models = (conditionals(vocab, window + 1, 2 * seed + i, keep) for i in (40, 41))
            case = (*models, window, vocab, stop)
            gain = expected("block", *case) - expected("standard", *case)
            assert gain > -1e-12
            gains.setdefault(window, []).append(gain)
    assert max(gains[1]) < 1e-12  # one token alone is judged alike
    for window in (2, 3):
        assert sum(gain > 1e-3 for gain in gains[window]) > len(gains[window]) / 3


def test_block_equals_standard_for_one_token():
    for seed in range(5):
        draft, target, coins = scene(50, 1, 5, seed=seed, dtype=torch.float64)
        assert_close(
            make("block").judge(draft, target, coins),
            make("standard").judge(draft, target, coins),
            atol=1e-13,
        )


# --- easd ---------------------------------------------------------------------------------------


def position(raw_target, raw_draft, token, *, temperature=1.0, greedy=False, sure=False):
    """One drafted token and both models' logits at temperature 1; the coin rejects if it can."""
    target, guess = (torch.tensor(z, dtype=torch.float64) for z in (raw_target, raw_draft))
    tokens = torch.tensor([[token]])
    probs = None if sure or greedy else (guess / temperature).softmax(-1).view(1, 1, -1)
    both = target.expand(1, 2, -1)
    return (
        Draft(tokens, torch.tensor([1]), probs, guess.view(1, 1, -1)),
        Target(both / (1 if greedy else temperature), torch.tensor([greedy]), both),
        torch.tensor([[LAST, 0.0]], dtype=torch.float64),
    )


def ranked(order, vocab=20, step=0.01):
    """Nearly uniform logits (entropy near log V) with these tokens on top, best first."""
    logits = [0.0] * vocab
    for rank, token in enumerate(order):
        logits[token] = step * (len(order) - rank)
    return logits


@pytest.mark.parametrize(("shared", "fires"), [(5, True), (4, True), (3, False), (0, False)])
def test_easd_penalises_from_four_of_five(shared, fires):
    target, guess = range(5), [*range(5 - shared, 5), *range(10, 15 - shared)]
    case = position(ranked(target), ranked(guess), 7)
    verdict = make("easd").judge(*case)
    assert (verdict.accept_prob.item() == 0) == fires
    assert (verdict.next_probs[0, 7].item() == 0) == fires
    always = make("easd(overlap=0)").judge(*case)
    assert always.accept_prob.item() == 0


def test_easd_with_more_ranks_than_tokens():
    """The overlap counts `n`, however few tokens there are: 4 of 5 at V = 4, 3 of 5 at V = 3."""
    for vocab, fires in ((4, True), (3, False)):
        case = position([0.0] * vocab, [0.1] * vocab, 1)
        assert (make("easd(entropy=0.5)").judge(*case).accept_prob.item() == 0) == fires


def test_easd_looks_at_temperature_one():
    flat, steep = ranked(range(5), step=0.3), [40.0] + [0.0] * 19
    for temperature in (0.01, 1.0, 50.0):
        fires = make("easd").judge(*position(flat, flat, 1, temperature=temperature))
        assert fires.accept_prob.item() == 0
        calm = make("easd").judge(*position(steep, steep, 0, temperature=temperature))
        assert math.isclose(calm.accept_prob.item(), 1)


@pytest.mark.parametrize("correction", ["target", "residual"])
def test_easd_greedy_takes_the_second_best(correction):
    logits = ranked([3, 8, 2, 5, 11], step=0.1)
    rule = make(f"easd(correction={correction})")
    verdict = rule.judge(*position(logits, logits, 3, greedy=True))
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 8)
    assert verdict.drift.item() == 1
    verdict = rule.judge(*position(logits, logits, 8, greedy=True))
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 3)
    assert verdict.drift.item() == 0
    # Nothing else is allowed: it stays.
    draft, target, coins = position(logits, logits, 3, greedy=True)
    alone = torch.full_like(target.logits, NEG)
    alone[..., 3] = 0
    verdict = rule.judge(draft, replace(target, logits=alone), coins)
    assert (verdict.accepted.item(), verdict.drift.item()) == (1, 0)


@pytest.mark.parametrize(("which", "fires"), [("", False), (",draft_entropy=false", True)])
def test_easd_both_must_be_unsure(which, fires):
    flat, steep = ranked(range(5)), [4.0, 3.9, 3.8, 3.7, 3.6] + [-20.0] * 15
    rule = make(f"easd{'(' + which[1:] + ')' if which else ''}")
    assert (rule.judge(*position(flat, steep, 1)).accept_prob.item() == 0) == fires
    assert rule.judge(*position(steep, flat, 1)).accept_prob.item() > 0
    assert rule.judge(*position(flat, flat, 1)).accept_prob.item() == 0


def roughly(draft, target, coins):
    """The same in float32."""
    return (
        replace(draft, probs=draft.probs.float()),
        replace(target, logits=target.logits.float(), raw=target.raw.float()),
        coins,
    )


@pytest.mark.parametrize("correction", ["target", "residual"])
def test_easd_drift_where_the_processed_target_is_nearly_sure(correction):
    """1 − target(x) of the best token x must be added up: as a difference it is rounding error.

    Both models waver at temperature 1, and the request is colder. The target is x but for 1e-6,
    so a drafted x gives another token for sure, and any other (all but) x: the drift is draft(x).
    """
    rule = make(f"easd(entropy=0.1,overlap=0,correction={correction})")
    target, guess = [0.0, -1.7, -1.8], [0.0, -0.05, -0.2]
    for temperature in (0.11, 0.08, 0.05):
        sure = torch.tensor(guess, dtype=torch.float64).div(temperature).softmax(-1)[0].item()
        case = position(target, guess, 0, temperature=temperature)
        assert abs(rule.judge(*case).drift.item() - sure) < 1e-5
        if temperature > 0.1:
            assert abs(rule.judge(*roughly(*case)).drift.item() - sure) < 1e-5


@pytest.mark.parametrize("temperature", [0.2, 0.1, 0.05, 0.02])
def test_easd_penalises_at_any_temperature(temperature):
    """A target whose best probability rounds to 1 still allows other tokens: as if greedy."""
    rule, logits = make("easd(entropy=0.1,overlap=0)"), [0.0, -1.7, -1.8]
    for case in (
        position(logits, logits, 0, greedy=True),
        position(logits, logits, 0, temperature=temperature),
        roughly(*position(logits, logits, 0, temperature=temperature)),
    ):
        verdict = rule.judge(*case)
        assert verdict.accept_prob.item() == 0
        assert verdict.next_token.item() == 1


# --- cm-asd, spec-verification ------------------------------------------------------------------


def test_ranks_count_ties_together():
    target = torch.tensor([[[2.0, 2.0, 1.0, 1.0, 0.0], [0.0] * 5]], dtype=torch.float64)
    for top, best in ((1, 2), (2, 2), (3, 4), (4, 4), (5, 5)):
        rule, coins = make(f"spec-verification(top={top},tau=9)"), torch.zeros(1, 2).double()
        for greedy, x in itertools.product((True, False), range(5)):
            given = Target(target, torch.tensor([greedy]))
            draft = Draft(torch.tensor([[x]]), torch.tensor([1]))
            assert rule.judge(draft, given, coins).accepted.item() == (x < best)


def test_a_gap_of_exactly_tau_is_kept():
    target = Target(torch.tensor([[[1.0, 0.5, 0.0], [0.0] * 3]]), torch.tensor([True]))
    draft, coins = Draft(torch.tensor([[1]]), torch.tensor([1])), torch.zeros(1, 2).double()
    assert make("spec-verification(tau=0.5)").judge(draft, target, coins).accepted.item() == 1
    assert make("spec-verification(tau=0.4999)").judge(draft, target, coins).accepted.item() == 0


@pytest.mark.parametrize("mode", ["prose", "formula"])
def test_each_token_has_its_own_margin(mode):
    """A draft of a sure and an unsure token: `prose` forgives the first, `formula` the second."""
    sure, unsure = [9.0, 0.0, 0.0], [0.1, 0.0, 0.0]
    guess = torch.tensor([[sure, unsure]])
    tokens = torch.tensor([[0, 0]])
    draft = Draft(tokens, torch.tensor([2]), raw=guess)
    target = Target(torch.tensor([[[0.0, 0.5, -1.0]] * 3]), torch.tensor([True]))
    rule = CMASDRule(mode=mode, top=2, tau=0.0, gamma=0.7)
    verdict = rule.judge(draft, target, torch.zeros(1, 3).double())
    assert verdict.accept_prob.tolist() == ([[1, 0]] if mode == "prose" else [[0, 1]])
    judged = [1, 0] if mode == "prose" else [0, 0]
    assert verdict.drift.tolist() == [judged]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["cm-asd(gamma=2)", "cm-asd(mode=formula,gamma=2)"])
def test_a_batch_of_16_is_16_batches_of_one(spec, kind):
    greedy = {"sampling": False, "greedy": True, "mixed": [True, False] * 8}[kind]
    draft, target, coins = scene(16, 6, 9, greedy=greedy, dtype=torch.float64)
    assert len(set(draft.lengths.tolist())) > 3
    confidence = Confidence().score(**measure(draft.raw, draft.tokens, Confidence().reads))
    assert confidence.max() - confidence.min() > 0.5
    verdict = make(spec).judge(draft, target, coins)
    assert len(set(verdict.accepted.tolist())) > 2
    for row in range(16):
        one = make(spec).judge(draft.take([row]), target.take([row]), coins[[row]])
        for name, value in tensors(one).items():
            torch.testing.assert_close(tensors(verdict)[name][[row]], value, atol=1e-14, rtol=0)


# --- fly ----------------------------------------------------------------------------------------


def fly(tokens: list[int], logits: list[list[float]], theta: float, window: int, top: int):
    """Which tokens of a draft are kept, each if all before it are: §3, position by position."""
    kept = []
    choice = [max(range(len(z)), key=lambda v: z[v]) for z in logits]
    for j, token in enumerate(tokens):
        weights = [math.exp(z - max(logits[j])) for z in logits[j]]
        terms = sorted((w / sum(weights) for w in weights), reverse=True)
        nats = -sum(p * math.log(p) for p in terms[: top or len(terms)] if p > 0)
        unsure = nats >= (theta if top else theta * math.log(len(terms)))
        fits = j + window <= len(tokens) - 1
        ahead = range(j + 1, j + 1 + window)
        agreed = fits and all(tokens[i] == choice[i] for i in ahead)
        kept.append(token == choice[j] or (unsure and agreed and logits[j][token] > NEG))
    return kept, choice


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("window", [0, 1, 2, 6])
def test_fly_forgives_what_the_paper_forgives(window, top):
    forgiven = refused = 0
    for theta, seed in itertools.product((0, 0.3, 0.8), range(4)):
        rule = make(f"fly(entropy={theta},window={window},top={top})")
        draft, target, coins = scene(
            16, 9, 4, greedy=[True, False] * 8, seed=seed, dtype=torch.float64
        )
        g = torch.Generator().manual_seed(seed)
        logits = target.logits * torch.rand(16, 10, 1, generator=g, dtype=torch.float64)
        logits[:8, :, 3] = NEG
        best, other = logits[:, :-1].argmax(-1), torch.randint(0, 4, (16, 9), generator=g)
        tokens = torch.where(torch.rand(16, 9, generator=g) < 0.75, best, other)
        inside = torch.arange(9) < draft.lengths.unsqueeze(-1)
        draft = replace(draft, tokens=tokens * inside, probs=None)
        target = replace(target, logits=logits)
        verdict = rule.judge(draft, target, coins)
        usual = make("standard").judge(draft, target, coins)
        for row in range(16):
            if row % 2:  # a sampling row
                for name, value in tensors(usual).items():
                    assert torch.equal(tensors(verdict)[name][row], value[row])
                assert (verdict.drift[row] == 0).all()
                continue
            n = int(draft.lengths[row])
            kept, choice = fly(tokens[row, :n].tolist(), logits[row].tolist(), theta, window, top)
            lossy = [k and tokens[row, j] != choice[j] for j, k in enumerate(kept)]
            assert verdict.accept_prob[row].tolist() == kept + [0] * (9 - n)
            first = [*kept, False].index(False)
            assert verdict.drift[row].tolist() == lossy[:first] + [0] * (9 - first)
            assert verdict.accepted[row] == first
            assert verdict.next_token[row] == choice[first]
            forgiven += sum(lossy)
            refused += n - sum(kept)
    assert refused
    assert forgiven or window == 6


# --- budget -------------------------------------------------------------------------------------

INNER = [
    "ears(beta=0.8)",
    "cm-asd(gamma=2)",
    "easd(entropy=0.3,overlap=0)",
    "easd(entropy=0.3,overlap=0,correction=residual)",
    "typical",
    "ensemble(weight=0.2)",
    "fly(entropy=0.1,window=0)",
    "spec-verification(tau=3)",
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(INNER),
    st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(0, 1)),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 40)), min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_mean_drift_never_exceeds_the_budget(inner, budget, seed, spent, certain, dtype):
    draft, target, coins = scene(
        6, 5, 5, seed=seed, greedy=[True, False] * 3, certain=certain, dtype=dtype
    )
    # What the request has spent is, or is not, within the budget.
    spent = torch.tensor([(total * max(budget, 0.1) * n, n) for total, n in spent]).double()
    target = replace(target, spent=spent)
    rules = {"budget": Budget(make(inner), budget), "inner": make(inner), "usual": make("standard")}
    verdicts = {name: rule.judge(draft, target, coins) for name, rule in rules.items()}
    verdict, free, usual = verdicts.values()
    lost = rules["inner"].weigh(Odds(draft, target)).drift(Odds(draft, target)).clamp(0, 1)
    before, made = spent.unbind(-1)
    for row in range(6):
        total = before[row].item()
        for i in range(min(int(draft.lengths[row]), int(verdict.accepted[row]) + 1)):
            here, tokens = verdict.drift[row, i].item(), made[row].item() + i + 1
            wanted = lost[row, i].item()
            total += here
            assert here == 0 or total <= budget * tokens  # so it never rises above the budget
            chosen = verdict.accept_prob[row, i]
            if total - here + wanted <= budget * tokens:
                assert chosen == free.accept_prob[row, i]
                assert math.isclose(here, wanted, abs_tol=1e-6)  # the order of sums differs
            else:
                assert (chosen, here) == (usual.accept_prob[row, i], 0)
        if before[row] <= budget * made[row]:
            assert total <= budget * (made[row].item() + int(draft.lengths[row]))
    # A rejected token is replaced as the position's own rule would have it.
    for name, other in (("inner", free), ("usual", usual)):
        for row in range(6):
            n = int(verdict.accepted[row])
            if n == other.accepted[row] and n < draft.lengths[row]:
                spends = verdict.drift[row, n] > 0
                if spends == (name == "inner") and lost[row, n] > 0:
                    assert torch.equal(verdict.next_probs[row], other.next_probs[row])
