"""Drafting by the target's own layers otherwise than SpecBound: Kangaroo's adapter, AdaDecode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from forerun.drafters import DRAFTERS
from forerun.drafters.adadecode import AdaDecode
from forerun.drafters.kangaroo import Kangaroo, KangarooDrafter
from forerun.engine.meter import Lap, Meter
from forerun.errors import ForerunWarning, ModelError, SettingError
from forerun.model import Model
from forerun.runtime import Rows, torch_rows
from forerun.runtime.drafts import About, fingerprint, save_draft
from forerun.runtime.exits import Adapter, LayersExecutor, layers_of
from forerun.runtime.layers import LayerAccess, Placed
from forerun.testing import ScriptedModel
from marks import FAMILIES, slow_but
from sourced import save_folders
from test_specbound import LAYERS, calm, close, drawn, forward, four_tokens, plainly
from tiny import CONFIGS, LIMIT, VOCAB, build, texts

MODEL = calm()


def adapter_of(model: Any, depth: int = 2) -> Adapter:
    """One that is not as it began."""
    adapter = Adapter(LayerAccess(model), depth)
    torch.manual_seed(2)
    for value in adapter.parameters():
        value.data += 0.05 * value.std().nan_to_num(1.0) * torch.randn_like(value)
    return adapter


def rows_of(model: Any, depth: int = 2) -> Rows:
    return Rows(LayersExecutor(model, adapter_of(model, depth)))


def kangaroo(
    model: Any, threshold: float = 0.3, most: int = 4, depth: int = 2, keep: bool = True
) -> Model:
    rows = rows_of(model, depth)
    return Model(rows, KangarooDrafter(rows, threshold, most, keep))


@torch.inference_mode()
def alone(model: Any, adapter: Adapter, text: list[int]) -> torch.Tensor:
    """`(n, V)` logits of the adapter over a whole text, without any cache."""
    access = LayerAccess(model)
    hidden = forward(model, text).hidden_states[adapter.depth]
    positions = torch.arange(len(text)).unsqueeze(0)
    mask = torch.full((len(text), len(text)), torch.finfo(torch.float32).min).triu(1)
    return access.unembed(adapter(access, hidden, Placed(mask[None, None], positions)))[0]


@pytest.mark.parametrize("family", slow_but(CONFIGS, FAMILIES.__contains__))
@pytest.mark.parametrize(("threshold", "keep"), [(0.0, True), (0.3, True), (0.3, False), (1, True)])
def test_greedy_equals_plain_in_every_family(family: str, threshold: float, keep: bool) -> None:
    model, prompts = calm(family), texts(5, 1, 9, 14)
    fast = kangaroo(model, threshold, keep=keep)
    how: dict[str, Any] = {"controller": "fixed(6)", "max_new_tokens": 24, "ignore_eos": True}
    done = fast.generate(prompts, **how)
    assert [c.tokens for c in done] == plainly(model, prompts, max_new_tokens=24)
    assert sum(c.stats.drafted for c in done)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_draft_is_the_adapters_distribution(family: str) -> None:
    """After rounds of drafting, rejecting and reordering, in ragged rows, as without a cache."""
    model = calm(family)
    rows, contexts = rows_of(model), texts(6, 11, 3)
    adapter = layers_of(rows).adapter
    drafter = KangarooDrafter(rows, 0.0, 4)
    rows.read(contexts)
    for order in ([2, 0, 1], [1, 1, 0]):
        for ahead in ([], [7], [7, 9]):
            shown = [[*context, *ahead] for context in contexts]
            step = drafter.step([shown[0], None, shown[2]], None)
            assert step.logits is not None
            for row in (0, 2):
                close(step.logits[row], alone(model, adapter, shown[row])[-1])
        # Row 1 did not draft; of the others' drafts, one token is kept.
        pieces = [[context[-1], 7, 9] for context in contexts]
        pieces[1] = contexts[1][-1:]
        logits = rows.feed(pieces)
        for row, piece in enumerate(pieces):
            wanted = forward(model, [*contexts[row][:-1], *piece]).logits[0, -len(piece) :]
            close(logits[row, : len(piece)], wanted)
            contexts[row] += [7, 11] if row != 1 else [11]
            rows.rollback(row, len(contexts[row]) - 1)
        rows.keep(order)
        contexts = [list(contexts[row]) for row in order]
    for row, context in enumerate(contexts):
        keys = layers_of(rows).cache._store[LAYERS][0]
        assert keys[row, :, : len(context) - 1].abs().sum() > 0


def test_every_layer_runs_once_per_token() -> None:
    fast = kangaroo(MODEL, threshold=0.2)
    done = fast.generate(texts(7, 5), controller="fixed(9)", max_new_tokens=14, ignore_eos=True)
    work = layers_of(fast.target).work
    assert work.passes("draft", "verify") == LAYERS * sum(
        c.stats.drafted + c.stats.rounds for c in done
    )
    assert sum(c.stats.exit_projections or 0 for c in done) == work.passes("exit")
    assert work.passes("exit") == sum(c.stats.drafted for c in done)


def test_the_second_early_exit() -> None:
    """An unsure token is the last of its draft, and stays in it."""

    def rounds(threshold: float, most: int = 3, controller: str = "fixed(9)") -> Any:
        fast = kangaroo(MODEL, threshold, most)
        how: dict[str, Any] = {"controller": controller, "max_new_tokens": 30, "ignore_eos": True}
        return [r for r in fast.generate(texts(6), **how)[0].rounds[1:] if r.stopped_by != 5]

    assert {(r.drafted, r.stopped_by.label) for r in rounds(0.0)} == {(3, "exhausted")}
    assert {(r.drafted, r.stopped_by.label) for r in rounds(1.0)} == {(1, "difficult")}
    assert {(r.drafted, r.stopped_by.label) for r in rounds(0.0, 9, "fixed(2)")} == {(2, "limit")}
    mixed_rounds = rounds(0.3, 6)
    assert "difficult" in {r.stopped_by.label for r in mixed_rounds}
    assert len({r.drafted for r in mixed_rounds}) > 1
    how: dict[str, Any] = {"controller": "fixed(9)", "max_new_tokens": 9}
    dropped = kangaroo(MODEL, 1.0, 3, keep=False).generate(texts(6), **how)[0]
    assert (dropped.stats.drafted, dropped.stats.stopped_by["difficult"] > 5) == (0, True)
    # By hand: it went on while each token was sure.
    fast, (context,) = kangaroo(MODEL, 0.3, 6), texts(6)
    done = fast.generate(context, controller="fixed(9)", max_new_tokens=30, ignore_eos=True)
    text, adapter = [*context], layers_of(fast.target).adapter
    at = 0
    for r in done.rounds:
        if r.drafted:
            ahead, drafted = list(text), 0
            while drafted < 6:
                logits = alone(MODEL, adapter, ahead)[-1]
                ahead.append(int(logits.argmax()))
                drafted += 1
                if float(logits.softmax(-1).max()) < 0.3:
                    break
            if r.stopped_by.label != "budget":
                assert r.drafted == drafted
        text += done.tokens[at : at + r.committed]
        at += r.committed


def test_ending_behind_an_unsure_token_takes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    laps: list[Lap] = []
    monkeypatch.setattr(Meter, "add", lambda _, lap: laps.append(lap))
    how: dict[str, Any] = {"controller": "fixed(3)", "max_new_tokens": 9, "ignore_eos": True}
    for most, threshold, steps in ((6, 1.0, 1), (2, 0.0, 2)):
        laps.clear()
        kangaroo(MODEL, threshold, most).generate(texts(6), **how)
        assert [lap.steps for lap in laps if lap.width == 1 + steps].count(steps) > 2
        assert all(lap.steps == lap.width - 1 for lap in laps)


@pytest.mark.parametrize("keep", slow_but([True, False], bool))
def test_sampled_text_has_the_targets_distribution(keep: bool) -> None:
    model = four_tokens()
    done = drawn(model, kangaroo(model, 0.75, 3, depth=1, keep=keep), 4)
    assert {"difficult", "budget"} <= {k for c in done for k, n in c.stats.stopped_by.items() if n}
    assert 0 < sum(c.stats.accepted for c in done) < sum(c.stats.drafted for c in done)


def test_a_warm_prefix_has_the_adapters_states() -> None:
    from forerun.engine.prefixes import Prefixes

    prompts = [a + b for a in texts(36) for b in ([5], [5, 6, 7], [9])]
    cold = kangaroo(MODEL, 0.0)
    rows = rows_of(MODEL)
    warm = Model(rows, KangarooDrafter(rows, 0.0, 4), prefixes=Prefixes(1 << 24))
    for how in ({}, {"temperature": 0.8, "seed": 3}):
        for prompt in prompts:
            settings: dict[str, Any] = {"max_new_tokens": 12, "controller": "fixed(3)", **how}
            got, wanted = warm.generate(prompt, **settings), cold.generate(prompt, **settings)
            assert got.tokens == wanted.tokens
            # Also what is drafted, and so the adapter's keys.
            assert got.stats.accepted == wanted.stats.accepted
    assert got.stats.cached_tokens == 36
    assert rows.facts.token_bytes * LAYERS == torch_rows(MODEL).facts.token_bytes * (LAYERS + 1)


def saved(folder: Path, model: Any, depth: int = 2, **changes: Any) -> str:
    about = replace(About("kangaroo", fingerprint(model), {"layers": depth}), **changes)
    save_draft(folder, about, dict(adapter_of(model, depth).named_parameters()))
    return str(folder)


def test_loading_by_folder_and_by_name(tmp_path: Path) -> None:
    folders = save_folders(tmp_path)
    target = str(folders.decoder)
    with pytest.raises(SettingError, match="make one with forerun train-draft kangaroo"):
        forerun.load(target, "kangaroo")
    model = forerun.load(target, "none", dtype="float32")
    module = model.target.executor.module()
    saved(Path(target) / "kangaroo", module, 1)
    prompts, how = texts(4, 7), {"max_new_tokens": 12, "ignore_eos": True}
    wanted = [c.tokens for c in model.generate(prompts, **how)]
    for draft in ("kangaroo", str(Path(target) / "kangaroo"), "kangaroo(threshold=0,most=2)"):
        fast = forerun.load(target, draft, dtype="float32")
        assert isinstance(fast.drafter, KangarooDrafter)
        assert [c.tokens for c in fast.generate(prompts, **how)] == wanted
        assert [c.tokens for c in fast.generate(prompts, plain=True, **how)] == wanted
    other = saved(tmp_path / "other", module, 1, target="0" * 16)
    with pytest.warns(ForerunWarning, match="trained for another target"):
        forerun.load(target, other, dtype="float32")
    with pytest.raises(ModelError, match="for the drafter 'shared', not 'kangaroo'"):
        forerun.load(target, Kangaroo(saved(tmp_path / "kind", module, 1, kind="shared")))
    with pytest.raises(ModelError, match="does not fit this target"):
        Kangaroo(saved(tmp_path / "fit", MODEL)).build(
            torch_rows(build("llama", hidden_size=64)), None
        )
    with pytest.raises(ModelError, match=r"draft\.json is missing"):
        forerun.load(target, f"kangaroo(path='{tmp_path / 'nowhere'}')")
    scripted = Rows(ScriptedModel(lambda _context: torch.zeros(VOCAB), LIMIT))
    with pytest.raises(SettingError, match="kangaroo runs on torch, and this target on scripted"):
        Kangaroo(other).build(scripted, None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kangaroo(path='')", "kangaroo path must be a folder"),
        ("kangaroo(threshold=1.5)", "kangaroo threshold must be a number"),
        ("kangaroo(most=0)", "kangaroo most must be a whole number of at least 1"),
        ("kangaroo(eta=1)", "kangaroo"),
        ("kangaroo(keep=1)", "kangaroo keep must be true or false"),
        ("adadecode(threshold=-1)", "adadecode threshold must be a number"),
        ("adadecode(most=0)", "adadecode most must be a whole number of at least 1"),
        ("adadecode(layers='2,x')", "adadecode layers must be"),
        ("adadecode(exits=3)", "adadecode exits must be a folder"),
    ],
)
def test_settings_out_of_range(spec: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        DRAFTERS.make(spec)


def test_targets_without_layers_to_call() -> None:
    for spec in (Kangaroo("somewhere"), AdaDecode(exits="")):
        with pytest.raises(SettingError, match="runs on torch"):
            spec.build(Rows(ScriptedModel(torch.eye(3))), None)
    with pytest.raises(SettingError, match="between 1 and 4 for kangaroo"):
        Adapter(LayerAccess(MODEL), LAYERS)


# AdaDecode


def adadecode(model: Any, **how: Any) -> Model:
    drafter = AdaDecode(**{"exits": "", **how}).build(torch_rows(model), None)
    assert drafter.target is not None
    return Model(drafter.target, drafter)


@pytest.mark.parametrize("family", slow_but(CONFIGS, FAMILIES.__contains__))
@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.01])
def test_adadecode_equals_plain_in_every_family(family: str, threshold: float) -> None:
    model, prompts = calm(family), texts(5, 1, 9, 14)
    how: dict[str, Any] = {"controller": "fixed(9)", "max_new_tokens": 24, "ignore_eos": True}
    done = adadecode(model, threshold=threshold).generate(prompts, **how)
    assert [c.tokens for c in done] == plainly(model, prompts, max_new_tokens=24)
    drafted = [r.drafted for c in done for r in c.rounds]
    assert max(drafted) <= 5
    assert (sum(drafted) == 0) == (threshold > 1)


def test_the_layers_that_adadecode_asks() -> None:
    assert AdaDecode()._asked(32, tuple(range(1, 32))) == (8, 16, 24)
    assert AdaDecode()._asked(12, (2, 3, 4, 5, 6, 8, 10)) == (3, 6, 8)
    assert AdaDecode()._asked(2, (1,)) == (1,)
    assert AdaDecode(layers="4, 2")._asked(12, (2, 3, 4)) == (2, 4)
    assert AdaDecode(layers=3)._asked(12, (2, 3, 4)) == (3,)
    with pytest.raises(SettingError, match=r"no exit head at layers \[9\]"):
        AdaDecode(layers="2,9")._asked(12, (2, 3, 4))
    with pytest.raises(SettingError, match="there are heads at none"):
        AdaDecode()._asked(1, ())
    model: Any = adadecode(calm(layers=8)).drafter
    assert (model.layers, model.threshold, model.anneal, model.width) == ((2, 4, 6), 0.75, 0, 5)


def test_deferred_layers_run_with_those_of_later_tokens() -> None:
    """Four tokens said at depth 2 of 8, and one that goes up: depths 3 to 8 run once for all."""
    fast = adadecode(calm(layers=8), threshold=0.0, most=4)
    done = fast.generate(texts(6), controller="fixed(9)", max_new_tokens=9, ignore_eos=True)[0]
    work = layers_of(fast.target).work
    assert max(r.drafted for r in done.rounds) == 4
    # Of every round the last token fed starts at the embedding, and takes the rest along from 2 on.
    assert work.calls("draft") == 2 * done.stats.drafted
    assert work.calls("verify") == 8 * done.stats.rounds


def test_adadecode_without_trained_heads_says_what_it_needs() -> None:
    with pytest.warns(ForerunWarning, match="adadecode has no trained exit heads"):
        AdaDecode().build(torch_rows(build("llama")), None)
