"""The sampling transform, against transformers' own processors and by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from forerun.engine.sampling import USUALLY_ENOUGH, Sampler, Sampling
from forerun.errors import SettingError

V = 23


def text(context: list[int], prompt: int) -> Any:
    return SimpleNamespace(context=context, prompt=prompt)


def transform(
    logits: torch.Tensor,
    settings: Sampling,
    context: list[int],
    prompt: int = 2,
    drafted: list[int] | None = None,
    eos: frozenset[int] = frozenset({0}),
    first: int = 0,
) -> torch.Tensor:
    sampler = Sampler([settings], [eos])
    return sampler.process(logits.unsqueeze(0), [text(context, prompt)], [drafted or []], first)[0]


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [hf.TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_p": 0.6}, [hf.TopPLogitsWarper(0.6)]),
        ({"temperature": 1.0, "min_p": 0.2}, [hf.MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
            [
                hf.TemperatureLogitsWarper(1.3),
                hf.TopKLogitsWarper(9),
                hf.TopPLogitsWarper(0.8),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
        (
            {"temperature": 1.0, "repetition_penalty": 1.7},
            [hf.RepetitionPenaltyLogitsProcessor(1.7)],
        ),
    ],
)
def test_agrees_with_transformers(settings: dict[str, Any], processors: list[Any]) -> None:
    context = [3, 7, 7, 12]
    for _ in range(20):
        logits = torch.randn(1, V) * 3
        wanted = logits.clone()
        for process in processors:
            wanted = process(torch.tensor([context]), wanted)
        got = transform(logits, Sampling(**settings), context)
        torch.testing.assert_close(got.softmax(-1), wanted.softmax(-1))


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    """Flat or peaked: whether or not a few tokens have the mass; also beside rows without."""
    logits = torch.randn(2, 3, 3 * USUALLY_ENOUGH) * spread
    rows = [Sampling(temperature=1.0, top_p=top_p), Sampling(temperature=1.0)]
    texts: Any = [text([1], 1)] * 2
    got = Sampler(rows, [frozenset()] * 2).process(logits, texts, [[], []])
    wanted = hf.TopPLogitsWarper(top_p)(None, logits[0])
    assert torch.equal(got[0].isneginf(), wanted.isneginf())
    assert torch.equal(got[1], logits[1])


def test_penalties_count_the_output_and_the_tokens_drafted_before_each_position() -> None:
    logits = torch.zeros(3, V)
    settings = Sampling(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5)
    got = transform(logits, settings, context=[4, 5, 6], prompt=2, drafted=[6, 8])
    expected = torch.zeros(3, V)
    expected[0, 6] = -1.5  # once in the output
    expected[1, 6] = expected[2, 6] = -2.0  # drafted a second time
    expected[2, 8] = -1.5
    torch.testing.assert_close(got, expected)
    # The drafter, asked one position at a time, sees the same.
    for i in range(3):
        step = transform(logits[i : i + 1], settings, [4, 5, 6], 2, [6, 8][:i], first=i)
        torch.testing.assert_close(step[0], expected[i])


def test_a_row_that_drafted_nothing_beside_one_that_did() -> None:
    """Its position is never used, but it must not disturb the others (it once raised)."""
    both = Sampler([Sampling(repetition_penalty=1.5)] * 2, [frozenset()] * 2)
    alone = Sampler([Sampling(repetition_penalty=1.5)], [frozenset()])
    logits, text = torch.randn(2, 1, 8), SimpleNamespace(context=[1, 2], prompt=2)
    got = both.process(logits, [text, text], [[], [5]], first=1)
    assert torch.equal(got[1:], alone.process(logits[1:], [text], [[5]], first=1))


def test_bias_and_minimum_length() -> None:
    settings = Sampling(temperature=1.0, logit_bias={3: 2.5, 4: -torch.inf}, min_new_tokens=2)
    got = transform(torch.zeros(3, V), settings, context=[1, 1], prompt=2, drafted=[5, 5])
    assert got[:, 3].tolist() == [2.5] * 3
    assert got[:, 4].tolist() == [-torch.inf] * 3
    assert got[:, 0].tolist() == [-torch.inf, -torch.inf, 0.0]


def test_rows_do_not_influence_each_other() -> None:
    rows = [
        Sampling(temperature=0.7, top_k=3),
        Sampling(),
        Sampling(temperature=2.0, top_p=0.5, repetition_penalty=1.3),
        Sampling(temperature=1.0, min_p=0.3, frequency_penalty=1.0),
        Sampling(temperature=1.0),
    ]
    logits, texts = torch.randn(5, 2, V), [text([1, 2, 3 + i], 2) for i in range(5)]
    drafted, eos = [[4], [], [9], [3], [1]], [frozenset({0})] * 5
    together = Sampler(rows, eos).process(logits, texts, drafted)
    for i in range(5):
        one = Sampler([rows[i]], eos[:1])
        alone = one.process(logits[i : i + 1], texts[i : i + 1], drafted[i : i + 1])
        torch.testing.assert_close(together[i], alone[0], atol=0, rtol=0)


def test_nothing_to_do_is_free_and_input_is_never_changed() -> None:
    logits = torch.randn(1, 2, V)
    assert Sampler([Sampling()], [frozenset()]).process(logits, [text([1], 1)], [[]]) is logits
    drawn = Sampler([Sampling(temperature=1.0)], [frozenset()])
    assert drawn.untouched
    assert drawn.process(logits, [text([1], 1)], [[]]) is logits
    for other in ({"temperature": 0.9}, {"temperature": 1.0, "top_k": 2}, {"presence_penalty": 1}):
        assert not Sampler([Sampling(**other)], [frozenset()]).untouched
    before = logits.clone()
    transform(logits[0], Sampling(temperature=0.5, top_k=2, repetition_penalty=2.0), [1, 2])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number ≥ 1e-30, or 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"min_p": 2.0}, "min_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be between"),
        ({"stop": ("",)}, "stop must be"),
        ({"bad_words": "b\ud800"}, "half a character"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1 must be"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Sampling(**settings)


def test_one_stop_string_may_be_given_bare() -> None:
    assert Sampling(stop="END").stop == ("END",)  # type: ignore[arg-type]
