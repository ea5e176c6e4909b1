"""What the lossy rules emit, against slow references written from the papers, one token at a time.

A reference sees one drafted token at one position and says how likely it is kept, and what would
replace it. From that the emitted distribution and its distance from the target follow by sums over
the vocabulary. No tensors here, except to ask the rule itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from forerun.rules.base import PositionRule
from forerun.rules.ears import EARS
from forerun.types import Draft, Target
from marks import slow_but
from rule_tools import (
    LAST,
    Keep,
    conditionals,
    continued,
    drafts,
    drops_last,
    emitted,
    keeps_last,
    make,
    never,
    outcomes,
)

Probs = list[float]
EXACT = 1e-12

# --- one position, written slowly ---------------------------------------------------------------


def softmax(logits: list[float]) -> Probs:
    best = max(logits)
    weights = [math.exp(z - best) for z in logits]
    return [w / math.fsum(weights) for w in weights]


def entropy(probs: Probs) -> float:
    return -math.fsum(p * math.log(p) for p in probs if p > 0)


def normalised(weights: Probs) -> Probs:
    return [w / math.fsum(weights) for w in weights]


def certain(token: int, vocab: int) -> Probs:
    return [float(v == token) for v in range(vocab)]


def best(values: list[float], n: int = 1) -> list[int]:
    return sorted(range(len(values)), key=lambda v: -values[v])[:n]


def residual(target: Probs, draft: Probs) -> Probs:
    left = [max(0.0, t - d) for t, d in zip(target, draft, strict=True)]
    return normalised(left) if math.fsum(left) > 0 else target


def distance(one: Probs, other: Probs) -> float:
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


@dataclass(frozen=True)
class Place:
    """One position: both models' logits, at temperature 1 and processed."""

    raw_target: list[float]
    raw_draft: list[float]
    logits: list[float]
    draft: Probs
    """What the drafted token was drawn from; one-hot if it was certain."""
    greedy: bool = False

    @property
    def target(self) -> Probs:
        """What the request wants."""
        if self.greedy:
            return certain(best(self.logits)[0], len(self.logits))
        return softmax(self.logits)


Outcome = tuple[float, Probs]
"""Probability of keeping the token, and the distribution of what replaces it."""
Reference = Callable[[Place, int], Outcome]


def standard(place: Place, x: int) -> Outcome:
    """Leviathan et al., Algorithm 1."""
    t, d = place.target, place.draft
    return min(1.0, t[x] / d[x]), residual(t, d)


def ears(beta: float, correction="residual", excluded=False) -> Reference:
    """§3.2 and §3.3: R ≥ max(U − tolerance, 0), with the draft's probability guarded."""

    def outcome(place: Place, x: int) -> Outcome:
        t, d = place.target, place.draft
        tolerance = beta * (1 - max(t))
        ratio = t[x] / max(d[x], 1e-10)
        # U ≤ R + tolerance, or U ≤ tolerance and so R ≥ 0: the former includes the latter.
        keep = min(1.0, ratio + tolerance) if t[x] > 0 or excluded else 0.0
        return keep, t if correction == "target" else residual(t, d)

    return outcome


def easd(
    tau_h: float, tau_o: float, n: int, correction: str, draft_entropy=True, penalty="drafted",
    processed=False,
) -> Reference:  # fmt: skip
    """Algorithm 1, lines 8 to 24, with `≥` for the overlap."""

    def outcome(place: Place, x: int) -> Outcome:
        p, d = softmax(place.logits), place.draft
        raw_d, raw_t = softmax(place.raw_draft), softmax(place.raw_target)
        overlap = len(set(best(raw_d, n)) & set(best(raw_t, n))) / n
        own = (place.target, d) if processed else (raw_t, raw_d)
        unsure = entropy(own[0]) > tau_h and (not draft_entropy or entropy(own[1]) > tau_h)
        struck = x if penalty == "drafted" else best(raw_d)[0]
        others = [0.0 if v == struck else z for v, z in enumerate(p)]
        fires = unsure and overlap > tau_o - 1e-9 and math.fsum(others) > 0
        if fires:
            p = normalised(others)
        t = certain(best(p)[0], len(p)) if place.greedy else p
        keep = min(1.0, t[x] / d[x])
        return keep, t if fires or correction == "target" else residual(t, d)

    return outcome


def spec_verification(top: int, tau: float | Callable[[Place], float]) -> Reference:
    """CM-ASD, §III.A: the target's top β, and a gap of at most τ, in its log-probabilities."""

    def outcome(place: Place, x: int) -> Outcome:
        p = softmax(place.logits)
        log = [math.log(v) if v > 0 else -math.inf for v in p]
        rank = sorted(log, reverse=True)
        margin = tau(place) if callable(tau) else tau
        inside = log[x] >= rank[min(top, len(p)) - 1]
        keep = inside and rank[0] - log[x] <= margin + 1e-13
        return float(keep), place.target

    return outcome


def score(
    raw: list[float],
    weights=(1 / 3, 1 / 3, 1 / 3, 0),
    sharpness=1.0,
    literal=False,
    normalized=True,
) -> float:
    """CM-ASD, §III.B (1): how sure the draft is."""
    probs, logits = softmax(raw), sorted(raw, reverse=True)
    first, second = sorted(probs, reverse=True)[:2]
    doubt = entropy(probs) / math.log(len(raw))
    margin = 1 / (1 + math.exp(-sharpness * (logits[0] - logits[1])))
    gap = first - second
    mean = math.fsum(raw) / len(raw)
    spread = math.fsum((z - mean) ** 2 for z in raw) / len(raw)
    parts = (doubt if literal else 1 - doubt, margin, gap / first if normalized else gap,
             spread / (1 + spread))  # fmt: skip
    return math.fsum(w * c for w, c in zip(weights, parts, strict=True))


def cm_asd(mode="prose", top=3, tau=0.1, gamma=0.4, **how) -> Reference:
    """CM-ASD, §III.B (c): the margin moves with the confidence."""

    def margin(place: Place) -> float:
        sure = score(place.raw_draft, **how)
        return tau + gamma * (sure if mode == "prose" else 1 - sure)

    return spec_verification(top, margin)


def typical(epsilon: float, delta: float) -> Reference:
    """Medusa, §2.3.1."""

    def outcome(place: Place, x: int) -> Outcome:
        t = place.target
        return float(t[x] > min(epsilon, delta * math.exp(-entropy(t)))), t

    return outcome


def ensemble(weight: float) -> Reference:
    """transformers' test, for tokens that the target allows."""

    def outcome(place: Place, x: int) -> Outcome:
        t, d = place.target, place.draft
        keep = min(1.0, 1 - weight + weight * t[x] / d[x]) if t[x] > 0 else 0.0
        return keep, residual(t, d)

    return outcome


def of_every_token(reference: Reference, place: Place) -> dict[int, Outcome]:
    """Of those that may be drafted."""
    return {x: reference(place, x) for x, d in enumerate(place.draft) if d > 0}


def drift(outcomes: dict[int, Outcome], place: Place) -> float:
    """How far Σ_x draft(x)·[keep(x)·δ_x + (1 − keep(x))·replacement_x] is from the target."""
    out = [0.0 for _ in place.logits]
    for x, (keep, other) in outcomes.items():
        out[x] += place.draft[x] * keep
        for v, chance in enumerate(other):
            out[v] += place.draft[x] * (1 - keep) * chance
    return distance(out, place.target)


REFERENCES: dict[str, Reference] = {
    "ears(beta=0)": standard,
    "ears(beta=0.1)": ears(0.1),
    "ears(beta=0.7)": ears(0.7),
    "ears(beta=1)": ears(1),
    "ears(beta=0,correction=target)": ears(0, "target"),
    "ears(beta=0.7,correction=target)": ears(0.7, "target"),
    "ears(beta=0.7,excluded=true)": ears(0.7, excluded=True),
    "ears(beta=0.7,correction=target,excluded=true)": ears(0.7, "target", excluded=True),
    "spec-verification": spec_verification(3, 0.3),
    "spec-verification(top=2,tau=2)": spec_verification(2, 2),
    "spec-verification(top=9,tau=100)": spec_verification(9, 100),
    "spec-verification(top=1,tau=0)": spec_verification(1, 0),
    "cm-asd": cm_asd(),
    "cm-asd(mode=formula,tau=0,gamma=3)": cm_asd("formula", tau=0, gamma=3),
    "cm-asd(top=2,gamma=2,entropy=0.2,margin=0.3,softmax=0.5,sharpness=2.5)": cm_asd(
        top=2, gamma=2, weights=(0.2, 0.3, 0.5, 0), sharpness=2.5
    ),
    "cm-asd(top=3,gamma=2,entropy=0.2,margin=0.3,softmax=0,variance=0.5)": cm_asd(
        top=3, gamma=2, weights=(0.2, 0.3, 0, 0.5)
    ),
    "cm-asd(top=5,gamma=2,entropy=1,margin=0,softmax=0,literal=true)": cm_asd(
        top=5, gamma=2, weights=(1, 0, 0, 0), literal=True
    ),
    "cm-asd(top=5,gamma=2,entropy=0.5,margin=0,softmax=0.5,normalized=false)": cm_asd(
        top=5, gamma=2, weights=(0.5, 0, 0.5, 0), normalized=False
    ),
    "typical": typical(0.09, 0.3),
    "typical(epsilon=0.5,delta=0.6)": typical(0.5, 0.6),
    "typical(epsilon=0,delta=0.5)": typical(0, 0.5),
    "ensemble": ensemble(0.9),
    "ensemble(weight=0.3)": ensemble(0.3),
    "ensemble(weight=0)": ensemble(0),
    "ensemble(weight=1)": standard,
}
for correction in ("target", "residual"):
    REFERENCES |= {
        f"easd(correction={correction})": easd(2, 0.8, 5, correction),
        f"easd(entropy=0.6,overlap=0.5,n=2,correction={correction})": easd(0.6, 0.5, 2, correction),
        f"easd(entropy=0.4,overlap=0.4,correction={correction})": easd(0.4, 0.4, 5, correction),
        f"easd(entropy=0.8,overlap=0,draft_entropy=false,correction={correction})": easd(
            0.8, 0, 5, correction, False
        ),
        f"easd(entropy=0,overlap=0,correction={correction})": easd(0, 0, 5, correction),
        f"easd(entropy=0.4,overlap=0.4,penalty=top,correction={correction})": easd(
            0.4, 0.4, 5, correction, penalty="top"
        ),
        f"easd(entropy=0.4,overlap=0.4,processed=true,correction={correction})": easd(
            0.4, 0.4, 5, correction, processed=True
        ),
    }

# --- the rule beside its reference --------------------------------------------------------------

KINDS = {  # name: (scale of the raw logits, temperature, the target's and draft's top-k)
    "plain": (1.5, 1.0, 0, 0),
    "cold": (1.5, 0.5, 0, 0),
    "warm": (1.5, 1.7, 0, 0),
    "top-2": (1.5, 1.0, 2, 2),
    "top-2 of 3": (1.0, 0.8, 2, 3),
    "close": (0.1, 1.0, 0, 0),
    "sharp": (6.0, 1.0, 0, 0),
}


def truncated(logits: list[float], temperature: float, k: int) -> list[float]:
    keep = set(best(logits, k or len(logits)))
    return [z / temperature if v in keep else -math.inf for v, z in enumerate(logits)]


def places(vocab: int, kind: str, greedy: bool, sure: bool, seeds=range(6)) -> list[Place]:
    """Random positions; where `sure`, one for each token the draft might be certain of."""
    scale, temperature, top_target, top_draft = KINDS[kind]
    positions = []
    for seed in seeds:
        g = torch.Generator().manual_seed(1000 * seed + vocab)
        target, other = (scale * torch.randn(2, vocab, generator=g, dtype=torch.float64)).tolist()
        draft = [0.6 * a + 0.6 * b for a, b in zip(target, other, strict=True)]
        logits = truncated(target, 1.0 if greedy else temperature, top_target)
        guess = softmax(truncated(draft, temperature, top_draft))
        if sure:
            for x in range(vocab):
                positions.append(Place(target, draft, logits, certain(x, vocab), greedy))
        else:
            guess = certain(best(draft)[0], vocab) if greedy else guess
            positions.append(Place(target, draft, logits, guess, greedy))
    return positions


def judged(rule: PositionRule, somewhere: list[Place], sure: bool, keep: bool):
    """The verdict on every token that could have been drafted at every place, in one batch."""
    rows = [(p, x) for p in somewhere for x, d in enumerate(p.draft) if d > 0]

    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    tokens = torch.tensor([[x] for _, x in rows])
    raw = tensor([[p.raw_draft] for p, _ in rows])
    probs = None if sure else tensor([[p.draft] for p, _ in rows])
    bonus = [0.5 * v for v in range(len(somewhere[0].logits))]
    verdict = rule.judge(
        Draft(tokens, torch.ones(len(rows)).long(), probs, raw),
        Target(
            tensor([[p.logits, bonus] for p, _ in rows]),
            torch.tensor([p.greedy for p, _ in rows]),
            tensor([[p.raw_target, bonus] for p, _ in rows]),
        ),
        tensor([[0.0 if keep else LAST, 0.5]]).expand(len(rows), 2),
    )
    return rows, verdict


def mistakes(rule, reference: Reference, somewhere: list[Place], sure: bool) -> dict[str, float]:
    """Largest difference between a rule and its reference."""
    wrong = {"accept": 0.0, "replaced": 0.0, "drift": 0.0, "bonus": 0.0}

    def note(what: str, one: float, other: float) -> None:
        error = abs(one - other)
        wrong[what] = max(wrong[what], error if error == error else math.inf)

    known = [of_every_token(reference, place) for place in somewhere]
    away = [
        drift(outcomes, p) for outcomes, p in zip(known, somewhere, strict=True) for _ in outcomes
    ]
    every = [outcome for outcomes in known for outcome in outcomes.values()]
    for keep in (True, False):
        rows, verdict = judged(rule, somewhere, sure, keep)
        accept, drifts = verdict.accept_prob[:, 0].tolist(), verdict.drift[:, 0].tolist()
        accepted, tokens = verdict.accepted.tolist(), verdict.next_token.tolist()
        drawn = None if verdict.next_probs is None else verdict.next_probs.tolist()
        for i, (place, _) in enumerate(rows):
            chance, other = every[i]
            note("accept", accept[i], chance)
            note("drift", drifts[i], away[i])
            kept = bool(accepted[i])
            assert kept == keep or chance in (0.0, 1.0) or 1 - chance < EXACT
            want = other
            if kept:
                want = softmax([0.5 * v for v in range(len(other))])
                if place.greedy:
                    want = certain(len(other) - 1, len(other))
            got = certain(tokens[i], len(other)) if drawn is None else drawn[i]
            if not kept and 1 - chance < EXACT:
                continue  # a rejection of probability zero
            note("bonus" if kept else "replaced", distance(got, want), 0)
    return wrong


def in_turns(spec: str, sure: bool) -> bool:
    """Every other variant, drafts sure in every other of these."""
    return list(REFERENCES).index(spec) % 4 == 2 * sure


@pytest.mark.parametrize(
    ("spec", "sure"), slow_but(itertools.product(REFERENCES, [False, True]), in_turns)
)
def test_is_its_paper_token_by_token(spec, sure):
    for kind, vocab in itertools.product(KINDS, (2, 4, 6)):
        for greedy in ([False], [True], [False, True]):
            somewhere = [p for mode in greedy for p in places(vocab, kind, mode, sure, range(2))]
            # A greedy row's draft is certain; beside sampling rows it comes as a one-hot.
            wrong = mistakes(make(spec), REFERENCES[spec], somewhere, sure or greedy == [True])
            assert max(wrong.values()) < EXACT, (kind, vocab, greedy, wrong)


def test_the_places_put_every_case():
    """The comparison is worth something only if tokens are kept, refused and penalised."""
    somewhere = [p for kind in KINDS for p in places(5, kind, False, False)]
    for spec, reference in REFERENCES.items():
        chances = [reference(p, x)[0] for p in somewhere for x in range(5) if p.draft[x] > 0]
        assert any(c > 0.5 for c in chances) or "entropy=0," in spec, spec
        assert any(c < 0.5 for c in chances) or spec == "ensemble(weight=0)", spec
        if spec.startswith("easd") and spec != "easd(correction=target)":
            usual = [standard(p, x)[0] for p in somewhere for x in range(5) if p.draft[x] > 0]
            pairs = list(zip(chances, usual, strict=True))
            fired = sum(c == 0 and u > 0 for c, u in pairs)
            assert (fired == 0) == spec.startswith("easd(correction"), spec


# --- wrong on purpose ---------------------------------------------------------------------------


class DriftOff(EARS):
    """Reports a hair too little drift."""

    def weigh(self, odds):
        weighed = super().weigh(odds)
        return replace(weighed, drift=lambda at: weighed.drift(at) * (1 - 1e-6))


class DriftOfTheDraftedToken(EARS):
    """Reports what the drafted token adds, not the expectation over the draft."""

    def weigh(self, odds):
        weighed = super().weigh(odds)
        extra = (weighed.accept - odds.ratio).clamp(min=0)
        return replace(weighed, drift=lambda at: at.at(extra))


class Generous(EARS):
    """Keeps a hair more than it should."""

    def weigh(self, odds):
        weighed = super().weigh(odds)
        return replace(weighed, accept=(weighed.accept + 1e-9).clamp(max=1))


class WrongCorrection(EARS):
    """Corrects from the target."""

    def weigh(self, odds):
        return replace(super().weigh(odds), residual=False)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (DriftOff, "drift"),
        (DriftOfTheDraftedToken, "drift"),
        (Generous, "accept"),
        (WrongCorrection, "replaced"),
    ],
)
def test_the_comparison_catches_wrong_rules(wrong, what):
    somewhere = places(4, "warm", False, False)
    errors = mistakes(wrong(beta=0.7), ears(0.7), somewhere, False)
    assert {name for name, error in errors.items() if error > 1e-10} == {what}
    assert max(mistakes(EARS(beta=0.7), ears(0.7), somewhere, False).values()) < EXACT


# --- several positions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two random models, at temperature 1 and processed, after every prefix."""

    seed: int
    keep: Keep
    vocab: int = 3
    depth: int = 4

    def table(self, draft: bool, raw: bool):
        keep = Keep() if raw else self.keep
        return conditionals(self.vocab, self.depth, 2 * self.seed + draft, keep)

    def both(self, raw: bool = False):
        return self.table(False, raw), self.table(True, raw)


def chain(reference, pair: Pair, window: int, sure, stop, budget=None, spent=(0.0, 0)):
    """What a reference emits, and its drift after every prefix of a draft, by walking every draft.

    With a budget, positions that would exceed the mean drift are judged by `standard`.
    """
    (target, draft), (raw_target, raw_draft) = pair.both(), pair.both(raw=True)
    starts: dict[tuple[int, ...], float] = {}
    drifts: dict[tuple[int, ...], float] = {}
    known: dict[tuple[int, ...], tuple[Place, float]] = {}

    def emit(weight: float, start: tuple[int, ...]) -> None:
        starts[start] = starts.get(start, 0.0) + weight

    for path, weight in drafts(draft, window, pair.vocab, sure, stop):
        total, tokens = spent
        for i, x in enumerate(path):
            past = path[:i]
            if past not in known:
                odds = certain(x, pair.vocab) if sure else softmax(draft[past].tolist())
                logits = (raw_target[past], raw_draft[past], target[past])
                place = Place(*(z.tolist() for z in logits), odds)
                known[past] = place, drift(of_every_token(reference, place), place)
            (place, here), use = known[past], reference
            if budget is not None and total + here > budget * (tokens + i + 1):
                here, use = 0.0, standard
            total += here
            drifts[path[: i + 1]] = here
            keep, other = use(place, x)
            for v in range(pair.vocab):
                emit(weight * (1 - keep) * other[v], (*past, v))
            weight *= keep
        for v, p in enumerate(softmax(target[path].tolist())):
            emit(weight * p, (*path, v))
    return continued(starts, target, window + 1, pair.vocab), drifts


WAYS = [
    (2, Keep(), False, never),
    (3, Keep(temperature=0.7), False, never),
    (3, Keep(temperature=1.6, top_k=2), False, keeps_last),
    (3, Keep(top_p=0.8), False, drops_last),
    (2, Keep(temperature=1.3), True, never),
]


def compare(rule, reference, way, seed, **how):
    """Emitted sequences and drifts of a rule and its reference."""
    window, keep, sure, stop = way
    pair = Pair(seed, keep)
    want, drifts = chain(reference, pair, window, sure, stop, **how)
    assert math.isclose(math.fsum(want.values()), 1)
    case = (rule, *pair.both(), window, pair.vocab)
    how = {"certain": sure, "stop": stop, "raw": pair.both(raw=True), "spent": how.get("spent")}
    got = emitted(*case, **how)
    assert max(abs(got[seq] - want[seq]) for seq in want) < EXACT
    meta, verdict = outcomes(*case, **how)
    for row, (path, _, n) in enumerate(meta):
        for i in range(min(n + 1, len(path)) if verdict.accepted[row] == n else 0):  # as judged
            assert abs(verdict.drift[row, i].item() - drifts[path[: i + 1]]) < EXACT
    # And without any reference: the first token really is so far from the target.
    if stop is never:
        first = [math.fsum(p for seq, p in got.items() if seq[0] == v) for v in range(pair.vocab)]
        away = distance(first, softmax(pair.table(False, False)[()].tolist()))
        assert abs(away - verdict.drift[0, 0].item()) < EXACT
    return drifts


@pytest.mark.parametrize("way", WAYS, ids=range(len(WAYS)))
@pytest.mark.parametrize("spec", REFERENCES)
def test_emits_what_its_paper_says(spec, way):
    compare(make(spec), REFERENCES[spec], way, seed=0)


INNER = [
    "ears(beta=0.7)",
    "cm-asd(mode=formula,tau=0,gamma=3)",
    "easd(entropy=0.4,overlap=0.4,correction=target)",
    "easd(entropy=0.4,overlap=0.4,correction=residual)",
    "typical(epsilon=0.5,delta=0.6)",
    "ensemble(weight=0.3)",
]


@pytest.mark.parametrize("way", WAYS, ids=range(len(WAYS)))
@pytest.mark.parametrize("spec", INNER)
def test_a_budget_is_the_inner_rule_until_it_is_spent(spec, way):
    seen = set()
    for seed, (budget, *spent) in enumerate(
        [(0.02, 0, 0), (0.1, 0, 5), (0.1, 0.5, 2), (0.3, 0, 0)]
    ):
        rule = make(f"budget({spec}, drift={budget})")
        drifts = compare(rule, REFERENCES[spec], way, seed, budget=budget, spent=spent)
        seen |= {d > 0 for d in drifts.values()}
    assert seen == {True, False}
