"""A layer on the target's states: its formula, what it reads in rounds, exactness."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from forerun.costs import Costs
from forerun.drafters import DRAFTERS
from forerun.drafters.eagle import Eagle, EagleDrafter
from forerun.drafters.model import ModelDraft
from forerun.drafters.retokenized import TextDrafter
from forerun.engine import Sampling
from forerun.engine.meter import Lap
from forerun.engine.prefixes import Prefixes
from forerun.errors import ForerunWarning, ModelError, SettingError
from forerun.lab.traces.record import Task
from forerun.lab.traces.record import record as traced
from forerun.lab.traces.replay import replay
from forerun.model import Model, drafter_spec
from forerun.runtime import Rows, torch_rows
from forerun.runtime.drafts import ABOUT, WEIGHTS, About, Tensors, rounded, save_draft
from forerun.runtime.eagle import EPS, EagleHead, load_eagle
from forerun.runtime.runtimes import Source, TorchRuntime
from forerun.testing import ScriptedModel
from forerun.training import eagle as training
from forerun.training import fit
from forerun.training.eagle import EagleTrainer, unrolled
from forerun.training.fit import Document
from forerun.training.settings import TrainingSettings
from marks import slow_but, spread
from sourced import build as build_encoder_decoder
from test_retokenized import DRAFT, STORY, TARGET, writes
from test_states import RUNTIMES, alone
from tiny import VOCAB, build, texts

WIDTH, INNER, DEPTHS = 128, 80, [1, 3]
TOKENS = torch.arange(3, VOCAB, 2, dtype=torch.int32)


def head(seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    made = EagleHead(WIDTH, INNER, len(TOKENS), len(DEPTHS) * 32)
    for weight in made.parameters():
        weight.data += 0.3 * torch.randn_like(weight) * weight.std().nan_to_num(0.3)
    return made.requires_grad_(False)


def saved(folder: Path, eight: bool = False, **changes: Any) -> str:
    tensors: Tensors = {**head().state_dict(), "tokens": TOKENS}
    about = {"kind": "eagle", "target": None, "settings": {"depths": DEPTHS}, **changes}
    save_draft(folder, About(**about), rounded(tensors) if eight else tensors)
    return str(folder)


def test_heads_in_16_bits_are_read_like_others(tmp_path: Path) -> None:
    """As train-draft wrote them once; numpy has no bfloat16."""
    own = {name: tensor.bfloat16() for name, tensor in head().state_dict().items()}
    for kind in (torch.bfloat16, torch.float16):
        tensors = {**{name: tensor.to(kind) for name, tensor in own.items()}, "tokens": TOKENS}
        save_draft(tmp_path, About("eagle", None, {"depths": DEPTHS}), tensors)
        made, tokens = load_eagle(str(tmp_path), 32, None, VOCAB)
        assert tokens.tolist() == TOKENS.tolist()
        for name, tensor in made.state_dict().items():
            assert torch.equal(tensor, own[name].to(kind).float()), name


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def by_hand(
    own: dict[str, torch.Tensor], states: torch.Tensor, text: list[int], known: int
) -> torch.Tensor:
    """Logits after a text whose tokens up to place `known` have the target's state before them.

    One token and one attention head at a time, in the terms of the formula alone.
    """
    index = {int(token): i for i, token in enumerate(TOKENS)}
    keys: list[list[torch.Tensor]] = []
    values: list[list[torch.Tensor]] = []
    x = torch.zeros(WIDTH)
    for place, token in enumerate(text):
        if place == 0:
            before = torch.zeros(WIDTH)
        elif place <= known:
            parts = states[place - 1].view(len(DEPTHS), 32)
            before = own["fuse.weight"] @ torch.cat([unit(part) for part in parts])
        else:
            before = x
        embedded = own["embedding.weight"][index.get(token, len(TOKENS))]
        u = own["input.weight"] @ torch.cat([unit(embedded), unit(before)])
        q, k, v = (own["qkv.weight"] @ (unit(u) * own["attention_norm.weight"])).split(WIDTH)
        turned = []
        for vector in (q, k):
            heads = []
            for part in vector.split(64):
                angles = [place * 10_000 ** (-i / 32) for i in range(32)]
                pairs = [complex(part[i], part[i + 32]) for i in range(32)]
                turns = [complex(math.cos(a), math.sin(a)) for a in angles]
                pairs = [z * turn for z, turn in zip(pairs, turns, strict=True)]
                heads.append(torch.tensor([z.real for z in pairs] + [z.imag for z in pairs]))
            turned.append(heads)
        keys.append(turned[1])
        values.append(list(v.split(64)))
        mixed = []
        for i, query in enumerate(turned[0]):
            weights = torch.stack([query @ key[i] / 8 for key in keys]).softmax(0)
            mixed.append(sum(w * value[i] for w, value in zip(weights, values, strict=True)))
        u = u + own["out.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
        gate, up = (own["gate_up.weight"] @ (unit(u) * own["mlp_norm.weight"])).split(INNER)
        x = u + own["down.weight"] @ (gate * gate.sigmoid() * up)
    return own["embedding.weight"][:-1] @ (unit(x) * own["norm.weight"])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_draft_is_the_formulas_distribution(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through rounds of drafting, rejecting and reordering, in ragged rows and prompts in parts."""
    model = build("llama")
    rows, contexts = RUNTIMES[runtime](model), texts(6, 11, 3)
    drafter = Eagle(saved(tmp_path)).build(rows, None)
    assert isinstance(drafter, EagleDrafter)
    own = dict(head().state_dict())
    if runtime == "openvino":
        monkeypatch.setattr("forerun.runtime.openvino.eagle._graph", None)  # it is in the store
        drafter = Eagle(saved(tmp_path)).build(rows, None)
        assert isinstance(drafter, EagleDrafter)
    loose = 0.03 if runtime == "openvino" else 1e-4  # 8 bits
    rows.join(3, 40)
    drafter.join(contexts, 40)
    if runtime == "openvino":
        levels = drafter.rows.executor._forms.levels()  # type: ignore[attr-defined]
        assert levels, "graphs for so many tokens, which a step of several rows is fast by"
    rows.feed([context[:2] for context in contexts], [0, 0, 0])
    drafter.follow([context[: min(3, len(context) - 1)] for context in contexts])
    rows.feed([context[2:-1] for context in contexts], [0, 0, 0])
    for order in ([2, 0, 1], [1, 1, 0], [0, 1, 2]):
        drafter._restore()
        drafter._newest.clear()
        for ahead in ([], [7], [7, 10]):
            shown = [[*context, *ahead] for context in contexts]
            step = drafter.step([shown[0], None, shown[2]], None)
            assert step.logits is not None
            for row in (0, 2):
                known = len(contexts[row]) - 1
                states = alone(model, contexts[row]).view(-1, 3, 32)[:, [d - 1 for d in DEPTHS]]
                wanted = by_hand(own, states.flatten(1), shown[row], known)
                got = step.logits[row, TOKENS.long()]
                assert float((got - wanted).abs().max() / wanted.abs().max()) < loose
                assert int((step.logits[row] > -torch.inf).sum()) == len(TOKENS)
        # Row 1 did not draft; of the others' drafts, one token is kept.
        rows.feed([[context[-1], 7, 10] if i != 1 else context[-1:]
                   for i, context in enumerate(contexts)])  # fmt: skip
        for row, context in enumerate(contexts):
            drafter.rollback(row, len(context) + (row != 1))
            context += [7, 11] if row != 1 else [11]
            rows.rollback(row, len(context) - 1)
        rows.keep(order)
        drafter.keep(order)
        contexts = [list(contexts[row]) for row in order]


@pytest.mark.parametrize(("runtime", "eight"), spread(2, list(RUNTIMES), [False, True]))
def test_greedy_text_is_plain(runtime: str, eight: bool, tmp_path: Path) -> None:
    model, prompts = build("qwen2"), texts(5, 1, 9)
    rows = RUNTIMES[runtime](model)
    how: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    plain = Model(rows, DRAFTERS.make("none").build(None, None)).generate(prompts, **how)
    folder = saved(tmp_path, eight)
    assert drafter_spec(f"memory+eagle(path={folder!r})").depths("target") == tuple(DEPTHS)
    fast = Model(rows, Eagle(folder).build(rows, None))
    for controller in ("fixed(3)", "auto", "svip", "cm-asd"):
        done = fast.generate(prompts, controller=controller, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        if controller == "fixed(3)":
            assert sum(c.stats.drafted for c in done) > 60


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_of_a_long_prompt_only_the_end_is_read(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the text began there; a prompt in parts, ragged rows, drafts that are rejected."""
    monkeypatch.setattr("forerun.runtime.eagle.EagleHead.span", 8)
    monkeypatch.setattr("forerun.runtime.head_file.HeadWeights.span", 8)
    model = build("llama")
    rows, contexts = RUNTIMES[runtime](model), texts(30, 5)
    drafter = Eagle(saved(tmp_path)).build(rows, None)
    assert isinstance(drafter, EagleDrafter)
    rows.join(2, 40)
    drafter.join(contexts, 40)
    rows.feed([contexts[0][:20], contexts[1][:-1]], [0, 0])
    drafter.follow([contexts[0][:20], None])
    assert list(drafter._states._held) == [0, 1], "states that are to be read are held"
    rows.feed([contexts[0][20:-1], []], [0, 0])
    own, loose = dict(head().state_dict()), 0.03 if runtime == "openvino" else 1e-4
    wanted = [8, 5]
    for _ in range(3):
        assert [drafter.unread(i, context) for i, context in enumerate(contexts)] == wanted
        drafter._restore()
        drafter._read(contexts, leave=99)
        for ahead in ([], [7], [7, 10]):
            step = drafter.step([[*context, *ahead] for context in contexts], None)
            assert step.logits is not None
            for row, begin in enumerate([22, 0]):
                text = [*contexts[row], *ahead][begin:]
                states = alone(model, contexts[row]).view(-1, 3, 32)[:, [d - 1 for d in DEPTHS]]
                said = by_hand(own, states.flatten(1)[begin:], text, len(contexts[row]) - 1 - begin)
                got = step.logits[row, TOKENS.long()]
                assert float((got - said).abs().max() / said.abs().max()) < loose
        rows.feed([[context[-1], 7, 10] for context in contexts])
        for row, context in enumerate(contexts):  # one token of the draft is kept
            drafter.rollback(row, len(context) + 1)
            context += [7, 11]
            rows.rollback(row, len(context) - 1)
        wanted = [2, 2]


@pytest.mark.parametrize("controller", slow_but(["fixed(3)", "auto"], "auto".__ne__))
def test_long_prompts_are_written_as_plainly_and_replayed_as_live(
    controller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, in batches and alone, with and without texts read before; what the head
    reads is told to the meter."""
    monkeypatch.setattr("forerun.runtime.eagle.EagleHead.span", 16)
    monkeypatch.setattr("forerun.engine.loop.CHUNK", 12)
    model, shared = build("llama"), texts(36)[0]
    prompts = [*texts(40, 20), *([*shared, *more] for more in ([5], [6, 7], [5]))]
    laps: list[Lap] = []

    def made(head: bool, **more: Any) -> Model:
        rows = torch_rows(model)
        spec = Eagle(saved(tmp_path)) if head else DRAFTERS.make("none")
        one = Model(rows, spec.build(rows, None), **more)
        add = one.meter.add
        one.meter.add = lambda lap: laps.append(lap) or add(lap)  # type: ignore[method-assign]
        return one

    how: dict[str, Any] = {"max_new_tokens": 18, "ignore_eos": True, "seed": 3}
    for temperature, size in ((0.0, 1), (0.0, 3), (0.8, 2)):
        how |= {"temperature": temperature, "batch_size": size}
        plain = made(False).generate(prompts, plain=True, **how)
        for more in ({}, {"prefixes": Prefixes(1 << 24)}):
            laps.clear()
            fast = made(True, **more)
            for _ in range(2):
                done = fast.generate(prompts, controller=controller, **how)
                assert [c.tokens for c in done] == [c.tokens for c in plain]
            read = [lap.reading_tokens for lap in laps if lap.reading_tokens]
            assert max(read) <= (16 if controller == "fixed(3)" else 16 + 18) * size
            if not more and controller == "fixed(3)":
                assert sum(read) == 2 * 5 * 16
                assert all(lap.reading_seconds > 0 for lap in laps if lap.reading_tokens)
    if controller == "fixed(3)":
        tasks = [
            Task("a", str(i), prompt, Sampling(max_new_tokens=18, ignore_eos=True))
            for i, prompt in enumerate(prompts)
        ]
        trace = traced(made(True), tasks, depth=6)
        ours = replay(trace, "fixed(3)", Costs.synthetic(10, 0.02))
        live = made(True).generate(prompts, controller="fixed(3)", **{**how, "temperature": 0.0})
        assert ours.accepted.tolist() == [c.stats.accepted for c in live]
        assert ours.rounds.tolist() == [c.stats.rounds for c in live]


def test_a_row_alone_has_its_draft_of_few_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pass writes ahead is what it would say if asked, behind any number of new tokens."""
    from forerun.runtime.openvino.forms import Form

    run, passes = Form.run, list[int]()

    def counted(form: Form, starts: Any, pieces: Any, *more: Any) -> Any:
        passes.append(len(pieces[0]))
        return run(form, starts, pieces, *more)

    rows = RUNTIMES["openvino"](build("llama"))
    drafter = Eagle(saved(tmp_path)).build(rows, None)
    monkeypatch.setattr(Form, "run", counted)
    drafts = []
    for count in (1, 2):
        text = texts(9)[0]
        rows.join(count, 60)
        drafter.join([text] * count, 60)
        for new in ([], [7, 11], [7], [4, 9, 7, 10, 3]):
            text = [*text, *new]
            length = rows.lengths[0]
            rows.feed([text[length:-1]] * count, [0] * count)
            passes.clear()
            drafts.append(drafter.likeliest([text] * count, [6] * count)[0])
            assert len(passes) == (6 if count == 2 else 3 if passes[0] > 5 else 2)
        rows.keep([])
        drafter.keep([])
    assert drafts[:4] == drafts[4:]

    # Behind a text that is read by another pass, nothing goes on that a text before it left.
    long = [*texts(9)[0], 7, 11, 4, 9]
    fresh = Eagle(saved(tmp_path)).build(rows, None)
    for own in (fresh, drafter):
        rows.join(1, 60)
        own.join([long], 60)
        rows.feed([long[:-1]], [0])
        if own is drafter:  # a text before it drafted this very token at this very place
            at = own._executor
            at._first, at._read = len(long), ([own._cut[drafts[-1][0]]] * 4, [True] * 4, {})
        drafts.append(own.likeliest([long], [4])[0])
        rows.keep([])
        own.keep([])
    assert drafts[-2] == drafts[-1]


def test_a_draft_by_text_goes_on_with_its_head(tmp_path: Path) -> None:
    """One pass of the draft a round; then what its head says behind that pass's token."""
    path, prompts = str(tmp_path), [TARGET.encode(STORY)[:n] for n in (5, 30, 12)]
    build("llama", vocab_size=len(DRAFT.get_vocab())).save_pretrained(path)
    DRAFT.save_pretrained(path)
    head = saved(tmp_path / "eagle")
    target = writes(TARGET, STORY)
    with pytest.warns(ForerunWarning, match="drafts by text"):
        drafter = ModelDraft(path).build(target, TARGET)
    assert isinstance(drafter, TextDrafter)

    alone, own = TorchRuntime().load(Source(path)), DRAFT.encode(STORY)[:30]
    eagle = Eagle(head).build(alone, None)
    alone.join(1)
    eagle.join([own], 20)
    first = alone.best([own], [1]).tokens[0][0]
    wanted = [first, *eagle.likeliest([[*own, first]], [3])[0]]
    text = TARGET.encode(DRAFT.decode(own))
    drafter.join([text], 20)
    for passes in (1, 2):
        proposal = drafter.propose([text], [4], Mock(clock=float))
        assert proposal.tokens[0] == drafter._continued(text, DRAFT.decode(wanted))[:4]
        assert (proposal.steps, drafter.rows.passes) == (4, passes)
    drafter.keep([])

    def run(drafter: Any, controller: str) -> list[list[int]]:
        rows = writes(TARGET, STORY)
        done = Model(rows, drafter).generate(prompts, max_new_tokens=20, controller=controller)
        return [completion.tokens for completion in done]

    plain = run(DRAFTERS.make("none").build(None, None), "fixed(0)")
    for controller in ("fixed(4)", "auto"):
        assert run(drafter, controller) == plain


@pytest.mark.parametrize("name", ["norm.weight", "fuse.weight", "embedding.weight"])
def test_a_head_that_says_no_numbers_changes_no_text(name: str, tmp_path: Path) -> None:
    """A file of such a head is refused; one that comes to it later is not believed."""
    model, prompts = build("llama"), texts(5, 1, 9)
    rows = torch_rows(model)
    how: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "controller": "fixed(3)"}
    plain = Model(rows, DRAFTERS.make("none").build(None, None)).generate(prompts, **how)
    drafter = Eagle(saved(tmp_path / "good")).build(rows, None)
    assert isinstance(drafter, EagleDrafter)
    dict(drafter._head.named_parameters())[name].data[:7] = torch.nan
    fast = Model(rows, drafter)
    assert [c.tokens for c in fast.generate(prompts, **how)] == [c.tokens for c in plain]
    done = fast.generate(prompts, temperature=0.8, seed=5, **how)
    assert all(c.error is None for c in done)
    tensors: Tensors = {**drafter._head.state_dict(), "tokens": TOKENS}
    save_draft(tmp_path, About("eagle", None, {"depths": DEPTHS}), tensors)
    with pytest.raises(ModelError, match=f"{name} holds NaN or infinity"):
        Eagle(str(tmp_path)).build(rows, None)


def test_a_warm_prefix_has_the_heads_keys(tmp_path: Path) -> None:
    model, path = build("llama"), saved(tmp_path)
    prompts = [a + b for a in texts(36) for b in ([5], [5, 6, 7], [9])]

    def made(**more: Any) -> Model:
        rows = torch_rows(model)
        return Model(rows, Eagle(path).build(rows, None), **more)

    cold, warm = made(), made(prefixes=Prefixes(1 << 24))
    settings: dict[str, Any] = {"max_new_tokens": 12, "controller": "fixed(3)"}
    for prompt in prompts:
        got, wanted = warm.generate(prompt, **settings), cold.generate(prompt, **settings)
        assert got.tokens == wanted.tokens
    assert got.stats.cached_tokens == 36


# Learning


def written(model: Any, count: int = 60) -> list[Document]:
    """What a model writes on random prompts, of two kinds."""
    prompts = texts(*[6] * count, seed=3)
    plain = Model(torch_rows(model), DRAFTERS.make("none").build(None, None))
    done = plain.generate(prompts, max_new_tokens=30, ignore_eos=True)
    return [
        Document(prompt + c.tokens, len(prompt) - 1, "even" if i % 2 else "odd")
        for i, (prompt, c) in enumerate(zip(prompts, done, strict=True))
    ]


@pytest.fixture(scope="module")
def taught() -> tuple[Any, EagleTrainer, list[Document]]:
    model = build("llama")
    documents = written(model)
    settings = TrainingSettings("eagle", width=64, steps=100, batch=10, vocab=60, lr=0.01)
    trainer = EagleTrainer(torch_rows(model), settings, documents)
    log = list(trainer.train(documents))
    assert log[-1]["loss"] < 0.75 * log[0]["loss"]
    return model, trainer, documents


def test_what_is_learned_is_what_is_drafted(taught: Any, tmp_path: Path) -> None:
    """Each unrolled step at each place says what the drafter says there, in three steps."""
    model, trainer, documents = taught
    trainer.export(tmp_path, 1, {})
    rows, text = torch_rows(model), documents[0].ids[:20]
    (states,) = trainer._states.of([Document(text)])
    known = states[:, trainer._columns].flatten(1)[None]
    with torch.inference_mode():
        index = trainer._index[torch.tensor([text])]
        index = torch.where(index < 0, 60, index)
        steps = [trainer.head.logits(x)[0] for x in unrolled(trainer.head, index, known, 3)]
        tensors = rounded(trainer.own)
        drafter = Eagle(str(tmp_path)).build(rows, None)
        assert isinstance(drafter, EagleDrafter)
        assert tensors["qkv.weight"].dtype == torch.int8
        drafter._head.load_state_dict(trainer.own)  # not rounded
        rows.read([text], 30)
        drafter.join([text], 30)
        for place in (3, 8, 15):
            drafter.rollback(0, place + 1)
            drafter.rows.rollback(0, place)
            drafter._newest.clear()
            for ahead in range(3):
                step = drafter.step([text[: place + 1 + ahead]], None)
                assert step.logits is not None
                got = step.logits[0, trainer.vocabulary]
                torch.testing.assert_close(got, steps[ahead][place + ahead], atol=1e-3, rtol=1e-3)
            drafter._restore()


def test_what_is_lost_is_the_same_whoever_runs_together(
    taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainer, documents = taught
    texts = [d._replace(ids=d.ids[: len(d.ids) - 3 * i]) for i, d in enumerate(documents[:6])]
    monkeypatch.setattr(training, "LEARNED", 1.0)
    losses = []
    for rows in (1, 2, 6):
        monkeypatch.setattr(training, "ROWS", rows)
        parts = [loss.item() for loss in trainer._losses(texts, random.Random(0))]
        assert len(parts) == 6 // rows
        losses.append(sum(parts))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.parametrize(("room", "passes"), [(0, 2), (1 << 20, 1)])
def test_a_text_is_read_again_where_there_is_no_room_for_its_states(
    monkeypatch: pytest.MonkeyPatch, room: int, passes: int
) -> None:
    monkeypatch.setattr(fit, "room", lambda: room)
    model, text, seen = build("llama"), Document([3, 4, 5]), []
    model.base_model.register_forward_hook(lambda *_: seen.append(1))
    states = fit.TargetStates(model, (1, 3))
    first, again = (states.of([text._replace(start=n)])[0] for n in range(2))
    assert first.shape == (3, 2, model.config.hidden_size)
    assert torch.equal(first, again)
    assert len(seen) == passes


def test_goals_are_shares_of_all_that_the_target_says_which_is_asked_once(
    taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainer, documents = taught
    texts = [document._replace(start=2 + i) for i, document in enumerate(documents[:3])]
    access, asked = trainer._access, []
    said = access.logits

    def logits(hidden: torch.Tensor, rows: Any = None) -> torch.Tensor:
        asked.append(rows)
        return said(hidden, rows)

    monkeypatch.setattr(access, "logits", logits)
    with torch.no_grad():
        every = said(trainer._scored_states(texts)[:, -1])
    wanted = 0.7 * every.softmax(-1)[:, trainer.vocabulary]
    places = trainer._index[every.argmax(-1)]
    known = (places >= 0).nonzero()[:, 0]
    wanted[known, places[known]] += 0.3
    for _ in range(2):
        goals, best = trainer._goals(texts)
        torch.testing.assert_close(goals, wanted)
        assert torch.equal(best, places)
    assert sum(rows is None for rows in asked) == 3


def test_a_taught_head_is_right(taught: Any, tmp_path: Path) -> None:
    model, trainer, documents = taught
    measured = trainer.agreement(documents)
    assert measured["top1"] == measured["by_depth"][0] > 0.4
    assert set(measured["by_family"]) == {"even", "odd"}
    assert 1 + measured["accepted"] > measured["tokens_per_round"] > 1.5
    trainer.export(tmp_path, len(documents), measured)
    rows = torch_rows(model)
    prompts = [d.ids[: d.start + 1] for d in documents[:8]]
    how: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "controller": "fixed(3)"}
    fast = Model(rows, Eagle(str(tmp_path)).build(rows, None))
    done = fast.generate(prompts, **how)
    assert [c.tokens for c in done] == [d.ids[d.start + 1 :] for d in documents[:8]]
    live = sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done)
    assert live == pytest.approx(measured["tokens_per_round"], rel=0.25)


def test_rounds_are_counted_one_after_the_other() -> None:
    from forerun.training.eagle import rounds_of

    assert rounds_of(torch.tensor([[1, 0, 0]] * 6)) == 3, "a token kept and one of the target's"
    assert rounds_of(torch.tensor([[0, 1, 1]] * 6)) == 6
    assert rounds_of(torch.tensor([[1, 1, 1]] * 9)) == 3, "the last one ends with the text"


def test_a_run_cut_in_two_is_the_run_in_one_piece(tmp_path: Path) -> None:
    model = build("llama")
    documents = written(model, 8)
    settings = TrainingSettings("eagle", (1, 3), width=64, steps=4, batch=3, vocab=30)
    whole, first, rest = (EagleTrainer(torch_rows(model), settings, documents) for _ in range(3))
    assert len(list(whole.train(documents))) == 4
    for record in first.train(documents):
        if record["step"] == 2:
            break
    first.save(tmp_path / "training.pt")
    rest.load(tmp_path / "training.pt")
    assert [record["step"] for record in rest.train(documents)] == [3, 4]
    for name, value in whole.own.items():
        torch.testing.assert_close(rest.own[name], value, rtol=0, atol=0)
    others = EagleTrainer(torch_rows(model), settings, documents[:2])  # other frequent tokens
    with pytest.raises(SettingError, match="begun with other settings"):
        others.load(tmp_path / "training.pt")


def test_settings_that_a_head_cannot_have() -> None:
    with pytest.raises(SettingError, match="width must be a multiple of 64"):
        TrainingSettings("eagle", width=100)
    with pytest.raises(SettingError, match="depths must rise from 1 to at most the target's 3"):
        EagleTrainer(
            torch_rows(build("llama")), TrainingSettings("eagle", (2, 4)), [Document([3, 4])]
        )


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = torch_rows(build("llama"))
    path = saved(tmp_path / "good")
    assert isinstance(drafter_spec(path), Eagle), "the folder alone names the drafter"
    with pytest.warns(ForerunWarning, match="trained for another target"):
        Eagle(saved(tmp_path / "other", target="0" * 16)).build(rows, None)
    with pytest.raises(ModelError, match=r"fuse\.weight is \(128, 64\), wanted \(128, 128\)"):
        Eagle(path).build(torch_rows(build("llama", hidden_size=64)), None)
    with pytest.raises(ModelError, match="tokens is missing, wanted ids of this vocabulary"):
        Eagle(path).build(torch_rows(build("llama", vocab_size=50)), None)
    with pytest.raises(SettingError, match="names no depths"):
        Eagle(saved(tmp_path / "deep", settings={})).build(rows, None)
    deep = saved(tmp_path / "deep", settings={"depths": [1, 4]}, trained={"target_name": "large"})
    with pytest.raises(SettingError, match=r"target's 3 .* was trained for the target 'large'$"):
        Eagle(deep).build(rows, None)
    with pytest.raises(ModelError, match="for the drafter 'medusa', not 'eagle'"):
        Eagle(saved(tmp_path / "kind", kind="medusa")).build(rows, None)
    (tmp_path / "good" / WEIGHTS).write_text("x")
    with pytest.raises(ModelError, match="cannot read the weights"):
        Eagle(path).build(rows, None)
    (tmp_path / "good" / ABOUT).write_text('{"format": "forerun draft decoder 1"}')
    with pytest.raises(ModelError, match="not of the format 'forerun draft 1'"):
        Eagle(path).build(rows, None)


def test_targets_that_give_no_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="does not give; use torch or openvino"):
        Eagle(saved(tmp_path)).build(Rows(ScriptedModel(torch.eye(4))), None)
    with pytest.raises(SettingError, match="decoder-only targets, and this one has an encoder"):
        Eagle().build(torch_rows(build_encoder_decoder("marian", decoder_layers=2)), None)
    with pytest.raises(SettingError, match="make one with forerun train-draft eagle"):
        Eagle().build(torch_rows(build("llama")), None)
    for bad in ({"path": ""}, {"path": 3}):
        with pytest.raises(SettingError, match="eagle path"):
            Eagle(**bad)  # type: ignore[arg-type]
