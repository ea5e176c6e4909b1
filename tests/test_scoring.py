"""Texts that are scored: rows like any other, in parts, beside rows that write."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.drafters.model import ModelDrafter
from forerun.engine import Engine, Request, Sampling
from forerun.engine.judging import ALONE, BESIDE
from forerun.engine.prefixes import Prefixes
from forerun.errors import PromptError, SettingError
from forerun.rules import RULES
from forerun.testing import ScriptedModel, engine

V = 7
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 2
LOG = TABLE.log_softmax(-1)


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def build(**more):
    target = ScriptedModel(TABLE, limit=more.pop("limit", 4096))
    draft = ScriptedModel(TABLE.flip(0), limit=4096)
    return target, Engine(target, ModelDrafter(draft, V), eos=frozenset(), **more)


def writing(prompt, count=20):
    how = Sampling(max_new_tokens=count)
    return Request(prompt, how, CONTROLLERS.make("fixed(2)"), RULES.make("gumbel"))


def exact(ids):
    return [float(LOG[a, b]) for a, b in pairwise(ids)]


def widest(target, row):
    """Tokens of a row in each pass it was in."""
    return [fed[row] for fed in target.passes if len(fed) > row and fed[row]]


@pytest.mark.parametrize("count", [2, 3, BESIDE + 1, ALONE, ALONE + 1, ALONE + 2, 3 * ALONE + 5])
def test_every_token_but_the_first_is_scored(count: int) -> None:
    target, made = build()
    ids = text(count)
    made.submit(Request.to_score(ids, 2))
    (done,) = [event.completion for event in made.run()]
    assert [s.logprob for s in done.scores] == pytest.approx(exact(ids), abs=1e-5)
    assert [s.top[0][0] for s in done.scores] == [int(TABLE[t].argmax()) for t in ids[:-1]]
    assert all(len(s.top) == 2 for s in done.scores)
    assert (done.tokens, done.finish_reason, done.stats.prompt_tokens) == ([], "length", count)
    assert sum(map(sum, target.passes)) == count - 1
    assert max(map(max, target.passes)) == min(count - 1, ALONE)


def test_parts_are_small_beside_a_row_that_writes_and_both_are_as_alone() -> None:
    target, made = build()
    ids, prompt = text(1000), [1, 2, 3]
    alone = engine(ScriptedModel(TABLE))(prompt, max_new_tokens=20, controller="fixed(0)")
    score = made.submit(Request.to_score(ids, 0))
    write = made.submit(writing(prompt))
    done, rounds = {}, 0
    while len(done) < 2:
        for event in made.step():
            if event.completion:
                done[event.request] = (event.completion, len(target.passes))
        rounds += 1
    assert done[write][0].tokens == alone.tokens
    assert [s.logprob for s in done[score][0].scores] == pytest.approx(exact(ids), abs=1e-5)
    together = done[write][1]
    assert together < done[score][1] == rounds
    assert {fed[0] for fed in target.passes[:together]} == {BESIDE}
    assert max(fed[0] for fed in target.passes[together:]) == ALONE


def test_texts_share_one_part_of_a_pass_first_come_first_served() -> None:
    target, made = build()
    ids = [text(ALONE + 40, seed) for seed in range(3)]
    order = [made.submit(Request.to_score(t, 0)) for t in ids]
    ended = [event.request for event in made.run()]
    assert ended == order
    assert all(sum(fed) <= ALONE for fed in target.passes)


def test_parts_are_smaller_where_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.judging.LOGITS", 2 * V * 10)
    target, made = build()
    made.submit(Request.to_score(text(60), 0))
    made.submit(writing([1]))
    list(made.run())
    assert max(fed[0] for fed in target.passes if len(fed) == 2) == 10


def test_nothing_is_copied_of_a_text_to_score() -> None:
    target, made = build(prefixes=Prefixes(1 << 20))
    ids = text(100)
    for _ in range(2):
        made.submit(Request.to_score(ids, 0))
        (done,) = [event.completion for event in made.run()]
        assert [s.logprob for s in done.scores] == pytest.approx(exact(ids), abs=1e-5)
    fed = sum(map(sum, target.passes))
    assert fed == 2 * 99
    made.submit(writing(ids))
    list(made.run())
    assert sum(map(sum, target.passes)) < fed + 99  # but what it read is there for others


def test_a_whole_context_is_scored_and_what_cannot_be_is_refused() -> None:
    _, made = build(limit=64)
    made.submit(Request.to_score(text(64), 0))
    (done,) = [event.completion for event in made.run()]
    assert len(done.scores) == 63
    for wrong in (text(65), [1]):
        with pytest.raises(PromptError, match="2 to 64 tokens can be scored"):
            made.submit(Request.to_score(wrong, 0))
    with pytest.raises(SettingError, match="top"):
        made.submit(Request.to_score([1, 2], -1))


def test_one_that_is_cancelled_leaves_no_work() -> None:
    target, made = build()
    score = made.submit(Request.to_score(text(2000), 0))
    made.step()
    assert made.cancel(score).finish_reason == "cancelled"
    assert list(made.run()) == []
    assert target.history == []
