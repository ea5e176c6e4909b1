"""Requests with a source, at every door, on a tiny Marian with a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forerun
from benchmarks.peers import hugging_face as hf
from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.drafters.model import ModelDrafter
from forerun.engine import Engine, Request, Sampling
from forerun.errors import ModelError, PromptError, SettingError, UnknownNameError
from forerun.lab.audit import Kind, audit
from forerun.lab.bench.peers import Peer, Run
from forerun.lab.calibrate import easd
from forerun.lab.traces import measuring
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay
from forerun.model import Model
from forerun.rules import RULES
from forerun.testing import ScriptedModel
from marks import slow_but, spread
from sourced import SOURCES, Folders, save_folders
from test_engine import chaotic


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_folders(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(folders: Folders) -> Model:
    return forerun.load(folders.target, folders.draft, device="cpu", dtype="float32")


def of_transformers(model: Model, source: str, most: int) -> list[int]:
    ids = torch.tensor([model.encode(source)])
    out = model.target.executor.module().generate(
        ids, num_beams=1, do_sample=False, max_new_tokens=most
    )
    return out[0, 1:].tolist()


@pytest.mark.parametrize(
    "controller", spread(2, ["cm-asd(two_pass=True)", "fixed(3)", "auto", "cm-asd"])
)
def test_greedy_text_is_that_of_transformers(model: Model, controller: str) -> None:
    done = model.generate(SOURCES, controller=controller, max_new_tokens=20)
    plain = model.generate(SOURCES, plain=True, max_new_tokens=20)
    for source, spoken, alone in zip(SOURCES, done, plain, strict=True):
        assert spoken.tokens == alone.tokens == of_transformers(model, source, 20)
        assert spoken.text == model.tokenizer.decode(spoken.tokens, skip_special_tokens=True)
        assert spoken.stats.source_tokens == len(model.encode(source))
        assert 0 < spoken.stats.encode_seconds < spoken.stats.seconds
        assert spoken.stats.prompt_tokens == 1


def test_lookup_drafts_from_the_source(folders: Folders) -> None:
    """A model that copies: what it wrote stands in the source."""
    model = forerun.load(folders.target, "lookup(n=2,least=1)", dtype="float32")
    plain = model.generate("the cat", plain=True, max_new_tokens=12)
    source = [*model.encode("five dogs"), *plain.tokens]
    done = model.generate([source], controller="fixed(4)", max_new_tokens=12, ignore_eos=True)[0]
    alone = model.generate([source], plain=True, max_new_tokens=12, ignore_eos=True)[0]
    assert done.tokens == alone.tokens
    assert done.rounds[0].drafted == 0 or done.stats.drafted > 0


def test_sampled_text_does_not_depend_on_the_neighbours(model: Model) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_new_tokens": 12}
    together = model.generate(SOURCES, **how)
    for source, done in zip(SOURCES, together, strict=True):
        assert model.generate(source, **how).tokens == done.tokens


def test_a_decoder_prompt_is_what_the_text_begins_with(model: Model) -> None:
    plain = model.generate(SOURCES[0], max_new_tokens=10, ignore_eos=True)
    begin = model.generate(
        SOURCES[0], decoder_prompt=plain.tokens[:4], max_new_tokens=6, ignore_eos=True
    )
    assert begin.tokens == plain.tokens[4:]
    assert begin.stats.prompt_tokens == 5
    text = model.generate(SOURCES[0], decoder_prompt="the cat", max_new_tokens=3)
    words = model.tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert text.stats.prompt_tokens == 1 + len(words)


def test_languages_are_tokens_of_the_tokenizer(folders: Folders) -> None:
    model = forerun.load(folders.target, "none", dtype="float32")
    with pytest.raises(SettingError, match="no tokens for languages"):
        model.generate("the cat", language="de")
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["de_DE", "fr_XX", "__it__"]})
    known = model.tokenizer.get_vocab()
    assert model.open("de").prompt == (0, known["de_DE"])
    assert model.open("it").prompt == (0, known["__it__"])
    with pytest.raises(UnknownNameError, match="did you mean 'fr_XX'"):
        model.open("fr_X")
    model.tokenizer.add_tokens([">>es<<"])
    opened = model.open("es")
    assert opened.prompt == (0,)
    assert opened.source == (model.tokenizer.get_vocab()[">>es<<"],)
    assert model.context([5, 6], opened) == ([0], [*opened.source, 5, 6])


def test_what_does_not_fit_is_refused(folders: Folders, model: Model) -> None:
    with pytest.raises(PromptError, match="the source is empty"):
        model.generate([[]])
    with pytest.raises(PromptError, match=r"the source has 600 tokens and the encoder reads 512"):
        model.generate([[5] * 600])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        model.generate([[5000]])
    with pytest.raises(SettingError, match="scores no text without its source"):
        model.score("the cat")
    with pytest.raises(ModelError, match=r"the draft .* a decoder-only one"):
        forerun.load(folders.target, folders.decoder)
    with pytest.raises(ModelError, match="the target is a decoder-only one"):
        forerun.load(folders.decoder, folders.draft)
    decoder = forerun.load(folders.decoder, "none")
    with pytest.raises(SettingError, match="are for encoder-decoder models"):
        decoder.generate("the cat", language="de")
    how = (Sampling(), CONTROLLERS.make("fixed(2)"), RULES.make("standard"))
    with pytest.raises(SettingError, match="this one has no encoder"):
        Engine(decoder.target, decoder.drafter).submit(Request([5], *how, source=[5]))
    with pytest.raises(SettingError, match="give the text that it reads as source"):
        Engine(model.target, model.drafter).submit(Request([0], *how))


def test_specbound_is_refused_with_the_reason(folders: Folders) -> None:
    with pytest.raises(ModelError, match="marian models have no layer-by-layer access"):
        forerun.load(folders.target, "specbound(exits='')")


def test_a_trace_replays_as_live(model: Model) -> None:
    how = Sampling(max_new_tokens=16)
    tasks = [Task("any", str(i), model.encode(s), how) for i, s in enumerate(SOURCES)]
    trace = record(model, tasks, depth=5)
    live = model.generate(SOURCES, controller="fixed(3)", max_new_tokens=16)
    played = replay(trace, "fixed(3)", Costs.synthetic(4.0, 0.1))
    assert played.rounds.tolist() == [done.stats.rounds for done in live]
    assert trace.prompt_tokens.tolist() == [1, 1, 1]


class InProcess(Peer):
    """A peer without a pipe."""

    def __init__(self, name: str, plain: str | None, peer: hf.Plain) -> None:
        self.name, self.plain, self._peer = name, plain, peer

    def generate(self, prompts, max_new_tokens, repetition_penalty=1.0):
        return Run(0.0, self._peer.generate(prompts, max_new_tokens, repetition_penalty))


def test_the_audit_is_clean_beside_transformers(model: Model) -> None:
    """Its plain and its assisted generation, the same texts; a batch of ours, too."""
    ids = [model.encode(source) for source in SOURCES]
    how = [Sampling(max_new_tokens=16)] * len(ids)
    peers = [
        InProcess("transformers", None, hf.beside(hf.Plain, model)),
        *(
            InProcess(schedule, "transformers", hf.beside(hf.Assisted, model, schedule, 5))
            for schedule in ("constant", "heuristic")
        ),
    ]
    comparisons = list(audit(model, ids, how, batch_size=3, peers=peers))
    assert {c.kind for c in comparisons} <= {Kind.IDENTICAL, Kind.NEAR_TIE}
    assert len(comparisons) > 20


def test_beam_search_is_a_peer(model: Model) -> None:
    ids = [model.encode(source) for source in SOURCES]
    done = hf.beside(hf.Beam, model, 3).generate(ids, 8)
    out = model.target.executor.module().generate(
        torch.tensor([ids[0]]), num_beams=3, do_sample=False, max_new_tokens=8
    )
    assert done[0] == out[0, 1 : 1 + len(done[0])].tolist()


@pytest.mark.usefixtures("quick_costs")
def test_calibrate_and_costs_read_sources(model: Model) -> None:
    calibrated = easd(model, SOURCES, sampling=Sampling(max_new_tokens=8))
    assert calibrated["target"]["steps"] == calibrated["draft"]["steps"] > 0
    *_, table = measuring.measure(model, batches=(1, 2), contexts=(6,), widths=(1, 3), repeats=1)
    assert [cell.batch for cell in table.cells] == [1, 2]


def scripted(seed: int) -> ScriptedModel:
    return ScriptedModel(chaotic(seed, 4), source_limit=8)


@pytest.mark.parametrize("rule", slow_but(["standard", "block"], "standard".__eq__))
def test_sampled_texts_have_the_targets_distribution(rule: str) -> None:
    """χ² over all texts of two tokens, each source its own; one false alarm in 10⁴ a source."""
    script, sources, count = chaotic(3, 4), [[1, 2], [3], [2, 0, 1]], 700
    made = Engine(scripted(3), ModelDrafter(scripted(8), 4), max_rows=5)
    how = CONTROLLERS.make("fixed(2)"), RULES.make(rule)
    ids = [
        made.submit(Request([0], Sampling(1.0, seed=i * 3 + s, max_new_tokens=2), *how, source))
        for i in range(count)
        for s, source in enumerate(sources)
    ]
    done = {e.request: e.completion.tokens for e in made.run() if e.completion}
    for s, source in enumerate(sources):
        texts = [tuple(done[i]) for i in ids[s :: len(sources)]]
        chi = 0.0
        for first in range(4):
            before = (*source, 0)
            a = script(before).softmax(-1)[first]
            for second in range(4):
                wanted = count * float(a * script((*before, first)).softmax(-1)[second])
                chi += (texts.count((first, second)) - wanted) ** 2 / wanted
        assert chi < 44.3  # 15 degrees of freedom


def test_every_row_keeps_its_source() -> None:
    """Greedy texts of many sources, ragged, joining and leaving: those of each alone."""
    made = Engine(scripted(5), ModelDrafter(scripted(6), 4), max_rows=3)
    how = CONTROLLERS.make("fixed(3)"), RULES.make("standard")
    sources = [[i % 4, (i * i) % 4, i // 4][: 1 + i % 3] for i in range(12)]
    ids = [
        made.submit(Request([0], Sampling(max_new_tokens=3 + i), *how, source))
        for i, source in enumerate(sources)
    ]
    done = {e.request: e.completion.tokens for e in made.run() if e.completion}
    script = chaotic(5, 4)
    for i, source in zip(ids, sources, strict=True):
        text = [0]
        while len(text) <= len(done[i]):
            text.append(int(script((*source, *text)).argmax()))
        assert done[i] == text[1:]
