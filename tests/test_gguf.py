"""GGUF files: what they say, their tokenizers, and their logits beside `transformers`' own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forerun
from forerun import zoo
from forerun.errors import (
    ForerunWarning,
    MissingExtraError,
    ModelError,
    SettingError,
    UnsupportedModelError,
)
from forerun.model import default_draft
from forerun.runtime import gguf as gguf_reader
from forerun.runtime import load_model, load_tokenizer
from forerun.runtime.gguf import Tensor, locate, read
from forerun.runtime.gguf_tokenizer import tokenizer_of
from forerun.runtime.load import sampling_settings, saved_generation_config
from forerun.runtime.padded import facts_of
from forerun.runtime.preview import _gguf, preview

pytest.importorskip("gguf", reason="needs the package gguf: pip install 'forerun[gguf]'")
pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")

from forerun.runtime.openvino import blocks, forms, load, making
from forerun.runtime.openvino import gguf as reading
from forerun.runtime.openvino.blocks import rounds_inputs
from forerun.runtime.openvino.executor import OpenVINOExecutor
from forerun.runtime.openvino.load import from_name
from forerun.runtime.openvino.nodes import attach
from forerun.runtime.openvino.parts import narrows
from forerun.runtime.openvino.placeholders import attentions
from gguf_files import LIMIT, SPECIAL, TOKENS, write
from marks import slow_but, spread

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "phi3"]
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
IDS = [(7 * i + 3) % len(TOKENS) for i in range(40)]
rounding = pytest.mark.skipif(not rounds_inputs(), reason="this CPU rounds no inputs")
ROUNDED = 0.1 if rounds_inputs() else 5e-3
"""Of the largest value: what scales in 16 bits cost, and inputs in 8 where the CPU has such, of
weights drawn at random: rows or blocks that are mixed up differ by about 1."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    with torch.no_grad():
        write(path)
    return path


def logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


def unrounded(path: Path) -> OpenVINOExecutor:
    """An executor whose inputs of products are rounded on no CPU."""
    parsed = read(path)
    return OpenVINOExecutor(attach(reading.graph_of(parsed)), parsed.facts(), 1, group=0)


@pytest.mark.parametrize(("family", "kind"), spread(5, FAMILIES, KINDS))
def test_logits_are_those_of_the_weights_in_the_file(
    family: str, kind: str, tmp_path: Path
) -> None:
    """But for inputs in 8 bits, where the CPU multiplies these."""
    with torch.no_grad():
        model = write(tmp_path / "tiny.gguf", family, kind)
    wanted = logits(model, IDS)
    loaded = from_name(tmp_path / "tiny.gguf", threads=1)
    for executor, most in ((unrounded(tmp_path / "tiny.gguf"), 5e-3), (loaded, ROUNDED)):
        got = executor.run([0], [IDS], [len(IDS)])[0].numpy()
        assert np.abs(got - wanted).max() < most * np.abs(wanted).max()
        assert executor.facts.precision == kind
        assert executor.facts.eos == {2}


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_widens_it(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra: pip install 'forerun[gguf]'")
    with torch.no_grad():
        model = write(tmp_path / "tiny.gguf", family, "Q4_K")
    with pytest.warns(ForerunWarning, match="widens its Q4_K weights to bfloat16"):
        widened = load_model(tmp_path / "tiny.gguf", "cpu")
    assert widened.dtype == torch.bfloat16
    assert widened.name_or_path == str(tmp_path / "tiny.gguf")
    # The same model in any precision, by what none rounds.
    assert facts_of(model).identity == read(tmp_path / "tiny.gguf").identity != ""
    wanted = logits(model, IDS)
    assert np.abs(logits(widened.float(), IDS) - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_drafts_change_no_text(file: Path, draft: str) -> None:
    model = forerun.load(file, file if draft == "itself" else draft, runtime="openvino")
    assert model.target.facts.executor == "openvino"
    prompts = ["the 12 in the 12 in", "in the th", "12 12 the"]
    plain = model.generate(prompts, max_new_tokens=40, plain=True)
    for controller in ("fixed(1)", "fixed(4)", "auto"):
        drafted = model.generate(prompts, max_new_tokens=40, controller=controller)
        assert [list(x.tokens) for x in drafted] == [list(x.tokens) for x in plain]


def test_rows_chunks_and_prefixes_compute_the_same(file: Path) -> None:
    executor = from_name(file, threads=1)
    whole = executor.run([0], [IDS], [len(IDS)])[0].numpy()
    executor.keep([], [])
    tolerance = 0 if rounds_inputs() else 1e-4 * np.abs(whole).max()
    for sizes in ((1,) * 40, (2,) * 20, (5,) * 8, (16, 1, 23)):
        seen, at = [], 0
        for size in sizes:
            out = executor.run([0, at], [IDS[: 3 + size], IDS[at : at + size]], [1, size])
            seen.append(out[1, :size].numpy())
            at += size
        executor.keep([], [])
        assert np.abs(np.concatenate(seen) - whole).max() <= tolerance
    executor.run([0], [IDS[:30]], [0])
    columns = executor.copy_out(0, 0, 20)
    executor.keep([], [])
    executor.copy_in(0, 0, columns)
    assert np.abs(executor.run([20], [IDS[20:]], [1])[0, 0].numpy() - whole[-1]).max() <= tolerance


@rounding
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K"])
def test_loud_channels_are_not_rounded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the channels: the last layer's sums are less in error; no product loses anything."""
    with torch.no_grad():
        write(tmp_path / "tiny.gguf", "llama", kind)
    parsed = read(tmp_path / "tiny.gguf")
    runs: dict[tuple[int, tuple[int, int]], torch.Tensor] = {}
    for group in (0, blocks.GROUP):
        for loud in ((0, 0), (3, 5), (240, 240)):
            monkeypatch.setattr(blocks, "LOUD", loud)
            graph = attach(reading.graph_of(parsed))
            executor = OpenVINOExecutor(graph, parsed.facts(), 1, group=group)
            runs[group, loud] = executor.run([0], [IDS], [len(IDS)])[0]
    exact = runs[0, (0, 0)]
    for loud in ((3, 5), (240, 240)):
        assert float((runs[0, loud] - exact).abs().max()) < 1e-4 * float(exact.abs().max())
    without, some, most = (
        float((runs[blocks.GROUP, loud] - exact).square().mean())
        for loud in ((0, 0), (3, 5), (240, 240))
    )
    assert most < 0.7 * without
    assert some < 1.05 * without


def cache_type(executor: OpenVINOExecutor) -> str:
    (kind,) = {port.get_element_type().get_type_name() for port in executor._forms.open.ports()}
    return kind


@pytest.mark.skipif(not narrows("Q4_K"), reason="attention is in float32 here")
def test_attention_of_blocks_is_in_bfloat16_and_the_same_at_every_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes differ by their widths, and of weights in full precision, it is in float32."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    for kind in ("F32", "Q4_K"):
        with torch.no_grad():
            write(tmp_path / f"{kind}.gguf", "llama", kind)
    wide = from_name(tmp_path / "F32.gguf", threads=1)
    assert cache_type(wide) == "f32"
    said = [preview(tmp_path / f"{kind}.gguf")[2] for kind in ("F32", "Q4_K")]
    assert [line.split(" takes ")[1] for line in said] == [
        "2 MB per 1,000 tokens",
        "1 MB per 1,000 tokens",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(load, "passes_agree", lambda executor, rounds: cache_type(executor) == "f32")
        assert cache_type(from_name(tmp_path / "Q4_K.gguf", threads=2)) == "f32"
    executor = from_name(tmp_path / "Q4_K.gguf", threads=1)
    assert cache_type(executor) == "bf16"
    assert 2 * executor.facts.token_bytes == wide.facts.token_bytes == 2 * 2 * 64 * 2 * 4
    ids = (IDS * 3)[: LIMIT - 8]
    whole = executor.run([0], [ids], [len(ids)])[0]
    executor.keep([], [])
    for size in (1, 2, 4, 5, 8, 16, 37, 64):
        for at in range(0, len(ids), size):
            piece = ids[at : at + size]
            beside = executor.run([at, 0], [piece, IDS[:1]], [len(piece), 0])[0]
            assert torch.equal(beside[: len(piece)], whole[at : at + len(piece)]), size
        executor.keep([], [])


def test_a_row_of_the_whole_context(file: Path) -> None:
    ids, parsed = (IDS * 4)[:LIMIT], read(file)
    for least in (1, 2):
        graph = attach(reading.graph_of(parsed))
        executor = OpenVINOExecutor(graph, parsed.facts(), 1, least=least)
        executor.run([0], [ids[:-1]], [0])
        last = executor.run([LIMIT - 1], [ids[-1:]], [1])
        assert last.shape == (1, 1, len(TOKENS))
        assert last.isfinite().all()


def test_passes_are_padded_where_one_token_takes_another_kernel(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in of a CPU that rounds inputs of several tokens, and those of one not."""
    real = forms.Form.run

    def rounding(self: Any, *args: Any) -> Any:
        out = real(self, *args)
        return out if self.request.input_size("input_ids") == 1 else out + 0.1

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))  # this CPU's own widths are kept elsewhere
    monkeypatch.setattr(forms.Form, "run", rounding)
    monkeypatch.setattr(load, "rounds_inputs", lambda: True)
    monkeypatch.setattr(
        forms.InferRequest,
        "input_size",
        lambda self, name: len(self._bound[name][0]),
        raising=False,
    )
    executor = from_name(file, threads=1)
    many = executor.run([0], [IDS], [len(IDS)])[0].numpy()
    executor.keep([], [])
    one = [executor.run([i], [IDS[i : i + 1]], [1])[0, 0].numpy() for i in range(len(IDS))]
    assert np.abs(np.stack(one) - many).max() < 1e-4 * np.abs(many).max()
    again = from_name(file, threads=1)  # by what is kept
    same = [again.run([i], [IDS[i : i + 1]], [1])[0, 0].numpy() for i in range(len(IDS))]
    assert np.array_equal(same, one), "a text does not depend on which start it is"
    executor.keep([], [])
    executor._forms.open._spare = 0  # else the last row would be padded for all of them
    executor.run([0] * 6, [IDS[:3]] * 6, [0] * 6)
    executor.run([3] * 6, [IDS[3:4]] * 6, [1] * 6)
    request = executor._forms.open.request
    assert len(request._bound["input_ids"][0]) == 6, "products are over no padding"
    assert list(request._bound["subsequence_begins"][0]) == list(range(0, 14, 2))
    for start in (executor, again):
        start.finish()
        assert [start._maker.fitting([n]).tokens for n in range(1, 7)] == [2, 2, 5, 5, 5, 0]


@rounding
def test_passes_of_new_sizes_are_padded_while_that_costs_less(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To sizes that were fed, and compute the same; where the context has room."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    padded, exact = (from_name(file, threads=1) for _ in range(2))
    padded._forms.open._padded.clear()  # of passes at the load
    padded._forms.open._spare, exact._forms.open._spare = 5, 0

    def compared(starts: list[int], sizes: list[int], wanted: list[int]) -> tuple[int, int]:
        """Tokens of the padded pass, and logits of it."""
        pieces = [IDS[:n] for n in sizes]
        seen = [executor.run(starts, pieces, wanted) for executor in (padded, exact)]
        assert torch.equal(*seen)
        counts = [
            [len(executor._forms.open.request._bound[name][0]) for name in ("input_ids", "wanted")]
            for executor in (padded, exact)
        ]
        assert counts[1] == [sum(sizes), max(sum(wanted), 2)]
        for executor in (padded, exact):
            executor.keep([], [])
        return counts[0][0], counts[0][1]

    for sizes, wanted, size in (
        ([6], [6], (8, 8)), ([6], [1], (8, 2)), ([6], [6], (6, 6)),  # 5 tokens are spent by then
        ([6, 5], [6, 5], (16, 16)), ([14, 1], [8, 1], (16, 16)), ([8], [8], (8, 8)),
    ):  # fmt: skip
        assert compared([0] * len(sizes), sizes, wanted) == size
    for executor in (padded, exact):
        executor.run([0], [(IDS * LIMIT)[: LIMIT - 7]], [0])
    assert compared([LIMIT - 7], [7], [7]) == (7, 7), "no room is left"


@rounding
def test_graphs_for_exactly_so_many_tokens_are_made_when_passes_want_them(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    first, again = (from_name(file, threads=1) for _ in range(2))
    assert not first.finished
    assert not again.finished
    assert again.levels == first.levels

    def last(executor: Any, size: int) -> Any:
        executor.keep([0], [9])
        return executor.run([9], [IDS[9 : 9 + size]], [1])[0, 0].numpy()

    for executor in (first, again):
        executor.run([0], [IDS[:9]], [0])
    for size in (1, 5, 8, 16):
        wanted = last(first, size)
        for _ in range(making.WANTED):
            assert again._forms.fitting(max(size, 2)).tokens == 0
            assert np.array_equal(last(again, size), wanted)
        making.BEHIND.submit(int).result()  # what was asked for before is there
        assert np.array_equal(last(again, size), wanted)
        assert again._maker.fitting([size]).tokens == max(size, 2)
    assert again.finished


@rounding
def test_rows_that_share_passes_have_graphs_of_their_own(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded for attention alone; as many as there is room for."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    wanted, executor = (from_name(file, threads=1) for _ in range(2))
    monkeypatch.setattr(making, "WANTED", 2)
    executor._maker._room = 3
    monkeypatch.setattr(wanted._maker, "fitting", lambda _: wanted._forms.open)
    executor._maker._wanted.clear()  # of passes at the load
    sizes = [1, 1, 1, 1], [3, 0, 4, 1], [9, 1, 1, 12]
    for used, counts in zip((4, 8, 24), sizes, strict=True):
        for again in range(4):
            if again == 2:
                making.BEHIND.submit(int).result()
            seen = []
            for own in (wanted, executor):
                own.keep([], [])
                own.run([0] * 4, [IDS[row : 15 + row] for row in range(4)], [0] * 4)
                pieces = [IDS[15 + row :][:n] for row, n in enumerate(counts)]
                seen.append(own.run([15] * 4, pieces, counts))
            assert torch.equal(*seen), "in every logit"
            there = executor._forms.fitting(sum(counts), several=True).tokens
            assert there == (used if again > 1 else 0)
    assert executor._forms.fitting(1).tokens == 4, "a row alone may use them"
    assert not executor._maker._lacking
    assert executor._maker._make is None, "it holds the graph"
    making.keep_json("widths", f"{executor._maker._kept}-4", "damaged")
    assert executor._maker._known(4) is None, "it is compared again"


@pytest.mark.parametrize("wrong", [2, 5])
@rounding
def test_a_graph_that_computes_something_else_is_never_used(
    wrong: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in the last bit; it is compared once, and not made again."""
    run, compare = forms.Form.run, making._equal
    compared: list[int] = []

    def differing(self: Any, *args: Any) -> Any:
        out = run(self, *args)
        return np.nextafter(out, np.float32(np.inf)) if self.tokens == wrong else out

    def counted(open_: Any, exact: Any, text: Any) -> bool:
        compared.append(exact.tokens)
        return compare(open_, exact, text)

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(forms.Form, "run", differing)
    monkeypatch.setattr(making, "_equal", counted)
    used = {2: [5] * 5, 5: [2, 2, 0, 0, 0]}[wrong]
    every = {2, 4, 5, 8, 16, 24, 32, 48}
    for lacking in (every, every - {wrong}):
        executor = from_name(file, threads=1)
        assert executor._maker._lacking == lacking
        whole = executor.run([0], [IDS[:12]], [12])[0]
        executor.keep([0], [7])
        executor.finish()  # while a row is there
        assert executor.finished
        assert [executor._maker.fitting([n]).tokens for n in range(1, 6)] == used
        for size in (1, 2, 5):
            assert torch.equal(executor.run([7], [IDS[7 : 7 + size]], [1])[0, 0], whole[6 + size])
    assert sorted(compared) == [2, 5]


def test_smollm2_drafts_for_large_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Path("small.gguf")
    monkeypatch.setattr(zoo, "smollm2", lambda: small)
    assert default_draft(file) == "memory"
    monkeypatch.setattr("forerun.model.MANY", 1)
    assert default_draft(file) == small
    monkeypatch.setattr(zoo, "smollm2", lambda: None)
    assert default_draft(file) == "memory"


def test_what_a_file_says(file: Path) -> None:
    facts = read(file).facts()
    assert (facts.vocab_size, facts.limit, facts.layers) == (len(TOKENS), LIMIT, 2)
    assert (facts.precision, facts.eos, facts.token_bytes) == ("Q4_1", {2}, 2 * 2 * 64 * 2 * 4)
    tokenizer = load_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode("the 12 ½ é\n")) == "the 12 ½ é\n"
    assert tokenizer.encode("12") == [TOKENS.index("1"), TOKENS.index("2")]  # digits one by one
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == list(SPECIAL)
    turn = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text)[0] == 1


def test_where_a_file_is(file: Path, tmp_path: Path) -> None:
    assert locate(file) == locate(str(file)) == locate(file.parent) == file
    assert locate(tmp_path) is None
    assert locate("some/model") is None
    (tmp_path / "a.gguf").write_bytes(file.read_bytes())
    assert locate(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"several GGUF files; name one of a\.gguf, b\.gguf"):
        locate(tmp_path)
    with pytest.raises(ModelError, match="no GGUF file at"):
        locate(tmp_path / "c.gguf")
    with pytest.raises(ModelError, match="empty"):
        read(tmp_path / "b.gguf")
    (tmp_path / "a.gguf").write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match="download it again"):
        read(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"it is cut short, by [0-9]+ bytes; download it again"):
        read(tmp_path / "a.gguf")
    (tmp_path / "sha256-0f").write_bytes(file.read_bytes())  # as Ollama stores them
    assert locate(tmp_path / "sha256-0f") == tmp_path / "sha256-0f"


def test_a_file_on_the_hub(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(hub: str, name: str) -> str:
        asked.append((hub, name))
        if name == "none.gguf":
            raise OSError("404: no such file\nmore")
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", get)
    assert locate("some/model:tiny.gguf") == file
    with pytest.raises(ModelError, match=r"cannot get 'none.gguf' of 'some/model': 404"):
        locate("some/model:none.gguf")
    assert asked == [("some/model", "tiny.gguf"), ("some/model", "none.gguf")]


def test_what_is_not_served_is_refused_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = read(file)
    other = replace(parsed, metadata={**parsed.metadata, "general.architecture": "mamba"})
    with pytest.raises(UnsupportedModelError, match="'mamba' are not served by openvino"):
        reading.graph_of(other)
    odd = replace(parsed, tensors=(replace(parsed.tensors[0], kind="type 99"),))
    with pytest.raises(UnsupportedModelError, match="weights are of type 99"):
        reading.graph_of(odd)
    for key, value, line in (
        ("tokenizer.ggml.model", "rwkv", "of the kind 'rwkv'"),
        ("tokenizer.ggml.pre", "viking", "by the rule 'viking'"),
    ):
        with pytest.raises(UnsupportedModelError, match=line):
            tokenizer_of(replace(parsed, metadata={**parsed.metadata, key: value}))
    with pytest.raises(SettingError, match="in the precision of its weights, got precision='int8'"):
        from_name(file, "int8")
    monkeypatch.setattr(reading, "FrontEndManager", lambda: _Nothing())
    with pytest.raises(MissingExtraError, match="install the pinned version"):
        reading.graph_of(parsed)


class _Nothing:
    def load_by_framework(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def test_pieces_with_scores(file: Path) -> None:
    """A tokenizer of Llama 2's kind, against what `sentencepiece` would give."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    scored = ["▁", "a", "b", "ab", "▁a", "▁ab", "aa"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + scored,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-9.0, -8.0, -7.0, -1.0, -3.0, -2.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scored),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = tokenizer_of(replace(read(file), metadata=metadata))
    assert tokenizer.tokenize("abaab") == ["▁ab", "a", "ab"]  # ▁ab, ab (-1) before aa (-4)
    assert tokenizer.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a") == [1, len(pieces) + 4]
    assert tokenizer.decode(tokenizer.encode("ab aé"), skip_special_tokens=True) == "ab aé"


@pytest.mark.parametrize(
    ("family", "known"),
    slow_but(
        [("llama", ()), ("llama", (1, 2)), ("qwen2", (1, 2)), ("qwen3", ()), ("phi3", ())],
        lambda family, known: known,
    ),
)
def test_states_of_named_depths(family: str, known: tuple[int, ...], tmp_path: Path) -> None:
    """Of depths known when it is loaded, which is not compiled again, and of others."""
    with torch.no_grad():
        model = write(tmp_path / "tiny.gguf", family)
    executor = from_name(tmp_path / "tiny.gguf", threads=1, depths=known)
    forms = executor._forms
    executor.tap((1, 2))
    assert (executor._forms is forms) == bool(known)
    executor.run([0], [IDS], [1])
    assert executor.states is not None
    with torch.inference_mode():
        streams = []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, output: streams.append(output))
        model(input_ids=torch.tensor([IDS]))
    wanted = torch.cat([x[0] if x.dim() == 3 else x for x in streams], -1)
    got = torch.from_numpy(executor.states.read(0, 0, len(IDS)))
    assert (got - wanted).abs().max() < ROUNDED * wanted.abs().max()


def test_what_would_be_loaded_is_said_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = preview(file)
    assert lines[0] == f"{file.name}: llama, 1 million weights"
    assert lines[1] == "files: Q4_1, 1 MB"
    cache = f"its cache takes {1 if narrows('Q4_1') else 2} MB per 1,000 tokens"
    assert lines[2] == f"context: 128 tokens; {cache}"
    held = r"on a CPU: openvino, weights as they are \(Q4_1\), about 0\.[23] GB of"
    assert re.match(held, lines[3])
    shipped = preview(zoo.DRAFT)
    assert ": llama, " in shipped[0]
    assert shipped[1].startswith("files: BF16, ")
    assert "openvino(precision='int8') would take" in shipped[3]
    with pytest.raises(ModelError, match="no model folder at"):
        preview(file.parent / "nothing")
    monkeypatch.setattr(gguf_reader, "SERVED", ())
    assert (
        "torch, weights widened to bfloat16 (2 MB): GGUF files of the architecture"
        in (preview(file)[3])
    )


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        # As SmolLM2-135M's. With one graph less 0.38 GB were measured, with one more 0.71.
        ({"token_embd.weight": (49_152 * 576, "Q8_0"), "x": (106_168_320, "Q4_1")}, (0.5, 0.6)),
        # As Qwen2.5-Coder-1.5B's: 1.90 and 2.81.
        (
            {
                "token_embd.weight": (151_936 * 1536, "Q4_K"),
                "output.weight": (151_936 * 1536, "Q6_K"),
                "x": (1_112_014_848, "Q4_K"),
                "y": (198_180_864, "Q6_K"),
            },
            (1.9, 3.0),
        ),
    ],
)
def test_memory_that_a_file_will_need(
    file: Path,
    tensors: dict[str, tuple[int, str]],
    said: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU that rounds no inputs; one more graph is kept where it does."""
    monkeypatch.setattr("forerun.runtime.openvino.blocks.rounds_inputs", lambda: False)
    listed = [Tensor(name, (count,), kind, 0) for name, (count, kind) in tensors.items()]
    line = _gguf(replace(read(file), tensors=tuple(listed)), installed=True)[3]
    loaded, most = said
    assert f"about {loaded} GB of memory without a draft, {most} while it loads" in line


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_file_that_changes_does_not_change_a_model_that_runs(
    file: Path, tmp_path: Path, damage: str
) -> None:
    copy = tmp_path / "copied.gguf"
    copy.write_bytes(file.read_bytes())
    executor = from_name(copy, threads=1)
    before = executor.run([0], [IDS[:5]], [1]).tolist()
    with copy.open("r+b") as opened:
        if damage == "cut":
            opened.truncate(512)
        else:
            opened.write(b"\x3f" * copy.stat().st_size)
    executor.keep([], [])
    executor.run([0], [IDS], [1])  # a shape that was not run before
    executor.keep([], [])
    assert executor.run([0], [IDS[:5]], [1]).tolist() == before


def test_a_part_of_a_model_says_how_to_join_it(tmp_path: Path) -> None:
    with torch.no_grad():
        write(tmp_path / "part.gguf", metadata={"split.count": 3})
    with pytest.raises(ModelError, match="one of 3 parts of a model; join them by"):
        read(tmp_path / "part.gguf")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaled_rotations(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Of contexts that were stretched: Llama 3's by a tensor of factors, others by metadata."""
    with torch.no_grad():
        model = write(tmp_path / "tiny.gguf", rope_parameters={"rope_theta": 500.0, **scaling})
    executor = unrounded(tmp_path / "tiny.gguf")
    got = executor.run([0], [IDS], [len(IDS)])[0].numpy()
    wanted = logits(model, IDS)
    assert np.abs(got - wanted).max() < 5e-3 * np.abs(wanted).max()
    with pytest.raises(UnsupportedModelError, match="its rotations are stretched"):
        load_model(tmp_path / "tiny.gguf", "cpu")


SHORT, LONG = ([by + 0.05 * i for i in range(24)] for by in (1, 2))


@pytest.mark.parametrize(
    ("family", "changes", "limit"),
    [
        ("phi3", {"sliding_window": 8}, LIMIT),  # in every layer, and for the reader in half
        (
            "phi3",  # Phi-4-mini's: of three quarters of a head, scaled; others in longer texts
            {
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
                    "short_factor": SHORT, "long_factor": LONG,
                    "original_max_position_embeddings": 64,
                },
                "original_max_position_embeddings": 64,
            },
            64,
        ),
        (
            "gemma3",  # from 4 billion weights on: but not in layers with a window
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            LIMIT,
        ),
    ],
    ids=["window", "longrope", "linear"],
)  # fmt: skip
def test_what_the_reader_passes_over(
    family: str, changes: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    with torch.no_grad():
        model = write(tmp_path / "tiny.gguf", family, "Q8_0", **changes)
    executor = unrounded(tmp_path / "tiny.gguf")
    assert executor.facts.limit == limit
    got = executor.run([0], [IDS], [len(IDS)])[0].numpy()
    wanted = logits(model, IDS)
    assert np.abs(got - wanted).max() < 5e-3 * np.abs(wanted).max()


def test_the_scale_of_the_largest_gemma_3(tmp_path: Path) -> None:
    """It is of the width of all heads' share, and the file does not say it."""
    few: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    with torch.no_grad():
        write(tmp_path / "tiny.gguf", "gemma3", "F32", num_hidden_layers=62, head_dim=64, **few)
    calls = attentions(reading.graph_of(read(tmp_path / "tiny.gguf")))
    assert {call.scale for call in calls} == {32**-0.5}
    assert [call.window for call in calls[:6]] == [8] * 5 + [0]


def test_texts_of_llama_3_begin_where_the_file_does_not_say(file: Path) -> None:
    parsed = read(file)
    known = {k: v for k, v in parsed.metadata.items() if k != "tokenizer.ggml.add_bos_token"}
    for rule, begins in (("llama3", True), ("smollm", False)):
        metadata = {**known, "tokenizer.ggml.pre": rule}
        ids = tokenizer_of(replace(parsed, metadata=metadata)).encode("the")
        assert (ids[0] == 1) == begins


def test_how_its_makers_sample(tmp_path: Path) -> None:
    own = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    with torch.no_grad():
        write(tmp_path / "tiny.gguf", metadata=own)
    config = saved_generation_config(str(tmp_path / "tiny.gguf"))
    assert sampling_settings(config) == {"temperature": 0.5, "top_k": 20}
