"""What every executor must do, whatever it runs on: rows in one batch equal the model run alone.

An executor is a line in the table. Logits are compared, not arg-maxes, which would hide errors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from forerun.errors import SettingError
from forerun.runtime import base as base_module
from forerun.runtime.attention import FOLDED, folded_attention, groups_of
from forerun.runtime.base import Executor, Rows, best_of, read_stacked, stacked_best
from forerun.runtime.cuda_graphs import CudaGraphExecutor, Graph
from forerun.runtime.encoder_decoder import EncoderDecoderExecutor
from forerun.runtime.exits import LayersExecutor
from forerun.runtime.packing import pack
from forerun.runtime.runtimes import RUNTIMES, Source
from forerun.runtime.support import PROVEN
from forerun.runtime.torch_executor import TorchExecutor
from forerun.signals import measure
from forerun.testing import ScriptedModel
from gguf_files import write as write_gguf
from marks import FAMILIES, slow_but, spread
from sourced import OneSource
from sourced import alone as alone_with
from sourced import build as build_encoder_decoder
from tiny import CONFIGS, LIMIT, VOCAB, WINDOWED, build, texts

TOLERANCE = 5e-5  # logits here reach about 5; fp32 rounding over three layers stays below 1e-5
OTHERS = {"layers", "encoder", "gemma3_text", "qwen2-windowed"}
"""Families of executors that CI runs besides `FAMILIES`: what has windows, or no family."""
GRAPHS = {
    "padded-llama",
    "llama",
    "marian",
    "halved-llama-large",
    "parts-gpt2-large",
    "layers-llama",
}
"""Of openvino, each of which is exported first: one of each kind."""


@dataclass(frozen=True)
class Case:
    """An executor of a model, and the model run alone."""

    make: Callable[[], Executor]
    alone: Callable[[Sequence[int]], torch.Tensor]
    """`(n, V)` logits after every token of a text."""
    rows_of: Callable[[Executor], Rows] = Rows
    idle: list[Executor] = field(default_factory=list)
    """Executors that earlier tests left: making one may take a second."""

    def rows(self) -> Rows:
        return self.rows_of(self.make())

    @contextmanager
    def lent(self) -> Iterator[Case]:
        """The same, which makes an executor only where none is idle."""
        used: list[Executor] = []

        def make() -> Executor:
            used.append(self.idle.pop() if self.idle else self.make())
            return used[-1]

        yield replace(self, make=make)
        for executor in used:
            executor.keep([], [])
        self.idle.extend(used)


def of_encoder_decoder(
    family: str, kind: Callable[[Any], Executor] = EncoderDecoderExecutor
) -> Case:
    """All rows have one source; `test_encoder_decoder` gives each its own."""
    model = build_encoder_decoder(family)
    return Case(
        lambda: kind(model),
        lambda tokens: alone_with(model, OneSource.SOURCE, tokens),
        OneSource,
    )


def of_model(
    kind: Callable[[Any], Executor], family: str, change: Callable[[Any], Any] = lambda model: model
) -> Case:
    model = change(build(family))

    def alone(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)])).logits[0]

    return Case(lambda: kind(model), alone)


def of_packed(kind: Callable[[Any], Executor], family: str) -> Case:
    return of_model(lambda model: kind(pack(copy.deepcopy(model))), family)


def of_script() -> Case:
    def script(context: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(context) % 1_000_003)
        return torch.randn(VOCAB, generator=generator)

    return Case(
        lambda: ScriptedModel(script, LIMIT),
        lambda tokens: torch.stack([script(tuple(tokens[: i + 1])) for i in range(len(tokens))]),
    )


class Eager:
    """Stands in for a captured graph where there is no GPU: runs the step again."""

    pool = None

    def __init__(self, step: Any, inputs: torch.Tensor, pool: Any) -> None:
        self._step = step

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._step(inputs)


def of_cuda_graphs(family: str, compile: bool = False) -> Case:
    """Captured where there is a GPU; else all but the capture."""

    def make(model: Any) -> Executor:
        on_gpu = torch.cuda.is_available()
        model = copy.deepcopy(model).to("cuda") if on_gpu else model
        return CudaGraphExecutor(model, compile, Graph if on_gpu else Eager)

    return of_model(make, family)


def of_openvino(family: str) -> Case:
    pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
    from forerun.runtime.openvino.load import from_model

    if family in ("marian", "bart"):
        return of_encoder_decoder(family, from_model)
    return of_model(from_model, family)


def of_halved(family: str, large: bool = False, tiled: bool = False) -> Case:
    """Of weights that are bfloat16 numbers; a large model has them in no other form. Tiled, wide
    passes multiply in parts, on whatever this CPU has."""
    pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
    from forerun.runtime.openvino import making
    from forerun.runtime.openvino.load import from_model

    def make(model: Any) -> Executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(making, "has_matrix_units", lambda: tiled)
            patch.setattr(making, "SMALLEST_WIDE", 0)
            if large:
                patch.setattr(making, "LARGEST_COPIES", 1)
            executor = from_model(model, cached=False)
        assert 4 in executor.levels or not large
        return executor

    return of_model(make, family, lambda model: model.bfloat16().float())


def of_padded(family: str) -> Case:
    """As where one token takes another kernel, whatever this CPU does."""
    pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
    from forerun.runtime.openvino import load

    def make(model: Any) -> Executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "passes_agree", lambda executor, rounds: executor._least == 2)
            return load.from_model(model, cached=False)

    return of_model(make, family)


def of_precision(precision: str) -> Case:
    """Weights in fewer bits are a model of their own, which a text alone is read by in one pass."""
    pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")
    from forerun.runtime.openvino.load import from_model, from_name

    def make() -> Executor:
        if precision == "int8":
            return from_model(build("llama"), precision)
        path = Path(os.environ["FORERUN_CACHE"], f"{precision}.gguf")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with torch.inference_mode():
                write_gguf(path, "llama", precision)
        return from_name(path)

    single = make()

    def alone(tokens: Sequence[int]) -> torch.Tensor:
        logits = single.run([0], [list(tokens)], [len(tokens)])[0]
        single.keep([], [])
        return logits

    return Case(make, alone)


CASES: dict[str, Callable[[], Case]] = {
    **{f"torch-{f}": lambda f=f: of_model(TorchExecutor, f) for f in (*CONFIGS, *WINDOWED)},
    **{f"packed-{family}": lambda f=family: of_packed(TorchExecutor, f) for family in CONFIGS},
    "packed-layers": lambda: of_packed(LayersExecutor, "llama"),
    **{f"layers-{family}": lambda f=family: of_model(LayersExecutor, f) for family in CONFIGS},
    **{f"openvino-{f}": lambda f=f: of_openvino(f) for f in ("llama", "gpt2", "marian", "bart")},
    **{f"encoder-{f}": lambda f=f: of_encoder_decoder(f) for f in ("t5", "marian", "bart")},
    "packed-encoder": lambda: of_encoder_decoder(
        "bart", lambda model: EncoderDecoderExecutor(pack(copy.deepcopy(model)))
    ),
    **{f"cudagraphs-{f}": lambda f=f: of_cuda_graphs(f) for f in (*CONFIGS, *WINDOWED)},
    "openvino-padded-llama": lambda: of_padded("llama"),
    "openvino-halved-gpt2": lambda: of_halved("gpt2"),
    "openvino-halved-llama-large": lambda: of_halved("llama", large=True),
    "openvino-parts-llama": lambda: of_halved("llama", tiled=True),
    "openvino-parts-gpt2-large": lambda: of_halved("gpt2", large=True, tiled=True),
    **{f"openvino-{p}": lambda p=p: of_precision(p) for p in ("int8", "Q8_0", "Q4_1", "Q4_K")},
    "scripted": of_script,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
def test_compiled_passes_equal_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler, under the graph where there is a GPU."""
    monkeypatch.setattr(base_module, "CHUNK", 32)
    case, prompts = of_cuda_graphs("llama", compile=True), texts(5, 40)
    rows = Rows(case.make())
    rows.read(prompts)
    pieces = [[prompts[0][-1], 5, 9], prompts[1][-1:]]
    got = rows.feed(pieces)
    close(got[0, :3], case.alone([*prompts[0], 5, 9])[-3:])
    close(got[1, :1], case.alone(prompts[1])[-1:])
    rows.rollback(0, 5)
    rows.keep([1, 0])
    got = rows.feed([[7], [8]])[:, 0]
    close(got[1], case.alone([*prompts[0], 8])[-1])
    close(got[0], case.alone([*prompts[1], 7])[-1])


def usually(name: str) -> bool:
    """Cases that CI runs: of executors over the same modules, some families."""
    kind, _, family = name.partition("-")
    if kind == "openvino":
        return family in GRAPHS
    alike = kind in ("torch", "packed", "layers", "cudagraphs")
    return not alike or family in {*FAMILIES, *OTHERS}


@cache
def made(name: str) -> Case:
    return CASES[name]()


@pytest.fixture(params=slow_but(CASES, usually))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with made(request.param).lent() as case:
        yield case


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    got = got.cpu()
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def test_the_tested_families_are_the_proven_ones() -> None:
    assert set(CONFIGS) | {f for f in WINDOWED if not f.endswith("-windowed")} == PROVEN


@pytest.mark.parametrize("family", [*CONFIGS, *WINDOWED])
@pytest.mark.transformers_versions
def test_folded_attention_is_that_of_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, folded = build(family), texts(5, 17, 1, 9), []

    def spy(*args: Any, **more: Any) -> Any:
        folded.append(args)
        return folded_attention(*args, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, FOLDED, spy)

    def logits(groups: int) -> torch.Tensor:
        executor = TorchExecutor(model)
        executor._groups = groups
        rows = Rows(executor)
        rows.read(prompts)
        return rows.feed([p[-1:] + [3, 4, 5][:i] for i, p in enumerate(prompts)])

    groups = groups_of(model)
    plain, seen = logits(1), len(folded)
    got = logits(groups)
    assert (seen, bool(folded)) == (0, groups > 1)
    assert groups == {"gpt2": 1, "gpt_neox": 1, "gemma": 4, "gemma3_text": 4, "gemma2": 1}.get(
        family, 2
    )  # a soft cap is not for folding
    for row in range(4):
        torch.testing.assert_close(got[row, : row + 1], plain[row, : row + 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "runtime"), spread(2, [*WINDOWED], ["torch", "cudagraphs"]))
@pytest.mark.transformers_versions
def test_text_beyond_the_window_is_that_of_generate(runtime: str, family: str) -> None:
    """Three drafted tokens are thrown away a pass, and the text goes on: alone and in four rows."""
    model, prompts = build(family), texts(13, 4, 21, 9)
    end = model.generation_config.eos_token_id = VOCAB  # none: every text is as long
    alone = [
        model.generate(
            torch.tensor([p]), max_new_tokens=24, do_sample=False, eos_token_id=end, pad_token_id=0
        )[0, len(p) :].tolist()
        for p in prompts
    ]
    for chosen in ([0], [0, 1, 2, 3]):
        executor = TorchExecutor(model)
        if runtime == "cudagraphs":
            executor = CudaGraphExecutor(model, capture=Eager)
        rows, written = Rows(executor), [list(prompts[i]) for i in chosen]
        rows.read(written)
        for _ in range(24):
            best = rows.best([[t[-1], 5, 6, 7] for t in written], [4] * len(written))
            for i, text in enumerate(written):
                text.append(best.tokens[i][0])
                rows.rollback(i, len(text) - 1)
        assert [t[len(prompts[i]) :] for i, t in zip(chosen, written, strict=True)] == [
            alone[i] for i in chosen
        ]


@pytest.mark.parametrize("case", slow_but(CASES, usually), indirect=True)
@pytest.mark.transformers_versions
def test_ragged_rows_equal_rows_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_module, "CHUNK", 5)
    rows, prompts = case.rows(), texts(5, 17, 1, 9)
    rows.read(prompts)
    assert rows.lengths == [4, 16, 0, 8]
    more = [[3, 4, 5][:i] for i in range(4)]
    got = rows.feed([p[-1:] + m for p, m in zip(prompts, more, strict=True)])
    for row, (prompt, extra) in enumerate(zip(prompts, more, strict=True)):
        close(got[row, : len(extra) + 1], case.alone(prompt + extra)[len(prompt) - 1 :])

    # Reject everything fed last, let two rows leave, reorder the others, go on.
    for row, prompt in enumerate(prompts):
        rows.rollback(row, len(prompt))
    rows.keep([3, 1])
    got = rows.feed([[7], [8, 9]], [1, 1])[:, 0]
    for row, tokens in ((0, [*prompts[3], 7]), (1, [*prompts[1], 8, 9])):
        close(got[row], case.alone(tokens)[-1])

    # One more joins; a row that is fed nothing stays as it is.
    late = texts(6, seed=5)[0]
    rows.read([late])
    rows.feed([[], [], late[-1:]])
    got = rows.feed([[5], [5], [5]])[:, 0]
    for row, tokens in enumerate(([*prompts[3], 7, 5], [*prompts[1], 8, 9, 5], [*late, 5])):
        close(got[row], case.alone(tokens)[-1])
    rows.keep([])
    assert rows.lengths == []


def test_prompts_are_read_beside_rows_that_decode(case: Case) -> None:
    """Rows of one pass may read a prompt, judge a draft, decode a token, or do nothing."""
    rows, (old, new, idle, late) = case.rows(), texts(7, 50, 4, 40)
    rows.read([old, idle])
    rows.join(2)
    got = rows.feed([[old[-1], 5, 6], [], new[:45], late], [3, 0, 0, 1])
    close(got[0], case.alone([*old, 5, 6])[-3:])
    close(got[3, 0], case.alone(late)[-1])
    assert rows.lengths == [9, 3, 45, 40]
    got = rows.feed([[9], [], [*new[45:], 3, 4], []], [1, 0, 3, 0])
    close(got[0, 0], case.alone([*old, 5, 6, 9])[-1])
    close(got[2], case.alone([*new, 3, 4])[-3:])


def test_a_row_may_be_kept_twice(case: Case) -> None:
    rows, (first, second) = case.rows(), texts(6, 9)
    rows.read([first, second])
    rows.keep([1, 0, 1])
    got = rows.feed([[second[-1], 5], [first[-1]], [second[-1], 6]], [1, 1, 1])[:, 0]
    for row, tokens in enumerate(([*second, 5], first, [*second, 6])):
        close(got[row], case.alone(tokens)[-1])


def test_nothing_is_fed_and_nothing_wanted(case: Case) -> None:
    rows, prompts = case.rows(), texts(4, 6)
    rows.read(prompts)
    assert rows.feed([[], []]).shape[:2] == (2, 0)
    rows.feed([prompts[0][-1:], []], [0, 0])
    assert rows.lengths == [4, 5]
    close(rows.feed([[5], []], [1, 0])[0, 0], case.alone([*prompts[0], 5])[-1])


SIGNALS = frozenset({"top1", "chosen", "entropy", "logit_margin"})


def test_the_best_tokens_are_those_of_the_logits(case: Case) -> None:
    prompts = texts(5, 8, 3)
    logits, best = case.rows(), case.rows()
    for rows in (logits, best):
        rows.read(prompts)
    pieces = [[prompts[0][-1], 5, 9], [prompts[1][-1]], []]
    wanted = [3, 1, 0]
    full, got = logits.feed(pieces, wanted), best.best(pieces, wanted, SIGNALS)
    for row, count in enumerate(wanted):
        tokens = full[row, :count].argmax(-1)
        assert got.tokens[row][:count] == tokens.tolist()
        assert all(got.sound[row][:count])
        expected = measure(full[row, :count], tokens, SIGNALS)
        for name in SIGNALS:
            assert got.signals[name][row][:count] == pytest.approx(
                expected[name].tolist(), abs=1e-4
            )
    assert best.lengths == logits.lengths


@pytest.mark.parametrize("positions", [1, 4, 1000])
@pytest.mark.parametrize("signals", [SIGNALS, frozenset()])
def test_the_best_of_a_gpu_are_those_of_the_cpu(
    signals: frozenset[str], positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arithmetic where logits stay on a device, run on this one, in parts or at once."""
    monkeypatch.setattr(base_module, "FLOATS", positions * VOCAB)
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 2, 5] = float("nan")
    got, wanted = (
        read_stacked(stacked_best(logits, signals).tolist(), signals),
        best_of(logits, signals),
    )
    assert got.sound == wanted.sound == [[True] * 3, [True, True, False]]
    got.tokens[1].pop(), wanted.tokens[1].pop()
    assert got.tokens == wanted.tokens
    for name in signals:
        assert got.signals[name][0] == pytest.approx(wanted.signals[name][0], abs=1e-6)


def test_cuda_graphs_want_a_gpu(tmp_path: Any) -> None:
    with pytest.raises(SettingError, match="cudagraphs needs an NVIDIA GPU, got the device 'cpu'"):
        RUNTIMES.make("cudagraphs").load(Source(tmp_path, device="cpu"))


@settings(max_examples=6, deadline=None)
@given(st.data())
@pytest.mark.parametrize(
    "name",
    [
        "torch-llama",
        "torch-gpt2",
        "layers-llama",
        "openvino-llama",
        "cudagraphs-llama",
        "encoder-t5",
        "encoder-marian",
        "scripted",
    ],
)
def test_whatever_comes_and_goes(name: str, data: st.DataObject) -> None:
    """Random joins, pieces, rollbacks, leaves and repetitions."""
    with made(name).lent() as case:
        come_and_go(case, data)


def come_and_go(case: Case, data: st.DataObject) -> None:
    rows, contexts = case.rows(), []
    token = st.integers(3, VOCAB - 1)
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 2))):
            rows.join(1)
            contexts.append([])
        if not contexts:
            continue
        pieces = [data.draw(st.lists(token, max_size=min(5, LIMIT - len(c)))) for c in contexts]
        wanted = [data.draw(st.integers(0, len(piece))) for piece in pieces]
        got = rows.feed(pieces, wanted)
        for row, (piece, count) in enumerate(zip(pieces, wanted, strict=True)):
            contexts[row] += piece
            if count:
                close(got[row, :count], case.alone(contexts[row])[-count:])
            length = data.draw(st.integers(0, len(contexts[row])))
            rows.rollback(row, length)
            del contexts[row][length:]
        kept = data.draw(st.lists(st.integers(0, len(contexts) - 1), max_size=4))
        if data.draw(st.booleans()):
            rows.keep(kept)
            contexts = [list(contexts[row]) for row in kept]
        assert rows.lengths == [len(c) for c in contexts]


def test_columns_copied_out_and_in_are_as_good_as_read(case: Case) -> None:
    rows, (text, other) = Rows(case.make()), texts(45, 9)
    if not rows.executor.copies:
        pytest.skip("keeps no copies")
    rows.read([other, [*text, 5]])
    first, rest = rows.copy_out(1, 0, 33), rows.copy_out(1, 33, 45)
    assert first.part(3, 20).nbytes < first.nbytes
    assert first.part(3, 20).count == 17
    rows.keep([0])
    rows.join(2)
    for row in (1, 2):
        rows.extend(row, first.part(0, 7))
        rows.extend(row, first.part(7, 33))
    rows.extend(2, rest)
    assert rows.lengths == [8, 33, 45]
    got = rows.feed([[*other[-1:], 5], [*text[33:], 5], [5]], [2, 1, 1])
    close(got[0], case.alone([*other, 5])[-2:])
    close(got[1, 0], case.alone([*text, 5])[-1])
    close(got[2, 0], case.alone([*text, 5])[-1])
