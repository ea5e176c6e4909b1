"""What cannot be loaded is refused with the real reason; what is odd is said."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

import forerun
from forerun import zoo
from forerun.drafters.model import difference
from forerun.drafters.specbound import SpecBound
from forerun.errors import ForerunError, ForerunWarning, ModelError, UnsupportedModelError
from forerun.runtime import load_model, load_tokenizer, torch_rows
from forerun.runtime.load import read_config
from forerun.runtime.support import context_limit, refusal
from marks import slow_but
from tiny import VOCAB, build

TOKENIZER = (
    '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,'
    '"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{"type":"WordLevel",'
    '"vocab":{"a":0,"b":1},"unk_token":"a"}}'
)


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class":"PreTrainedTokenizerFast"}')
    return folder


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_missing_tensors_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = save(build(family), tmp_path)
    names = sorted(load_file(folder / "model.safetensors"))
    for gone in ([names[-1]], names[3:9]):
        change(folder, lambda t, gone=gone: [t.pop(n) for n in gone])  # type: ignore[misc]
        with pytest.raises(ModelError, match=r"are incomplete: .* missing") as caught:
            forerun.load(folder, draft="lookup")
        assert gone[0] in str(caught.value)
        assert ("and 2 more" in str(caught.value)) == (len(gone) == 6)
        save(build(family), folder)


def test_tied_tensors_are_not_missing(tmp_path: Path) -> None:
    folder = save(build("gpt2"), tmp_path)
    assert not any("lm_head" in name for name in load_file(folder / "model.safetensors"))
    assert forerun.load(folder, draft="lookup").generate([3, 4], max_new_tokens=2).tokens


def test_tensors_without_a_place_are_said(tmp_path: Path) -> None:
    folder = save(build("llama"), tmp_path)
    change(folder, lambda t: t.update({"model.extra": torch.zeros(2)}))
    with pytest.warns(ForerunWarning, match=r"has no place for model\.extra of its checkpoint"):
        load_model(folder)


def test_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = save(build("llama"), tmp_path)
    change(folder, lambda t: t.update({"model.norm.weight": torch.zeros(7)}))
    wanted = r"do not fit their config\.json: model\.norm\.weight is \(7,\) where .* \(32,\)"
    with pytest.raises(ModelError, match=wanted):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{ broken", "Expecting property name"),
        ("", "Expecting value"),
        ("[]", "not an object"),
        ('{"eos_token_id": "abc"}', "eos_token_id is 'abc'"),
        ('{"eos_token_id": [2, true]}', "not one or more token ids"),
        ('{"eos_token_id": -1}', "eos_token_id is -1"),
    ],
)
def test_a_broken_generation_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    folder = save(build("llama"), tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        forerun.load(folder, draft="lookup")
    assert "delete it" in str(caught.value)


def test_end_of_text_ids_come_from_either_file(tmp_path: Path) -> None:
    folder = save(build("llama"), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert forerun.load(folder, draft="lookup").eos == {5, 6}
    (folder / "generation_config.json").unlink()
    assert forerun.load(folder, draft="lookup").eos == {2}


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gpt_neox"], "llama".__eq__))
def test_odd_configurations_work_or_are_refused(family: str, tmp_path: Path) -> None:
    """Every key of a configuration, half of the kinds of wrong values, the other of the next: no
    other exception, no traceback."""
    folder = save(build(family), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    refused = []
    values = [0, -1, 3, "abc", None, [], {}, 2.5]
    for place, key in enumerate(config):
        for value in values[place % 2 :: 2]:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = forerun.load(folder, draft="lookup")
                    model.generate([3, 4], max_new_tokens=1)
            except ForerunError as error:
                refused.append(str(error))
    assert len(refused) > 50
    assert not any("\n" in message for message in refused)
    for key, value in (("num_attention_heads", 0), ("hidden_size", "abc")):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=r"cannot load the model|do not fit"):
            forerun.load(folder, draft="lookup")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds no tokenizer: tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert not str(caught.value).endswith(":")


def test_the_shipped_tokenizer_is_what_transformers_would_load() -> None:
    ours, theirs = load_tokenizer(zoo.TARGET), hf.AutoTokenizer.from_pretrained(zoo.TARGET)
    assert type(ours) is type(theirs)
    text = "A  b\n12 Übel <|endoftext|> x"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.eos_token_id == theirs.eos_token_id
    assert context_limit(read_config(zoo.TARGET)) == context_limit(
        hf.AutoConfig.from_pretrained(zoo.TARGET)
    )


def test_limits_and_tokenizers_of_other_models_are_read_by_transformers(tmp_path: Path) -> None:
    folder = save(build("gpt2"), tmp_path)
    assert context_limit(read_config(folder)) == build("gpt2").config.n_positions
    assert load_tokenizer(folder).encode("a") == [0]


VISION = [
    hf.Qwen2VLConfig, hf.LlavaConfig, hf.Gemma3Config, hf.MllamaConfig, hf.PaliGemmaConfig,
    hf.Qwen2AudioConfig, hf.CLIPConfig,
]  # fmt: skip


@pytest.mark.parametrize("config", VISION, ids=lambda c: c.model_type)
def test_models_of_more_than_text_are_refused_as_such(config: Any, tmp_path: Path) -> None:
    assert "-language models are not supported" in str(refusal(config()))
    config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="use a model of text alone"):
        load_model(tmp_path)


def test_models_that_write_no_text_are_refused_as_such(tmp_path: Path) -> None:
    hf.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not a language model that writes text"):
        load_model(tmp_path)


def test_falcon_with_alibi(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = hf.FalconConfig(**sizes, alibi=True, bos_token_id=1, eos_token_id=2)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"falcon models cannot run here: .*ALiBi"):
        torch_rows(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        load_model(tmp_path)


# --- tokenizers ---------------------------------------------------------------------------------


def bytes_of(count: int, first: str = "", shift: int = 0) -> Any:
    """A tokenizer of single characters, `shift` places on, with a token before every text."""
    letters = [chr(33 + (i + shift) % count) for i in range(count)]
    vocab = {token: i for i, token in enumerate([*letters, "<s>", "<unk>"])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="<unk>", continuing_subword_prefix=""))
    if first:
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, vocab[first])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_what_differs_between_two_tokenizers() -> None:
    target = bytes_of(90)
    assert not difference(target, bytes_of(90))
    assert "90 of 92 shared ids differ, e.g. 0 is '!'" in difference(target, bytes_of(90, shift=1))
    why = difference(target, bytes_of(90, first="<s>"))
    assert why.startswith("the same text encodes differently: 'Words, ")
    assert "ids 91 … in the target and 90, 91 … in the draft from place 0" in why


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("medusa", "none comes with this one; make one with forerun train-draft medusa"),
        ("memory+kangaroo", "none comes with this one; make one with forerun train-draft kangaroo"),
        ("eagle3", "none comes with this one"),
        ("block", "states of the target's encoder, and this target has none"),
        ("mtp", "is a GGUF file, of which none is read"),
        ("medusa(path='nowhere')", "'nowhere' holds no draft: draft.json is missing"),
        (f"kangaroo(path='{zoo.TARGET / 'medusa'}')", "for the drafter 'medusa', not 'kangaroo'"),
        ("eagle3(path='nowhere')", "'nowhere' holds no head: config.json is missing"),
    ],
)
def test_what_no_gguf_file_can_have_is_refused_before_it_is_loaded(
    draft: str, message: str, tmp_path: Path
) -> None:
    """Nothing could be loaded of this one."""
    (tmp_path / "empty.gguf").write_bytes(b"GGUF")
    with pytest.raises(ForerunError, match=message):
        forerun.load(tmp_path / "empty.gguf", draft)


def test_specbound_without_trained_heads_says_what_it_needs() -> None:
    rows = torch_rows(build("llama"))
    with pytest.warns(ForerunWarning, match="forerun train-draft exits trains them"):
        SpecBound().build(rows, None)
    SpecBound(exits="").build(rows, None)  # on purpose: no warning, which would be an error here


@pytest.mark.parametrize("damage", ["overwritten", "cut"])
def test_a_file_that_changes_does_not_change_a_model_that_runs(tmp_path, damage):
    """On torch, target, draft and exit heads: nothing is a mapping of its file any more."""
    import os
    import shutil

    import forerun
    from forerun import zoo

    for name in ("target", "draft"):
        shutil.copytree(Path(zoo.locate(None)).parent / name, tmp_path / name)
    target = tmp_path / "target"
    makes = [str(tmp_path / "draft"), f"specbound(exits='{target / 'exits'}')"]
    models = [forerun.load(target, draft, runtime="torch") for draft in makes]
    before = [m.generate("Once upon a time", max_new_tokens=12).tokens for m in models]
    for file in tmp_path.rglob("*.safetensors"):
        if damage == "cut":
            os.truncate(file, 4096)
        else:
            with file.open("r+b") as open_file:
                open_file.write(b"\x3f" * file.stat().st_size)
    after = [m.generate("Once upon a time", max_new_tokens=12).tokens for m in models]
    assert before == after


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            {"adapter_config.json": '{"base_model_name_or_path": "some/base"}'},
            "a LoRA adapter of some/base; merge it first",
        ),
        (
            {"config.json": '{"quantization_config": {"quant_method": "awq"}}'},
            "quantised by awq, which is not read here; use the checkpoint",
        ),
    ],
)
def test_other_formats_are_refused_by_name(
    files: dict[str, str], line: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedModelError, match=line):
        load_model(tmp_path)
    with pytest.raises(UnsupportedModelError, match=line):
        load_tokenizer(tmp_path)
