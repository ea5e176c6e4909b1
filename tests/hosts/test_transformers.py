"""`forerun.transformers`: the text of transformers' own `generate`, and no trace left behind."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import sourced
from forerun import zoo
from forerun.errors import ForerunError, SettingError
from forerun.model import Model, drafter_spec
from forerun.runtime.cache import cache_argument
from forerun.runtime.load import load_tokenizer
from forerun.runtime.torch_executor import torch_rows
from forerun.transformers import Speculative, attach, detach
from marks import spread
from tiny import build, texts

pytestmark = pytest.mark.transformers_versions


def noisy(model: Any, share: float = 0.03) -> Any:
    """A draft that agrees often, but not always."""
    draft = copy.deepcopy(model)
    torch.manual_seed(5)
    for weight in draft.parameters():
        weight.data += share * weight.data.std() * torch.randn_like(weight)
    return draft


def target(family: str = "llama", seed: int = 0) -> Any:
    model = build(family, seed)
    model.generation_config.pad_token_id = 0
    return model


def batch(rows: int, longest: int = 12) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.tensor(texts(*[longest] * rows))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : row % longest] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def plainly(model: Any, **settings: Any) -> Any:
    return type(model).generate(model, **settings)


def drafters(model: Any) -> dict[str, Any]:
    return {"model": noisy(model), "suffix": "suffix", "lookup": "lookup(n=1,least=1)"}


@pytest.mark.parametrize(("rows", "draft"), spread(3, [1, 4, 16], ["model", "suffix", "lookup"]))
def test_greedy_text_is_that_of_generate(rows: int, draft: str) -> None:
    model, inputs = target(), batch(rows)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    speculative = attach(model, drafters(model)[draft], "fixed(4)")
    for controller in ("fixed(4)", "gammatune", "auto"):
        got = model.generate(**inputs, max_new_tokens=24, do_sample=False, controller=controller)
        assert torch.equal(got, plain)
    model.generate(**inputs, max_new_tokens=24, do_sample=False)
    stats = [completion.stats for completion in speculative.last]
    assert len(stats) == rows
    assert sum(s.drafted for s in stats) > 0
    if draft == "model":
        assert sum(s.accepted for s in stats) > 0
    detach(model)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "qwen3", "mistral-windowed"])
def test_other_families(family: str) -> None:
    """Of the first and the last, the texts grow beyond the windows."""
    model, inputs = target(family), batch(4)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    attach(model, noisy(model), "fixed(3)")
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), plain)


class Padded(LogitsProcessor):
    """Reads the ids as `generate` shows them: padding, places and all."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = (input_ids.sum(-1) + input_ids.shape[1] * torch.arange(len(input_ids))) % 97
        return scores.scatter(-1, banned[:, None], -torch.inf)


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 8]]},
    "new tokens": {"min_new_tokens": 12},
    "length": {"min_length": 24},
    "suppressed": {"suppress_tokens": [3, 4, 5], "begin_suppress_tokens": [9]},
    "bias": {"sequence_bias": [[[10], 4.0], [[11, 12], -3.0]]},
    "forced": {"forced_eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (4, 1.5)},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 20 + row, 40 + len(ids), 2]},
    "own": {"logits_processor": LogitsProcessorList([Padded()])},
    "own, penalised": {"repetition_penalty": 1.2, "logits_processor": [Padded()]},
    "normalised": {"renormalize_logits": True},
}


@pytest.mark.parametrize(("name", "draft"), spread(2, list(PROCESSED), ["model", "lookup"]))
def test_processors_are_asked_at_every_place(name: str, draft: str) -> None:
    settings = {**PROCESSED[name], "max_new_tokens": 16, "do_sample": False}
    if isinstance(settings.get("logits_processor"), list):
        settings["logits_processor"] = LogitsProcessorList(settings["logits_processor"])
    model, inputs = target(), batch(4)
    plain = model.generate(**inputs, **settings)
    attach(model, drafters(model)[draft], "fixed(4)")
    assert torch.equal(model.generate(**inputs, **settings), plain)


class Counted(StoppingCriteria):
    """Keeps state per row, as lm-eval's does: ends a row at its so-manieth even token."""

    def __init__(self, rows: int) -> None:
        self.seen = [0] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> Any:
        for row, last in enumerate(input_ids[:, -1].tolist()):
            self.seen[row] += last % 2 == 0
        return torch.tensor([seen >= 2 + row for row, seen in enumerate(self.seen)])


class Broken(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> Any:
        if input_ids.shape[1] > 15:
            raise ZeroDivisionError("mine")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_stopping_criteria_that_count_by_row() -> None:
    model, inputs = target(), batch(4)

    def settings() -> dict[str, Any]:
        own = StoppingCriteriaList([Counted(4)])
        return {"max_new_tokens": 24, "do_sample": False, "stopping_criteria": own}

    plain = model.generate(**inputs, **settings())
    speculative = attach(model, noisy(model), "fixed(4)")
    assert torch.equal(model.generate(**inputs, **settings()), plain)
    assert any(completion.finish_reason == "stop" for completion in speculative.last)


def test_errors_of_processors_and_criteria_come_as_they_are() -> None:
    model = target()
    attach(model, noisy(model), "fixed(4)")
    inputs: dict[str, Any] = {**batch(2), "max_new_tokens": 24, "do_sample": False}
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.generate(**inputs, stopping_criteria=StoppingCriteriaList([Broken()]))

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate(**inputs, prefix_allowed_tokens_fn=allowed)
    assert model.generate(**inputs).shape[0] == 2


def test_several_ends_and_no_time() -> None:
    model, inputs = target(), batch(4)
    ends = {"eos_token_id": [2, *range(30, 60)], "max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**inputs, **ends)
    speculative = attach(model, noisy(model), "fixed(4)")
    assert torch.equal(model.generate(**inputs, **ends), plain)
    assert {c.finish_reason for c in speculative.last} == {"eos"}
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False, max_time=0.0)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "repetition": {"repetition_penalty": 1.5, "top_k": 20},
    "typical": {"typical_p": 0.5, "top_k": 10, "temperature": 1.2},
}
DRAWS = 300


def p_value(one: Counter[Any], other: Counter[Any]) -> float:
    """Of the χ² test that two samples are of one distribution; rare outcomes in one class."""
    often = [key for key, count in (one + other).items() if count >= 10]
    table = [[one[key], other[key]] for key in often]
    rest = [sum(sample.values()) - sum(sample[key] for key in often) for sample in (one, other)]
    table += [rest] if sum(rest) >= 10 else []
    assert len(table) > 1, "too few draws to compare"
    counts = torch.tensor(table, dtype=torch.float64)
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(table) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("name", spread(2, list(SAMPLED)))
def test_samples_are_distributed_like_those_of_generate(name: str) -> None:
    """By pairs of tokens; a right implementation fails with probability 0.007."""
    model, prompt = target(), torch.tensor(texts(9))
    settings = {
        "do_sample": True, "max_new_tokens": 2, "eos_token_id": None,
        "num_return_sequences": DRAWS, **SAMPLED[name],
    }  # fmt: skip
    plain = Counter(map(tuple, plainly(model, inputs=prompt, **settings)[:, -2:].tolist()))
    attach(model, noisy(model, 0.2), "fixed(2)")
    for rule in ("gumbel", "standard") if name == "temperature" else ("gumbel",):
        got = model.generate(prompt, **settings, rule=rule)
        assert p_value(plain, Counter(map(tuple, got[:, -2:].tolist()))) > 0.001
    torch.manual_seed(3)
    first = model.generate(prompt, **{**settings, "num_return_sequences": 3})
    torch.manual_seed(3)
    assert torch.equal(first, model.generate(prompt, **{**settings, "num_return_sequences": 3}))


def test_a_dictionary_holds_scores_logits_and_statistics() -> None:
    model, inputs = target(), batch(4)
    asked = {
        "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 2,
        "return_dict_in_generate": True, "output_logits": True, "output_scores": True,
    }  # fmt: skip
    plain = model.generate(**inputs, **asked)
    attach(model, noisy(model), "fixed(4)")
    got = model.generate(**inputs, **asked)
    assert torch.equal(got.sequences, plain.sequences)
    for name in ("logits", "scores"):
        assert len(got[name]) == 12
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(plain[name]))
    assert [s.tokens for s in got.forerun] == [12] * 4


def whole_cache(out: Any) -> Any:
    return out.cache if "cache" in out else out.past_key_values


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("givers", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_a_cache_is_given_back_and_taken_for_the_next_turn(
    family: str, givers: tuple[int, int]
) -> None:
    """By ours and by transformers' own, each continuing the other's."""
    if family == "gemma3_text" and givers[0]:
        pytest.skip("transformers keeps the last of a window only")
    model, inputs = target(family), batch(3)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    settings["eos_token_id"] = None
    first = plainly(model, **inputs, **settings).sequences
    ids = torch.cat([first, torch.tensor(texts(5, 5, 5, seed=4))], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 13, dtype=torch.long)], 1)
    second = plainly(model, input_ids=ids, attention_mask=mask, **settings).sequences
    speculative = attach(model, noisy(model), "fixed(3)")
    ways = [model.generate, type(model).generate.__get__(model)]
    turn = ways[givers[0]](**inputs, **settings)
    assert torch.equal(turn.sequences, first)
    assert whole_cache(turn).get_seq_length() == first.shape[1] - 1
    named = "cache" if "cache" in turn else "past_key_values"
    more = {named: whole_cache(turn)}
    turn = ways[givers[1]](input_ids=ids, attention_mask=mask, **settings, **more)
    assert torch.equal(turn.sequences, second)
    assert whole_cache(turn).get_seq_length() == second.shape[1] - 1
    if not givers[1]:
        assert speculative.last[0].stats.cached_tokens == first.shape[1] - 1
        assert whole_cache(turn) is more[named]


@pytest.mark.parametrize(("family", "rows"), spread(2, ["bart", "t5", "marian"], [1, 4]))
def test_encoder_decoder_models(family: str, rows: int) -> None:
    model = sourced.build(family)
    pad = model.config.pad_token_id
    ids = torch.tensor(texts(*[9] * rows))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        ids[row, -row:], mask[row, -row:] = pad, 0
    settings = {"max_new_tokens": 16, "do_sample": False, "num_beams": 1}
    given = {"input_ids": ids, "attention_mask": mask, **settings}
    draft, lookup = noisy(model), "lookup(n=1,least=1)"
    for more in ({}, {"no_repeat_ngram_size": 2}, {"encoder_repetition_penalty": 1.5}):
        plain = plainly(model, **given, **more)
        attach(model, draft, "fixed(3)")
        assert torch.equal(model.generate(**given, **more), plain)
        spec = Speculative(lookup, "fixed(3)")
        assert torch.equal(plainly(model, **given, custom_generate=spec, **more), plain)


def test_nothing_of_the_model_changes() -> None:
    model, inputs = target(), batch(2)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = model.config.to_dict(), model.generation_config.to_dict(), torch.get_rng_state()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    attach(model, noisy(model), "fixed(3)")
    torch.set_rng_state(before[2])
    model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before[2])
    detach(model)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before[:2]
    assert [module.training for module in model.modules()] == modes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights
    model(**inputs, labels=inputs["input_ids"]).loss.backward()


def test_eight_threads_share_the_engine() -> None:
    model, inputs = target(), [batch(1 + n % 3, 8 + n) for n in range(24)]
    settings = {"max_new_tokens": 16, "do_sample": False}
    plain = [model.generate(**one, **settings) for one in inputs]
    attach(model, noisy(model), "fixed(3)")
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda one: model.generate(**one, **settings), inputs))
    assert all(map(torch.equal, got, plain))


def test_a_copy_of_an_attached_model_is_attached_to_itself() -> None:
    model, inputs = target(), batch(1)
    attach(model, "suffix", "fixed(3)")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for weight in other.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        plain = plainly(other, **inputs, max_new_tokens=12, do_sample=False)
        got = other.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert torch.equal(got, plain)


def shipped() -> tuple[Any, Any, Any]:
    from forerun.runtime.load import load_model

    tokenizer = load_tokenizer(zoo.TARGET)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    models = [load_model(where, dtype="float32") for where in (zoo.TARGET, zoo.DRAFT)]
    return models[0], models[1], tokenizer


def test_an_engine_of_ours_behind_a_model_that_is_but_a_form() -> None:
    model, inputs = target(), batch(3)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    rows = torch_rows(model)
    engine = Model(rows, drafter_spec("suffix").build(rows, None))
    form = target(seed=1)
    attach(form, engine, "fixed(3)")
    assert torch.equal(form.generate(**inputs, max_new_tokens=16, do_sample=False), plain)


def test_streamers_pipelines_and_stop_strings() -> None:
    from transformers import pipeline

    model, draft, tokenizer = shipped()
    prompts = ["Once upon a time", "English: I like apples.\nGerman:", "Add 34 and 27.\n"]
    settings = {"max_new_tokens": 16, "do_sample": False}
    one = tokenizer(prompts[0], return_tensors="pt")
    many = tokenizer(prompts, return_tensors="pt", padding=True)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    stops = {**settings, "stop_strings": [" the", "."], "tokenizer": tokenizer}
    config = GenerationConfig(**settings, stop_strings=" the")
    wanted = [
        pipe(prompts, **settings, batch_size=3),
        model.generate(**many, **stops),
        model.generate(**many, generation_config=config, tokenizer=tokenizer),
    ]
    speculative = attach(model, draft, "fixed(4)", tokenizer=tokenizer)
    got = [
        pipe(prompts, **settings, batch_size=3),
        model.generate(**many, **stops),
        model.generate(**many, generation_config=config),
    ]
    assert got[0] == wanted[0]
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(got[2], wanted[2])
    assert config.stop_strings == " the"
    assert sum(c.stats.accepted for c in speculative.last) > 0
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = model.generate(**one, **settings, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, one["input_ids"].shape[1] :])


REFUSED: dict[str, dict[str, Any]] = {
    "beam_search": {"num_beams": 2},
    "assisted_generation": {"prompt_lookup_num_tokens": 3},
    "assistant_model": {"assistant_model": object()},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "guidance": {"guidance_scale": 1.5},
    "token_type_ids": {"token_type_ids": torch.zeros(1, 12, dtype=torch.long)},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    model = target()
    attach(model, "suffix")
    shown = {"guidance": "FreeGuidance", "token_type_ids": "token_type_ids"}.get(name, name)
    with pytest.raises((SettingError, ValueError), match=shown):
        model.generate(**batch(1), max_new_tokens=4, **REFUSED[name])


def test_caches_that_lack_something_are_refused() -> None:
    model, inputs = target("gemma3_text"), batch(1, 12)
    windowed = DynamicCache(config=model.config)
    named = cache_argument(model)
    plain = plainly(model, **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    ids = plain[:, :16]
    model(input_ids=ids[:, :-1], **{named: windowed})
    attach(model, "suffix")
    with pytest.raises(SettingError, match="every token of every layer"):
        model.generate(ids, max_new_tokens=4, **{named: windowed})


def test_who_can_be_attached_to() -> None:
    with pytest.raises(SettingError, match="Linear does not generate"):
        attach(torch.nn.Linear(2, 2))
    model = target()
    attach(model)
    attach(model, "lookup(n=2)")  # anew
    detach(model)
    model.generate = lambda *args, **kwargs: None
    with pytest.raises(SettingError, match="generate of its own"):
        attach(model)
    with pytest.raises(ForerunError, match="gamma"):
        attach(target(), controller="gamatune")


def test_models_whose_layers_are_dispatched(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = target(), batch(3)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    draft = noisy(model)
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    parts |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    parts |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=str(tmp_path))
    attach(model, draft, "fixed(3)")
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)


def test_controllers_of_anybody_run() -> None:
    model, inputs = target(), batch(2)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    attach(model, noisy(model))
    for spec in ("bounded(gammatune,low=1,high=3)", "hf-threshold", "cm-asd", "goodput", "bandit"):
        got = model.generate(**inputs, max_new_tokens=16, do_sample=False, controller=spec)
        assert torch.equal(got, plain), spec
