"""The sweep: what is replayed is what decoding does, count for count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters import DRAFTERS
from forerun.drafters.specbound import SpecBound, SpecBoundDrafter
from forerun.engine import Sampling
from forerun.errors import SettingError
from forerun.lab.exits import sweep
from forerun.lab.exits.exit_replay import ANNEALS, ExitTrace, OwnText, Setting
from forerun.lab.exits.sweep import ExitSearch, Sweep, _fit, untuned
from forerun.model import Model
from forerun.runtime import Rows, torch_rows
from forerun.runtime.exits import LayersExecutor, Work, layers_of
from forerun.runtime.heads import ExitHeads
from forerun.runtime.layers import LayerAccess
from tiny import build, texts

LAYERS = 6
EXITS = tuple(range(1, LAYERS))


def calm(scale: float = 0.25) -> Any:
    """A random model whose layers after the first change little: shallow exits are often right."""
    model = build("llama", num_hidden_layers=LAYERS)
    for path, weight in model.named_parameters():
        if ".0." not in path and path.split(".")[-2] in ("o_proj", "down_proj"):
            weight.data *= scale
    return model


MODEL = calm()
PROMPTS = texts(5, 1, 9, 14)


def light(access: LayerAccess) -> ExitHeads:
    """Heads with random corrections at some layers."""
    width = access.width
    own = {
        layer: {
            "weight": 0.05 * torch.randn(width, width),
            "bias": torch.zeros(width),
            "scale": torch.tensor([1.0 + 0.1 * layer]),
        }
        for layer in (1, 2, 4)
    }
    return ExitHeads(access, own)


def written(sampling: Sampling, eos: frozenset[int] = frozenset()) -> list[OwnText]:
    plain = Model(torch_rows(MODEL), DRAFTERS.make("none").build(None, None))
    plain.eos = eos
    return [
        OwnText(p, plain.generate([p], sampling=sampling)[0].tokens, sampling, eos) for p in PROMPTS
    ]


def live(setting: Setting, text: OwnText, heads: Any = None) -> tuple[Work, list[tuple[int, int]]]:
    """What decoding takes: the model's counters, and drafted and accepted of every round."""
    rows = Rows(LayersExecutor(MODEL))
    drafter = SpecBoundDrafter(
        rows, heads or ExitHeads(layers_of(rows).access), setting.layers, setting.threshold,
        setting.anneal, setting.width, setting.bonus,
    )  # fmt: skip
    model = Model(rows, drafter)
    model.eos = text.eos
    done = model.generate([text.prompt], controller=setting.controller, sampling=text.sampling)[0]
    assert done.tokens == text.output
    return layers_of(rows).work, [(r.drafted, r.accepted) for r in done.rounds]


SAMPLINGS = [
    Sampling(max_new_tokens=24, ignore_eos=True),
    Sampling(max_new_tokens=24, repetition_penalty=1.5, min_new_tokens=6),
    Sampling(max_new_tokens=24, ignore_eos=True, temperature=1.0, top_k=12, seed=5),
]
EOS = frozenset(range(3, 30))
"""So many tokens end the text that drafts, right and wrong ones, run into them."""


def recording(
    outputs: list[OwnText], heads: Any = None, layers: tuple[int, ...] = EXITS
) -> ExitTrace:
    return ExitTrace.record(heads or ExitHeads(LayerAccess(MODEL)), layers, outputs)


@pytest.fixture(scope="module", params=SAMPLINGS, ids=["greedy", "penalties, end", "drawn"])
def recorded(request: pytest.FixtureRequest) -> ExitTrace:
    eos = frozenset() if request.param.ignore_eos else EOS
    return recording(written(request.param, eos))


made = st.builds(
    Setting,
    layers=st.sets(st.sampled_from(EXITS), min_size=1).map(lambda s: tuple(sorted(s))),
    threshold=st.sampled_from([0.0, 0.15, 0.3, 0.6, 0.85, 1.01]),
    anneal=st.sampled_from(ANNEALS),
    width=st.integers(1, 7),
    bonus=st.booleans(),
)


@settings(max_examples=8, deadline=None)
@given(setting=made, text=st.integers(0, len(PROMPTS) - 1))
def test_rounds_are_those_of_decoding(recorded: ExitTrace, setting: Setting, text: int) -> None:
    """Every counter, too, of a text in which wrong tokens ended drafts of full width, so that none
    was followed by what it led to. Without its bonus token a draft cut by the budget may take one
    round more."""
    work, rounds = live(setting, recorded.texts[text])
    counts = {name: int(values[text]) for name, values in recorded.counts(setting).items()}
    assert 0 <= len(rounds) - counts["rounds"] <= (not setting.bonus)
    apart = any(
        drafted > accepted and not drafted == accepted + 1 == setting.width
        for drafted, accepted in rounds
    )
    if setting.bonus and not apart:
        assert counts == {
            "layers": work.calls("draft", "verify"), "exits": work.calls("exit"),
            "steps": work.passes("step"), "rounds": len(rounds),
        }  # fmt: skip


def test_what_follows_a_wrong_token_is_about_right(recorded: ExitTrace) -> None:
    for setting in (Setting((1, 4), 0.3, 0.5, 4), Setting((2, 3), 0.15, 0.0, 6)):
        ours, theirs = recorded.counts(setting), [live(setting, t)[0] for t in recorded.texts]
        for name, parts in (("layers", ("draft", "verify")), ("exits", ("exit",))):
            assert ours[name].sum() == pytest.approx(sum(w.calls(*parts) for w in theirs), rel=0.25)


def test_trained_heads_that_know_some_tokens_only() -> None:
    few = light(LayerAccess(MODEL))
    heads = ExitHeads(LayerAccess(MODEL), few.weights, tokens=torch.arange(40, 90))
    recorded = recording(written(SAMPLINGS[0]), heads, heads.layers)
    for setting in (Setting((1, 4), 0.3, 0.5, 4), Setting((2,), 0.0, 0.0, 3)):
        rounds = recorded.counts(setting)["rounds"].tolist()
        assert rounds == [len(live(setting, text, heads)[1]) for text in recorded.texts]


def test_what_cannot_be_replayed_is_said(recorded: ExitTrace) -> None:
    with pytest.raises(SettingError, match="cannot be replayed"):
        recorded.counts(Setting((1, LAYERS), 0.5, 0.5, 3))
    with pytest.raises(SettingError, match="cannot be replayed"):
        recorded.counts(Setting((1,), 0.5, 0.1, 3))


def costs(**changed: float) -> dict[str, float]:
    """A machine where a layer takes a second, an exit and a projection half of one."""
    usual = {"layers": 1.0, "exits": 0.5, "steps": 0.0, "rounds": 0.5, "plain": LAYERS + 0.5}
    return usual | changed


def test_costs_weigh_counts(recorded: ExitTrace) -> None:
    setting = Setting((1, 4), 0.3, 0.5, 4)
    counts = {name: values.sum() for name, values in recorded.counts(setting).items()}
    parts = ExitSearch(recorded, costs(steps=0.25)).parts(setting)
    own = [counts["layers"], counts["exits"] / 2, counts["steps"] / 4, counts["rounds"] / 2]
    assert list(parts.values()) == pytest.approx([seconds / sum(own) for seconds in own])


def test_fixed_costs_are_found_in_spite_of_disturbance() -> None:
    made = np.random.default_rng(1)
    counts = [[float(made.integers(1, 4)), float(made.integers(0, 5)), 1.0] for _ in range(80)]
    seconds = [3.0 * a + 0.5 * b + 2.0 for a, b, _ in counts]
    seconds[7] += 50.0
    fitted = _fit(list(zip(counts, seconds, strict=True)))
    assert fitted == pytest.approx([3.0, 0.5, 2.0])
    less = [value - 3.0 * (a + 1.0) for value, (a, *_) in zip(seconds, counts, strict=True)]
    assert min(_fit(list(zip(counts, less, strict=True)))) == 0.0


def test_the_search_gives_the_best_of_its_trials(recorded: ExitTrace) -> None:
    search = ExitSearch(recorded, costs(), width=3)
    best = search.sweep(25, seed=3)
    assert search.score(best) == max(search.scores.values()) == search.score(search.best)
    assert search.top(3)[0] == best
    assert len({(s.layers, s.width) for s in search.top(5)}) == 5
    again = ExitSearch(recorded, costs(), width=3)
    assert again.sweep(25, seed=3) == best
    assert again.scores == search.scores


def test_no_draft_costs_what_plain_decoding_does_and_the_exit_asked(recorded: ExitTrace) -> None:
    never = Setting((2,), 1.01, 0.0, 3)
    search = ExitSearch(recorded, costs(exits=0.0))
    assert search.score(never) == pytest.approx(1.0)
    asked = ExitSearch(recorded, costs(exits=1.0))
    assert asked.score(never) < 1.0


def test_sensitivity_changes_one_thing(recorded: ExitTrace) -> None:
    search = ExitSearch(recorded, costs(), width=4)
    of = Setting((2, 4), 0.3, 0.5, 2)
    around = search.sensitivity(of)
    assert list(around) == ["threshold", "anneal", "depth", "width", "layers", "bonus"]
    score = round(search.score(of), 4)
    assert dict(around["threshold"])[0.3] == dict(around["anneal"])[0.5] == score
    assert dict(around["depth"])[4] == dict(around["width"])[2] == score
    assert [v for v, _ in around["layers"]] == ["+1", "-2", "+3", "-4", "+5"]
    assert dict(around["depth"])[1] == round(search.score(replace(of, layers=(1,))), 4)


@pytest.mark.parametrize("trained", [False, True])
def test_untuned_is_what_the_drafter_does_without_settings(tmp_path: Any, trained: bool) -> None:
    from test_heads import save_heads

    target = torch_rows(MODEL)
    access = LayerAccess(MODEL)
    where = str(save_heads(light(access), tmp_path)) if trained else ""
    built: Any = SpecBound(exits=where).build(target, None)
    layers = light(access).layers if trained else EXITS
    assert untuned(layers, LAYERS, trained) == Setting(
        built.layers, built.threshold, built.anneal, built.width
    )
    assert untuned((5,), LAYERS, True) is None


def test_settings_are_specs_that_load() -> None:
    setting = Setting((1, 4), 0.35, 0.75, 5)
    made: Any = DRAFTERS.make(setting.spec(""))
    built = made.build(torch_rows(MODEL), None)
    assert (built.layers, built.threshold, built.anneal, built.width) == ((1, 4), 0.35, 0.75, 5)
    assert SpecBound(**setting.settings()) == SpecBound(0.35, 0.75, 4, 5, "1,4")


def test_measured_and_confirmed_on_a_tiny_model() -> None:
    model = Model(torch_rows(MODEL), DRAFTERS.make("none").build(None, None))
    short = replace(SAMPLINGS[0], max_new_tokens=10)
    made = list(sweep.written(model, [(p, short) for p in PROMPTS[:2]]))
    assert [t.output for t in made] == [t.output for t in written(short)[:2]]
    tried = Sweep(model, "", width=4)
    measured = tried.measure(EXITS, made)
    assert measured["layers"] + measured["rounds"] > 0 < measured["plain"]
    search = ExitSearch(recording(made), measured, 4)
    settings = [Setting((1,), 0.2, 0.0, 4), Setting((5,), 0.0, 0.0, 2)]
    live_ = tried.confirm(search, settings)
    assert set(live_) == set(settings)
    fastest, other = live_.values()
    assert fastest["speedup"]["mean"] >= other["speedup"]["mean"]
    for setting, c in live_.items():
        assert c["same"] == 2
        assert c["speedup"]["low"] <= c["speedup"]["mean"] <= c["speedup"]["high"]
        rounds = search.exits.counts(setting)["rounds"].sum()
        per_round = sum(len(t.output) for t in made) / rounds
        assert c["tokens_per_round"] == pytest.approx(per_round, abs=1e-4)
