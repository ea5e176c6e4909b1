"""SpecBound: the target drafts through early exits, exactly, and computes nothing twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun.model
from forerun.controllers import CONTROLLERS
from forerun.drafters import DRAFTERS
from forerun.drafters.specbound import SpecBound, SpecBoundDrafter, temperature
from forerun.engine import Engine, Sampling
from forerun.errors import PromptError, SettingError
from forerun.model import Model
from forerun.rules import RULES
from forerun.runtime import Rows, torch_rows
from forerun.runtime.cache import cache_argument
from forerun.runtime.exits import LayersExecutor, layers_of
from forerun.runtime.heads import ExitHeads
from forerun.runtime.layers import LayerAccess
from forerun.testing import ScriptedModel
from forerun.types import CENSORING, Draft, Target
from marks import FAMILIES, slow_but
from test_heads import save_heads
from tiny import CONFIGS, LIMIT, VOCAB, build, texts

TOLERANCE = 1e-5  # of the largest value compared: states here reach about 30, in fp32
LAYERS = 5
WRITERS = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h")
"""Modules whose output joins the residual stream."""


def calm(family: str = "llama", layers: int = LAYERS, scale: float = 0.2, **changes: Any) -> Any:
    """A random model whose layers after the first change little: shallow exits are often right."""
    kinds = {"layer_types": ["full_attention"] * layers} if family.startswith("qwen") else {}
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    model = build(family, **{name: layers}, **kinds, **changes)
    for path, weight in model.named_parameters():
        parts = path.split(".")
        deep = any(p.isdecimal() and int(p) > 0 for p in parts)
        if deep and weight.dim() > 1 and parts[-2] in WRITERS:
            weight.data *= scale
    return model


def specbound(model: Any, **how: Any) -> Model:
    drafter = SpecBound(**{"exits": "", **how}).build(torch_rows(model), None)
    assert drafter.target is not None
    return Model(drafter.target, drafter)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    largest = float(wanted.abs().max().clamp(min=1.0))
    torch.testing.assert_close(got, wanted, atol=TOLERANCE * largest, rtol=0)


def plainly(model: Any, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    plain = Model(torch_rows(model), DRAFTERS.make("none").build(None, None))
    return [c.tokens for c in plain.generate(prompts, ignore_eos=True, **how)]


def exit_rows(model: Any) -> Rows:
    return Rows(LayersExecutor(model))


def depths_of(rows: Rows) -> list[list[int]]:
    """Per row the depths that its pending tokens have come to."""
    return [[token.depth for token in row] for row in layers_of(rows)._pending]


class Gain:
    """The logit lens made surer or less sure by a factor per call, so that exits are scripted."""

    def __init__(self, access: LayerAccess, gains: Sequence[float]) -> None:
        self._lens, self._gains = ExitHeads(access), itertools.cycle(gains)
        self.layers, self.tokens = self._lens.layers, None
        self.asked: list[int] = []

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(layer)
        return self._lens.logits(layer, hidden) * next(self._gains)


# Greedy output


@pytest.mark.parametrize("family", slow_but(CONFIGS, FAMILIES.__contains__))
@pytest.mark.parametrize(
    "how",
    [
        {"threshold": 0.0, "layers": 1, "depth": 2, "width": 3},
        {"threshold": 1.01, "depth": 4},
        {"threshold": 0.35, "layers": 1, "depth": 4, "width": 5},
        {"threshold": 0.5, "layers": "1,3", "depth": 4, "anneal": 0.0},
        {"threshold": 0.5, "layers": "1,3", "depth": LAYERS, "width": 5},
        {"threshold": 0.35, "layers": 1, "depth": 4, "width": 3, "bonus": False},
        {"threshold": 0.35, "layers": 1, "depth": LAYERS, "width": 3, "bonus": False},
    ],
    ids=["always", "never", "sometimes", "few", "no bound", "no bonus", "neither"],
)
def test_greedy_equals_plain_in_every_family(family: str, how: dict[str, Any]) -> None:
    model, prompts = calm(family), texts(5, 1, 9, 14)
    fast = specbound(model, **how).generate(
        prompts, controller="fixed(6)", max_new_tokens=24, ignore_eos=True
    )
    assert [c.tokens for c in fast] == plainly(model, prompts, max_new_tokens=24)
    drafted = sum(c.stats.drafted for c in fast)
    assert (drafted == 0) == (how["threshold"] > 1)


@pytest.mark.parametrize(
    "controller",
    ["fixed(0)", "fixed(2)", "gammatune+", "svip", "adaedl(keep=False)", "hf-threshold",
     "cm-asd", "cm-asd(two_pass=True)", "goodput", "bandit", "gammatune+(keep=False)"],
)  # fmt: skip
def test_greedy_equals_plain_with_every_kind_of_controller(controller: str) -> None:
    model, prompts = calm(), texts(3, 8, 6)
    plain = plainly(model, prompts, max_new_tokens=18)
    for bonus in (True, False):
        fast = specbound(model, threshold=0.3, layers=1, depth=4, width=4, bonus=bonus)
        done = fast.generate(prompts, controller=controller, max_new_tokens=18, ignore_eos=True)
        assert [c.tokens for c in done] == plain


@settings(max_examples=8, deadline=None)
@given(
    gains=st.lists(st.sampled_from([0.0, 0.5, 1.0, 5.0, 50.0]), min_size=1, max_size=9),
    threshold=st.sampled_from([0.2, 0.5, 0.9]),
    layers=st.sets(st.integers(1, LAYERS), min_size=1),
    bonus=st.booleans(),
    width=st.integers(1, 5),
    limit=st.integers(0, 6),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    max_rows=st.integers(1, 3),
)
def test_greedy_equals_plain_whatever_the_exits(
    gains: list[float], threshold: float, layers: set[int], bonus: bool, width: int, limit: int,
    lengths: list[int], max_rows: int,
) -> None:  # fmt: skip
    model, prompts = MODEL, texts(*lengths)
    rows = exit_rows(model)
    heads = Gain(layers_of(rows).access, gains)
    drafter = SpecBoundDrafter(rows, heads, tuple(sorted(layers)), threshold, 0.5, width, bonus)
    made = Engine(rows, drafter, max_rows=max_rows)
    fixed, standard = CONTROLLERS.make(f"fixed({limit})"), RULES.make("standard")
    contexts = {
        made.submit(p, Sampling(max_new_tokens=12), fixed, standard): list(p) for p in prompts
    }
    order, rounds = list(contexts), 0
    done: dict[int, Any] = {}
    while len(done) < len(prompts):
        fed = 0
        before = layers_of(rows).work.passes("draft", "verify")
        for event in made.step():
            contexts[event.request] += [p.token for p in event.pieces]
            ended = event.round.stopped_by not in CENSORING or not event.round.drafted
            fed += event.round.drafted + (bonus or ended)
            rounds += 1
            assert event.round.drafted <= min(width, limit)
            if event.completion:
                done[event.request] = event.completion
        # Every token that was fed passed each layer once, wherever it had exited.
        assert layers_of(rows).work.passes("draft", "verify") - before == LAYERS * fed
        alive = [contexts[i] for i in order if i not in done][: len(rows.lengths)]
        check_cache(rows, alive)
        assert not any(depths_of(rows))
    assert [done[i].tokens for i in order] == plainly(model, prompts, max_new_tokens=12)
    assert set(heads.asked) <= layers - {LAYERS}


MODEL = calm()


def check_cache(rows: Rows, contexts: list[list[int]]) -> None:
    """The cache of every row equals that of a plain forward of the same tokens."""
    for row, (context, covered) in enumerate(zip(contexts, rows.lengths, strict=True)):
        assert covered == len(context) - 1
        if not covered:
            continue
        model = rows.executor.module()
        own = forward(model, context[:-1])[cache_argument(model)].layers
        for layer, (keys, values) in layers_of(rows).cache._store.items():
            for ours, theirs in ((keys, own[layer].keys), (values, own[layer].values)):
                close(ours[row, :, :covered], theirs[0])


@torch.inference_mode()
def forward(model: Any, tokens: list[int]) -> Any:
    return model(torch.tensor([tokens]), output_hidden_states=True, use_cache=True)


# The runtime by itself


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_states_keys_and_logits_equal_a_plain_forward(data: st.DataObject) -> None:
    """Random texts, exit depths, stops, rejections: everything equals the model run alone."""
    family = data.draw(st.sampled_from(["llama", "gpt2", "gpt_neox", "phi3"]))
    model = FAMILY_MODELS[family]
    rows, contexts = exit_rows(model), texts(*data.draw(st.lists(st.integers(1, 6), min_size=1,
                                                                 max_size=3)))  # fmt: skip
    rows.read(contexts)
    token, depth = st.integers(3, VOCAB - 1), st.integers(1, LAYERS)
    for _ in range(data.draw(st.integers(1, 3))):
        drafts: list[list[int]] = [[] for _ in contexts]
        before, needed = layers_of(rows).work.passes("draft", "verify"), 0
        climbing = list(range(len(contexts)))
        for _ in range(data.draw(st.integers(0, 4))):
            climbing = [r for r in climbing if data.draw(st.booleans())]
            exits = {row: data.draw(depth) for row in climbing}
            shown = [[*c, *d] for c, d in zip(contexts, drafts, strict=True)]
            seen = Exits(exits)
            asked = [shown[r] if r in exits else None for r in range(len(contexts))]
            layers_of(rows).climb(rows.lengths, asked, range(1, LAYERS), seen)
            for row, layer, hidden in seen.states:
                wanted = forward(model, shown[row]).hidden_states[layer][0, -1]
                close(hidden, wanted)
            for row in climbing:
                depths = depths_of(rows)[row]
                assert depths == sorted(depths, reverse=True)
                assert depths[-1] == min(exits[row], LAYERS - 1)
                drafts[row].append(data.draw(token))
        pending = sum(sum(d) for d in depths_of(rows))
        assert (
            layers_of(rows).work.passes("draft", "verify") - before == pending
        )  # nothing was run twice
        pieces = [[c[-1], *d] for c, d in zip(contexts, drafts, strict=True)]
        for row, piece in enumerate(pieces):  # a controller may drop the last drafted tokens
            del piece[1 + data.draw(st.integers(0, len(piece) - 1)) :]
            needed += LAYERS * len(piece) + sum(depths_of(rows)[row][len(piece) :])
        logits = rows.feed(pieces)
        assert layers_of(rows).work.passes("draft", "verify") - before == needed
        for row, piece in enumerate(pieces):
            wanted = forward(model, contexts[row][:-1] + piece).logits[0, -len(piece) :]
            close(logits[row, : len(piece)], wanted)
            accepted = data.draw(st.integers(0, len(piece) - 1))
            contexts[row] = [*contexts[row], *piece[1 : 1 + accepted], data.draw(token)]
            rows.rollback(row, len(contexts[row]) - 1)
        check_cache(rows, contexts)


FAMILY_MODELS = {f: calm(f) for f in ("llama", "gpt2", "gpt_neox", "phi3")}


class Exits:
    """Rows leave at the depth they are told, and their states are kept."""

    def __init__(self, exits: dict[int, int]) -> None:
        self._exits = exits
        self.states: list[tuple[int, int, torch.Tensor]] = []

    def __call__(self, layer: int, rows: list[int], hidden: torch.Tensor) -> list[bool]:
        self.states += [(r, layer, h.clone()) for r, h in zip(rows, hidden, strict=True)]
        return [self._exits[row] <= layer for row in rows]


def test_layer_passes_of_one_round() -> None:
    """The example of the paper's appendix A: exits at 2, 4, 6 and 2 of (here) 8 layers."""
    rows, context = exit_rows(calm(layers=8)), texts(6)[0]
    rows.read([context])
    for token, exit_at in ((5, 2), (6, 4), (7, 6), (8, 2)):
        layers_of(rows).climb(rows.lengths, [context], range(1, 8), Exits({0: exit_at}))
        context = [*context, token]
    assert depths_of(rows) == [[6, 6, 6, 2]]
    # Layers 3-4 ran for the first two together, 5-6 for the first three.
    assert layers_of(rows).work.calls("draft") == 2 + 4 + 6 + 2
    assert layers_of(rows).work.passes("draft") == 6 + 6 + 6 + 2
    rows.feed([context[rows.lengths[0] :]])
    # The last drafted token starts at the embedding; from layer 3 on it takes the fourth along, and
    # from layer 7 on all.
    assert layers_of(rows).work.calls("verify") == 8
    assert layers_of(rows).work.passes("draft", "verify") == 5 * 8
    assert layers_of(rows).work.passes("project") == 5
    assert rows.lengths == [10]


def test_a_difficult_token_costs_what_plain_decoding_costs() -> None:
    model, prompts = calm(), texts(7)
    fast = specbound(model, threshold=1.01, depth=3)
    how: dict[str, Any] = {"controller": "fixed(9)", "max_new_tokens": 10, "ignore_eos": True}
    (done,) = fast.generate(prompts, **how)
    work = layers_of(fast.target).work
    # The first has no draft, and the tenth no budget for one.
    assert done.stats.stopped_by == {"budget": 2, "difficult": 8}
    assert work.passes("draft", "verify") == work.calls("draft", "verify") == LAYERS * 10
    assert (work.passes("draft"), work.passes("exit"), work.passes("project")) == (8 * 3, 8 * 2, 10)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 1.01])
def test_statistics_count_layer_passes_of_each_request(threshold: float) -> None:
    """Batched or alone; what is committed passes each layer once, what is rejected at most so."""
    fast = specbound(calm(), threshold=threshold, depth=3)
    how: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "controller": "fixed(3)"}
    together = fast.generate(texts(7, 5, 9), **how)
    work = layers_of(fast.target).work
    assert sum(c.stats.layer_passes or 0 for c in together) == work.passes("draft", "verify")
    assert sum(c.stats.exit_projections or 0 for c in together) == work.passes("exit")
    for prompt, done in zip(texts(7, 5, 9), together, strict=True):
        stats = fast.generate([prompt], **how)[0].stats
        assert stats.layer_passes == done.stats.layer_passes
        assert stats.exit_projections == done.stats.exit_projections
        assert stats.layer_passes == LAYERS * (stats.drafted + stats.rounds)
        for r in done.rounds:
            assert r.layer_passes == LAYERS * (r.drafted + 1)
            assert r.to_json()["layer_passes"] == r.layer_passes
    plain = fast.generate(texts(7), plain=True, max_new_tokens=3)[0]
    assert plain.stats.layer_passes is None


def test_without_a_depth_bound_no_token_is_difficult() -> None:
    """One that no exit is sure of is decoded by all layers, and drafting goes on."""
    prompts = texts(7)
    fast = specbound(calm(), threshold=1.01, layers="2", depth=LAYERS, width=4)
    (done,) = fast.generate(prompts, controller="fixed(9)", max_new_tokens=11, ignore_eos=True)
    work = layers_of(fast.target).work
    # One plain token, two full rounds; drafted tokens are the target's own, and judged by it again.
    assert [(r.drafted, r.accepted) for r in done.rounds] == [(0, 0), (4, 4), (4, 4)]
    assert set(done.stats.stopped_by) == {"budget", "exhausted"}
    assert work.passes("draft", "verify") == work.calls("draft", "verify") == LAYERS * 11
    assert (work.passes("exit"), work.passes("project")) == (8, 8 + 11)
    assert [c.tokens for c in (done,)] == plainly(calm(), prompts, max_new_tokens=11)


def test_a_round_without_bonus_feeds_no_more_than_was_drafted() -> None:
    prompts, how = texts(7), {"max_new_tokens": 13, "ignore_eos": True, "controller": "fixed(9)"}
    settings = {"threshold": 1.01, "layers": "2", "depth": LAYERS, "width": 4}
    fast = specbound(calm(), **settings, bonus=False)
    (done,) = fast.generate(prompts, **how)
    assert [r.committed for r in done.rounds] == [1, 4, 4, 3, 1]
    assert layers_of(fast.target).work.passes("draft", "verify") == LAYERS * 13
    assert [done.tokens] == plainly(calm(), prompts, max_new_tokens=13)
    assert specbound(calm(), **settings).generate(prompts, **how)[0].stats.rounds == 4
    # A controller that ends a draft counts on the target's own token behind it.
    (done,) = fast.generate(prompts, **how | {"controller": "fixed(3)"})
    assert [r.drafted for r in done.rounds] == [0, 3, 3, 3]
    assert [r.committed for r in done.rounds] == [1, 4, 4, 4]
    assert [done.tokens] == plainly(calm(), prompts, max_new_tokens=13)
    # A difficult token was fed, and is decoded.
    fast = specbound(calm(), threshold=1.01, depth=3, bonus=False)
    assert fast.generate(prompts, **how)[0].stats.rounds == 13


def test_a_known_token_may_be_climbed_again() -> None:
    rows, context = exit_rows(MODEL), texts(5)[0]
    rows.read([context])
    layers_of(rows).climb(rows.lengths, [context], [1, 2], Exits({0: 2}))
    layers_of(rows).climb(rows.lengths, [context], [1], Exits({0: 1}))
    assert depths_of(rows) == [[1]]
    got = rows.feed([context[-1:]])[0, 0]
    close(got, forward(MODEL, context).logits[0, -1])


def test_bfloat16_states_are_close() -> None:
    model = calm(scale=0.1).to(torch.bfloat16)
    rows, contexts = exit_rows(model), texts(4, 11)
    rows.read(contexts)
    layers_of(rows).climb(rows.lengths, contexts, [1, 2, 3], Exits({0: 2, 1: 3}))
    got = rows.feed([[*c[-1:], *more] for c, more in zip(contexts, ([], [7]), strict=True)])
    for logits, tokens in ((got[0, 0], contexts[0]), (got[1, 1], [*contexts[1], 7])):
        wanted = forward(model, tokens).logits[0, -1]
        torch.testing.assert_close(logits, wanted, atol=0.3, rtol=0.05)


@pytest.mark.parametrize("wanted", [[1, 0, 1], [0, 0, 0]])
def test_feeding_some_rows_only(wanted: list[int]) -> None:
    rows, contexts = exit_rows(MODEL), texts(5, 3, 7)
    rows.read(contexts)
    layers_of(rows).climb(rows.lengths, [contexts[0], None, contexts[2]], [2], Exits({0: 2, 2: 2}))
    got = rows.feed([contexts[0][-1:], [], [contexts[2][-1], 9]], wanted)
    assert rows.lengths == [5, 2, 8]
    if any(wanted):
        for row, tokens in ((0, contexts[0]), (2, [*contexts[2], 9])):
            wanted = forward(MODEL, tokens).logits[0, -1]
            close(got[row, 0], wanted)
    assert rows.feed([[], [], []]).numel() == 0


def test_the_context_is_not_exceeded() -> None:
    rows, context = exit_rows(calm("gpt2")), texts(LIMIT)[0]
    rows.read([context])
    layers_of(rows).climb(rows.lengths, [context], [1], Exits({0: 1}))
    with pytest.raises(PromptError, match=f"{LIMIT + 1} tokens do not fit"):
        layers_of(rows).climb(rows.lengths, [[*context, 3]], [1], Exits({0: 1}))
    with pytest.raises(PromptError, match=f"{LIMIT + 1} tokens do not fit"):
        rows.feed([[context[-1], 3]])
    fast = specbound(calm("gpt2"), threshold=0.0, width=4)
    prompt = context[: LIMIT - 7]
    done = fast.generate(prompt, controller="fixed(4)", max_new_tokens=50, ignore_eos=True)
    assert (done.finish_reason, len(done.tokens)) == ("context", 7)


# Bounds and stops


def test_bounds_and_why_drafting_stopped() -> None:
    model, prompts = calm(), texts(6)

    def stops(controller: str, **how: Any) -> dict[str, int]:
        fast = specbound(model, **how)
        done = fast.generate(prompts, controller=controller, max_new_tokens=20, ignore_eos=True)[0]
        assert max(r.drafted for r in done.rounds) <= how.get("width", 6)
        return {k: n for k, n in done.stats.stopped_by.items() if n and k != "budget"}

    assert stops("fixed(9)", threshold=0.0, width=3).keys() == {"exhausted"}
    assert stops("fixed(2)", threshold=0.0, width=3).keys() == {"limit"}
    assert stops("fixed(9)", threshold=1.01, width=3).keys() == {"difficult"}
    assert stops("fixed(0)", threshold=0.0).keys() == {"limit"}


def test_annealing_makes_shallow_layers_less_sure() -> None:
    assert temperature(12, 12, 0.7) == 1.0
    assert temperature(3, 12, 0.8) == pytest.approx(1.6)

    def drafted(anneal: float) -> int:
        fast = specbound(MODEL, threshold=0.4, anneal=anneal, layers=1, depth=4)
        done = fast.generate(texts(6, 4), controller="fixed(6)", max_new_tokens=20, ignore_eos=True)
        return sum(c.stats.drafted for c in done)

    assert drafted(0.0) > drafted(1.0) > drafted(1e6) == 0


@torch.inference_mode()
def test_the_draft_is_the_exit_heads_distribution_without_annealing() -> None:
    fast = specbound(MODEL, threshold=0.0, anneal=2.0, layers="2", depth=3)
    (context,) = texts(6)
    fast.target.read([context])
    proposal = fast.drafter.step([context], None)
    hidden = forward(MODEL, context).hidden_states[2][0, -1]
    wanted = ExitHeads(fast.drafter.executor.access).logits(2, hidden)  # type: ignore[attr-defined]
    assert proposal.logits is not None
    close(proposal.logits[0], wanted)
    assert proposal.ended == [None]


def test_heads_of_few_tokens_draft_those_alone() -> None:
    rows = exit_rows(MODEL)
    few = ExitHeads(layers_of(rows).access, tokens=torch.tensor([3, 8, 40]))
    drafter = SpecBoundDrafter(rows, few, (2,), 0.0, 0.0, 4)
    contexts = [*texts(6, 9)]
    rows.read(contexts)
    proposal = drafter.step(contexts, None)
    assert isinstance(proposal.logits, torch.Tensor)
    for context, logits in zip(contexts, proposal.logits, strict=True):
        hidden = forward(MODEL, context).hidden_states[2][0, -1]
        wanted = ExitHeads(layers_of(rows).access).logits(2, hidden).detach()
        assert logits.isfinite().nonzero().flatten().tolist() == [3, 8, 40]
        close(logits[[3, 8, 40]], wanted[[3, 8, 40]])
    rows.keep([])
    fast = Model(rows, drafter)
    got = fast.generate(texts(6, 9), controller="fixed(3)", max_new_tokens=12, ignore_eos=True)
    assert [c.tokens for c in got] == plainly(MODEL, texts(6, 9), max_new_tokens=12)


# Sampling


def branches(drafter: SpecBoundDrafter, context: list[int], width: int) -> Iterator[Any]:
    """Every draft the sampler may produce: `(tokens, probability, draft logits)`."""

    def walk(tokens: list[int], weight: float, logits: list[torch.Tensor]) -> Iterator[Any]:
        drafter.rows.rollback(0, len(context) - 1)
        ended = len(tokens) == width
        if not ended:
            for i in range(len(tokens) + 1):  # this branch from its start
                proposal = drafter.step([[*context, *tokens[:i]]], None)
            assert proposal.ended is not None
            ended = proposal.ended[0] is not None
        if ended:
            yield tokens, weight, logits
            return
        assert proposal.logits is not None
        for token, p in enumerate(proposal.logits[0].double().softmax(-1).tolist()):
            if p > 0:
                yield from walk([*tokens, token], weight * p, [*logits, proposal.logits[0]])

    yield from walk([], 1.0, [])


@pytest.mark.parametrize(
    ("threshold", "drafted"), [(0.0, {2}), (0.6, {1, 2}), (0.7, {1, 2}), (1.01, {0})]
)
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("few", [False, True])
def test_sampling_is_lossless_by_enumeration(
    threshold: float, drafted: set[int], rule: str, few: bool
) -> None:
    """All drafts of up to two tokens over a vocabulary of five, and every way to judge each.

    Whatever was committed before a position, the token there has the target's distribution; also
    where it depends on the first drafted token whether the second is difficult.
    """
    vocab, width = 5, 2
    model = calm(layers=2, vocab_size=vocab, pad_token_id=None, eos_token_id=None, scale=2.0)
    fast = specbound(model, threshold=threshold, anneal=0.3, depth=1, width=width)
    rows, drafter, context = fast.target, fast.drafter, [0, 2, 0]
    assert isinstance(drafter, SpecBoundDrafter)
    if few:
        drafter.heads = ExitHeads(drafter.executor.access, tokens=torch.tensor([0, 2, 3]))
    rows.read([context])
    law: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}
    lengths = set()
    for tokens, weight, draft_logits in branches(drafter, context, width):
        rows.rollback(0, len(context) - 1)
        for i in range(len(tokens) + 1 if len(tokens) < width else width):
            drafter.step([[*context, *tokens[:i]]], None)
        k = len(tokens)
        lengths.add(k)
        draft = Draft(
            torch.tensor([tokens], dtype=torch.long).view(1, k),
            torch.tensor([k]),
            torch.stack(draft_logits)[None].double().softmax(-1) if k else None,
        )
        target = Target(rows.feed([[context[-1], *tokens]]).double(), torch.tensor([False]))
        for accepted, p, following in ways(RULES.make(rule), draft, target):
            for i in range(accepted):
                spread = np.eye(vocab)[tokens[i]]
                law[prefix] = law.get(prefix := tuple(tokens[:i]), 0) + weight * p * spread
            prefix = tuple(tokens[:accepted])
            law[prefix] = law.get(prefix, 0) + weight * p * following
    for prefix, mass in law.items():
        wanted = forward(model, [*context, *prefix]).logits[0, -1].double().softmax(-1).numpy()
        np.testing.assert_allclose(mass / mass.sum(), wanted, atol=2e-6)
    assert law[()].sum() == pytest.approx(1, abs=1e-9)
    assert lengths == drafted


def ways(rule: Any, draft: Draft, target: Target) -> Iterator[Any]:
    """`(accepted, probability, distribution of the next token)` of every way to judge a draft.

    Coins 0 and 1 force how much is accepted; how likely that is, is what the rule reports.
    """
    k = draft.tokens.shape[1]
    for accepted in range(k + 1):
        coins = torch.full((1, k + 1), 0.5, dtype=torch.float64)
        coins[0, :accepted], coins[0, accepted:k] = 0.0, 1.0 - 1e-12
        verdict = rule.judge(draft, target, coins)
        prob = verdict.accept_prob[0].double().tolist()
        reach = float(np.prod(prob[:accepted])) * (1 - prob[accepted] if accepted < k else 1.0)
        if reach > 1e-9:
            assert int(verdict.accepted[0]) == accepted
            assert verdict.next_probs is not None
            yield accepted, reach, verdict.next_probs[0].double().numpy()


def test_sampled_text_has_the_targets_distribution() -> None:
    model = four_tokens()
    done = drawn(model, specbound(model, threshold=0.45, anneal=0.2, depth=1, width=2))
    stops = {k for c in done for k, n in c.stats.stopped_by.items() if n}
    assert {"difficult", "budget"} <= stops
    assert 0 < sum(c.stats.accepted for c in done) < sum(c.stats.drafted for c in done)


def four_tokens() -> Any:
    return calm(layers=2, vocab_size=4, pad_token_id=None, eos_token_id=None, scale=2.0)


def drawn(model: Any, fast: Model, length: int = 3) -> list[Any]:
    """Three tokens of a vocabulary of four, 1 500 draws, through the engine in batches.

    The total-variation distance D of an empirical distribution over n = 4³ outcomes from N draws
    satisfies P(D > E[D] + t) ≤ exp(−2 N t²) with E[D] ≤ ½ √(n / N) (McDiarmid). With t = 0.08 the
    false-alarm probability is below 5e-9.
    """
    vocab, draws = 4, 1500
    done = fast.generate(
        [[1, 3]] * draws, controller="fixed(3)", temperature=1.3, top_p=0.95, max_new_tokens=length,
        batch_size=250, ignore_eos=True, sampling=None,
    )  # fmt: skip
    counts = np.zeros((vocab,) * length)
    for completion in done:
        counts[tuple(completion.tokens)] += 1
    exact = {(): 1.0}
    for _ in range(length):
        exact = {
            (*text, token): prob * share
            for text, prob in exact.items()
            for token, share in enumerate(
                nucleus(forward(model, [1, 3, *text]).logits[0, -1] / 1.3, 0.95)
            )
        }
    assert sum(exact.values()) == pytest.approx(1)
    away = 0.5 * sum(abs(counts[text] / draws - prob) for text, prob in exact.items())
    assert away < 0.5 * np.sqrt(vocab**length / draws) + 0.08
    return done


def nucleus(logits: torch.Tensor, mass: float) -> list[float]:
    probs, order = logits.double().softmax(-1).sort(descending=True)
    kept = torch.where(probs.cumsum(-1) - probs < mass, probs, 0.0)
    return torch.zeros_like(probs).scatter(0, order, kept / kept.sum()).tolist()


def test_a_sampled_row_does_not_depend_on_its_neighbours() -> None:
    fast = specbound(MODEL, threshold=0.3, layers=1, depth=4, width=4)
    how: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 20, "ignore_eos": True}
    for controller in ("fixed(5)", "cm-asd(two_pass=True)", "svip"):
        together = fast.generate(texts(4, 9, 2), controller=controller, **how)
        for prompt, completion in zip(texts(4, 9, 2), together, strict=True):
            alone = fast.generate(prompt, controller=controller, **how)
            assert alone.tokens == completion.tokens
            assert [r.stopped_by for r in alone.rounds] == [r.stopped_by for r in completion.rounds]


# Interruption


def test_a_consumer_may_walk_away_and_rows_may_be_cancelled() -> None:
    prompts = texts(5, 8, 3)
    wanted = plainly(MODEL, prompts, max_new_tokens=20)
    fast = specbound(MODEL, threshold=0.3, layers=1, depth=4)
    how: dict[str, Any] = {"controller": "fixed(6)", "max_new_tokens": 20, "ignore_eos": True}
    for stop_after in (1, 4, 7):
        stream = fast.stream(prompts, **how)
        for _ in range(stop_after):
            next(stream)
        stream.close()
        assert fast.target.lengths == []
        assert [c.tokens for c in fast.generate(prompts, **how)] == wanted

    made = Engine(fast.target, fast.drafter)
    fixed, exact = CONTROLLERS.make("fixed(6)"), RULES.make("exact")
    ids = [
        made.submit(p, Sampling(max_new_tokens=20, ignore_eos=True), fixed, exact) for p in prompts
    ]
    made.step()
    assert made.cancel(ids[1]) is not None
    done = {e.request: e.completion.tokens for e in made.run() if e.completion}
    assert done == {ids[0]: wanted[0], ids[2]: wanted[2]}


def test_an_error_in_the_middle_of_a_climb_leaves_the_model_usable() -> None:
    class Breaking(Gain):
        def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
            if len(self.asked) == 11:
                self.asked.append(0)
                raise RuntimeError("out of memory")
            return super().logits(layer, hidden)

    rows = exit_rows(MODEL)
    heads = Breaking(layers_of(rows).access, [9.0, 0.1, 1.0])
    fast = Model(rows, SpecBoundDrafter(rows, heads, (1, 3), 0.5, 0.5, 4))
    how: dict[str, Any] = {"controller": "fixed(6)", "max_new_tokens": 16, "ignore_eos": True}
    failed = fast.generate(texts(5, 8), **how)
    assert ["out of memory" in str(c.error) for c in failed] == [True, True]
    assert rows.lengths == depths_of(rows) == []
    got = fast.generate(texts(5, 8), **how)
    assert [c.tokens for c in got] == plainly(MODEL, texts(5, 8), max_new_tokens=16)


# Settings and loading


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("specbound(threshold=-0.1)", "specbound threshold must be a number"),
        ("specbound(anneal=-1)", "specbound anneal must be a number"),
        ("specbound(width=0)", "specbound width must be a whole number of at least 1"),
        ("specbound(depth=0)", "specbound depth must be a whole number"),
        ("specbound(layers=0)", "specbound layers must be a whole number"),
        ("specbound(layers='2,x')", "specbound layers must be a whole number or text like"),
        ("specbound(bonus=1)", "specbound bonus must be true or false"),
        ("specbound(exits=3)", "specbound exits must be a folder"),
        ("specbound(deepth=3)", "did you mean 'depth'"),
    ],
)
def test_settings_out_of_range(spec: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        DRAFTERS.make(spec)


@pytest.mark.parametrize(
    ("how", "layers"),
    [
        ({}, (4, 2, 6)),
        ({"depth": 5}, (1, 3, 5)),
        ({"depth": 7, "layers": 3}, (1, 4, 7)),
        ({"layers": "5, 3,11"}, (3, 5)),
        ({"depth": 11, "layers": "11"}, (11,)),
        ({"depth": 12, "layers": "5,8"}, (5, 8, 12)),
        ({"depth": 12, "layers": 5}, (2, 7, 12)),
    ],
)
def test_exit_layers_of_twelve(how: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert SpecBound(**how).exit_layers(12, tuple(range(1, 12))) == tuple(sorted(layers))


def test_exit_layers_that_are_not_there() -> None:
    with pytest.raises(SettingError, match=r"depth must be between 1 and the target's 5 layers"):
        SpecBound(depth=6).exit_layers(5, (1, 2, 3, 4))
    with pytest.raises(SettingError, match=r"no exit head at layers \[9\]"):
        SpecBound(layers="2,9").exit_layers(5, (1, 2, 3, 4))
    with pytest.raises(SettingError, match="no exit layer up to depth 2; raise depth"):
        SpecBound(layers="3", depth=2).exit_layers(5, (1, 2, 3, 4))
    assert SpecBound().exit_layers(1, ()) == (1,)
    assert SpecBound(exits="somewhere").exit_layers(12, (1, 3, 5, 7)) == (1, 3, 5)


def test_loading_by_name(tmp_path: Any) -> None:
    model = calm()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,'
        '"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{"type":"WordLevel",'
        '"vocab":{"a":0,"b":1},"unk_token":"a"}}'
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class":"PreTrainedTokenizerFast"}')
    loaded = forerun.model.load(str(tmp_path), "specbound(threshold=0.3,depth=4,layers=1,exits='')")
    assert isinstance(loaded.target.executor, LayersExecutor)
    assert loaded.drafter.target is loaded.target
    prompts, how = texts(4, 7), {"max_new_tokens": 12, "ignore_eos": True}
    wanted = plainly(model, prompts, max_new_tokens=12)
    assert [c.tokens for c in loaded.generate(prompts, **how)] == wanted
    assert [c.tokens for c in loaded.generate(prompts, plain=True, **how)] == wanted
    assert loaded.drafter.seconds > 0

    heads, named = tmp_path / "heads", f"exits='{tmp_path / 'heads'}'"
    access = layers_of(loaded.target).access
    weights = {
        layer: {"weight": torch.zeros(32, 32), "bias": torch.zeros(32), "scale": torch.ones(1)}
        for layer in (1, 3, 4)
    }
    stored = {"threshold": 0.25, "anneal": 0.0, "depth": 4, "width": 3, "layers": "1,4"}
    save_heads(ExitHeads(access, weights, tuned=stored), heads)
    tuned = forerun.model.load(str(tmp_path), f"specbound({named})")
    assert tuned.drafter.layers == (1, 4)  # type: ignore[attr-defined]
    assert (tuned.drafter.threshold, tuned.drafter.width) == (0.25, 3)  # type: ignore[attr-defined]
    assert [c.tokens for c in tuned.generate(prompts, **how)] == wanted
    own = forerun.model.load(str(tmp_path), f"specbound(threshold=0.6,depth=3,{named})")
    assert own.drafter.layers == (1, 3)  # type: ignore[attr-defined]
    assert (own.drafter.threshold, own.drafter.width) == (0.6, 3)  # type: ignore[attr-defined]
    save_heads(ExitHeads(access, weights, tuned={"treshold": 2}), heads)
    with pytest.raises(SettingError, match="the settings kept in"):
        forerun.model.load(str(tmp_path), f"specbound({named})")
    heads.rename(tmp_path / "exits")
    save_heads(ExitHeads(access, weights), tmp_path / "exits")
    assert forerun.model.load(str(tmp_path), "specbound(depth=4)").drafter.layers == (1, 3, 4)  # type: ignore[attr-defined]
    assert DRAFTERS.text(SpecBound(depth=4, layers="2,4")) == "specbound(depth=4,layers='2,4')"


def test_targets_that_cannot_draft_for_themselves() -> None:
    with pytest.raises(SettingError, match="runs on torch"):
        SpecBound(exits="").build(Rows(ScriptedModel(torch.eye(3))), None)
    drafter = SpecBound(exits="").build(torch_rows(MODEL), None)
    with pytest.raises(SettingError, match=r"verify with that one: Engine\(drafter\.target"):
        Engine(torch_rows(MODEL), drafter)
