"""Every rule keeps the contract; the lossless ones are shown to be so by exact enumeration."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import SettingError, UnknownNameError
from forerun.rules import RULES, AcceptanceRule, sample
from forerun.rules.standard import Standard
from forerun.types import Draft, Target, Verdict

CASES = {"exact": ["exact"], "standard": ["standard"]}
GREEDY_ONLY = {"exact"}
SPECS = [spec for specs in CASES.values() for spec in specs]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NEG = -math.inf


def make(spec: str) -> AcceptanceRule:
    return RULES.make(spec)


def scene(rows=5, width=4, vocab=7, *, seed=0, greedy=None, certain=False, dtype=torch.float32):
    """A random draft, target and coins."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (2 * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    lengths[: rows // 2] = width
    logits = normal(rows, width, vocab)
    target_logits = normal(rows, width + 1, vocab)
    if width:
        target_logits[:, :width] += logits  # so that some drafts are good
    tokens = logits.argmax(-1) * (torch.arange(width) < lengths.unsqueeze(-1))
    mask = torch.zeros(rows, dtype=torch.bool) if greedy is None else torch.as_tensor(greedy)
    coins = torch.rand(rows, width + 1, generator=g, dtype=torch.float64)
    draft = Draft(tokens, lengths, None if certain else logits)
    return draft, Target(target_logits, mask.expand(rows).clone()), coins


def fit(spec, **kwargs):
    """A scene that the rule takes."""
    return scene(greedy=spec.split("(")[0] in GREEDY_ONLY, **kwargs)


def tensors(part) -> dict[str, torch.Tensor]:
    return {f.name: v for f in fields(part) if (v := getattr(part, f.name)) is not None}


def assert_close(one: Verdict, other: Verdict, atol=0.0):
    assert tensors(one).keys() == tensors(other).keys()
    for name, value in tensors(one).items():
        torch.testing.assert_close(value, tensors(other)[name], atol=atol, rtol=0)


# --- conformance --------------------------------------------------------------------------------


def test_every_registered_rule_is_in_the_table():
    assert set(RULES.names()) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_is_a_frozen_dataclass_with_its_card(name):
    cls = RULES.load(name)
    assert issubclass(cls, AcceptanceRule)
    assert is_dataclass(cls)
    with pytest.raises(FrozenInstanceError):
        make(name).anything = 1
    assert isinstance(cls.lossless, bool)
    assert len(cls.summary) < 80
    assert cls.paper
    assert cls.bibtex.startswith("@")
    for part in ("Helps", "Hurts", "Rule", "Reference"):
        assert part in cls.__doc__
    for f in fields(cls):
        assert f"{f.name}:" in cls.__doc__, f"{name} does not document {f.name}"


@pytest.mark.parametrize("spec", SPECS)
def test_pickles_and_text_round_trip(spec):
    rule = make(spec)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert make(RULES.text(rule)) == rule
    with pytest.raises(UnknownNameError):
        make(f"{RULES.text(rule)}(nonsense=1)")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_shapes_dtypes_and_ranges(spec, certain, width, dtype, device):
    draft, target, coins = fit(spec, width=width, certain=certain, dtype=dtype)
    draft = Draft(*(None if t is None else t.to(device) for t in tensors_of(draft)))
    verdict = make(spec).judge(
        draft, replace(target, logits=target.logits.to(device)), coins.to(device)
    )
    rows = len(coins)
    assert all(t.device.type == device for t in tensors(verdict).values())
    assert verdict.accepted.shape == verdict.next_token.shape == (rows,)
    assert verdict.accepted.dtype == verdict.next_token.dtype == torch.int64
    assert verdict.accept_prob.shape == (rows, width)
    assert verdict.accept_prob.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ((verdict.accepted >= 0) & (verdict.accepted <= draft.lengths)).all()
    assert ((verdict.accept_prob >= 0) & (verdict.accept_prob <= 1)).all()
    beyond = torch.arange(width, device=device) >= draft.lengths.unsqueeze(-1)
    assert (verdict.accept_prob[beyond] == 0).all()
    assert ((verdict.next_token >= 0) & (verdict.next_token < 7)).all()
    if verdict.next_probs is not None:
        assert verdict.next_probs.shape == (rows, 7)
        torch.testing.assert_close(
            verdict.next_probs.sum(-1).cpu(),
            torch.ones(rows).to(verdict.next_probs.dtype),
            atol=1e-5,
            rtol=0,
        )
        assert (verdict.next_probs.gather(1, verdict.next_token.unsqueeze(-1)) > 0).all()


def tensors_of(part):
    return [getattr(part, f.name) for f in fields(part)]


@pytest.mark.parametrize("spec", SPECS)
def test_pure(spec):
    draft, target, coins = fit(spec)
    before = [t.clone() for t in (*tensors(draft).values(), target.logits, target.greedy, coins)]
    first = make(spec).judge(draft, target, coins)
    assert_close(first, make(spec).judge(draft, target, coins))
    after = (*tensors(draft).values(), target.logits, target.greedy, coins)
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_do_not_influence_each_other(spec, certain):
    draft, target, coins = fit(spec, rows=6, certain=certain, dtype=torch.float64)
    verdict = make(spec).judge(draft, target, coins)
    for row in range(6):
        at = slice(row, row + 1)
        one = make(spec).judge(
            Draft(*(None if t is None else t[at] for t in tensors_of(draft))),
            Target(target.logits[at], target.greedy[at]),
            coins[at],
        )
        whole = Verdict(*(None if t is None else t[at] for t in tensors_of(verdict)))
        assert_close(one, whole, atol=1e-14)


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_rows_give_the_greedy_output(spec):
    for certain, seed in itertools.product([True, False], range(5)):
        draft, target, coins = scene(greedy=True, certain=certain, seed=seed)
        verdict = make(spec).judge(draft, target, coins)
        choice = target.logits.argmax(-1)
        for row in range(len(coins)):
            n = 0
            while n < draft.lengths[row] and draft.tokens[row, n] == choice[row, n]:
                n += 1
            assert verdict.accepted[row] == n
            assert verdict.next_token[row] == choice[row, n]
            match = (draft.tokens[row] == choice[row, :-1])[: draft.lengths[row]]
            assert verdict.accept_prob[row].tolist() == match.float().tolist() + [0.0] * (
                4 - len(match)
            )
        assert verdict.next_probs is None


@pytest.mark.parametrize("spec", SPECS)
def test_padding_is_never_accepted(spec):
    # Token 0 pads the draft, and 0 is the target's favourite everywhere.
    target = torch.zeros(1, 4, 3)
    target[..., 0] = 9
    draft = Draft(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([1]))
    for greedy in [True] if spec in GREEDY_ONLY else [True, False]:
        verdict = make(spec).judge(
            draft, Target(target, torch.tensor([greedy])), torch.zeros(1, 4, dtype=torch.float64)
        )
        assert verdict.accepted.tolist() == [1]
        assert verdict.accept_prob[0, 1:].tolist() == [0, 0]


@pytest.mark.parametrize("spec", GREEDY_ONLY)
def test_greedy_only_rules_refuse_sampling(spec):
    draft, target, coins = scene(greedy=[True, True, False, True, True])
    with pytest.raises(SettingError, match="needs temperature 0, got a sampling request in row 2"):
        make(spec).judge(draft, target, coins)


# --- standard -----------------------------------------------------------------------------------


def test_mixed_rows_are_judged_each_by_its_kind():
    greedy = [True, False, True, False, True]
    for certain in (True, False):
        draft, target, coins = scene(greedy=greedy, certain=certain, dtype=torch.float64)
        mixed = make("standard").judge(draft, target, coins)
        for kind in (True, False):
            same = replace(target, greedy=torch.full((5,), kind))
            alone = make("standard").judge(draft, same, coins)
            rows = torch.tensor(greedy) == kind
            assert torch.equal(mixed.accepted[rows], alone.accepted[rows])
            assert torch.equal(mixed.next_token[rows], alone.next_token[rows])
            assert torch.equal(mixed.accept_prob[rows], alone.accept_prob[rows])
        certainty = mixed.next_probs[torch.tensor(greedy)]
        assert torch.equal(certainty.amax(-1), torch.ones(3, dtype=torch.float64))
        assert torch.equal(certainty.sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_drafter_equal_to_the_target_is_always_believed(dtype):
    draft, target, _ = scene(rows=50, vocab=40, dtype=dtype)
    draft = replace(draft, logits=target.logits[:, :-1].clone())
    coins = torch.full((50, 5), 1 - 2**-53, dtype=torch.float64)
    verdict = make("standard").judge(draft, target, coins)
    assert torch.equal(verdict.accepted, draft.lengths)
    inside = torch.arange(4) < draft.lengths.unsqueeze(-1)
    assert (verdict.accept_prob[inside] == 1).all()


def test_without_a_draft_the_target_is_sampled():
    _, target, coins = scene(width=0, dtype=torch.float64)
    for logits in (None, torch.zeros(5, 0, 7)):
        draft = Draft(torch.zeros(5, 0, dtype=torch.int64), torch.zeros(5).long(), logits)
        verdict = make("standard").judge(draft, target, coins)
        probs = target.logits[:, 0].softmax(-1)
        torch.testing.assert_close(verdict.next_probs, probs)
        assert torch.equal(verdict.next_token, sample(probs, coins[:, 0]))
        assert verdict.accepted.tolist() == [0] * 5
        assert verdict.accept_prob.shape == (5, 0)


def test_column_i_decides_position_i_and_the_last_draws():
    draft, target, _ = scene(rows=1, dtype=torch.float64)
    rule, eps = make("standard"), 1e-9
    prob = rule.judge(draft, target, torch.zeros(1, 5, dtype=torch.float64)).accept_prob[0]
    for i in range(4):
        coins = torch.zeros(1, 5, dtype=torch.float64)
        coins[0, i] = prob[i] - eps
        assert rule.judge(draft, target, coins).accepted[0] == 4
        if prob[i] < 1:
            coins[0, i] = prob[i] + eps
            assert rule.judge(draft, target, coins).accepted[0] == i


def test_tokens_that_the_target_excludes_are_never_kept():
    target = torch.tensor([[[0.0, NEG, 0.0], [0.0, 0.0, 0.0]]])
    coins = torch.zeros(1, 2, dtype=torch.float64)
    for draft_logits in (torch.zeros(1, 1, 3), torch.tensor([[[0.0, NEG, 0.0]]]), None):
        draft = Draft(torch.tensor([[1]]), torch.tensor([1]), draft_logits)
        verdict = make("standard").judge(draft, Target(target, torch.tensor([False])), coins)
        assert verdict.accepted.tolist() == [0]
        assert verdict.accept_prob.tolist() == [[0]]
        assert verdict.next_probs[0].tolist() == [0.5, 0, 0.5]


def test_an_empty_residual_falls_back_to_the_target():
    # The draft is below the target nowhere, but the coin says no (as rounding might have it).
    draft_logits = torch.tensor([[[0.0, 0.0, NEG]]])
    target = torch.tensor([[[0.0, 1e-9, NEG], [0.0, 0.0, 0.0]]], dtype=torch.float32)
    rule = make("standard")
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), draft_logits - 1e-3)
    verdict = rule.judge(
        draft, Target(target, torch.tensor([False])), torch.tensor([[1.0, 0.9]]).double()
    )
    assert verdict.accepted.tolist() == [0]
    torch.testing.assert_close(verdict.next_probs, torch.tensor([[0.5, 0.5, 0.0]]))
    assert verdict.next_token.tolist() == [1]


# --- losslessness by exact enumeration ----------------------------------------------------------

Conditional = dict[tuple[int, ...], torch.Tensor]
"""Processed logits after every prefix."""


@dataclass(frozen=True)
class Keep:
    """Sampling transforms, written for clarity."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits / self.temperature
        order = logits.argsort(descending=True)
        keep = torch.zeros_like(logits, dtype=torch.bool)
        mass = 0.0
        for rank, token in enumerate(order.tolist()):
            if (self.top_k and rank >= self.top_k) or mass >= self.top_p:
                break
            keep[token] = True
            mass += logits.softmax(-1)[token].item()
        return logits.masked_fill(~keep, NEG)


TRANSFORMS = [
    Keep(),
    Keep(temperature=0.5),
    Keep(temperature=1.7),
    Keep(top_k=2),
    Keep(top_p=0.7),
    Keep(temperature=0.8, top_k=3, top_p=0.9),
]


def conditionals(vocab, depth, seed, keep) -> Conditional:
    g = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(depth) for p in itertools.product(range(vocab), repeat=n)]
    return {p: keep(1.5 * torch.randn(vocab, generator=g, dtype=torch.float64)) for p in prefixes}


def joint(target: Conditional, start: tuple[int, ...], depth: int, vocab: int):
    """Probability of every continuation of `start` up to `depth` tokens, by the chain rule."""
    table = {start: 1.0}
    for _ in range(depth - len(start)):
        table = {
            (*p, v): mass * target[p].softmax(-1)[v].item()
            for p, mass in table.items()
            for v in range(vocab)
        }
    return table


def drafts(draft: Conditional, window, vocab, certain, stop):
    """(tokens, probability, all tokens drawn) of every draft, stopping where `stop` says so."""
    if certain:
        tokens: tuple[int, ...] = ()
        while len(tokens) < window:
            tokens += (int(draft[tokens].argmax()),)
        return [(tokens, 1.0)]
    found, open_ = [], [((), 1.0)]
    for i in range(window):
        grown = []
        for prefix, mass in open_:
            for v, p in enumerate(draft[prefix].softmax(-1).tolist()):
                if p > 0:
                    kept = stop(draft[prefix], (*prefix, v))
                    place = grown if kept is None and i + 1 < window else found
                    place.append(((*prefix, v) if kept is None else kept, mass * p))
        open_ = grown
    return found


def never(logits, tokens):
    return None


def emitted(rule, target, draft, window, vocab, certain=False, stop=never):
    """Exact distribution of the first `window + 1` emitted tokens.

    For every draft and every number of accepted tokens the rule is made to accept so many by its
    coins; its own accept probabilities and next-token distribution then weigh the outcome, and
    the target goes on from there.
    """
    cases = drafts(draft, window, vocab, certain, stop)
    tokens, lengths, q, p, coins, meta = [], [], [], [], [], []
    blank = torch.zeros(vocab, dtype=torch.float64)
    for path, mass in cases:
        for n in range(len(path) + 1):
            pad = window - len(path)
            tokens.append([*path, *[0] * pad])
            lengths.append(len(path))
            q.append([draft[path[:i]] if i < len(path) else blank for i in range(window)])
            p.append([target[path[:i]] if i <= len(path) else blank for i in range(window + 1)])
            coins.append([0.0] * n + [1 - 2**-53] * (window - n) + [0.5])
            meta.append((path, mass, n))
    logits = torch.stack([torch.stack(row) for row in q])
    verdict = rule.judge(
        Draft(torch.tensor(tokens), torch.tensor(lengths), None if certain else logits),
        Target(
            torch.stack([torch.stack(row) for row in p]), torch.zeros(len(tokens), dtype=torch.bool)
        ),
        torch.tensor(coins, dtype=torch.float64),
    )
    table = dict.fromkeys(itertools.product(range(vocab), repeat=window + 1), 0.0)
    for row, (path, mass, n) in enumerate(meta):
        accept = verdict.accept_prob[row].tolist()
        weight = mass * math.prod(accept[:n]) * (1 - accept[n] if n < len(path) else 1)
        if verdict.accepted[row] != n:
            assert weight < 1e-15  # the coins could not force an outcome of probability zero
            continue
        for v, chance in enumerate(verdict.next_probs[row].tolist()):
            if chance > 0 and weight > 0:
                for end, m in joint(target, (*path[:n], v), window + 1, vocab).items():
                    table[end] += weight * chance * m
    return table


def distance(rule, *, vocab=3, window=2, seed=0, keep=TRANSFORMS[0], **how):
    """Largest difference between what is emitted and the target's own distribution."""
    target = conditionals(vocab, window + 1, 2 * seed, keep)
    draft = conditionals(vocab, window + 1, 2 * seed + 1, keep)
    got = emitted(rule, target, draft, window, vocab, **how)
    want = joint(target, (), window + 1, vocab)
    assert math.isclose(sum(want.values()), 1)
    return max(abs(got[seq] - want[seq]) for seq in want)


@pytest.mark.parametrize("keep", TRANSFORMS, ids=str)
@pytest.mark.parametrize(("vocab", "window"), [(3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("spec", [s for s in SPECS if s not in GREEDY_ONLY and make(s).lossless])
def test_lossless_by_enumeration(spec, vocab, window, keep):
    for seed in range(3 if window < 3 else 1):
        assert distance(make(spec), vocab=vocab, window=window, seed=seed, keep=keep) < 1e-12


@pytest.mark.parametrize("keep", TRANSFORMS[:4], ids=str)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_lossless_with_certain_drafts(window, keep):
    for seed in range(3):
        assert distance(make("standard"), window=window, seed=seed, keep=keep, certain=True) < 1e-12


def unsure(logits):
    return logits.softmax(-1).max() < 0.6


def keeps_last(logits, tokens):
    return tokens if unsure(logits) else None


def drops_last(logits, tokens):
    return tokens[:-1] if unsure(logits) else None


def drops_what_was_sampled(logits, tokens):
    return tokens[:-1] if logits.softmax(-1)[tokens[-1]] < 0.5 else None


@pytest.mark.parametrize("stop", [keeps_last, drops_last])
def test_lossless_when_the_drafter_stops_early(stop):
    for seed in range(4):
        assert distance(make("standard"), window=3, seed=seed, stop=stop) < 1e-12


def drops_all_but_end_of_text(logits, tokens):
    return (tokens if tokens[-1] == 0 else tokens[:-1]) if unsure(logits) else None


@pytest.mark.parametrize("stop", [drops_what_was_sampled, drops_all_but_end_of_text])
def test_dropping_a_token_for_what_it_is_would_be_lossy(stop):
    """Why `LengthController.drops_last` must not depend on the sampled token."""
    assert distance(make("standard"), window=2, stop=stop) > 1e-3


class TargetCorrection(Standard):
    """Wrong on purpose: corrects from the target instead of the residual."""

    def judge(self, draft, target, uniforms):
        verdict = super().judge(draft, target, uniforms)
        row = torch.arange(len(uniforms))
        probs = target.logits[row, verdict.accepted].softmax(-1)
        return replace(verdict, next_probs=probs, next_token=sample(probs, uniforms[:, -1]))


class AlwaysResidual(Standard):
    """Wrong on purpose: takes the bonus token's distribution from the position before."""

    def judge(self, draft, target, uniforms):
        verdict = super().judge(draft, target, uniforms)
        row, at = torch.arange(len(uniforms)), (verdict.accepted - 1).clamp(min=0)
        probs = target.logits[row, at].softmax(-1)
        full = (verdict.accepted == draft.lengths).unsqueeze(-1)
        return replace(verdict, next_probs=torch.where(full, probs, verdict.next_probs))


class Generous(Standard):
    """Wrong on purpose: accepts a little too often."""

    def judge(self, draft, target, uniforms):
        verdict = super().judge(draft, target, uniforms)
        inside = torch.arange(draft.tokens.shape[1]) < draft.lengths.unsqueeze(-1)
        accept = torch.where(inside, (verdict.accept_prob + 1e-6).clamp(max=1), 0)
        return replace(verdict, accept_prob=accept)


@pytest.mark.parametrize("wrong", [TargetCorrection, AlwaysResidual, Generous])
def test_the_enumeration_catches_wrong_rules(wrong):
    assert distance(wrong(), window=2) > 1e-8


# --- real coins ---------------------------------------------------------------------------------


def chi_square(rule, draws=20_000, vocab=3, window=2, seed=0):
    """Pearson's statistic of emitted sequences from real coins, and its degrees of freedom."""
    g = torch.Generator().manual_seed(seed)
    depth = window + 1
    target_at = conditionals(vocab, depth, 100, Keep(temperature=1.5))
    draft_at = conditionals(vocab, depth, 101, Keep(temperature=1.5))

    def rows(table, prefix):
        return torch.stack([table[tuple(p)] for p in prefix.tolist()])

    def coins(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    tokens = torch.zeros(draws, 0, dtype=torch.int64)
    q = []
    for _ in range(window):
        q.append(rows(draft_at, tokens))
        new = sample(q[-1].softmax(-1), coins(draws))
        tokens = torch.cat([tokens, new.unsqueeze(-1)], 1)
    p = torch.stack([rows(target_at, tokens[:, :i]) for i in range(depth)], 1)
    verdict = rule.judge(
        Draft(tokens, torch.full((draws,), window), torch.stack(q, 1)),
        Target(p, torch.zeros(draws, dtype=torch.bool)),
        coins(draws, depth),
    )
    counts = dict.fromkeys(itertools.product(range(vocab), repeat=depth), 0)
    rest = coins(draws, depth).tolist()
    probs = {k: v.softmax(-1).tolist() for k, v in target_at.items()}
    for row in range(draws):
        n = int(verdict.accepted[row])
        seq = (*tokens[row, :n].tolist(), int(verdict.next_token[row]))
        while len(seq) < depth:
            u, v = rest[row][len(seq)], 0
            while v < vocab - 1 and u >= sum(probs[seq][: v + 1]):
                v += 1
            seq += (v,)
        counts[seq] += 1
    want = {k: draws * v for k, v in joint(target_at, (), depth, vocab).items()}
    assert min(want.values()) > 5
    return sum((counts[k] - want[k]) ** 2 / want[k] for k in want), len(want) - 1


def test_real_coins_follow_the_target():
    """False alarm below 1e-6: P(χ² ≥ d + 2√(dx) + 2x) ≤ e^(−x) (Laurent and Massart), x = 14."""
    statistic, d = chi_square(make("standard"))
    assert statistic < d + 2 * math.sqrt(14 * d) + 28
    statistic, d = chi_square(TargetCorrection())
    assert statistic > d + 2 * math.sqrt(14 * d) + 28


# --- sample -------------------------------------------------------------------------------------

LAST = 1 - 2**-53


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-30, 1e-9, 0.1, 1 / 3, 1.0, 7.0]), min_size=1).filter(
        any
    ),
    st.one_of(st.just(0.0), st.just(LAST), st.floats(0, LAST)),
)
def test_a_token_of_weight_zero_is_never_drawn(weights, coin):
    probs = torch.tensor([weights], dtype=torch.float64)
    token = int(sample(probs, torch.tensor([coin], dtype=torch.float64)))
    assert weights[token] > 0


def test_sample_inverts_the_cumulative_sum():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    coins = torch.tensor([0, 0.2499, 0.25, 0.7499, 0.75, LAST], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got = sample(probs.to(dtype).expand(6, 6), coins)
        assert got.tolist() == [1, 1, 3, 3, 4, 4]
        assert got.dtype == torch.int64
    assert sample(100 * probs, coins[2]).shape == ()
    assert sample(probs.expand(2, 3, 6), coins.view(2, 3)).tolist() == [[1, 1, 3], [3, 4, 4]]


def test_sample_at_the_extremes_of_a_large_vocabulary():
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(4, 50_000, generator=g).softmax(-1)
    probs[:, :100] = 0
    probs[:, -100:] = 0
    assert sample(probs, torch.zeros(4, dtype=torch.float64)).tolist() == [100] * 4
    assert sample(probs, torch.full((4,), LAST, dtype=torch.float64)).tolist() == [49_899] * 4
