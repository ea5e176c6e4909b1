"""Lookahead: guesses that move on in the target's own passes, and their n-grams."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.drafters.lookahead import Lookahead, LookaheadDrafter
from forerun.engine import Engine, Request, Sampling
from forerun.errors import SettingError
from forerun.model import Model
from forerun.rules import RULES
from forerun.runtime import Rows, torch_rows
from forerun.testing import ScriptedModel, engine
from sourced import build as build_encoder_decoder
from test_drafters import Greedy
from test_engine import chaotic


def drafted(drafter: LookaheadDrafter, *texts: list[int], most: int = 9) -> list[list[int]]:
    return drafter.propose(list(texts), [most] * len(texts), Greedy()).tokens


def test_guesses_move_on_and_their_n_grams_are_drafted() -> None:
    """By hand: N = 3, W = 3, a target that says token + 10 of whatever it is fed."""
    drafter = LookaheadDrafter(3, 3, text=False)
    drafter.join([[5]], 9)
    assert drafted(drafter, [5]) == [[5, 5, 5]], "the window begins with tokens of the text"
    drafter.hear([[5]], [[5, 5, 5]], [[15, 15, 15, 15]])  # nothing is kept but 15 at place 1
    assert drafted(drafter, [5, 15]) == [[15, 15, 15]], "places 2, 3 and 4 as they were said"
    drafter.hear([[5, 15]], [[15, 15, 15]], [[25, 25, 25, 25]])
    # 5, 15, 25 followed each other from pass to pass; 25 is the newest token and begins nothing.
    assert drafted(drafter, [5, 15, 25]) == [[25, 25, 25]]
    assert drafted(drafter, [5, 15, 25, 5], most=2) == [[15, 25]], "the n-gram of the newest token"


def test_an_n_gram_is_lengthened_by_the_next_and_then_by_guesses() -> None:
    drafter = LookaheadDrafter(6, 3, fill=False)
    drafter.join([[1, 2, 3, 4, 5, 9, 1]], 9)
    text = [1, 2, 3, 4, 5, 9, 1]
    assert drafted(drafter, text) == [[2, 3, 4, 5, 9, 1]]
    assert drafted(drafter, text, most=3) == [[2, 3, 4]]
    fresh = LookaheadDrafter(6, 3, text=False, fill=False)
    fresh.join([text], 9)
    assert drafted(fresh, text) == [[]]
    fresh.hear([text], [[7, 7]], [[8, 6, 6]])  # a draft of somebody else
    assert drafted(fresh, [*text, 8]) == [[6, 6]]
    assert drafted(fresh, [*text, 8, 8]) == [[6]], "each guess stays at its place in the text"


def test_a_row_that_is_kept_twice_goes_on_by_itself() -> None:
    drafter = LookaheadDrafter(4, 2, fill=False)
    drafter.join([[1, 2]], 9)
    drafter.keep([0, 0])
    drafter.hear([[1, 2], [1, 2]], [[3], []], [[4, 5], []])
    assert drafted(drafter, [1, 2, 4], [1, 2, 4]) == [[5], []]


class Ear(LookaheadDrafter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.heard: list[tuple[list[int], list[int], list[int]]] = []

    def hear(
        self,
        texts: Sequence[Sequence[int]],
        fed: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
    ) -> None:
        self.heard += [
            (list(t), list(f), list(s)) for t, f, s in zip(texts, fed, answers, strict=True)
        ]
        super().hear(texts, fed, answers)


@pytest.mark.parametrize("rule", ["standard", "no-bonus(ears)"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 1}])
def test_a_drafter_hears_what_the_target_says(rule: str, how: dict[str, Any]) -> None:
    script, drafter = chaotic(3), Ear()
    made = Engine(Rows(ScriptedModel(script)), drafter, max_rows=2)
    prompts = [[0], [3, 4] * 400, [5, 1, 2]]  # the second is read in two rounds
    for prompt in prompts:
        made.submit(
            Request(prompt, Sampling(max_new_tokens=12, ignore_eos=True, **how),
                    CONTROLLERS.make("fixed(3)"), RULES.make(rule))
        )  # fmt: skip
    done = {e.request: e.completion for e in made.run() if e.completion}
    judged = [one for one in drafter.heard if one[2]]
    assert len(judged) < len(drafter.heard), "a row that only reads is told nothing"
    for text, fed, answers in judged:
        every = [script((*text, *fed[:i])) for i in range(len(fed) + 1)]
        assert answers == [int(logits.argmax()) for logits in every]
        assert any(text == (prompts[i] + c.tokens)[: len(text)] for i, c in done.items() if c)


def test_greedy_text_on_an_encoder() -> None:
    model = build_encoder_decoder("marian", decoder_layers=2)
    rows = torch_rows(model)
    fast = Model(rows, Lookahead().build(None, None))
    prompts = [[5, 6, 7, 8], [9], [11, 12, 13, 14, 15, 16]]
    how = {"max_new_tokens": 12, "ignore_eos": True}
    wanted = [c.tokens for c in fast.generate(prompts, plain=True, **how)]
    assert [c.tokens for c in fast.generate(prompts, controller="fixed(4)", **how)] == wanted


def test_guesses_are_kept_now_and_then() -> None:
    """On a target that says what follows of the newest token alone, every n-gram is right."""
    table = torch.eye(7).roll(1, dims=1) * 9
    done = engine(ScriptedModel(table), LookaheadDrafter(6, 3, text=False))(
        [0, 1], max_new_tokens=40, ignore_eos=True, controller="fixed(6)"
    )
    assert done.stats.accepted > 10
    assert done.stats.rounds < 30


def test_sampled_text_is_distributed_as_the_targets() -> None:
    """A certain draft must be judged as certain. False alarm: 1e-6 (χ² with 26 degrees)."""
    torch.manual_seed(2)
    script = torch.randn(3, 3) * 1.5
    run = engine(ScriptedModel(script), LookaheadDrafter(4, 2))
    count, seen = 3000, Counter[tuple[int, ...]]()
    for first in range(0, count, 500):
        prompts = [[0, 1, 0, 2, 1, 1]] * 500
        made = run(prompts, max_new_tokens=3, temperature=1.0, controller="fixed(3)",
                   seed=None, ignore_eos=True)  # fmt: skip
        seen.update(tuple(c.tokens) for c in made)
        assert first or any(c.stats.drafted for c in made)
    probs = script.softmax(-1).double()
    squares = 0.0
    for tokens in itertools.product(range(3), repeat=3):
        expected, last = float(count), 1
        for token in tokens:
            expected, last = expected * float(probs[last, token]), token
        squares += (seen[tokens] - expected) ** 2 / expected
    assert squares < 79


@pytest.mark.parametrize("bad", [{"width": 0}, {"n": 1}, {"text": 1}, {"fill": "yes"}, {"n": 2.5}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="lookahead "):
        Lookahead(**bad)
