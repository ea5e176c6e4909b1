"""Near-ties and bugs are told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafters.model import ModelDrafter
from forerun.engine import Sampling
from forerun.errors import PromptError, SettingError
from forerun.lab.audit import Kind, audit, checks, explain, first_difference
from forerun.lab.bench.peers import Peer, Run
from forerun.model import Model
from forerun.runtime import Executor, Rows, TorchExecutor, torch_rows
from forerun.testing import ScriptedModel
from tiny import build, texts


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [4]) == 0


def greedy(model: object, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))  # type: ignore[operator]
    return tokens[len(prompt) :]


def test_a_wrong_token_is_a_bug_wherever_it_stands() -> None:
    model = build("llama")
    prompt = texts(5)[0]
    right = greedy(model, prompt, 6)
    wrapped = SimpleNamespace(target=torch_rows(model))
    for place in (0, 3, 5):
        wrong = list(right)
        wrong[place] = (right[place] + 1) % 97
        difference = explain(wrapped, prompt, right, wrong)
        assert not difference.near_tie
        assert difference.position == place
        assert "bug" in difference.message
        assert wrapped.target.lengths == []
    assert not explain(wrapped, prompt, right, right[:4]).near_tie


def test_two_tokens_of_equal_weight_are_a_near_tie() -> None:
    model = build("llama")
    prompt = texts(5)[0]
    best = greedy(model, prompt, 1)[0]
    twin = (best + 1) % 97
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[best]
    difference = explain(SimpleNamespace(target=torch_rows(model)), prompt, [best], [twin])
    assert difference.near_tie
    assert difference.margin <= difference.bound < 1e-3
    # Equal to each other, but neither is the best: still a bug.
    worse = int(model(torch.tensor([prompt])).logits[0, -1].argmin())
    other = (worse + 1) % 97
    with torch.no_grad():
        head[other] = head[worse]
    assert not explain(SimpleNamespace(target=torch_rows(model)), prompt, [worse], [other]).near_tie


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_first_difference_ends_the_common_prefix(a: list[int], b: list[int]) -> None:
    at = first_difference(a, b)
    if at is None:
        assert a == b
    else:
        assert a[:at] == b[:at]
        assert a[at : at + 1] != b[at : at + 1]


# ---- penalties


def test_a_tie_that_a_penalty_makes_is_seen_through_the_penalty() -> None:
    table = torch.zeros(4, 4)
    table[:, 1], table[:, 2] = 2.0, 1.0  # token 1 stands in the prompt; halved, it ties with 2
    model = SimpleNamespace(target=Rows(ScriptedModel(table)))
    assert not explain(model, [1], [1], [2]).near_tie
    assert explain(model, [1], [1], [2], Sampling(repetition_penalty=2.0)).near_tie
    difference = explain(model, [1], [1], [2], Sampling(repetition_penalty=1.9))
    assert not difference.near_tie
    assert difference.margin == pytest.approx(2 / 1.9 - 1)


def test_a_tie_at_the_edge_of_a_truncation_is_one() -> None:
    """By noise token 2 is far ahead of 1, where top-k keeps it; 3 is as likely as it."""
    from forerun.engine.sampling import Noise, stream

    seed = next(s for s in range(99) if _drawn(Noise(stream(s, [0]))) == 2)
    how = Sampling(temperature=1.0, top_k=2, seed=seed)

    def near_tie(third: float) -> bool:
        table = torch.tensor([[-9.0, 1.0, 0.0, third]]).repeat(4, 1)
        model = SimpleNamespace(target=Rows(ScriptedModel(table)), eos=frozenset())
        return explain(model, [0], [1], [2], how).near_tie

    assert near_tie(1e-7)  # of 2 and 3 roundings decide which one is among two
    assert not near_tie(0.5)  # 2 is out of the question


def _drawn(noise: Any) -> int:
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf]])
    noise.add(logits, 1, 1)
    return int(logits.argmax())


def test_a_ban_of_the_end_is_seen() -> None:
    table = torch.tensor([[0.0, 5.0, 3.0]]).repeat(3, 1)
    model = SimpleNamespace(target=Rows(ScriptedModel(table)), eos=frozenset({1}))
    # 1 is the best, but no end of text is allowed yet, so who wrote it is wrong by any measure.
    difference = explain(model, [0], [1], [2], Sampling(min_new_tokens=4))
    assert not difference.near_tie
    assert difference.to_json()["margin"] is None


# ---- planted bugs, and what is none


class Wrapped(Executor):
    """An executor with a fault; everything else is the executor's own."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.facts, self.device = inner, inner.facts, inner.device

    def reserve(self, rows: int, columns: int) -> None:
        self.inner.reserve(rows, columns)

    def keep(self, rows: Any, lengths: Any) -> None:
        self.inner.keep(rows, lengths)

    def run(self, starts: Any, pieces: Any, wanted: Any) -> torch.Tensor:
        return self.inner.run(starts, pieces, wanted)


class Off(Wrapped):
    """One token's logit is off in passes of some shape."""

    def __init__(
        self, inner: Executor, token: int, by: float, when: Callable[[int, int], bool]
    ) -> None:
        super().__init__(inner)
        self.token, self.by, self.when = token, by, when

    def run(self, starts: Any, pieces: Any, wanted: Any) -> torch.Tensor:
        logits = self.inner.run(starts, pieces, wanted)
        fed = [len(piece) for piece in pieces if piece]
        if fed and self.when(len(fed), max(fed)):
            logits = logits.clone()
            logits[..., self.token] += self.by
        return logits


class Forgetful(Wrapped):
    """Rolling back leaves the first rejected token where the right one should come."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.held: dict[int, list[int]] = {}

    def run(self, starts: Any, pieces: Any, wanted: Any) -> torch.Tensor:
        fed = []
        for row, (start, piece) in enumerate(zip(starts, pieces, strict=True)):
            held = self.held.get(row, [])
            stale = start < len(held) and bool(piece)
            fed.append([held[start], *piece[1:]] if stale else list(piece))
            self.held[row] = [*held[:start], *fed[-1]]
        return self.inner.run(starts, fed, wanted)

    def keep(self, rows: Any, lengths: Any) -> None:
        self.held = {}  # rows are only compared alone here
        self.inner.keep(rows, lengths)


def pair(fault: Callable[[Executor], Executor] = lambda executor: executor) -> Model:
    """A tiny target with a fault, and a draft that is often wrong."""
    target = build("llama")
    draft = build("llama")
    with torch.no_grad():
        noise = torch.randn(draft.get_output_embeddings().weight.shape) * 0.3
        draft.get_output_embeddings().weight += noise
    return Model(Rows(fault(TorchExecutor(target))), ModelDrafter(torch_rows(draft), 97))


PROMPTS = texts(5, 9, 3, 7)
SHORT = [Sampling(max_new_tokens=12, ignore_eos=True)] * 4


def kinds(model: Model, **how: Any) -> dict[str, set[str]]:
    """The kinds found by each check."""
    by_check: dict[str, set[str]] = {}
    for c in audit(model, PROMPTS, SHORT, controller="fixed(3)", **how):
        by_check.setdefault(c.check, set()).add(c.kind.value)
    assert model.target.lengths == []
    return by_check


def test_a_sound_runtime_is_identical_in_every_check() -> None:
    model = pair()
    by_check = kinds(model, batch_size=3)
    assert by_check == {
        "speculative": {"identical"},
        "speculative, batch of 3": {"identical"},
        "plain, batch of 3": {"identical"},
    }
    assert set(kinds(model)) == {"speculative"}
    done = model.generate(PROMPTS[0], controller="fixed(3)", max_new_tokens=12, ignore_eos=True)
    assert 0 < done.stats.accepted < done.stats.drafted  # so that both were put to the test


def test_a_rollback_that_forgets_is_a_bug() -> None:
    failures = [
        c
        for c in audit(pair(Forgetful), PROMPTS, SHORT, controller="fixed(3)")
        if c.kind != Kind.IDENTICAL
    ]
    assert failures
    for comparison in failures:
        assert comparison.kind == Kind.BUG
        assert comparison.difference is not None
        assert comparison.difference.margin > comparison.difference.bound
        a, b = comparison.outputs
        assert a[: comparison.difference.position] == b[: comparison.difference.position]


def favourite(model: Model) -> int:
    """The token a target writes most."""
    done = model.generate(PROMPTS, plain=True, max_new_tokens=12, ignore_eos=True)
    return Counter(t for completion in done for t in completion.tokens).most_common(1)[0][0]


def test_a_logit_off_in_verify_passes_only_is_a_bug() -> None:
    """Also where the recomputation shares the fault: shapes may not disagree that much."""
    token = favourite(pair())
    wide = lambda rows, width: width > 1  # noqa: E731
    model = pair(lambda rows: Off(rows, token, -3.0, wide))
    failures = [c for c in audit(model, PROMPTS, SHORT, controller="fixed(3)") if c.difference]
    assert failures
    for c in failures:
        assert c.kind == Kind.BUG
        assert c.difference is not None
    assert any(c.difference and c.difference.spread > c.difference.ceiling for c in failures)
    assert any("between shapes" in c.difference.message for c in failures if c.difference)


def test_a_logit_off_in_batches_only_is_found_in_batches_only() -> None:
    token = favourite(pair())
    by_check = kinds(
        pair(lambda rows: Off(rows, token, -3.0, lambda count, width: count > 1)), batch_size=4
    )
    assert by_check["speculative"] == {"identical"}
    assert "bug" in by_check["speculative, batch of 4"]
    assert "bug" in by_check["plain, batch of 4"]
    assert "near-tie" not in set().union(*by_check.values())


@pytest.mark.parametrize(("roundings", "kind"), [(3.0, Kind.NEAR_TIE), (1e5, Kind.BUG)])
def test_a_tie_up_to_rounding_is_a_near_tie(roundings: float, kind: Kind) -> None:
    """The best token has an equal twin, and verify passes prefer the twin by a few roundings."""
    target = build("llama")
    best = greedy(target, PROMPTS[0], 1)[0]
    twin = (best + 1) % 97
    head = target.get_output_embeddings().weight
    with torch.no_grad():
        head[twin] = head[best]
    logits = target(torch.tensor([PROMPTS[0]])).logits[0, -1]
    by = roundings * float(logits.detach().abs().max()) * torch.finfo(torch.float32).eps
    faulty = Off(
        TorchExecutor(target), twin, by, lambda count, width: width not in (1, len(PROMPTS[0]))
    )
    model = Model(Rows(faulty), ModelDrafter(torch_rows(build("llama", seed=3)), 97))
    (comparison,) = audit(model, PROMPTS[:1], SHORT[:1], controller="fixed(3)")
    assert comparison.kind == kind
    assert comparison.difference is not None
    assert comparison.difference.position == 0
    assert set(comparison.difference.tokens) == {best, twin}


# ---- peers


class Scripted(Peer):
    """Says what it is told."""

    def __init__(self, name: str, outputs: list[list[int]], plain: str | None = None) -> None:
        self.name, self.outputs, self.plain = name, outputs, plain

    def available(self) -> None:
        return None

    def generate(self, prompts: Any, max_new_tokens: int, repetition_penalty: float = 1.0) -> Any:
        assert max_new_tokens == 12
        return Run(0.0, [self.outputs[PROMPTS.index(p)] for p in prompts])


def test_a_peer_is_compared_with_plain_and_with_its_own_plain() -> None:
    model = pair()
    samplings = [Sampling(max_new_tokens=12, repetition_penalty=1.1)] * 4
    right = [c.tokens for c in model.generate(PROMPTS, plain=True, sampling=samplings)]
    wrong = [[*tokens[:5], (tokens[5] + 1) % 97] for tokens in right]
    peers = [Scripted("a", right), Scripted("a-fast", wrong, plain="a")]
    assert checks(1, peers)[1:] == [("a", "plain"), ("a-fast", "plain"), ("a-fast", "a")]
    comparisons = list(audit(model, PROMPTS, samplings, controller="fixed(3)", peers=peers))
    assert [(c.check, c.against) for c in comparisons[:4]] == checks(1, peers)
    assert {c.kind for c in comparisons if c.check != "a-fast"} == {Kind.IDENTICAL}
    fast = [c for c in comparisons if c.check == "a-fast"]
    assert {c.kind for c in fast} == {Kind.DIFFERS}  # not a bug of ours
    assert all(c.difference and c.difference.position == 5 for c in fast)


# ---- what cannot be audited


def test_what_cannot_be_audited_is_refused() -> None:
    model = pair()
    with pytest.raises(SettingError, match="drift meter"):
        audit(model, PROMPTS, rule="typical")
    with pytest.raises(SettingError, match="one per prompt"):
        audit(model, PROMPTS, SHORT[:1])
    with pytest.raises(SettingError, match="batch size"):
        audit(model, PROMPTS, batch_size=0)
    with pytest.raises(PromptError, match="no prompts"):
        audit(model, [])
    peer = Scripted("a", [])
    with pytest.raises(SettingError, match="with a peer"):
        audit(model, PROMPTS, SHORT, peers=[peer])  # ignore_eos
    audit(model, PROMPTS, [Sampling(temperature=0.7, top_p=0.9)] * 4, peers=[peer])


def test_walking_away_leaves_the_model_usable() -> None:
    model = pair()
    run = audit(model, PROMPTS, SHORT, controller="fixed(3)", batch_size=4)
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert kinds(model)["speculative"] == {"identical"}
