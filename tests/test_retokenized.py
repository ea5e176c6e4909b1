"""Drafts of another tokenizer: exact by text and by tokens, refused with the reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forerun.controllers import CONTROLLERS
from forerun.drafters.none import NullDrafter
from forerun.drafters.retokenized import SharedTokensDrafter, TextDrafter
from forerun.engine.loop import Engine
from forerun.errors import ModelError
from forerun.requests import Request, Sampling
from forerun.rules import RULES
from forerun.runtime.base import Rows
from forerun.testing import ScriptedModel
from marks import spread

STORY = "def area(width, height):\n    return width * height\n\n" * 3 + "naïve ☃ text\n"


def trained(size: int, text: str) -> Any:
    """A byte-level tokenizer that knows a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    every = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=size, initial_alphabet=every, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


TARGET = trained(300, STORY)
DRAFT = trained(281, STORY.replace("width", "depth").upper() + STORY)


def writes(tokenizer: Any, story: str) -> Rows:
    """A model that continues a story wherever it is, and says something else off it."""
    size = len(tokenizer.get_vocab())
    ids = tokenizer.encode(story)

    def script(context: tuple[int, ...]) -> torch.Tensor:
        out = torch.zeros(size)
        n = len(context)
        out[ids[n] if list(context) == ids[:n] and n < len(ids) else sum(context) % size] = 5.0
        return out

    return Rows(ScriptedModel(script))


@pytest.mark.parametrize("kind", [TextDrafter, SharedTokensDrafter])
def test_greedy_text_is_plain_and_much_is_kept(kind: Any) -> None:
    """Rows of other lengths leave earlier, and the draft knows another end of the story."""
    prompts = [TARGET.encode(STORY)[:n] for n in (5, 30, 12)]
    target = writes(TARGET, STORY)
    draft = kind(writes(DRAFT, STORY.replace("naïve", "native")), 300, TARGET, DRAFT)

    def run(drafter: Any, controller: str) -> list[Any]:
        engine = Engine(target, drafter, max_rows=2)
        for i, prompt in enumerate(prompts):
            how, length = Sampling(max_new_tokens=16 + 4 * i), CONTROLLERS.make(controller)
            engine.submit(Request(prompt, how, length, RULES.make("gumbel")))
        done = {e.request: e.completion for e in engine.run() if e.completion is not None}
        return [done[i].tokens for i in sorted(done)], sum(len(c.rounds) for c in done.values())

    plain, rounds = run(NullDrafter(), "fixed(0)")
    for controller in ("fixed(4)", "auto", "svip"):
        tokens, fewer = run(draft, controller)
        assert tokens == plain
        if controller == "fixed(4)":
            assert fewer < 0.7 * rounds


def letters(order: str) -> Any:
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(order)}, order[-1]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(
    ("kind", "rule"), spread(2, [TextDrafter, SharedTokensDrafter], ["gumbel", "standard"])
)
def test_sampled_text_has_the_targets_distribution(kind: Any, rule: str) -> None:
    """χ² of 2 tokens of 800 texts against the target's own 16 probabilities; fails by chance once
    in 100,000. One of the target's letters the draft lacks."""
    torch.manual_seed(3)
    script, near = torch.randn(4, 4), torch.randn(4, 4)
    drafter = kind(Rows(ScriptedModel(near)), 4, letters("abcd"), letters("cbaz"))
    engine = Engine(Rows(ScriptedModel(script)), drafter, max_rows=60)
    how = Sampling(max_new_tokens=3, temperature=1.0)
    for _ in range(800):
        engine.submit(Request([0], how, CONTROLLERS.make("fixed(2)"), RULES.make(rule)))
    seen: Counter[tuple[int, ...]] = Counter()
    drafted = 0
    for event in engine.run():
        drafted += len(event.drafted)
        if event.completion is not None:
            seen[tuple(event.completion.tokens[:2])] += 1
    assert drafted > 500
    p = script.softmax(-1).double().numpy()
    wanted = 800 * p[0][:, None] * p
    got = np.array([[seen[a, b] for b in range(4)] for a in range(4)])
    assert float(((got - wanted) ** 2 / wanted).sum()) < 50.0, "χ² of 15 degrees of freedom"


def test_too_few_shared_tokens_are_refused_by_their_number() -> None:
    with pytest.raises(ModelError, match=r"the target has 1 of the draft's 4 tokens, .* 50%"):
        SharedTokensDrafter(Rows(ScriptedModel(torch.eye(4))), 4, letters("abcd"), letters("awxz"))


def test_a_text_that_is_cut_anew_is_read_anew() -> None:
    """The draft's tokens before the end change when a word grows."""
    draft = writes(DRAFT, STORY)
    drafter = TextDrafter(draft, 300, TARGET, DRAFT)
    for i, text in enumerate(("return wid", "return width *")):
        ids = TARGET.encode(text)
        if not i:
            drafter.join([ids], 20)
        drafter.rows.feed(drafter._fed(drafter._own([ids], [4])), [0])
        held = draft.executor.history[0][: draft.lengths[0]]  # type: ignore[attr-defined]
        assert DRAFT.decode(held) == text


def test_a_step_by_itself_reads_the_text_anew() -> None:
    """As a calibration asks: a token more each time, and nothing is proposed."""
    draft, ids = writes(DRAFT, STORY), TARGET.encode(STORY)
    drafter = SharedTokensDrafter(draft, 300, TARGET, DRAFT)
    drafter.join([ids[:3]], 40)
    for n in range(3, 20):
        logits = drafter.step([ids[:n]], None).logits
        held = draft.executor.history[0][: draft.lengths[0]]  # type: ignore[attr-defined]
        assert DRAFT.decode(held) == TARGET.decode(ids[:n])
        assert logits is not None
        assert logits.shape == (1, 300)


@pytest.mark.parametrize("kind", [TextDrafter, SharedTokensDrafter])
def test_a_draft_without_numbers_changes_no_text(kind: Any) -> None:
    prompts = [TARGET.encode(STORY)[:n] for n in (5, 30)]
    size = len(DRAFT.get_vocab())
    broken = Rows(ScriptedModel(lambda context: torch.full((size,), torch.nan)))

    def run(drafter: Any, spec: str) -> list[list[int]]:
        engine = Engine(writes(TARGET, STORY), drafter)
        for prompt in prompts:
            how, length = Sampling(max_new_tokens=12), CONTROLLERS.make(spec)
            engine.submit(Request(prompt, how, length, RULES.make("standard")))
        return [e.completion.tokens for e in engine.run() if e.completion is not None]

    assert run(kind(broken, 300, TARGET, DRAFT), "fixed(4)") == run(NullDrafter(), "fixed(0)")
