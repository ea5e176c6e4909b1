"""What a distribution says about its tokens, against the definitions; and the confidence score."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.confidence import PARTS, Confidence
from forerun.errors import SettingError
from forerun.signals import entropy, entropy_of, measure

NEG = -math.inf
NAMES = frozenset(
    {
        "top1",
        "chosen",
        "entropy",
        "normalized_entropy",
        "logit_margin",
        "softmax_margin",
        "logit_variance",
    }
)


def reference(logits: list[float], token: int) -> dict[str, float]:
    """The definitions, one token at a time, in double precision."""
    best = max(logits)
    weights = [math.exp(z - best) for z in logits]
    probs = [w / math.fsum(weights) for w in weights]
    nats = -math.fsum(p * math.log(p) for p in probs if p > 0)
    order = sorted(logits, reverse=True)
    first, second = order[0], order[1] if len(order) > 1 else NEG
    ranked = sorted(probs, reverse=True)
    return {
        "top1": ranked[0],
        "chosen": probs[token],
        "entropy": nats,
        "normalized_entropy": nats / math.log(len(probs)) if len(probs) > 1 else 0.0,
        "logit_margin": first - second,
        "softmax_margin": 1 - (ranked[1] if len(ranked) > 1 else 0.0) / ranked[0],
        "logit_variance": float(np.var([z for z in logits if z > NEG])),
    }


def check(logits: torch.Tensor, tokens: torch.Tensor, atol: float) -> None:
    measured = measure(logits, tokens, NAMES)
    assert measured.keys() == NAMES
    flat = logits.reshape(-1, logits.shape[-1]).tolist()
    wanted = [reference(z, x) for z, x in zip(flat, tokens.reshape(-1).tolist(), strict=True)]
    for name, values in measured.items():
        assert values.shape == tokens.shape
        assert values.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        want = torch.tensor([w[name] for w in wanted], dtype=torch.float64).view(tokens.shape)
        torch.testing.assert_close(values.double(), want, atol=atol, rtol=atol)
        assert (values >= 0).all()
        unbounded = ("entropy", "logit_margin", "logit_variance")
        assert name in unbounded or (values <= 1).all()


DTYPES = [(torch.float64, 1e-12), *((d, 3e-6) for d in (torch.float32, torch.bfloat16, torch.half))]


@pytest.mark.parametrize(("dtype", "atol"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (0, 3), (2, 0)])
@pytest.mark.parametrize("vocab", [1, 2, 3, 50])
def test_measures_what_is_defined(vocab, shape, dtype, atol):
    """Half precision is measured from its logits as they are, in float32."""
    g = torch.Generator().manual_seed(vocab)
    for scale in (0.0, 1.0, 12.0):  # uniform, usual, nearly certain
        logits = (scale * torch.randn(*shape, vocab, generator=g, dtype=torch.float64)).to(dtype)
        tokens = torch.randint(0, vocab, shape, generator=g)
        check(logits, tokens, atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES, ids=str)
def test_excluded_tokens_count_nothing(dtype, atol):
    rows = [[0.5, NEG, 1.5, NEG], [NEG, NEG, 2.0, NEG], [1.0, 1.0, 1.0, NEG], [3.0, 2.0, 1.0, 0.0]]
    logits = torch.tensor(rows, dtype=dtype)
    for token in range(4):
        check(logits, torch.full((4,), token), atol)
    only = measure(logits[1], torch.tensor(2), NAMES)
    assert {name: value.item() for name, value in only.items()} == {
        "top1": 1,
        "chosen": 1,
        "entropy": 0,
        "normalized_entropy": 0,
        "logit_margin": math.inf,
        "softmax_margin": 1,
        "logit_variance": 0,
    }


def test_an_entropy_is_that_of_the_logits_where_a_pass_left_them():
    g = torch.Generator().manual_seed(0)
    for scale, excluded in ((0.0, 0), (3.0, 0), (40.0, 3), (3.0, 99)):
        row = scale * torch.randn(100, generator=g)
        row[:excluded] = NEG
        wanted = entropy(row.double().log_softmax(-1)).item()
        assert entropy_of(row.numpy()) == pytest.approx(wanted, abs=1e-5)
    for wrong in (math.nan, math.inf):
        row[7] = wrong
        assert math.isnan(entropy_of(row.numpy()))


def test_uniform_and_one_token():
    even = measure(torch.zeros(8, dtype=torch.float64), torch.tensor(3), NAMES)
    assert math.isclose(even["entropy"].item(), math.log(8))
    assert math.isclose(even["normalized_entropy"].item(), 1)
    assert even["logit_margin"].item() == even["softmax_margin"].item() == 0
    alone = measure(torch.tensor([7.0]), torch.tensor(0), NAMES)
    assert [alone[n].item() for n in ("top1", "chosen", "entropy", "softmax_margin")] == [
        1,
        1,
        0,
        1,
    ]
    assert alone["normalized_entropy"].item() == 0
    assert alone["logit_margin"].item() == math.inf


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=8),
    st.sets(st.sampled_from(sorted(NAMES))),
)
def test_gives_what_is_asked_within_its_bounds(logits, names):
    values = torch.tensor([logits])
    measured = measure(values, torch.zeros(1).long(), names)
    everything = measure(values, torch.zeros(1).long(), NAMES)
    assert measured.keys() == names
    for name, value in measured.items():
        assert torch.equal(value, everything[name])
        assert value.item() >= 0
        assert name in ("entropy", "logit_margin", "logit_variance") or value.item() <= 1
    assert everything["entropy"].item() <= math.log(len(logits)) + 1e-5


def test_asked_for_nothing():
    assert measure(torch.zeros(2, 3), torch.zeros(2).long(), frozenset()) == {}


def test_a_shift_of_the_logits_changes_nothing():
    logits = torch.randn(5, 9, dtype=torch.float64)
    tokens = torch.arange(5)
    one, other = measure(logits, tokens, NAMES), measure(logits + 1000, tokens, NAMES)
    for name in NAMES:
        torch.testing.assert_close(one[name], other[name], atol=1e-10, rtol=0)


def test_entropy_of_some_of_the_tokens():
    log = torch.tensor([[math.log(0.5), math.log(0.25), NEG]], dtype=torch.float64)
    assert math.isclose(entropy(log).item(), 0.5 * math.log(2) + 0.25 * math.log(4))


# --- confidence ---------------------------------------------------------------------------------


def signals(count=40, vocab=6):
    """Signals of random distributions, of an even one, and of a certain one."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, vocab, generator=g, dtype=torch.float64)
    logits[0] = 0
    logits[1, 1:] = NEG
    return measure(logits, torch.zeros(count).long(), NAMES), logits.tolist()


CONFIDENCES = {
    "equal": Confidence(),
    "literal": Confidence(literal=True),
    "entropy": Confidence(entropy=1, margin=0, softmax=0),
    "literal entropy": Confidence(entropy=1, margin=0, softmax=0, literal=True),
    "margin": Confidence(entropy=0, margin=1, softmax=0, sharpness=0.3),
    "softmax": Confidence(entropy=0, margin=0, softmax=1),
    "P1 - P2": Confidence(entropy=0, margin=0, softmax=1, normalized=False),
    "variance": Confidence(entropy=0.5, margin=0, softmax=0, variance=0.5),
    "uneven": Confidence(entropy=0.2, margin=0.3, softmax=0.5, sharpness=4),
}


@pytest.mark.parametrize("name", CONFIDENCES)
def test_confidence_is_the_papers_sum(name):
    confidence, (measured, logits) = CONFIDENCES[name], signals()
    given = {k: v for k, v in measured.items() if k in confidence.reads}
    scores = confidence.score(**given)
    for i, row in enumerate(logits):
        expected = reference(row, 0)
        doubt = expected["normalized_entropy"]
        sigmoid = 1 / (1 + math.exp(-confidence.sharpness * expected["logit_margin"]))
        want = (
            confidence.entropy * (doubt if confidence.literal else 1 - doubt)
            + confidence.margin * sigmoid
            + confidence.softmax
            * expected["softmax_margin"]
            * (1 if confidence.normalized else expected["top1"])
            + confidence.variance * expected["logit_variance"] / (1 + expected["logit_variance"])
        )
        assert math.isclose(scores[i].item(), want, abs_tol=1e-12)
    assert ((scores >= 0) & (scores <= 1 + 1e-12)).all()


@pytest.mark.parametrize("name", CONFIDENCES)
def test_numpy_and_torch_say_the_same(name):
    confidence, (measured, _) = CONFIDENCES[name], signals()
    arrays = {k: v.numpy() for k, v in measured.items()}
    one, other = confidence.score(**measured), confidence.score(**arrays)
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, np.ndarray)
    np.testing.assert_allclose(one.numpy(), other, atol=1e-15, rtol=0)
    assert confidence.score(**{k: v.view(8, 5) for k, v in measured.items()}).shape == (8, 5)


def test_reads_only_what_counts():
    assert Confidence().reads == frozenset(PARTS.values()) - {"logit_variance"}
    plain = Confidence(entropy=0, margin=0, softmax=1, normalized=False)
    assert plain.reads == {"softmax_margin", "top1"}
    for part, name in PARTS.items():
        alone = Confidence(**{p: float(p == part) for p in PARTS})
        assert alone.reads == {name}
        with pytest.raises(KeyError):
            alone.score()


def test_a_sure_drafter_is_more_confident():
    logits = torch.stack([torch.tensor([s, 0.0, 0.0, 0.0]) for s in (0.0, 1.0, 3.0, 9.0)])
    measured = measure(logits, torch.zeros(4).long(), NAMES)
    for name in ("equal", "entropy", "margin", "softmax", "uneven"):
        confidence = CONFIDENCES[name]
        score = confidence.score(**{k: measured[k] for k in confidence.reads})
        assert (score.diff() > 0).all()
    literal = CONFIDENCES["literal entropy"].score(
        normalized_entropy=measured["normalized_entropy"]
    )
    assert (literal.diff() < 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"entropy": 0.5},
        {"entropy": -0.5, "margin": 1, "softmax": 0.5},
        {"entropy": 1.5, "margin": 0, "softmax": -0.5},
        {"entropy": True, "margin": 0, "softmax": 0},
        {"entropy": math.nan},
        {"entropy": "1", "margin": 0, "softmax": 0},
        {"entropy": 0, "margin": 0, "softmax": 0},
        {"sharpness": 0},
        {"sharpness": -1},
        {"sharpness": math.inf},
        {"sharpness": math.nan},
        {"sharpness": True},
        {"literal": 1},
        {"literal": "yes"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(SettingError, match="must be"):
        Confidence(**bad)


def test_weights_may_be_rounded():
    assert Confidence(entropy=0.333333, margin=0.333333, softmax=0.333334).reads
    assert Confidence(entropy=0.1, margin=0.2, softmax=0.7).reads
    with pytest.raises(SettingError, match="must be 1"):
        Confidence(entropy=0.33, margin=0.33, softmax=0.33)
