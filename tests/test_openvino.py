"""The OpenVINO executor against torch: logits, not arg-max, for every family that is wanted."""

from __future__ import annotations

import copy
import json
import platform
import re
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from forerun.errors import MissingExtraError, ModelError, SettingError, UnsupportedModelError
from forerun.runtime import Rows
from forerun.runtime.base import LOGITS, Facts, best_of, logits_of
from forerun.runtime.padded import facts_of
from marks import slow_but
from sourced import alone as alone_with
from sourced import build as build_encoder_decoder
from tiny import build, texts

ov = pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")

from forerun.runtime import probe as probing  # noqa: E402
from forerun.runtime.openvino import executor as executing  # noqa: E402
from forerun.runtime.openvino import forms, making, nodes, parts, store  # noqa: E402
from forerun.runtime.openvino import load as loading  # noqa: E402
from forerun.runtime.openvino.core import core  # noqa: E402
from forerun.runtime.openvino.executor import OpenVINOExecutor  # noqa: E402
from forerun.runtime.openvino.export import Attention, export, halved  # noqa: E402
from forerun.runtime.openvino.load import from_model, from_name  # noqa: E402
from forerun.runtime.openvino.pool import Pool  # noqa: E402
from forerun.runtime.openvino.weights import fuse, halves, held, hold  # noqa: E402

TOLERANCE = 1e-4  # logits here reach about 10; fp32 rounding over two layers stays below 2e-5
WINDOW = 8
MULTIPLIES_BFLOAT16 = "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": None},
    "gemma3_text": {"sliding_window": WINDOW},
    "gpt2": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "cohere": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
}
CI = {"llama", "gpt2", "gemma2", "qwen3_moe"}
"""Of these: gated or not, rotary or not, with windows, with experts."""


def tiny(family: str, **changes: Any) -> Any:
    """A random model whose logits are spread."""
    sizes = _GPT2 if family == "gpt2" else {**_SIZES, **FAMILIES.get(family, {}), **changes}
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(family, **sizes)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@torch.inference_mode()
def alone(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of several tokens for tiny models, too."""
    monkeypatch.setattr(making, "SMALLEST_WIDE", 0)


@pytest.fixture(scope="module", autouse=True)
def _one_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the exported graphs of this file's models, and nothing of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def shared(model: Any) -> OpenVINOExecutor:
    return from_model(model)


@pytest.fixture
def executor(shared: OpenVINOExecutor) -> OpenVINOExecutor:
    shared.keep([], [])
    return shared


def close(got: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got), wanted, atol=TOLERANCE, rtol=0)


def test_a_graph_of_one_node_computes_attention() -> None:
    """Fails when the installed version builds, names or computes its private node differently."""
    call = Attention(query_heads=2, key_heads=1, key_size=4, value_size=4, scale=0.5, window=0)
    op, i32 = ov.opset15, ov.Type.i32
    states = [op.parameter(ov.PartialShape([-1, n]), ov.Type.f32) for n in (8, 4, 4)]
    cache = ov.PartialShape([-1, 1, nodes.BLOCK, 4])
    caches = [op.parameter(cache, ov.Type.dynamic) for _ in range(2)]
    rows = [op.parameter(ov.PartialShape([-1]), i32) for _ in range(4)]
    rows.append(op.parameter(ov.PartialShape([]), i32))
    out = [[node.output(0) for node in group] for group in (states, caches, rows)]
    node = nodes.paged_attention(call, *out)
    graph = ov.Model([node.output(0)], [*states, *caches, *rows], "node")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    request = core().compile_model(graph, "CPU", settings).create_infer_request()
    pools = [np.full((2, 1, nodes.BLOCK, 4), np.nan, np.float32) for _ in range(2)]
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(5, n)).astype(np.float32) for n in (8, 4, 4))
    for first, last in ((0, 3), (3, 5)):  # three tokens, then two that see them
        values = [x[first:last] for x in (query, key, value)] + pools
        values += [np.array(x, np.int32) for x in ([first], [0, last - first], [1], [0, 1], last)]
        for i, x in enumerate(values):
            request.set_input_tensor(i, ov.Tensor(x, shared_memory=i in (3, 4)))
        request.infer()
    scores = query.reshape(5, 2, 4)[3:] @ key.T * 0.5  # (2 tokens, 2 heads, 5)
    scores[0, :, 4] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    got = request.get_output_tensor(0).data.reshape(2, 2, 4)
    np.testing.assert_allclose(got, weights @ value, atol=1e-5)


@pytest.mark.parametrize("family", slow_but(FAMILIES, CI.__contains__))
def test_families_equal_torch(family: str) -> None:
    model = tiny(family)
    executor = from_model(model, cached=False)
    for pool in executor.pool._tensors:
        pool.data[...] = np.nan  # what no token wrote must not be read
    a, b, c = texts(5, 40, 3)
    executor.run([0, 0], [[*a[:3], 9, 9], b[:-1]], [0, 1])
    # Two tokens of the first row are rejected; the third row joins; the second reads on.
    got = executor.run([3, 39, 0], [a[3:], b[39:], c], [2, 1, 3])
    for row, (text, n) in enumerate(((a, 2), (b, 1), (c, 3))):
        close(got[row, :n], alone(model, text)[-n:])
    executor.keep([2, 1], [3, 40])
    got = executor.run([3, 30], [[], b[30:35]], [0, 5])
    close(got[1], alone(model, b[:35])[30:])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.Gemma2Config(**_SIZES), "soft cap"),
        (hf.GptOssConfig(**_SIZES, num_local_experts=2, num_experts_per_tok=1), "sinks"),
        (hf.FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
         "attention interface"),
        (hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4), "positions per row"),
        (hf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1), "rolled back"),
    ],
    ids=lambda x: getattr(x, "model_type", None),
)  # fmt: skip
def test_refusals_name_the_reason(config: Any, reason: str) -> None:
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        from_model(model)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.usefixtures("shared")
def test_the_model_stays_as_it_was(model: Any) -> None:
    assert torch.equal(alone(model, [3, 4, 5]), alone(build("llama"), [3, 4, 5]))


def test_a_model_in_bfloat16_runs_in_fp32(model: Any) -> None:
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    text = texts(9)[0]
    executor = from_model(rounded)
    close(executor.run([0], [text], [9])[0], alone(copy.deepcopy(rounded).float(), text))
    assert rounded.dtype == torch.bfloat16
    assert executor.facts.precision == "float32"


def test_logits_are_the_callers_own(executor: OpenVINOExecutor) -> None:
    first = executor.run([0], [[5, 6]], [2])
    kept = first.clone()
    executor.run([2], [[7, 8]], [2])
    assert torch.equal(first, kept)


def test_nothing_fed_or_wanted(executor: OpenVINOExecutor) -> None:
    assert executor.run([0, 0], [[], []], [0, 0]).shape == (2, 0, 97)
    assert executor.run([0, 0], [[4], []], [0, 0]).shape == (2, 0, 97)
    assert executor.best([1, 0], [[], [3]], [0, 0], frozenset()).tokens == [[], []]
    assert executor.best([1, 1], [[], [3]], [0, 1], frozenset()).sound == [[False], [True]]


def test_the_pool_grows_and_is_given_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.runtime.openvino.executor.FIRST_BLOCKS", 1)
    executor = from_model(model)
    rows, prompts = Rows(executor), texts(3, 60, 60, 60, 60)
    small = executor.pool.nbytes
    rows.join(5)
    rows.feed([prompts[0], *(p[:20] for p in prompts[1:])])
    got = rows.feed([[4], *(p[20:] for p in prompts[1:])])
    close(got[0, :1], alone(model, [*prompts[0], 4])[-1:])
    for row in range(1, 5):
        close(got[row], alone(model, prompts[row])[20:])
    assert executor.pool.nbytes > small
    rows.keep([])
    assert len(executor.pool._free) == executor.pool.total


def test_what_is_reserved_is_bounded(
    executor: OpenVINOExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = executor.pool.nbytes
    monkeypatch.setattr("forerun.runtime.openvino.pool.LARGEST_RESERVE", 2 * before)
    executor.reserve(1000, 64)
    assert executor.pool.nbytes == 2 * before


def test_a_cache_that_memory_does_not_hold(executor: OpenVINOExecutor) -> None:
    before = executor.pool.nbytes
    with pytest.raises(ModelError, match=r"no memory for a cache of .* use a smaller batch"):
        executor.pool.grow(1 << 40)
    assert executor.pool.nbytes == before
    executor.run([0], [[5]], [1])


def test_a_row_kept_twice_is_two_rows(model: Any, executor: OpenVINOExecutor) -> None:
    rows, (text,) = Rows(executor), texts(40)
    rows.join(1)
    rows.feed([text])
    rows.keep([0, 0])
    rows.feed([[5], [6]], [0, 0])
    got = rows.feed([[7], [7]])
    for row, between in enumerate((5, 6)):
        close(got[row], alone(model, [*text, between, 7])[-1:])


def test_blocks() -> None:
    pool = Pool([], 5, lambda tensors: None)
    assert pool.cover([2 * nodes.BLOCK + 1, nodes.BLOCK])
    assert not pool.cover([2 * nodes.BLOCK + 2, 1])  # a shorter row keeps what it has
    assert pool.total == 5
    pool.keep([1, 1, 0], [1, 1, 2 * nodes.BLOCK + 2])  # the copy has the last block
    assert [len(table) for table in pool.tables] == [1, 1, 3]
    assert sorted(block for table in pool.tables for block in table) == [*range(5)]
    assert pool.cover([1, 1, 3 * nodes.BLOCK + 1])
    assert pool.total == 10
    pool.keep([1], [1])
    assert pool.cover([10 * nodes.BLOCK])  # all others' are free
    assert (pool.total, sorted(pool.tables[0])) == (10, [*range(10)])


SIGNALS = frozenset(
    [
        "top1",
        "chosen",
        "entropy",
        "normalized_entropy",
        "logit_margin",
        "softmax_margin",
        "logit_variance",
    ]
)


@pytest.mark.parametrize("wanted", [frozenset(), SIGNALS, *(frozenset([name]) for name in SIGNALS)])
def test_best_tokens_and_signals(executor: OpenVINOExecutor, wanted: frozenset[str]) -> None:
    prompts, counts = texts(5, 9, 2), [2, 0, 1]
    reference = best_of(executor.run([0, 0, 0], prompts, counts), wanted)
    got = executor.best([0, 0, 0], prompts, counts, wanted)
    assert [len(row) for row in got.tokens] == [max(counts)] * 3  # beyond the wanted ones: padding
    assert set(got.signals) == wanted
    for row, n in enumerate(counts):
        assert got.tokens[row][:n] == reference.tokens[row][:n]
        assert got.sound[row][:n] == [True] * n
        for name in wanted:
            assert got.signals[name][row][:n] == pytest.approx(
                reference.signals[name][row][:n], abs=1e-5
            )


def test_many_logits_are_read_in_parts(
    executor: OpenVINOExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, counts, sizes = texts(5, 9, 2, 4), [5, 3, 0, 4], []
    whole = executor.best([0] * 4, prompts, counts, SIGNALS | {LOGITS})
    logits = logits_of(whole)
    ran = OpenVINOExecutor._pass

    def counted(self: Any, starts: Any, pieces: Any, wanted: Any, *parents: Any) -> Any:
        sizes.append(sum(wanted))
        return ran(self, starts, pieces, wanted, *parents)

    monkeypatch.setattr(OpenVINOExecutor, "_pass", counted)
    monkeypatch.setattr(executor, "_most", 4)
    parts = executor.best([0] * 4, prompts, counts, SIGNALS | {LOGITS})
    assert sizes == [5, 3, 4]  # a row's own are never divided
    assert parts.tokens == whole.tokens
    assert parts.sound == whole.sound
    for row, n in enumerate(counts):
        close(logits_of(parts)[row, :n], logits[row, :n])
        for name in SIGNALS:
            assert parts.signals[name][row][:n] == pytest.approx(
                whole.signals[name][row][:n], abs=1e-5
            )
    next_tokens = [[7], [8], [9], [10]]
    got = executor.run([5, 9, 2, 4], next_tokens, [1] * 4)
    executor.keep([], [])
    close(
        got,
        executor.run([0] * 4, [p + n for p, n in zip(prompts, next_tokens, strict=True)], [1] * 4),
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_not_sound(
    executor: OpenVINOExecutor, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = OpenVINOExecutor._pass

    def broken(self: Any, *arguments: Any) -> Any:
        seen = ran(self, *arguments)
        seen[1, 7] = bad
        return seen

    monkeypatch.setattr(OpenVINOExecutor, "_pass", broken)
    got = executor.best([0, 0], [[5], [6, 7]], [1, 2], SIGNALS)
    assert got.sound == [[True, False], [False, True]]


def test_the_probe_finds_a_wrong_model(model: Any, executor: OpenVINOExecutor) -> None:
    wanted = probing.reference(model, executor.facts.limit)
    probing.probe(executor, wanted)
    other = probing.reference(build("llama", seed=1), executor.facts.limit)
    with pytest.raises(UnsupportedModelError, match="differs from the model alone by"):
        probing.probe(executor, other)


def test_the_probe_sees_rows_mixed_up(
    model: Any, executor: OpenVINOExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = probing.reference(model, executor.facts.limit)
    ran = OpenVINOExecutor._pass

    def late(self: Any, starts: list[int], *rest: Any) -> Any:
        return ran(self, [start and start + 1 for start in starts], *rest)

    monkeypatch.setattr(OpenVINOExecutor, "_pass", late)
    with pytest.raises(UnsupportedModelError, match="differs"):
        probing.probe(executor, wanted)


@pytest.mark.usefixtures("own_store")
def test_the_store(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = []
    noted = lambda m: exported.append(1) or export(m)  # noqa: E731
    monkeypatch.setattr("forerun.runtime.openvino.export.export", noted)
    text = texts(20)[0]
    first, second = from_model(model), from_model(model)
    assert len(exported) == 1
    assert first.facts == second.facts
    # The graph that was read back runs the same operations, so the same numbers come out.
    assert torch.equal(first.run([0], [text], [20]), second.run([0], [text], [20]))
    (entry,) = store.folder().iterdir()
    assert json.loads((entry / "facts.json").read_text())["sizes"]
    weights = entry / "graph.bin"
    size = weights.stat().st_size
    weights.unlink()  # `first` and `second` go on reading the old one
    weights.write_bytes(bytes(size))  # only the probe can see that
    third = from_model(model)
    assert len(exported) == 2
    assert torch.equal(first.run([0], [text], [20]), third.run([0], [text], [20]))


def small(executor: OpenVINOExecutor, model: Any) -> store.Stored:
    input = ov.opset15.parameter(ov.PartialShape([1]), ov.Type.f32)
    graph = ov.Model([ov.opset15.add(input, np.ones(1, np.float32))], [input], "small")
    return store.Stored(graph, executor.facts, probing.reference(model, executor.facts.limit))


@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize("damage", ["cut short", "empty", "missing", "wrong"])
@pytest.mark.parametrize("file", ["graph.xml", "graph.bin", "facts.json", "reference.npy"])
def test_a_damaged_entry_is_deleted(
    shared: OpenVINOExecutor, model: Any, file: str, damage: str
) -> None:
    assert store.write("entry", small(shared, model))
    read = store.read("entry")
    assert read is not None
    assert read.facts == shared.facts
    path = store.folder() / "entry" / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        new = {"cut short": data[:-3], "empty": b"", "wrong": bytes(len(data))}[damage]
        path.write_bytes(new)
    if (file, damage) != ("graph.bin", "wrong"):  # that one is the probe's to find
        assert store.read("entry") is None
        assert list(store.folder().iterdir()) == []


def test_another_model_has_another_entry(model: Any) -> None:
    same, other = build("llama"), build("llama", seed=1)
    hashes = [store.of_model(m) for m in (model, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    names = {store.key(weights, form) for weights in hashes for form in ("f32", "int8")}
    assert len(names) == 4


def test_a_store_that_cannot_be_written_is_no_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    assert from_model(model).facts.vocab_size == 97


@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize(
    "damaged", slow_but(['{"a": null}', "5", "[1, 2]", '["x", 9, 9]'], lambda text: text[0] == "{")
)
def test_damaged_widths_are_found_anew(model: Any, tmp_path: Path, damaged: str) -> None:
    from_model(model)
    (kept,) = (tmp_path / "cache" / "widths").iterdir()
    found = kept.read_text()
    kept.write_text(damaged)
    from_model(model)
    assert kept.read_text() == found


@pytest.mark.usefixtures("own_store")
def test_the_store_stays_small(
    shared: OpenVINOExecutor, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.write("old", small(shared, model))
    monkeypatch.setattr(store, "LARGEST_BYTES", 1)
    assert store.write("new", small(shared, model))
    assert [entry.name for entry in store.folder().iterdir()] == ["new"]


def test_a_folder_is_loaded_without_torch_weights(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    from_name(tmp_path / "model")
    monkeypatch.setattr(loading, "load_model", None)
    executor = from_name(tmp_path / "model")
    text = texts(9)[0]
    close(executor.run([0], [text], [9])[0], alone(model, text))
    assert executor.facts.name == str(tmp_path / "model")
    assert executor.facts.eos == frozenset([2])


def test_precisions(model: Any) -> None:
    text = texts(20)[0]
    exact = alone(model, text)
    for precision, name in (("int8", "int8"), ("bf16", "bfloat16")):
        if precision == "bf16" and not MULTIPLIES_BFLOAT16:
            continue
        executor = from_model(model, precision, threads=2)
        assert executor.facts.precision == name
        off = (executor.run([0], [text], [20])[0] - exact).abs().max() / exact.abs().max()
        assert 1e-4 < off < 0.1  # another model, but a near one
        from_model(build_encoder_decoder("marian"), precision, threads=2)  # passes the probe


@pytest.mark.parametrize(
    ("family", "fused"),
    slow_but(
        [("llama", 2), ("qwen2", 0), ("gpt2", 0), ("qwen3_moe", 2)],
        lambda family, _: family != "qwen3_moe",
    ),
)
def test_queries_keys_and_values_are_one_product(family: str, fused: int) -> None:
    """But for Qwen2, whose biases follow, and GPT-2, which has one product already."""
    model = tiny(family)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)  # biases of 0 are left out of the graph
    graph = export(model)

    def products() -> int:
        return sum(node.get_type_name() == "MatMul" for node in graph.get_ops())

    before = products()
    fuse(graph)
    assert products() == before - 2 * fused


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_experts_are_rounded_to_8_bits_like_everything_else(family: str) -> None:
    model = tiny(family)
    graph = export(model)
    fuse(graph)
    every = sum(node.get_type_name() == "MatMul" for node in graph.get_ops())
    hold(graph, eight_bits=True)
    kinds = [node.get_output_element_type(0) for node in graph.get_ops()]
    assert kinds.count(ov.Type.i8) == every
    text = texts(20)[0]
    exact = alone(model, text)
    got = from_model(model, "int8", cached=False).run([0], [text], [20])[0]
    # Where rounding sends a token to another expert, its logits are others altogether.
    assert (got - exact).abs().median() / exact.abs().max() < 0.05


@pytest.mark.parametrize(
    ("precision", "line"),
    [("bf16", "at least 2 threads .* got 1; use fp32"), ("fp8", "must be one of .*got 'fp8'")],
)
def test_precisions_that_cannot_run(model: Any, precision: str, line: str) -> None:
    with pytest.raises(SettingError, match=line):
        from_model(model, precision, threads=1)


def test_a_cpu_without_bfloat16_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32", "INT8"]

    monkeypatch.setattr(executing, "core", Plain)
    with pytest.raises(SettingError, match="this one lacks; use fp32 or int8"):
        executing.settings("bf16", threads=2)


def test_threads_are_torchs_unless_set(model: Any, shared: OpenVINOExecutor) -> None:
    assert shared.threads == torch.get_num_threads()
    assert from_model(model, threads=2).threads == 2


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.runtime.runtimes import OpenVINORuntime, Source

    monkeypatch.setattr("forerun.runtime.runtimes.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"forerun\[openvino\]"):
        OpenVINORuntime().load(Source("a model"))


def test_the_server_reads_sampling_defaults_beside_the_weights(model: Any, tmp_path: Path) -> None:
    """An executor that keeps no module cannot say them."""
    from forerun.runtime.load import sampling_settings, saved_generation_config

    model = copy.deepcopy(model)
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9)
    model.save_pretrained(tmp_path)
    defaults = sampling_settings(saved_generation_config(str(tmp_path)))
    assert (defaults["temperature"], defaults["top_p"]) == (0.7, 0.9)
    assert saved_generation_config("") is saved_generation_config(str(tmp_path / "no")) is None


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the graphs that ran."""
    ran: list[int] = []
    run = forms.Form.run

    def noted(self: forms.Form, *arguments: Any) -> Any:
        ran.append(self.tokens)
        return run(self, *arguments)

    monkeypatch.setattr(forms.Form, "run", noted)
    return ran


def test_a_row_alone_goes_through_graphs_of_fixed_shapes(
    model: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executing, "FIRST_BLOCKS", 1)  # the pool grows below them
    executor = from_model(model)
    text = [(5 * i + 3) % 90 for i in range(nodes.BLOCK + 9)]
    exact = alone(model, text)

    def feed(at: int, count: int, wanted: int) -> int:
        executor.run([0, 0], [[], text[:at]], [0, 0])
        seen = executor.run([0, at], [[], text[at : at + count]], [0, wanted])
        close(seen[1, :wanted], exact[at + count - wanted : at + count])
        return sizes[-1]

    for count, tokens in ((1, 1), (2, 5), (5, 5), (6, 8), (8, 8), (3, 5)):
        for at in (9, 10, nodes.BLOCK - 2, nodes.BLOCK, 9):  # at last rolled back
            for wanted in (1, count):
                assert feed(at, count, wanted) == tokens
    assert feed(9, 9, 1) == 0, "nothing is compiled for so many of a row alone"


def test_rows_that_share_passes_go_through_larger_ones(model: Any, sizes: list[int]) -> None:
    executor = from_model(model)
    rows = texts(40, 60, 50)
    exact = [alone(model, text) for text in rows]
    held = [7, nodes.BLOCK - 1, 30]

    def feed(*counts: int) -> int:
        """From where each row stands: all is rolled back afterwards."""
        pieces = [t[at : at + n] for t, at, n in zip(rows, held, counts, strict=True)]
        seen = executor.run(held, pieces, counts)
        for row, (at, n) in enumerate(zip(held, counts, strict=True)):
            close(seen[row, :n], exact[row][at : at + n])
        return sizes[-1]

    executor.run([0] * 3, [text[:at] for text, at in zip(rows, held, strict=True)], [0] * 3)
    # What is filled up is the last row that is fed, whatever the others hold.
    assert [feed(1, 1, 1), feed(2, 1, 1), feed(2, 3, 0), feed(0, 4, 4)] == [5, 5, 5, 8]
    assert feed(4, 4, 4) == 0
    executor.reserve(3, 64)
    assert [feed(4, 4, 4), feed(6, 5, 5), feed(1, 9, 0), feed(1, 1, 1)] == [12, 16, 12, 5]
    assert feed(9, 5, 3) == 0
    executor.keep([2, 0], [30, 7])
    rows, exact, held = [rows[2], rows[0]], [exact[2], exact[0]], [30, 7]
    assert [feed(6, 6), feed(1, 4), feed(0, 1)] == [12, 5, 1]


def test_rows_with_sources_go_through_them_too(sizes: list[int]) -> None:
    model = build_encoder_decoder("bart", max_position_embeddings=300)
    executor = from_model(model, cached=False)
    executor.reserve(2, 64)
    (text,) = texts(20)
    sources = texts(60, 7)  # of two blocks and of one
    exact = [alone_with(model, source, text) for source in sources]
    for row, source in enumerate(sources):
        executor.attend([source])
        executor.run([0], [text[:9]], [0])
        for at, count in ((9, 1), (10, 5), (12, 8), (9, 3)):
            seen = executor.run([at], [text[at : at + count]], [count])[0]
            close(seen, exact[row][at : at + count])
            assert sizes[-1] in (1, 5, 8)
        executor.keep([], [])
    executor.attend(sources)
    executor.run([0, 0], [text[:9], text[:5]], [0, 0])
    for counts, tokens in (((1, 1), 5), ((2, 4), 8), ((0, 3), 5), ((6, 5), 12), ((9, 9), 0)):
        pieces = [text[at : at + n] for at, n in zip((9, 5), counts, strict=True)]
        seen = executor.run([9, 5], pieces, counts)
        for row, (at, n) in enumerate(zip((9, 5), counts, strict=True)):
            close(seen[row, :n], exact[row][at : at + n])
        assert sizes[-1] == tokens
    executor.keep([1], [5])
    close(executor.run([5], [text[5:8]], [3])[0], exact[1][5:8])


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_what_cannot_be_compiled_goes_through_open_shapes(
    model: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    made = forms.Form.__init__

    def refuse(self: forms.Form, *arguments: Any, **more: Any) -> None:
        if arguments[-1] in (1, 16):
            raise error
        made(self, *arguments, **more)

    monkeypatch.setattr(forms.Form, "__init__", refuse)
    executor = from_model(model)
    executor.reserve(2, 64)
    (text,) = texts(20)
    exact = alone(model, text)
    for count, tokens in ((1, 5), (7, 8), (12, 12), (14, 0)):
        close(executor.run([0], [text[:count]], [count])[0], exact[:count])
        assert sizes[-1] == tokens


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "mixtral", "bart"], "llama".__eq__))
def test_bfloat16_weights_are_read_as_they_are(
    family: str, tiled: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "has_matrix_units", lambda: tiled)
    sourced = family == "bart"
    model = build_encoder_decoder("bart") if sourced else tiny(family)
    model = model.bfloat16().float()
    with halved(model) as memory:
        graph = export(model)
    assert model.dtype == torch.float32
    hold(graph)
    del memory
    products = sum(node.get_type_name() == "MatMul" for node in graph.get_ops())
    assert len(list(halves(graph))) == products
    executor = from_model(model, cached=False)
    (text,) = texts(30)
    exact = alone_with(model, text, text) if sourced else alone(model, text)
    if sourced:
        executor.attend([text])
    at = 0
    ran = (10, 1, 4, 4, 10, 10) if tiled else (0, 1, 4, 4, 5, 8)
    for count, tokens in zip((9, 1, 3, 4, 5, 7), ran, strict=True):
        close(executor.run([at], [text[at : at + count]], [count])[0], exact[at : at + count])
        at += count
        assert sizes[-1] == tokens


@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_but(
        product(FAMILIES, [torch.bfloat16, torch.float16]),
        lambda family, dtype: family == {torch.float16: "llama"}.get(dtype, "gemma3_text"),
    ),
)
def test_a_checkpoint_in_16_bits_is_not_widened_to_be_exported(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor copied; but for a model that makes numbers of its own and would round them."""
    tiny(family).to(dtype).save_pretrained(tmp_path / "model")
    dtypes = []
    load = loading.load_model

    def noted(name: Any, device: Any, dtype: Any, *more: Any, **options: Any) -> Any:
        dtypes.append(dtype)
        return load(name, device, dtype, *more, **options)

    monkeypatch.setattr(loading, "load_model", noted)
    (text,) = texts(20)
    for precision, most in (("fp32", TOLERANCE), ("int8", 2.0)):
        dtypes.clear()
        executor = from_name(tmp_path / "model", precision)
        exact = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        wanted = alone(exact, text)
        assert (executor.run([0], [text], [20])[0] - wanted).abs().max() < most
        assert executor.facts.token_bytes == facts_of(exact).token_bytes
        assert dtypes == ([dtype, "fp32"] if family.startswith("gemma") else [dtype])


@pytest.mark.usefixtures("own_store")
def test_positions_that_are_not_in_the_checkpoint_are_not_rounded(tmp_path: Path) -> None:
    """They are weights to Marian's classes, which make them themselves."""
    build_encoder_decoder("marian").bfloat16().save_pretrained(tmp_path)
    exact = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, weight in from_name(tmp_path).module().state_dict().items():
        assert torch.equal(weight.float(), exact[name]), name


def test_weights_that_are_not_bfloat16_stay(model: Any) -> None:
    with halved(model):
        graph = export(model)
    hold(graph)
    assert not [*halves(graph)]


@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize(("tied", "tiled"), [(True, False), (False, False), (True, True)])
def test_halved_weights_of_a_large_model(
    monkeypatch: pytest.MonkeyPatch, tied: bool, tiled: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr(making, "LARGEST_COPIES", 1)
    monkeypatch.setattr(making, "has_matrix_units", lambda: tiled)
    tiny("llama", tie_word_embeddings=tied).bfloat16().save_pretrained(tmp_path / "model")
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    exact = alone(read, text := texts(30)[0])
    for _ in range(2):  # exported, and from the store
        executor = from_name(tmp_path / "model")
        assert executor.levels == ((4, 5, 10, 16) if tiled else (4, 8, 12, 16))
        close(executor.run([0], [text], [30])[0], exact)
        for count in (1, 4, 5, 8, 15, 16):
            for wanted in (0, 1, 3, count):
                seen = executor.run([9], [text[9 : 9 + count]], [min(wanted, count)])[0]
                close(seen, exact[9 + count - min(wanted, count) : 9 + count])
        executor.keep([0, 0], [9, 9])
        executor.reserve(2, 64)
        assert executor.shared_levels == executor.levels
        seen = executor.run([9, 20], [text[9:12], text[20:26]], [2, 6])
        close(seen[0, :2], exact[10:12])
        close(seen[1], exact[20:26])
        best = executor.best([12, 9], [text[12:15], text[9:16]], [1, 7], frozenset())
        assert best.tokens[1] == exact[9:16].argmax(-1).tolist()
    if MULTIPLIES_BFLOAT16:
        reduced = from_name(tmp_path / "model", "bf16", threads=2).run([0], [text], [30])[0]
        assert 1e-4 < (reduced - exact).abs().max() / exact.abs().max() < 0.1


def test_parts_of_numbers_are_their_sum() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(1, 500, 64)) * 10.0 ** rng.integers(-25, 25, (1, 500, 64))
    numbers[0, 0, :4] = 0, 1, -1, 1 + 2**-23
    numbers = numbers.astype(np.float32)
    x = ov.opset15.parameter([1, 500, 64], ov.Type.f32)
    whole = ov.opset15.reduce_sum(
        ov.opset15.convert(parts._parts(x), "f64"), ov.opset15.constant([0]), True
    )
    compiled = core().compile_model(
        ov.Model([whole], [x]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    assert np.array_equal(compiled([numbers])[0], numbers)


@pytest.mark.parametrize("rank", [2, 3])
def test_products_in_parts_are_as_exact_as_fp32(rank: int) -> None:
    rng = np.random.default_rng(rank)
    weights = rng.normal(size=(96, 200)).astype(np.float32)
    bits = weights.view(np.uint16)[:, 1::2]
    weights = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    numbers = (rng.normal(size=(16, 200)) * np.exp(2 * rng.normal(size=(16, 200)))).astype("f")
    exact = numbers.astype(np.float64) @ weights.T.astype(np.float64)
    x = ov.opset15.parameter([16, 1, 200] if rank == 3 else [16, 200], ov.Type.f32)
    graph = ov.Model([ov.opset15.matmul(x, held(bits), False, True)], [x])
    worst = []
    for in_parts in (False, True):
        if in_parts:
            parts.multiply_in_parts(graph)
            assert [n.get_type_name() for n in graph.get_ops()].count("Split") == 1
        compiled = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        got = compiled([numbers.reshape(x.get_output_shape(0))])[0]
        assert got.shape == ((16, 1, 96) if rank == 3 else (16, 96))
        worst.append(np.abs(got.reshape(16, 96) - exact).max() / np.abs(exact).max())
    assert worst[1] < max(2 * worst[0], 1e-6)


def test_a_plugin_without_such_products_multiplies_as_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    unknown = tmp_path / "unknown.xml"
    unknown.write_text(parts._PRODUCT.read_text().replace("type_relaxed", "unknown"))
    monkeypatch.setattr(parts, "_PRODUCT", unknown)
    parts.has_matrix_units.cache_clear()
    assert not parts.has_matrix_units()
    parts.has_matrix_units.cache_clear()


def test_what_is_padded_does_not_reach_beyond_the_context(model: Any) -> None:
    executor = from_model(model)
    limit = executor.facts.limit
    text = [(5 * i + 3) % 90 for i in range(limit)]
    executor.run([0], [text[:-2]], [0])
    close(executor.run([limit - 2], [text[-2:]], [2])[0], alone(model, text)[-2:])


def test_copies_of_weights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def of(
        weights: int,
        precision: str = "float32",
        halved: bool = False,
        tiled: bool = False,
        lazy: bool = False,
    ) -> tuple[list[int], list[int]]:
        facts = Facts(vocab_size=8, limit=8, weights=weights, precision=precision)
        return making.sizes(facts, halved, tiled, lazy)

    million = 1 << 20
    every = [1, 5, 8], [12, 16]
    assert of(16 * million) == of(64 * million, "int8") == every, "a byte each"
    bounded = [of(n * million) for n in (24, 32, 48, 96, 97)]
    assert bounded == [([1, 5, 8], [12]), ([1, 5, 8], []), ([1, 5], []), ([1], []), ([], [])]
    assert of(million) == ([1, 2], [4, 8, 12, 16]), "small ones stay in the caches"
    assert of(0) == of(million, "bfloat16") == ([], [])
    assert of(128 * million, "Q4_1") == of(128 * million, "int4") == ([1], [])
    wanted = [2, 5], [4, 8, 16, 24, 32, 48]
    assert of(128 * million, "Q4_1", lazy=True) == of(512 * million, "Q4_K", lazy=True) == wanted
    assert of(1024 * million, "Q4_1", lazy=True) == ([], [])
    assert of(512 * million, "Q4_K") == of(128 * million, "F16") == ([], [])
    bounded = [of(n * million, halved=True) for n in (16, 24, 32, 48, 96)]
    assert bounded[:2] == [([1, 4, 5, 8], [12, 16]), ([1, 4, 5, 8], [12])]
    assert bounded[2:] == [([1, 4, 5, 8], []), ([1, 4, 5], []), ([1, 4], [])]
    assert of(million, halved=True) == of(million)
    assert [of(n * million, halved=True) for n in (97, 192, 193)] == [
        ([1], []),
        ([1], []),
        ([], []),
    ]
    tiled = [of(n * million, halved=True, tiled=True) for n in (24, 27, 28, 48, 49, 97, 193)]
    assert tiled[:2] == [([1, 4, 10, 16], [24, 32, 48]), ([1, 4, 10, 16], [24, 32, 48])]
    assert tiled[2:4] == [([1, 4, 10, 16], [24, 32]), ([1, 4, 10, 16], [])]
    assert tiled[4:] == [([1, 4, 10], []), ([1], []), ([], [])]
    assert of(million, halved=True, tiled=True) == of(million)


def huge() -> int:
    """Bytes of this process's own memory that are in huge pages."""
    of = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"AnonHugePages: +(\d+)", of)[0]) << 10


@pytest.mark.skipif(
    [*map(int, re.findall(r"\d+", platform.release())[:2])] < [6, 1]
    or not Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file(),
    reason="this system puts no memory into huge pages when asked",
)
def test_memory_is_put_into_huge_pages() -> None:
    numbers, before = np.arange(4 << 20), huge()
    store.join_pages()
    assert huge() - before >= 24 << 20, "of 32 MB"
    assert np.array_equal(numbers, np.arange(4 << 20))


@pytest.mark.parametrize(("least", "joined"), [(1, 1), (1 << 20, 0)])
def test_passes_of_large_weights_put_them_into_huge_pages(
    model: Any, monkeypatch: pytest.MonkeyPatch, least: int, joined: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(making, "SMALLEST_JOINED", least)
    monkeypatch.setattr(making, "join_pages", lambda: calls.append(1))
    executor = from_model(model, cached=False)
    for _ in range(2 * making.WANTED):
        executor.run([0], [[1]], [1])
    for thread in threading.enumerate():
        if thread.name == "pages":
            thread.join()
    assert len(calls) == joined
