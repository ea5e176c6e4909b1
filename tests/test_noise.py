"""Gumbel noise draws from the distribution it is added to, and is the same whoever asks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.engine.sampling import MOST_KEPT, Noise, stream
from forerun.requests import Sampling

PLACES, V = 20_000, 7


def made(noise: Noise, places: int, vocab: int, first: int = 0) -> torch.Tensor:
    logits = torch.zeros(places, vocab)
    noise.add(logits, first, first)
    return logits


def test_it_is_gumbel_distributed_and_independent() -> None:
    """Kolmogorov–Smirnov at 1 in 10⁶; correlations of places, tokens and seeds at 5 sigma."""
    one, other = (made(Noise(seed), PLACES, V).double() for seed in (1, 2))
    values = one.flatten().sort().values
    cdf = (-(-values).exp()).exp()
    steps = torch.arange(1, len(values) + 1) / len(values)
    assert float((cdf - steps).abs().max()) < 2.7 / len(values) ** 0.5
    around = one - float(np.euler_gamma)
    for a, b in (
        (around[1:], around[:-1]),
        (around[:, 1:], around[:, :-1]),
        (around, other - float(np.euler_gamma)),
    ):
        products = (a * b).flatten()
        assert abs(float(products.mean())) < 5 * (np.pi**2 / 6) / len(products) ** 0.5


@pytest.mark.parametrize("seed", [-5, 1 << 70])
def test_the_arg_max_is_a_draw(seed: int) -> None:
    """Also of unlikely tokens; each token's count within 5 sigma."""
    chance = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.0097, 2e-4, 1e-4])
    logits = chance.log().repeat(PLACES, 1)
    Noise(seed).add(logits, 0, 0)
    counts = torch.bincount(logits.argmax(-1), minlength=V)
    sigma = (PLACES * chance * (1 - chance)).sqrt()
    assert ((counts - PLACES * chance).abs() < 5 * sigma + 1).all()


def test_it_depends_on_seed_and_place_alone() -> None:
    whole = made(Noise(3), 3 * MOST_KEPT, 5, first=2)
    assert torch.equal(whole, made(Noise(3), 3 * MOST_KEPT, 5, first=2))
    assert not torch.equal(whole, made(Noise(4), 3 * MOST_KEPT, 5, first=2))
    kept = Noise(3)
    for first in (2, 9, 5, 2 + MOST_KEPT, 3):  # what is known, and what is known no more
        logits = torch.zeros(7, 5)
        kept.add(logits, first, min(first, 3))
        assert torch.equal(logits, whole[first - 2 : first + 5])
    odd = torch.zeros(1, 3)  # of another vocabulary at a place that is known
    kept.add(odd, 3, 3)
    assert torch.equal(odd, made(Noise(3), 1, 3, first=3))


def test_prompts_that_share_a_seed_do_not_draw_alike() -> None:
    texts = [([1, 2], None), ([2, 1], None), ([1], [2]), ([1], [3]), ([1, 2], [3])]
    streams = [stream(seed, *text) for seed in (0, 7) for text in texts]
    assert len(set(streams)) == len(streams)
    assert streams == [stream(seed, *text) for seed in (0, 7) for text in texts]
    assert all(0 <= number < 2**63 for number in streams)
    assert stream(-3, [1]) == stream(2**63 - 3, [1])
    how, whole = Sampling(temperature=1.0, seed=7), made(Noise(streams[5]), 3, V)
    assert torch.equal(made(Noise.of(how, [1, 2]), 3, V), whole)
    assert not torch.equal(made(Noise.of(how, [2, 1]), 3, V), whole)
    assert Noise.of(Sampling(seed=7), [1, 2]) is None


def test_what_is_excluded_stays_so_and_what_is_no_number_too() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [torch.nan, 1.0, 2.0]])
    Noise(1).add(logits, 0, 0)
    assert logits[0].isneginf().tolist() == [True, False, True]
    assert logits[1].isnan().tolist() == [True, False, False]
    assert made(Noise(5), 4000, 300).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_made_there() -> None:
    chance = torch.tensor([0.6, 0.3, 0.1], device="cuda")
    logits = chance.log().repeat(2000, 1)
    Noise(1).add(logits, 0, 0)
    share = torch.bincount(logits.argmax(-1), minlength=3) / 2000
    assert ((share - chance).abs() < 0.06).all()
