"""Texts that were read before are not read again, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import forerun
from forerun.controllers import CONTROLLERS
from forerun.drafters import DRAFTERS
from forerun.drafters.model import ModelDrafter
from forerun.engine import Completion, Engine, Request, Sampling
from forerun.engine.prefixes import LEAST, Prefixes
from forerun.engine.text import common
from forerun.errors import SettingError
from forerun.model import Model
from forerun.rules import RULES
from forerun.runtime.base import Rows
from forerun.runtime.torch_executor import torch_rows
from forerun.testing import ScriptedModel
from marks import slow_but
from tiny import build, texts

V = 97
BIG = 1 << 30


def script(context: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(context[-3:]) % 1_000_003)
    return torch.randn(V, generator=generator) * 3


class Watched:
    """An engine of scripted models, with what its passes fed."""

    def __init__(self, budget: int = BIG, max_rows: int = 16) -> None:
        self.target, self.draft = ScriptedModel(script), ScriptedModel(script)
        self.prefixes = Prefixes(budget)
        self.engine = Engine(
            self.target, ModelDrafter(self.draft, V), max_rows=max_rows, prefixes=self.prefixes
        )

    def run(self, prompts: Sequence[list[int]], spec: str = "fixed(3)", **how: Any) -> list[Any]:
        """Completions, after forgetting earlier passes."""
        self.target.passes.clear()
        self.draft.passes.clear()
        sampling = Sampling(**{"max_new_tokens": 12} | how)
        ids = [
            self.engine.submit(Request(p, sampling, CONTROLLERS.make(spec), RULES.make("standard")))
            for p in prompts
        ]
        done = {e.request: e.completion for e in self.engine.run() if e.completion}
        return [done[i] for i in ids]

    @staticmethod
    def fed(model: ScriptedModel) -> int:
        return sum(map(sum, model.passes))


def trie_bytes(prefixes: Prefixes) -> int:
    return sum(node.nbytes for node in prefixes._order)


def test_a_second_turn_reads_what_is_new_in_target_and_draft() -> None:
    watched, (prompt, more) = Watched(), texts(200, 10)
    (first,) = watched.run([prompt])
    assert first.stats.cached_tokens == 0
    longer = prompt + first.tokens + more
    (again,) = watched.run([longer])
    assert again.stats.cached_tokens == len(prompt) + 11  # the newest token was never read
    assert watched.target.passes[0] == [11 + 3]
    assert watched.draft.passes[0][0] <= 11 + 4  # it had not seen its last own drafts
    (cold,) = Watched().run([longer])
    assert again.tokens == cold.tokens
    assert [r.drafted for r in again.rounds] == [r.drafted for r in cold.rounds]


def test_the_same_prompt_again_reads_its_last_token() -> None:
    watched, (prompt,) = Watched(), texts(100)
    one, two = (watched.run([prompt], temperature=0.9, seed=4)[0] for _ in range(2))
    assert one.tokens == two.tokens
    assert two.stats.cached_tokens == 99
    assert watched.target.passes[0] == [1 + 3]


def test_plain_requests_leave_the_draft_out_and_a_later_one_fills_it_in() -> None:
    watched, (prompt,) = Watched(), texts(100)
    watched.run([prompt], "fixed(0)")
    assert watched.fed(watched.draft) == 0
    for read in (True, False):
        watched.run([prompt])
        assert (watched.draft.passes[0][0] >= 100) is read


@pytest.mark.parametrize("read_first", ["alone", "together"])
def test_copies_of_a_prompt_read_it_once(read_first: str) -> None:
    watched, (prompt,) = Watched(budget=0), texts(1500)
    how = [{"seed": i, "temperature": 1.0} for i in range(4)]
    sampled = [Watched().run([prompt], **h)[0].tokens for h in how]
    watched.target.passes.clear()
    sampling = [Sampling(max_new_tokens=12, **h) for h in how]
    controller, rule = CONTROLLERS.make("fixed(3)"), RULES.make("standard")
    ids = []
    for i, s in enumerate(sampling):
        ids.append(watched.engine.submit(Request(prompt, s, controller, rule)))
        if read_first == "alone" and i == 0:
            watched.engine.step()  # the others join while it is reading
    done = {e.request: e.completion for e in watched.engine.run() if e.completion}
    assert [done[i].tokens for i in ids] == sampled
    assert [done[i].stats.cached_tokens for i in ids] == [0, 1499, 1499, 1499]
    for model in (watched.target, watched.draft):
        assert watched.fed(model) < 1500 + 4 * 12 * 5
    assert watched.prefixes.nbytes == 0


def test_texts_with_a_common_beginning_read_it_once() -> None:
    watched, (system, *questions) = Watched(), texts(300, 20, 40, 33)
    done = watched.run([system + q for q in questions])
    assert [c.stats.cached_tokens for c in done] == [0, 300, 300]
    assert watched.fed(watched.target) < 300 + 93 + 3 * 12 * 5
    assert [c.tokens for c in done] == [Watched().run([system + q])[0].tokens for q in questions]


def test_a_short_beginning_is_read_again() -> None:
    watched, (short, one, two) = Watched(), texts(LEAST - 1, 50, 60)
    done = watched.run([short + one]) + watched.run([short + two])
    assert [c.stats.cached_tokens for c in done] == [0, 0]


def test_a_row_does_not_wait_for_one_that_left() -> None:
    watched, (prompt,) = Watched(budget=0), texts(900)
    sampling, controller = Sampling(max_new_tokens=5), CONTROLLERS.make("fixed(2)")
    request = Request(prompt, sampling, controller, RULES.make("standard"))
    first, second = watched.engine.submit(request), watched.engine.submit(request)
    watched.engine.step()
    watched.engine.cancel(first)
    done = [e.completion for e in watched.engine.run() if e.completion]
    assert len(done) == 1
    assert watched.engine.cancel(second) is None
    assert done[0].tokens == Watched().run([prompt], max_new_tokens=5)[0].tokens


def test_a_request_that_is_cancelled_leaves_what_it_read() -> None:
    watched, (prompt,) = Watched(), texts(2000)
    request = Request(prompt, Sampling(), CONTROLLERS.make("fixed(2)"), RULES.make("standard"))
    number = watched.engine.submit(request)
    watched.engine.step()
    watched.engine.cancel(number)
    assert watched.run([prompt])[0].stats.cached_tokens == 512


def test_what_was_used_longest_ago_goes_first() -> None:
    text_bytes = 8 * 112 * 2  # scripted columns: 8 bytes a token, target and draft
    watched, prompts = Watched(budget=3 * text_bytes), texts(101, 101, 101, 101)
    for i in (0, 1, 2, 0, 3):
        watched.run([prompts[i]])
        assert trie_bytes(watched.prefixes) == watched.prefixes.nbytes <= 3 * text_bytes
    cached = [watched.run([prompts[i]])[0].stats.cached_tokens for i in (3, 0, 2)]
    assert cached == [100, 100, 100]
    assert watched.run([prompts[1]])[0].stats.cached_tokens == 0


def test_a_text_above_the_budget_does_not_drive_out_the_rest() -> None:
    watched, prompts = Watched(budget=1000), texts(200, 30)
    watched.run([prompts[0]])
    assert watched.prefixes.nbytes <= 1000


def test_random_texts_keep_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits, fills and evictions, against a look at everything."""
    monkeypatch.setattr("forerun.engine.prefixes.LEAST", 1)
    cache, other = Rows(ScriptedModel(script)), Rows(ScriptedModel(script))
    random.seed(5)
    prefixes = Prefixes(3000)
    seen: list[list[int]] = []
    for _ in range(300):
        start = random.choice(seen)[: random.randrange(60)] if seen else []
        text = start + [random.randrange(3, 6) for _ in range(random.randrange(1, 40))]
        for rows in (cache, other):
            rows.join(1)
        prefixes.take(text, 0, (cache, other))
        for rows in (cache, other):
            n = rows.lengths[0]
            assert n < len(text)
            assert rows.executor.history[0][:n] == text[:n] if n else True
            rows.feed([text[n : len(text) if rows is cache else random.randrange(n, len(text))]])
        prefixes.put(text, 0, (cache, other))
        seen.append(text)
        assert trie_bytes(prefixes) == prefixes.nbytes <= 3000
        for node in prefixes._order:
            assert node.parent is prefixes._root or node.parent in prefixes._order
            assert all(child.tokens[0] == first for first, child in node.children.items())
            assert node.columns[cache].count == len(node.tokens)
        for rows in (cache, other):
            rows.keep([])


def test_common_prefixes() -> None:
    random.seed(2)
    for _ in range(200):
        a, b = ([random.randrange(2) for _ in range(random.randrange(9))] for _ in "ab")
        slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        assert common(a, b) == (min(len(a), len(b)) if slow is None else slow)


def test_a_copy_that_fails_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("damaged")

    watched, prompts = Watched(), [[5, *texts(60)[0]], texts(45)[0]]
    wanted = [done.tokens for done in watched.run(prompts)]
    watched.prefixes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(watched.target, "copy_out", fail)
        assert [done.tokens for done in watched.run(prompts)] == wanted
    assert trie_bytes(watched.prefixes) == watched.prefixes.nbytes == 0
    assert [done.tokens for done in watched.run(prompts)] == wanted


def test_an_executor_without_copies_is_refused() -> None:
    class Uncopied(ScriptedModel):
        copies = False

    with pytest.raises(SettingError, match="cannot copy its cache"):
        Engine(Uncopied(script), ModelDrafter(ScriptedModel(script), V), prefixes=Prefixes(5))
    with pytest.raises(SettingError, match="prefix cache"):
        Prefixes(-1)
    with pytest.raises(SettingError, match="prefix_cache"):
        forerun.load(prefix_cache=-1)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
@pytest.mark.parametrize("drafter", ["model", "lookup", "specbound"])
def test_warm_is_cold_on_models(drafter: str, how: dict[str, Any]) -> None:
    prompts = [a + b for a in texts(36) for b in ([5], [5, 6, 7], [9])]

    def made(prefixes: Prefixes | None) -> Model:
        rows = torch_rows(build("llama"))
        if drafter == "model":
            return Model(rows, ModelDrafter(torch_rows(build("llama", 3)), V), prefixes=prefixes)
        spec = DRAFTERS.make("specbound(exits='', threshold=0)" if drafter != "lookup" else drafter)
        chosen = spec.build(rows, None)
        return Model(chosen.target or rows, chosen, prefixes=prefixes)

    cold, warm = made(None), made(Prefixes(BIG))
    for prompt in prompts:
        settings = {"max_new_tokens": 12, "controller": "fixed(3)", **how}
        got = warm.generate(prompt, **settings)
        assert got.tokens == cold.generate(prompt, **settings).tokens
    assert got.stats.cached_tokens == 36
    warm.forget()
    assert warm.generate(prompts[0], max_new_tokens=1).stats.cached_tokens == 0


@pytest.mark.parametrize("runtime", slow_but(["torch", "openvino"], "openvino".__eq__))
def test_warm_is_cold_on_the_shipped_pair(runtime: str) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
    story = "Once upon a time there was a little dog who lived in a house near the forest. " * 3
    warm, cached = forerun.load(runtime=runtime, prefix_cache="50MB"), []
    kept = warm.prefixes
    for how in ({}, {"temperature": 0.8, "seed": 3}):
        for prompt in (story, story + "One day"):
            settings: dict[str, Any] = {"max_new_tokens": 10, "controller": "fixed(3)", **how}
            warm.prefixes = None
            cold = warm.generate(prompt, **settings)
            warm.prefixes = kept
            got: Completion = warm.generate(prompt, **settings)
            assert got.tokens == cold.tokens
            cached.append(got.stats.cached_tokens > 0)
    assert cached == [False, True, True, True]
    assert warm.prefixes is not None
    assert 0 < warm.prefixes.nbytes <= 50e6
