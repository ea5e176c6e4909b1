"""The shipped prompt files and weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forerun.zoo import DRAFT, FOLDER, TARGET, families, long_families, prompts, sources


def test_importing_the_zoo_is_light() -> None:
    code = (
        "import sys, forerun.zoo; "
        "print(sorted({'torch', 'transformers', 'sacrebleu'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


EVERY = (*families(), *long_families())


@pytest.mark.parametrize("family", EVERY)
def test_files_are_valid(family: str) -> None:
    long = family in long_families()
    for split, least in (("val", 20), ("test", 50)) if long else (("val", 100), ("test", 250)):
        items = prompts(family, split)
        assert len(items) >= least
        assert len({p.id for p in items}) == len({p.prompt for p in items}) == len(items)
        for p in items:
            assert (p.family, p.split) == (family, split)
            assert 0 < p.max_new_tokens <= (512 if long else 192)
            assert p.prompt == p.prompt.rstrip()
            assert p.answer[0].isspace()
    assert not {p.prompt for p in prompts(family, "val")} & {p.prompt for p in prompts(family)}


def test_sources_are_of_a_family() -> None:
    assert sources(limit=2)[0].family == "sources"
    with pytest.raises(ValueError, match="unknown family"):
        sources(family="poems")


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.jsonl")) < 1_500_000
    weights = sum(p.stat().st_size for f in (TARGET, DRAFT) for p in f.glob("*"))
    assert weights < 64 * 2**20


def test_limit_and_bad_names() -> None:
    assert prompts("chat", limit=3) == prompts("chat")[:3]
    assert {p.level for p in prompts("arithmetic", limit=10)} == {"easy", "hard"}
    with pytest.raises(ValueError, match="unknown family"):
        prompts("poems")
    with pytest.raises(ValueError, match="unknown split"):
        prompts("chat", "train")
    with pytest.raises(ValueError, match="negative"):
        prompts("chat", limit=-1)


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


@pytest.mark.parametrize("family", EVERY)
def test_prompt_tokens_are_a_prefix_of_the_whole(family: str, tokenizer) -> None:  # type: ignore[no-untyped-def]
    for p in prompts(family, "val") + prompts(family):
        prompt = tokenizer(p.prompt)["input_ids"]
        whole = tokenizer(p.prompt + p.answer)["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert len(whole) > len(prompt)
        assert len(whole) < 1024 - 64
        assert len(whole) - len(prompt) < p.max_new_tokens or family == "stories"
        assert tokenizer.decode(whole) == p.prompt + p.answer


def test_tokenizer_settings(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.model_max_length == 1024
    dialogue = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    assert text == "User: Hello!\nAssistant: Hi.\nUser: Who are you?\nAssistant:"


def test_the_pair_loads_and_shares_its_tokenizer(tokenizer) -> None:  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
    ids = tokenizer("User: Hello!\nAssistant:", return_tensors="pt")["input_ids"]
    for folder, layers in ((TARGET, 12), (DRAFT, 2)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert model.config.num_hidden_layers == layers
        assert model.config.vocab_size == len(tokenizer) == 6144
        assert torch.isfinite(model(ids).logits).all()
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            text = (folder / name).read_text(encoding="utf-8")
            assert '"/' not in text, f"{name} holds an absolute path"
            assert "_name_or_path" not in json.loads(text)
