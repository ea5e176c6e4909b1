"""Encoder-decoder models: ragged rows with sources of their own equal the model run alone."""

from __future__ import annotations

import random
from functools import wraps
from typing import Any

import pytest
import torch
import transformers as hf

from forerun.errors import (
    ForerunWarning,
    ModelError,
    PromptError,
    SettingError,
    UnsupportedModelError,
)
from forerun.runtime import Rows, load_model, torch_rows
from forerun.runtime.encoder_decoder import EncoderDecoderExecutor
from forerun.runtime.support import PROVEN_ENCODER_DECODER, REFUSED_ENCODER_DECODER, refusal
from forerun.testing import ScriptedModel
from marks import slow_but, spread
from sourced import FAMILIES, alone, build
from tiny import LIMIT, VOCAB
from tiny import build as build_decoder

TOLERANCE = 2e-4  # logits reach about 26 in gated T5; 6e-6 of that


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def test_the_tested_families_are_the_proven_ones() -> None:
    assert {build(family).config.model_type for family in FAMILIES} == PROVEN_ENCODER_DECODER


class Played:
    """Rows with their sources and texts, beside the model run alone."""

    def __init__(self, model: Any, seed: int, rows: Rows | None = None) -> None:
        self.model, self.random = model, random.Random(seed)
        self.rows = rows or torch_rows(model)
        self.sources: list[list[int]] = []
        self.texts: list[list[int]] = []

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(3, VOCAB - 1) for _ in range(count)]

    def join(self, count: int) -> None:
        new = [self.ids(self.random.randint(1, 15)) for _ in range(count)]
        prompts = [[*self.rows.facts.start, *self.ids(i % 3)] for i in range(count)]
        self.rows.read(prompts, 8, new)
        self.sources += new
        self.texts += prompts

    def draft(self) -> None:
        """Feed what each row lacks and a few tokens more; some rows wait."""
        for text in self.texts:
            text += self.ids(self.random.choice([0, 1, 2, 4]))
        starts = self.rows.lengths
        pieces = [
            text[n:] if self.random.random() < 0.85 else []
            for text, n in zip(self.texts, starts, strict=True)
        ]
        wanted = [self.random.randint(0, len(piece)) for piece in pieces]
        got = self.rows.feed(pieces, wanted)
        for row, count in enumerate(wanted):
            if count:
                text = self.texts[row][: starts[row] + len(pieces[row])]
                close(got[row, :count], alone(self.model, self.sources[row], text)[-count:])

    def reject(self) -> None:
        for row, text in enumerate(self.texts):
            del text[max(2, len(text) - self.random.randint(0, 4)) :]
            self.rows.rollback(row, len(text))
            text += self.ids(1)

    def leave(self) -> None:
        order = self.random.sample(range(len(self.texts)), len(self.texts) - 1)
        self.rows.keep(order)
        self.sources = [self.sources[row] for row in order]
        self.texts = [list(self.texts[row]) for row in order]


@pytest.mark.parametrize(("family", "attention"), spread(2, list(FAMILIES), ["sdpa", "eager"]))
def test_rows_with_sources_equal_the_model_run_alone(family: str, attention: str) -> None:
    """Over joins, drafts, rejections and leaves in random order."""
    model = build(family)
    model.set_attn_implementation(attention)
    play(Played(model, 5))


def play(played: Played) -> None:
    played.join(4)
    for turn in range(7):
        played.draft()
        played.reject()
        if turn in (1, 3, 4):
            played.leave()
        if turn in (2, 4):
            played.join(1 + turn // 4)
    assert len(played.texts) == 4


@pytest.mark.parametrize("family", slow_but(FAMILIES, {"t5", "marian", "bart"}.__contains__))
def test_rows_on_openvino_equal_the_model_run_alone(family: str) -> None:
    pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
    from forerun.runtime.openvino.load import from_model

    model = build(family)
    if "t5" in family:
        with pytest.raises(UnsupportedModelError, match="bias by distance"):
            from_model(model)
        return
    played = Played(model, 5, Rows(from_model(model, cached=False)))
    play(played)
    while len(played.texts) > 1:  # the last row goes through graphs of fixed shapes
        played.leave()
    for _ in range(4):
        played.draft()
        played.reject()


@pytest.mark.parametrize("family", ["t5", "marian", "bart", "m2m_100"])
def test_wrong_places_would_be_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with every row placed like the first, the logits are others."""
    played = Played(build(family), 5)
    placed = played.rows.executor.placement.placed

    def wrongly(queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> Any:
        return placed(queries[:1].expand_as(queries), keys, hidden)

    monkeypatch.setattr(played.rows.executor.placement, "placed", wrongly)
    played.join(4)
    with pytest.raises(AssertionError):
        played.draft()


def test_bfloat16_rows_are_close() -> None:
    model = build("marian").to(torch.bfloat16)
    rows = torch_rows(model)
    sources, texts = [[5, 6, 7, 8, 9], [11, 12]], [[96, 4, 5], [96, 7]]
    rows.read(texts, sources=sources)
    got = rows.feed([text[-1:] for text in texts])[:, 0]
    for row, (source, text) in enumerate(zip(sources, texts, strict=True)):
        torch.testing.assert_close(got[row], alone(model, source, text)[-1], atol=0.06, rtol=0.05)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_nothing_stays_on_the_model_after_an_error(family: str) -> None:
    model = build(family)
    rows = torch_rows(model)
    rows.join(2, 4, [[5, 6], [7, 8, 9]])

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.get_output_embeddings().register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        rows.feed([[5], [6, 7]])
    handle.remove()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "compute_bias" not in module.__dict__
    wanted = alone(build(family), [5, 6], [2, 5, 6])
    close(alone(model, [5, 6], [2, 5, 6]), wanted)


def test_two_runtimes_over_one_model_do_not_meet() -> None:
    model = build("marian")
    first, second = torch_rows(model), torch_rows(model)
    first.read([[96, 5]], sources=[[9, 8, 7]])
    second.read([[96, 6, 4]], sources=[[3, 4]])
    close(first.feed([[5]])[0, 0], alone(model, [9, 8, 7], [96, 5])[-1])
    close(second.feed([[4]])[0, 0], alone(model, [3, 4], [96, 6, 4])[-1])


def test_sources_of_a_join_are_encoded_together_by_length() -> None:
    model = build("bart")
    rows = torch_rows(model)
    shapes = []
    handle = model.get_encoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    rows.join(4, 4, [[5] * 60, [6] * 3, [7] * 9, [8] * 58])
    handle.remove()
    assert shapes == [(2, 9), (2, 60)]
    got = rows.feed([[2]] * 4)[:, 0]
    for row, source in enumerate([[5] * 60, [6] * 3, [7] * 9, [8] * 58]):
        close(got[row], alone(model, source, [2])[-1])


def test_texts_beyond_the_context_are_refused_and_its_end_is_reached() -> None:
    """Beside a row that is at the end of a learned table, padding would look beyond it."""
    model = build("bart")
    rows = torch_rows(model)
    rows.join(2, LIMIT, [[5, 6], [7]])
    text = [2, *[3 + i % 50 for i in range(LIMIT - 1)]]
    rows.feed([text[:-1], []])
    got = rows.feed([text[-1:], [2, 5, 6, 7]])
    close(got[0, 0], alone(model, [5, 6], text)[-1])
    close(got[1], alone(model, [7], [2, 5, 6, 7]))
    with pytest.raises(PromptError, match=f"{LIMIT + 1} tokens do not fit"):
        rows.feed([[5], []])


def test_what_a_model_says_of_itself() -> None:
    facts = torch_rows(build("bart")).facts
    assert facts.start == (2, 0), "the start token and the forced first one"
    assert facts.source_limit == facts.limit == LIMIT
    assert facts.eos == {2}
    assert facts.layers == 3
    assert torch_rows(build("t5")).facts.start == (0,)
    assert torch_rows(build_decoder("llama")).facts.source_limit is None


def test_sources_go_with_encoders_only() -> None:
    with pytest.raises(SettingError, match="a row joins with a source"):
        torch_rows(build("marian")).join(1)
    with pytest.raises(SettingError, match="this one has no encoder"):
        torch_rows(build_decoder("llama")).join(1, 0, [[5]])


def test_generation_settings_are_applied_or_named() -> None:
    model = build("marian")
    model.generation_config.bad_words_ids = [[96], [4, 5]]
    model.generation_config.num_beams = 4
    model.generation_config.no_repeat_ngram_size = 3
    with pytest.warns(ForerunWarning, match="num_beams=4, no_repeat_ngram_size=3, bad_words_ids=1"):
        rows = torch_rows(model)
    rows.join(1, 4, [[5, 6]])
    logits = rows.feed([[96]])[0, 0]
    assert logits.isneginf().nonzero().flatten().tolist() == [96]


@pytest.mark.parametrize("kind", REFUSED_ENCODER_DECODER)
def test_what_cannot_work_is_refused_with_the_reason(kind: str) -> None:
    config = hf.T5Config()
    config.model_type = kind
    reason = refusal(config, encoders=True)
    assert reason is not None
    assert len(reason) > 20
    assert "runtime torch" in str(refusal(config))


def test_a_refused_model_names_its_reason(tmp_path: Any) -> None:
    config = hf.LEDConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        max_encoder_position_embeddings=32, max_decoder_position_embeddings=32,
        attention_window=4,
    )  # fmt: skip
    model = hf.LEDForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match="led models cannot run here: its encoder"):
        torch_rows(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="windows padded to a fixed size"):
        load_model(tmp_path)


def test_an_unproven_family_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("marian")
    model.config.model_type = "marianette"
    assert torch_rows(model).lengths == []

    @wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = None  # every row sees what pads its source
        return type(model).forward(model, *args, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="a probe of this one failed: a row in a batch"):
        torch_rows(model)


def test_a_shared_encoder_reads_once() -> None:
    target, draft = build("marian"), build("marian", decoder_layers=1)
    draft.model.encoder = target.model.encoder
    one = EncoderDecoderExecutor(target)
    rows, small = Rows(one), Rows(one.beside(draft))
    calls = []
    handle = target.get_encoder().register_forward_pre_hook(lambda *_: calls.append(1))
    sources = [[5, 6, 7], [8, 9]]
    rows.join(2, 4, sources)
    small.join(2, 4, sources)
    assert len(calls) == 1
    Rows(one).join(2, 4, sources)  # another batch of the same sources is not free
    handle.remove()
    assert len(calls) == 2
    close(small.feed([[96], [96]])[1, 0], alone(draft, sources[1], [96])[-1])


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_an_error_of_the_encoder_leaves_the_rows_as_they_were(runtime: str) -> None:
    model, texts = build("marian"), [[5, 6, 7], [8, 9]]
    if runtime == "openvino":
        pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
        from forerun.runtime.openvino.load import from_model

        rows = Rows(from_model(model, cached=False))
    else:
        rows = torch_rows(model)
    rows.join(1, 4, texts[:1])

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.get_encoder().register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        rows.join(2, 4, [[4] * 9, [3]])
    handle.remove()
    rows.join(1, 4, texts[1:])
    logits = rows.feed([[96], [96]])
    for got, source in zip(logits, texts, strict=True):
        close(got[0], alone(model, source, [96])[-1])


def test_an_executor_without_drafts_beside_it_says_so() -> None:
    executor = ScriptedModel(torch.eye(4), source_limit=8)
    with pytest.raises(SettingError, match="shares the target's encoder; use a draft model"):
        executor.beside(None)
