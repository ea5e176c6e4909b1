"""The shipped translator: speculation equals plain decoding equals transformers, in float32.

Where two texts part, both logits are recomputed; anything but a floating-point near-tie fails.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from benchmarks.peers import hugging_face as hf
from forerun import zoo
from forerun.errors import SettingError
from forerun.lab.audit import explain, first_difference
from forerun.model import default_draft
from forerun.runtime.drafts import fingerprint, read_about
from forerun.runtime.load import load_model
from marks import slow_but

DRAFTERS = {"translator": ("shared", "block", "lookup"), "digest": ("block", "lookup")}
PAIRS = [("translator", "shared"), ("translator", "block"), ("digest", "block")]
SPECS = ["fixed(4)", "cm-asd", "cm-asd(two_pass=true)", "auto"]
TOKENS = 64


@cache
def loaded(target: str, draft: str) -> forerun.Model:
    return forerun.load(target, draft, device="cpu")


def sources(target: str, count: int) -> list[str]:
    """Held-out sources, each once.

    English sentences, the later half of them in pairs; or passages, and more with their sentences
    the other way round.
    """
    if target == "digest":
        texts = [p.prompt for split in ("test", "val") for p in zoo.sources(split, family=target)]
        more = [". ".join(reversed(text.removesuffix(".").split(". "))) + "." for text in texts]
        out = [*texts, *more][:count]
    else:
        texts = [p.prompt for split in ("test", "val") for p in zoo.sources(split)]
        half = count // 2
        pairs = [f"{a} {b}" for a, b in zip(texts, [*texts[100:], *texts[:100]], strict=True)]
        out = [*texts[:half], *pairs[: count - half]]
    assert len(out) == len(set(out)) == count
    return out


@cache
def plain(target: str, count: int, batch: int) -> list[Any]:
    return loaded(target, "none").generate(
        sources(target, count), plain=True, batch_size=batch, max_new_tokens=TOKENS
    )


@cache
def theirs(target: str, count: int, batch: int) -> list[list[int]]:
    """What transformers' own `generate` writes."""
    model = loaded(target, "none")
    peer = hf.beside(hf.Plain, model)
    ids = [model.encode(text) for text in sources(target, count)]
    made = [peer.generate(ids[i : i + batch], TOKENS) for i in range(0, count, batch)]
    return [row for rows in made for row in rows]


def ties(target: str, outputs: list[list[int]], wanted: list[list[int]]) -> int:
    """Fails on a difference that is no near-tie; how many near-ties there were."""
    model, number = loaded(target, "none"), 0
    for text, a, b in zip(sources(target, len(outputs)), wanted, outputs, strict=True):
        if first_difference(a, b) is not None:
            why = explain(model, model.encode(text), a, b, rows=16)
            assert why.near_tie, f"{text!r}: {why.message}"
            number += 1
    return number


def check(target: str, count: int, batch: int, drafter: str, spec: str) -> None:
    made = loaded(target, drafter).generate(
        sources(target, count), controller=spec, batch_size=batch, max_new_tokens=TOKENS
    )
    assert sum(c.stats.accepted for c in made) > 0
    outputs = [c.tokens for c in made]
    assert ties(target, outputs, [c.tokens for c in plain(target, count, batch)]) <= count // 100
    assert ties(target, outputs, theirs(target, count, batch)) <= count // 100


@pytest.mark.parametrize(
    ("target", "drafter", "spec"),
    slow_but(
        [(*pair, spec) for pair in PAIRS for spec in SPECS],
        lambda target, drafter, spec: spec == ("fixed(4)" if drafter == "shared" else SPECS[2]),
    ),
)
def test_greedy_speculation_is_plain_decoding_is_generate(
    target: str, drafter: str, spec: str
) -> None:
    check(target, 24, 8, drafter, spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("target", "drafter"), [(target, draft) for target in DRAFTERS for draft in DRAFTERS[target]]
)
@pytest.mark.parametrize("batch", [1, 16])
def test_so_it_is_on_500_sources(target: str, drafter: str, spec: str, batch: int) -> None:
    check(target, 500, batch, drafter, spec)


def test_its_drafts_come_with_it() -> None:
    assert default_draft("translator") == "shared"
    assert default_draft(zoo.TRANSLATOR) == "shared"
    assert default_draft("./translator") == default_draft("org/model") == "memory"
    assert default_draft(None) == zoo.DRAFT
    model = forerun.load("translator", device="cpu")
    assert model.target.facts.precision == "float32"
    assert (
        model.generate("I like apples.").tokens
        == loaded("translator", "none").generate("I like apples.").tokens
    )
    with pytest.raises(SettingError, match="this target has none"):
        forerun.load(draft="block", device="cpu", runtime="torch")


def test_what_ships_stays_small() -> None:
    sizes = [
        file.stat().st_size
        for folder in (zoo.TARGET, zoo.DRAFT, zoo.TRANSLATOR, zoo.DIGEST)
        for file in folder.rglob("*")
        if file.is_file()
    ]
    assert sum(sizes) < 63e6


def test_weights_in_8_bits_are_the_same_numbers_in_every_type(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    narrow, wide = (load_model(zoo.TRANSLATOR, "cpu", dtype) for dtype in (None, "float32"))
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    for name, weight in narrow.named_parameters():
        made = "embed_positions" in name  # when it is loaded
        assert made or torch.equal(weight.float(), wide.get_parameter(name))
    narrow.save_pretrained(tmp_path)
    read = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert fingerprint(read) == fingerprint(wide) == read_about(zoo.TRANSLATOR / "block").target
    with pytest.raises(OSError, match="no file named"):
        AutoModelForSeq2SeqLM.from_pretrained(zoo.TRANSLATOR)


def test_it_translates() -> None:
    import sacrebleu

    prompts = zoo.prompts("translation", "val", 60)
    texts = [p.prompt.removeprefix("English: ").removesuffix("\nGerman:") for p in prompts]
    done = loaded("translator", "shared").generate(texts, max_new_tokens=TOKENS)
    most = max(len(p.references) for p in prompts)
    references = [[(*p.references, *[None] * most)[i] for p in prompts] for i in range(most)]
    assert sacrebleu.corpus_bleu([c.text for c in done], references).score > 10


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["shared", "block"])
def test_sampled_texts_have_the_translators_distribution(drafter: str) -> None:
    """χ² of the first two tokens of 2,000 texts against the model's own probabilities."""
    top, count = 3, 2000
    model = loaded("translator", "none")
    hf: Any = model.target.executor.module()
    source = torch.tensor([model.encode("He was very tired when he came home.")])
    start = list(model.opening.prompt)

    @torch.inference_mode()
    def following(text: list[int]) -> dict[int, float]:
        logits = hf(input_ids=source, decoder_input_ids=torch.tensor([start + text])).logits[0, -1]
        logits[sorted(getattr(model.target.executor, "banned", ()))] = -torch.inf
        best = logits.double().topk(top)
        shares = best.values.softmax(-1)
        return dict(zip(best.indices.tolist(), shares.tolist(), strict=True))

    wanted = {
        (a, b): p * q for a, p in following([]).items() for b, q in following([a]).items()
    }  # fmt: skip
    how = [
        forerun.Sampling(1.0, top_k=top, max_new_tokens=2, ignore_eos=True, seed=i)
        for i in range(count)
    ]
    ids = [source[0].tolist()] * count
    made = loaded("translator", drafter).generate(
        ids, batch_size=100, controller="fixed(2)", sampling=how
    )
    seen = [tuple(c.tokens) for c in made]
    assert set(seen) <= set(wanted)
    chi = sum((seen.count(text) - count * p) ** 2 / (count * p) for text, p in wanted.items())
    assert chi < 26.1  # 8 degrees of freedom, 0.001


def test_a_block_is_paid_with_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter takes its pass for a round's start, not for the price of each further token."""
    model = loaded("translator", "block")
    feed, laps = type(model.drafter.rows).feed, []

    def slow(self: Any, *how: Any) -> Any:
        if self is model.drafter.rows:
            time.sleep(0.02)
        return feed(self, *how)

    monkeypatch.setattr(type(model.drafter.rows), "feed", slow)
    monkeypatch.setattr(model.meter, "add", laps.append)
    model.generate(sources("translator", 1)[0], controller="fixed(4)", max_new_tokens=20)
    drafting = [lap for lap in laps if lap.steps]
    assert max(lap.steps for lap in drafting) == 4
    assert all(lap.first_step_seconds >= 0.02 for lap in drafting)
