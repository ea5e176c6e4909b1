"""Rows of different lengths in one batch equal the model run alone (fp32, within 5e-5)."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from forerun.drafters.model import ModelDrafter
from forerun.errors import ModelError, PromptError, SettingError, UnsupportedModelError
from forerun.model import Model
from forerun.runtime import TorchExecutor, load_model, load_tokenizer, torch_rows
from forerun.runtime.cache import RowCache
from forerun.runtime.load import resolve_device, resolve_dtype
from tiny import CONFIGS, LIMIT, build, texts

TOLERANCE = 5e-5  # logits here reach about 5; fp32 rounding over three layers stays below 1e-5


def alone(model: object, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]  # type: ignore[operator]


def test_masks_on_a_gpu_begin_where_kernels_may_read() -> None:
    executor = TorchExecutor(build("llama"))
    executor.device = torch.device("meta")  # not a CPU: no data, but places in memory
    for columns in (5, 6, 13):
        mask = executor._mask([columns - 3], 3, columns)
        assert (mask.shape[-1], mask.storage_offset(), mask.is_contiguous()) == (columns, 0, True)


@pytest.mark.parametrize("width", range(1, 26))
def test_every_width_of_one_row(width: int) -> None:
    model = build("llama")
    rows, (prompt, rest) = torch_rows(model), texts(7, 25)
    rows.read([prompt])
    got = rows.feed([prompt[-1:] + rest[: width - 1]])
    wanted = alone(model, prompt + rest[: width - 1])[len(prompt) - 1 :]
    torch.testing.assert_close(got[0], wanted, atol=TOLERANCE, rtol=0)


def test_bfloat16_rows_are_close() -> None:
    model = build("llama", scale=0.1).to(torch.bfloat16)
    rows, prompts = torch_rows(model), texts(4, 11)
    rows.read(prompts)
    got = rows.feed([p[-1:] for p in prompts])[:, 0]
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(got[row], alone(model, prompt)[-1], atol=0.05, rtol=0.05)


def test_the_cache_grows_and_keeps_its_contents() -> None:
    model = build("llama")
    rows, prompts = torch_rows(model), texts(3, 3)
    rows.read(prompts)
    before = rows.executor.cache.columns
    tokens = [list(p) for p in prompts]
    for step in range(40):
        pieces = [t[n:] for t, n in zip(tokens, rows.lengths, strict=True)]
        got = rows.feed(pieces, [1, 1])[:, 0]
        for t in tokens:
            t.append(3 + step)
    assert rows.executor.cache.columns > before
    assert rows.executor.cache.copy_out(0, 0, 1)
    for row, t in enumerate(tokens):
        torch.testing.assert_close(got[row], alone(model, t[:-1])[-1], atol=TOLERANCE, rtol=0)


def test_feeding_beyond_the_context_is_refused() -> None:
    rows = torch_rows(build("gpt2"))
    rows.read([[3] * LIMIT])
    rows.feed([[3]])
    with pytest.raises(PromptError, match=f"{LIMIT + 1} tokens do not fit"):
        rows.feed([[3]])


def test_reserving_never_shrinks() -> None:
    cache = RowCache()
    cache.reserve(2, 8)
    cache.reserve(1, 4)
    assert cache.columns == 8


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.MambaConfig(), "recurrent state|cannot be rolled back"),
        (hf.JambaConfig(), "cannot be rolled back|recurrent"),
        (hf.T5Config(), "encoder-decoder models; use runtime torch"),
        (hf.BertConfig(), "encoder-only"),
        (hf.BloomConfig(), "positions per row"),
    ],
    ids=lambda v: getattr(v, "model_type", ""),
)
def test_what_cannot_work_is_refused_with_the_reason(config: object, reason: str) -> None:
    from forerun.runtime.support import refusal

    assert __import__("re").search(reason, refusal(config) or "")


def test_a_refused_model_names_its_reason(tmp_path: object) -> None:
    model = build("gpt2")
    model.config.alibi = True
    with pytest.raises(UnsupportedModelError, match="gpt2 models cannot run here: its attention b"):
        torch_rows(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="ALiBi"):
        load_model(str(tmp_path))


def test_an_unproven_family_is_probed() -> None:
    config = hf.OlmoConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    assert torch_rows(model).lengths == []

    class Forgetful(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            kwargs.pop("attention_mask", None)  # every row sees every other column
            return super().forward(*args, **kwargs)

    model.__class__ = Forgetful
    with pytest.raises(UnsupportedModelError, match="a probe of this one failed"):
        torch_rows(model)


def test_long_rope_is_limited_to_where_rows_are_independent() -> None:
    from forerun.runtime.support import context_limit

    config = CONFIGS["llama"]()
    config.rope_parameters = {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    assert context_limit(config) == 16


def test_loading_errors_are_one_line(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    with pytest.raises(ModelError, match="no model folder at"):
        load_model(folder / "missing")
    (folder / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(folder / "empty")
    build("llama").save_pretrained(folder / "torn")
    weights = folder / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="corrupt") as caught:
        load_model(folder / "torn")
    assert "\n" not in str(caught.value)
    (folder / "torn" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(folder / "torn")


def test_devices_and_dtypes() -> None:
    with pytest.raises(SettingError, match="device 'cuda:99' cannot be used"):
        resolve_device("cuda:99")
    with pytest.raises(SettingError, match="device 'tpux'"):
        resolve_device("tpux")
    with pytest.raises(SettingError, match="unknown dtype 'float99'"):
        resolve_dtype("float99")
    assert resolve_dtype("bf16") is torch.bfloat16
    assert resolve_dtype("auto") is None


def test_a_lone_request_takes_a_pass_per_round_and_none_besides() -> None:
    rows = torch_rows(build("llama"))
    draft = ModelDrafter(torch_rows(build("llama", seed=3)), rows.vocab_size)
    model = Model(rows, draft)
    (prompt,) = texts(9)
    done = model.generate([prompt], max_new_tokens=8, controller="fixed(2)")[0]
    assert rows.passes == len(done.rounds)
    assert draft.rows.passes == sum(r.drafted for r in done.rounds)
    assert done.rounds[0].verify_seconds == 0 < done.stats.prefill_seconds
    assert all(r.verify_seconds > 0 for r in done.rounds[1:])
    together = model.generate(
        [prompt, texts(5, seed=4)[0]], max_new_tokens=8, controller="fixed(2)"
    )
    assert together[0].tokens == done.tokens


@pytest.mark.parametrize(("target", "draft"), [(97, 60), (60, 97)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_of_two_sizes_share_what_they_can(
    target: int, draft: int, temperature: float
) -> None:
    """Padded to different sizes: also where the text holds ids that the draft lacks."""
    big = build("llama", vocab_size=target, tie_word_embeddings=False)
    small = build("llama", seed=3, vocab_size=draft, tie_word_embeddings=False)
    with torch.no_grad():  # alike on the ids they share, so that drafts are kept
        few = min(target, draft)
        for a, b in zip(big.parameters(), small.parameters(), strict=True):
            b[:few] = a[:few]
    prompts = [[3, 4, target - 1], [target - 1], [5], [target - 2] * 30]
    drafter = ModelDrafter(torch_rows(small), target)
    model = Model(torch_rows(big), drafter)
    how = {"max_new_tokens": 12, "temperature": temperature, "seed": 1, "ignore_eos": True}
    done = model.generate(prompts, controller="fixed(3)", batch_size=3, **how)
    assert all(len(c.tokens) == 12 and max(c.tokens) < target for c in done)
    assert sum(c.stats.accepted for c in done) > 0
    for prompt, completion in zip(prompts, done, strict=True):
        assert model.generate(prompt, controller="fixed(3)", **how).tokens == completion.tokens
    if not temperature:
        plain = model.generate(prompts, plain=True, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
    if target > draft:
        assert any(max(c.tokens) >= draft for c in done)
