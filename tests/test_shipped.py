"""The shipped pair: greedy speculation equals greedy plain decoding, token by token, in fp32.

Where two texts part, both logits are recomputed; anything but a floating-point near-tie fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import zoo
from forerun.controllers import CONTROLLERS
from forerun.drafters.kangaroo import KangarooDrafter
from forerun.engine import Sampling
from forerun.errors import ModelError, SettingError, UnknownNameError
from forerun.lab.audit import explain, first_difference
from forerun.model import drafter_spec
from forerun.runtime.drafts import fingerprint, read_about
from forerun.runtime.heads import ExitHeads
from marks import slow_but

DRAFTERS = ["model", "lookup", "specbound", "none"]
EVERY = "2,3,4,5,6,8,10"
EXITS = [
    "specbound", "specbound(exits='')", "specbound(anneal=1.0)", "specbound(width=64)",
    f"specbound(depth=11,layers='{EVERY}')", "specbound(depth=3)", "specbound(threshold=0.2)",
    f"specbound(threshold=0.0,depth=11,layers='{EVERY}',width=64)",
    "specbound(exits='',depth=11,layers=1,width=2)",
    "adadecode", "adadecode(threshold=0.3,layers='2,5,10')", "kangaroo", "kangaroo(threshold=0)",
    "kangaroo(keep=False)", "medusa", "medusa(heads=1)", "lookahead", "lookahead(text=False,n=2)",
]  # fmt: skip
"""Options of early exits."""
SPECS = [
    *(n for n in CONTROLLERS.names() if n != "bounded"),
    "fixed(1)", "hf-threshold(dynamic=true)", "gammatune+(keep=false)", "cm-asd(two_pass=true)",
    "bounded(gammatune+,low=1,high=8)",
]  # fmt: skip
FEW = "fixed", "auto", "svip", "cm-asd(two_pass=true)", "hf-threshold"
"""One of each kind: of no signals, of costs, of a signal, of a preview, of the last token's."""


@pytest.fixture(scope="module")
def models() -> dict[str, forerun.Model]:
    return {
        name: forerun.load(draft=None if name == "model" else name, dtype="float32")
        for name in DRAFTERS
    }


def prompts(count: int) -> list[str]:
    """Test prompts of all families in turn."""
    by_family = [zoo.prompts(f, "test") for f in zoo.families()]
    mixed = [p for group in zip(*by_family, strict=False) for p in group]
    return [p.prompt for p in mixed[:count]]


@pytest.fixture(scope="module")
def plain(models: dict[str, forerun.Model]) -> Callable[[int, int, int], list[Any]]:
    """Plain completions of the first prompts, made once."""

    @cache
    def make(count: int, tokens: int, batch: int, temperature: float = 0.0) -> list[Any]:
        how: dict[str, Any] = {"sampling": samplings(count, tokens, temperature)}
        how["batch_size"] = batch
        return models["none"].generate(prompts(count), plain=True, **how)

    return make


def samplings(count: int, tokens: int, temperature: float) -> list[Sampling]:
    """One per prompt, each with its own seed."""
    return [Sampling(max_new_tokens=tokens, temperature=temperature, seed=i) for i in range(count)]


def check_equal(
    model: forerun.Model,
    plain: list[Any],
    spec: str,
    tokens: int,
    batch: int,
    temperature: float = 0.0,
) -> int:
    """Fail on a difference that is no near-tie; return how many near-ties there were."""
    texts, hows = prompts(len(plain)), samplings(len(plain), tokens, temperature)
    fast = model.generate(texts, controller=spec, sampling=hows, batch_size=batch)
    ties = 0
    for text, how, a, b in zip(texts, hows, plain, fast, strict=True):
        if first_difference(a.tokens, b.tokens) is not None:
            difference = explain(model, model.encode(text), a.tokens, b.tokens, how)
            assert difference.near_tie, f"{spec} on {text[:40]!r}: {difference.message}"
            warnings.warn(f"{spec} on {text[:40]!r}: {difference.message}", stacklevel=2)
            ties += 1
    return ties


def test_shipped_exit_heads_are_specbounds_default() -> None:
    model = forerun.load(draft="specbound", dtype="float32")
    about = read_about(zoo.EXITS, "exits")
    settings = about.settings["tuned"]
    drafter: Any = model.drafter
    assert isinstance(drafter.heads, ExitHeads)
    assert ",".join(map(str, drafter.layers)) == settings["layers"]
    assert sum(f.stat().st_size for f in zoo.EXITS.iterdir()) < 8e6
    lens: Any = forerun.load(draft="specbound(exits='')", dtype="float32").drafter
    assert lens.heads.tokens is None
    assert lens.layers == (2, 4, 6)
    target = drafter.rows.executor.module()
    assert fingerprint(target) == about.target


def test_shipped_heads_and_adapter_serve_the_relatives_of_specbound() -> None:
    drafter: Any = forerun.load(draft="adadecode", dtype="float32").drafter
    assert drafter.layers == (3, 6, 8)
    adapted = forerun.load(draft="kangaroo", dtype="float32")  # no warning of another target
    assert isinstance(adapted.drafter, KangarooDrafter)
    folder = zoo.TARGET / "kangaroo"
    assert adapted.drafter.layers == (read_about(folder).settings["layers"],)
    assert sum(f.stat().st_size for f in folder.iterdir()) < 1e6
    how: dict[str, Any] = {"controller": "fixed(64)", "max_new_tokens": 32, "ignore_eos": True}
    stats = [c.stats for c in adapted.generate(prompts(6), **how)]
    # It has learnt something: by chance it would be one in 6,144.
    assert sum(s.accepted for s in stats) > 0.3 * sum(s.drafted for s in stats)


def test_shipped_medusa_heads_have_learnt_something() -> None:
    model = forerun.load(draft="medusa", dtype="float32")  # no warning of another target
    folder = zoo.TARGET / "medusa"
    assert sum(f.stat().st_size for f in folder.iterdir()) < 5e6
    how: dict[str, Any] = {"controller": "fixed(1)", "max_new_tokens": 32, "ignore_eos": True}
    stats = [c.stats for c in model.generate(prompts(6), **how)]
    assert sum(s.accepted for s in stats) > 0.2 * sum(s.drafted for s in stats)


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    ("drafter", "spec"),
    slow_but(
        [*product(["model"], SPECS), *product(["lookup", "specbound", "none"], FEW)],
        lambda drafter, spec: spec == "auto" or (drafter == "model" and spec in FEW[::3]),
    ),
)
def test_greedy_equals_plain_on_12_prompts(
    models: dict[str, forerun.Model], plain: Any, drafter: str, spec: str
) -> None:
    assert check_equal(models[drafter], plain(12, 16, 12), spec, tokens=16, batch=12) <= 2


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    ("drafter", "spec"),
    slow_but(
        product(["model", "lookup", "specbound"], FEW),
        lambda drafter, spec: drafter == "model" and spec in FEW[1:4:2],
    ),
)
def test_sampled_equals_plain_on_12_prompts(
    models: dict[str, forerun.Model], plain: Any, drafter: str, spec: str
) -> None:
    made = plain(12, 24, 12, temperature=0.8)
    assert check_equal(models[drafter], made, spec, 24, 12, temperature=0.8) <= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_plain_on_500_prompts(
    models: dict[str, forerun.Model], plain: Any, drafter: str, spec: str
) -> None:
    assert check_equal(models[drafter], plain(500, 48, 50), spec, tokens=48, batch=50) <= 10


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    ("spec", "count", "tokens", "batch"),
    slow_but(
        [(spec, *size) for spec in EXITS for size in ((6, 16, 6), (500, 48, 50))],
        lambda spec, count, tokens, batch: count == 6 and spec in EXITS[::6],
    ),
)
def test_every_option_of_early_exits_equals_plain(
    plain: Any, spec: str, count: int, tokens: int, batch: int
) -> None:
    model = forerun.load(draft=spec, dtype="float32")
    ties = check_equal(model, plain(count, tokens, batch), "fixed(64)", tokens, batch)
    assert ties <= max(2, count // 50)


def test_a_row_does_not_depend_on_its_neighbours(models: dict[str, forerun.Model]) -> None:
    texts = prompts(6)
    how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_new_tokens": 24}
    together = models["model"].generate(texts, **how)
    for text, completion in zip(texts, together, strict=True):
        assert models["model"].generate(text, **how).tokens == completion.tokens


def test_streamed_text_is_the_decoded_text(models: dict[str, forerun.Model]) -> None:
    model = models["model"]
    for text in [*prompts(6), "English: Ich heiße\nGerman:"]:
        done = model.generate(text, max_new_tokens=40, temperature=1.0, seed=1)
        ids = model.encode(text) + done.tokens
        whole = model.tokenizer.decode(ids, skip_special_tokens=True)
        assert whole == model.tokenizer.decode(model.encode(text)) + done.text


def test_stop_strings_end_the_text_before_them(models: dict[str, forerun.Model]) -> None:
    model = models["model"]
    free = model.generate("Once upon a time", max_new_tokens=30, ignore_eos=True)
    stop = free.text[20:26]
    cut = model.generate("Once upon a time", max_new_tokens=30, ignore_eos=True, stop=(stop,))
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.find(stop)]
    assert stop not in cut.text
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    never = model.generate("Once upon a time", max_new_tokens=30, ignore_eos=True, stop=("§§",))
    assert never.text == free.text


@pytest.mark.slow
def test_a_hundred_answers_end_where_their_turn_ends(models: dict[str, forerun.Model]) -> None:
    model = models["model"]
    asked = [p.prompt.rsplit("User: ")[-1].split("\n")[0] for p in zoo.prompts("chat", "test")]
    for question in asked[:100]:
        done = model.chat(question, max_new_tokens=160)
        assert done.finish_reason in ("eos", "stop"), question
        assert "User:" not in done.text, question
        assert done.text == done.text.lstrip(), question


def test_a_full_context_is_a_defined_end(models: dict[str, forerun.Model]) -> None:
    model = models["model"]
    prompt = (model.encode("and the ") * 600)[: model.target.limit - 5]
    done = model.generate([prompt], max_new_tokens=50, ignore_eos=True)[0]
    assert done.finish_reason == "context"
    assert len(done.tokens) == 5


def test_prompts_and_settings_that_cannot_work(models: dict[str, forerun.Model]) -> None:
    model = models["model"]
    for bad, message in (
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x " * 3000}, "the context holds"),
        ({"prompt": "x", "temprature": 1.0}, "did you mean 'temperature'"),
        ({"prompt": "x", "controller": "gammatun"}, "did you mean 'gammatune'"),
        ({"prompt": "x", "controller": "gammatune(etta=1)"}, "did you mean 'eta'"),
        ({"prompt": "x", "controller": "gammatune(high=0)"}, "high"),
        ({"prompt": "x", "rule": "standart"}, "did you mean 'standard'"),
        ({"prompt": "x", "rule": "exact", "temperature": 1.0}, "temperature 0"),
        ({"prompt": "x", "temperature": -1.0}, "temperature must be"),
    ):
        with pytest.raises(forerun.ForerunError, match=message):
            model.generate(**bad)  # type: ignore[call-overload]
        assert model.target.lengths == []  # the model stays usable
    assert len(model.generate("x", max_new_tokens=2).tokens) <= 2


def test_two_streams_of_one_model_do_not_mix(models: dict[str, forerun.Model]) -> None:
    model = models["model"]
    how = {"max_new_tokens": 20, "ignore_eos": True}
    alone = [model.generate(text, **how).tokens for text in ("Once", "Twice")]
    first, second = (model.stream(text, **how) for text in ("Once", "Twice"))
    begun = next(first)
    tokens = [[p.token for e in events for p in e.pieces] for events in (second, [begun, *first])]
    assert tokens == alone[::-1]
    assert model.target.lengths == []


def test_a_draft_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    import shutil

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path / "other"
    shutil.copytree(zoo.DRAFT, folder)
    other = Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.ByteLevel()
    other.decoder = decoders.ByteLevel()
    other.train_from_iterator(
        ["quite different words, altogether " * 9], trainers.BpeTrainer(vocab_size=300)
    )
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="has another tokenizer than the target"):
        forerun.load(draft=folder)


def test_drafters_are_told_from_models() -> None:
    assert drafter_spec("lookup(n=2)").n == 2  # type: ignore[attr-defined]
    assert drafter_spec("org/some-model").path == "org/some-model"  # type: ignore[attr-defined]
    with pytest.raises(UnknownNameError, match="did you mean 'lookup'"):
        drafter_spec("lookupp(n=2)")
    with pytest.raises(SettingError, match="least"):
        drafter_spec("lookup(n=1,least=2)")
    with pytest.raises(ModelError, match="no model folder"):
        forerun.load(draft="./nowhere")


def test_transformers_agrees_with_plain_decoding(models: dict[str, forerun.Model]) -> None:
    import torch

    model = models["none"]
    hf = model.target.executor.module()
    for text in prompts(4):
        ids = model.encode(text)
        out = hf.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=16,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        theirs = out[0, len(ids) :].tolist()
        ours = model.generate(text, max_new_tokens=16).tokens
        if ours != theirs:
            assert explain(model, ids, ours, theirs).near_tie


def test_a_draft_that_says_nothing_of_its_tokens_is_planned_whole() -> None:
    model = forerun.load(draft="lookup", device="cpu")
    prompt, how = (
        "Rewrite: repeat the text.\nText: The king and the queen went home.\nResult:",
        {"max_new_tokens": 16},
    )
    done = model.generate(prompt, controller="cm-asd(two_pass=true)", **how)
    assert done.stats.accepted > 0
    assert done.tokens == model.generate(prompt, plain=True, **how).tokens
