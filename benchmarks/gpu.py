"""The shipped pair on a GPU, as it is and enlarged to shapes that people run there.

An enlarged model computes what the small one does, at the cost of the large shape: hidden units,
heads and layers are added that nothing reads, with random weights. So drafts fare as the shipped
pair's do, live.
"""

from __future__ import annotations

import copy
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import forerun
from benchmarks.common import Task, commit, console, table
from benchmarks.common import tasks as tasks_of
from forerun.drafters.model import ModelDrafter
from forerun.runtime.base import Rows, stacked_best
from forerun.runtime.cuda_graphs import CudaGraphExecutor, Graph

METHODS = (None, "fixed(2)", "fixed(4)", "auto")
ASSISTED: dict[str, dict[str, Any]] = {
    "assisted heuristic": {
        "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.0,
    },
    "assisted 5": {
        "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    "assisted threshold": {
        "num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
}  # fmt: skip
"""Settings of transformers' assisted generation."""
SHORT, LONG = 200, 900
PASSES = (
    *((rows, width, SHORT) for rows in (1, 4) for width in (1, 4, 16)),
    *((16, width, SHORT) for width in (1, 4, 8)),
    *((rows, 1, LONG) for rows in (1, 4, 16)),
)
"""Rows, tokens of each, and tokens before them."""
TINY_PASSES = ((1, 1, SHORT), (2, 2, LONG))
BATCHES = (1, 4, 16)
TINY_BATCHES = (1, 2)
REPEATS = 9
TEXTS = (None, "fixed(4)", "auto"), (1, 4, 8, 16), 3
"""Methods, batches, and runs of a batch, of whole texts alone."""

SHAPES = {  # a hidden size 4 or 16 times the small model's keeps its numbers exact
    "14B": {  # Qwen3-14B, in heads of 64
        "hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17408,
        "num_attention_heads": 80, "num_key_value_heads": 16,
    },
    "0.6B": {  # Qwen3-0.6B
        "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
        "num_attention_heads": 32, "num_key_value_heads": 16,
    },
}  # fmt: skip
"""Fields of a Llama's configuration."""


@torch.no_grad()
def enlarged(small: Any, shape: dict[str, int]) -> Any:
    """A model of another shape on the device and in the dtype of a small one, with its function.

    What is added reads the text and writes nothing; norms divide by more numbers and multiply by
    as much less.
    """
    from transformers import AutoModelForCausalLM

    old = small.config
    config = copy.deepcopy(old)
    config.update(shape)
    config.layer_types = None
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / config.hidden_size
    with small.device:
        large = AutoModelForCausalLM.from_config(config, dtype=small.dtype).eval()
    width, head, units = old.hidden_size, old.head_dim, old.intermediate_size
    per_pair = old.num_attention_heads // old.num_key_value_heads
    queries = [
        i // per_pair * (config.num_attention_heads // config.num_key_value_heads) + i % per_pair
        for i in range(old.num_attention_heads)
    ]
    spans = torch.cat([torch.arange(q * head, (q + 1) * head) for q in queries]).to(small.device)
    pairs = old.num_key_value_heads * head
    shrunk = (old.hidden_size / config.hidden_size) ** 0.5

    def norm(new: Any, weight: torch.Tensor) -> None:
        new.weight.fill_(1.0)
        new.weight[:width] = weight * shrunk

    large.model.embed_tokens.weight.zero_()
    large.model.embed_tokens.weight[:, :width] = small.model.embed_tokens.weight
    norm(large.model.norm, small.model.norm.weight)
    for layer in large.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for new, given in zip(large.model.layers, small.model.layers, strict=False):
        norm(new.input_layernorm, given.input_layernorm.weight)
        norm(new.post_attention_layernorm, given.post_attention_layernorm.weight)
        to, of = new.self_attn, given.self_attn
        to.q_proj.weight[spans, :width] = of.q_proj.weight
        to.k_proj.weight[:pairs, :width] = of.k_proj.weight
        to.v_proj.weight[:pairs, :width] = of.v_proj.weight
        to.o_proj.weight[:width, spans] = of.o_proj.weight
        new.mlp.gate_proj.weight[:units, :width] = given.mlp.gate_proj.weight
        new.mlp.up_proj.weight[:units, :width] = given.mlp.up_proj.weight
        new.mlp.down_proj.weight[:width, :units] = given.mlp.down_proj.weight
    large.generation_config = small.generation_config
    return large


@dataclass
class Report:
    """What was measured so far: every part is written when it is done, and one may fail."""

    folder: Path
    name: str
    """Of the two files."""
    until: float
    """Of `time.perf_counter`; parts that begin later are left out."""
    parts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure a part, and write all of them."""
        if time.perf_counter() > self.until:
            self.parts[name] = {"left out": "the time was up"}
            return None
        began, result = time.perf_counter(), None
        try:
            result = measure()
            self.parts[name] = result
        except Exception:  # the others are worth as much
            self.parts[name] = {"failed": traceback.format_exc().splitlines()[-6:]}
        seconds = time.perf_counter() - began
        console.print(f"{name}: {seconds:.0f} s" + ("" if result else ", failed"), highlight=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = (f"{json.dumps(k)}: {json.dumps(_short(v))}" for k, v in self.parts.items())
        (self.folder / f"{self.name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        (self.folder / f"{self.name}.md").write_text(_text(self.parts) + "\n")
        return result


def main(
    folder: Path, seconds: float, compile: bool = False, tiny: bool = False, texts: bool = False
) -> None:
    """Measure, print one table, and write `gpu.json` and `gpu.md` (`gpu-compiled`, `gpu-texts`) to
    a folder.

    Args:
        folder: where to.
        seconds: after which no part is begun.
        compile: measure compiled passes of one token alone.
        tiny: the shipped pair as it is on the CPU, without graphs: whether it all runs.
        texts: measure whole texts of 128 tokens alone, by plain decoding, `fixed(4)` and `auto`, at
            1, 4, 8 and 16 rows: about 3 minutes.
    """
    from forerun import zoo
    from forerun.runtime.load import load_model, load_tokenizer

    name = "gpu-compiled" if compile else "gpu-texts" if texts else "gpu"
    report = Report(folder, name, time.perf_counter() + seconds)
    device = torch.device("cpu" if tiny else "cuda")
    dtype = "float32" if tiny else "bfloat16"
    pair = [load_model(name, device, dtype) for name in (zoo.TARGET, zoo.DRAFT)]
    if not tiny:
        pair = [enlarged(m, SHAPES[s]) for m, s in zip(pair, ("14B", "0.6B"), strict=True)]
    copied = report.add("copy", lambda: bandwidth(device))
    report.add("machine", lambda: machine(device, tiny, compile))

    def executor(model: Any) -> CudaGraphExecutor:
        return CudaGraphExecutor(model, compile, Call if tiny else Graph)

    if compile:
        for name, model in zip(("draft", "target"), reversed(pair), strict=True):
            report.add(
                f"passes {name}", lambda m=model: passes(executor(m), copied, ((1, 1, SHORT),))
            )
    else:
        if not texts:
            _passes(report, pair, executor, copied, tiny)
        _whole(report, pair, executor, load_tokenizer(zoo.TARGET), tiny, texts)
    print(_text(report.parts))


def _passes(
    report: Report,
    pair: Sequence[Any],
    executor: Callable[[Any], CudaGraphExecutor],
    copied: float,
    tiny: bool,
) -> None:
    """Passes of both models, beside their floors."""
    shapes = TINY_PASSES if tiny else PASSES
    for name, model in zip(("target", "draft"), pair, strict=True):
        report.add(f"passes {name}", lambda m=model: passes(executor(m), copied, shapes))
    report.add("vocabulary", lambda: vocabulary(pair[0].device))


def _whole(
    report: Report,
    pair: Sequence[Any],
    executor: Callable[[Any], CudaGraphExecutor],
    tokenizer: Any,
    tiny: bool,
    texts: bool,
) -> None:
    """Whole texts: short and long ones and a few by transformers, or long ones alone."""
    target, draft = pair
    drafter = ModelDrafter(Rows(executor(draft)), draft.config.vocab_size)
    model = forerun.Model(Rows(executor(target)), drafter, tokenizer)
    methods, batches, runs = TEXTS if texts else (METHODS, BATCHES, 1)
    if tiny:
        batches = TINY_BATCHES
    for rows in (model.target, drafter.rows):  # growing drops all graphs that were captured
        rows.executor.reserve(max(batches), 1)
    model.meter.warm()
    short = tasks_of(model, "test", 1, 6 if tiny else 64)
    long = [replace(t, max_new_tokens=128) for t in tasks_of(model, "test", 1, long=True)]
    work = {"long": short[:2] if tiny else long} if texts else {"short": short, "long": long}
    if tiny and not texts:
        work = {"short": short[:2]}
    for batch in batches:
        for kind, tasks in work.items():
            groups = _grouped(tasks, batch) * (1 if batch == 1 else runs)
            report.add(f"{kind} {batch}", lambda g=groups: generations(model, g, methods))
        if not texts:
            few = _grouped(short[:2], batch)
            report.add(f"transformers {batch}", lambda g=few: peers(model, target, draft, g))


def _grouped(work: Sequence[Task], batch: int) -> list[list[Task]]:
    """One at a time, or one batch of them all, again and again."""
    return [[task] for task in work] if batch == 1 else [(list(work) * batch)[:batch]]


def bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 22), device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(8):
        began = _now(device)
        target.copy_(source)
        taken.append(_now(device) - began)
    return 2 * source.nbytes / median(taken[2:])


def machine(device: torch.device, tiny: bool, compile: bool) -> dict[str, Any]:
    """What it was measured on."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "tiny": tiny,
        "compile": compile,
    }


@torch.inference_mode()
def passes(
    executor: CudaGraphExecutor, copied: float, shapes: Sequence[tuple[int, int, int]]
) -> dict[str, dict[str, float]]:
    """Median ms of a pass by `rows×tokens`, its best tokens on the host, and the floor of it.

    The floor is the time of copying the bytes of weights, keys and values that the pass reads.
    """
    facts, out = executor.facts, {}
    size = executor.model.dtype.itemsize
    for rows, width, context in shapes:
        arguments = [context] * rows, [[7] * width] * rows, [width] * rows, frozenset[str]()
        began = time.perf_counter()
        executor.best(*arguments)
        first, taken = time.perf_counter() - began, []
        for _ in range(REPEATS):
            began = time.perf_counter()
            executor.best(*arguments)
            taken.append((time.perf_counter() - began) * 1e3)
        floor = (facts.weights * size + rows * context * facts.token_bytes) / copied * 1e3
        out[f"{rows}×{width} after {context}"] = {
            "ms": median(taken), "floor": floor, "over": median(taken) / floor, "first s": first,
        }  # fmt: skip
    return out


@torch.inference_mode()
def vocabulary(device: torch.device) -> dict[str, float]:
    """MiB taken beside the logits for the best of 16 × 8 among 152,000 tokens, and all signals."""
    rows, width, size = (16, 8, 151_936) if device.type == "cuda" else (2, 2, 4096)
    logits = torch.randn(rows, width, size, device=device, dtype=torch.bfloat16)
    before = _reset(device)
    stacked_best(logits, frozenset({"entropy", "top1", "logit_margin"}))
    return {
        "peak MiB": (_peak(device) - before) / 2**20,
        "all as float32 MiB": 4 * logits.numel() / 2**20,
    }


def generations(
    model: forerun.Model, groups: Sequence[Sequence[Task]], methods: Sequence[str | None]
) -> dict[str, Any]:
    """Tokens/s of whole texts by method, in turns; the share of time outside passes; peak MiB."""

    def run(group: Sequence[Task], method: str | None) -> Run:
        how = [
            forerun.Sampling(
                max_new_tokens=task.max_new_tokens, repetition_penalty=task.repetition_penalty
            )
            for task in group
        ]
        began, before = time.perf_counter(), _in_passes(model)
        done = model.generate(
            [task.tokens for task in group],
            controller=method or "fixed(0)",
            plain=method is None,
            sampling=how,
            batch_size=len(group),
        )
        seconds = time.perf_counter() - began
        texts, rounds = [c.tokens for c in done], sum(len(c.rounds) for c in done)
        return Run(seconds, seconds - (_in_passes(model) - before), texts, rounds)

    before = _reset(model.target.device)
    out = _in_turns(groups, methods, run)
    peak = (_peak(model.target.device) - before) / 2**20
    return {**out, "peak MiB beyond weights and rows": peak}


def peers(
    model: forerun.Model, target: Any, draft: Any, groups: Sequence[Sequence[Task]]
) -> dict[str, Any]:
    """The same prompts by transformers' `generate`, plain and assisted, beside plain decoding."""

    def run(group: Sequence[Task], method: str | None) -> Run:
        limit = max(task.max_new_tokens for task in group)
        if method in METHODS:
            how = forerun.Sampling(max_new_tokens=limit)
            began = time.perf_counter()
            done = model.generate(
                [task.tokens for task in group],
                controller=method or "fixed(0)",
                plain=method is None,
                sampling=how,
                batch_size=len(group),
            )
            return Run(time.perf_counter() - began, 0.0, [c.tokens for c in done])
        return _by_transformers(target, draft, [task.tokens for task in group], limit, method)

    assisted = list(ASSISTED) if len(groups[0]) == 1 else []  # it takes one row alone
    return _in_turns(groups, [None, "auto", "transformers", *assisted], run, warm=8)


def _by_transformers(
    target: Any, draft: Any, prompts: Sequence[list[int]], limit: int, method: str | None
) -> Run:
    widest, device = max(map(len, prompts)), target.device
    ids = torch.tensor([[0] * (widest - len(p)) + list(p) for p in prompts], device=device)
    seen = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts], device=device)
    more: dict[str, Any] = {}
    if method in ASSISTED:
        for name, value in ASSISTED[method].items():
            setattr(draft.generation_config, name, value)
        more = {"assistant_model": draft}
    began = _now(device)
    with torch.inference_mode():
        out = target.generate(
            ids, attention_mask=seen, do_sample=False, max_new_tokens=limit, pad_token_id=0, **more
        )
    seconds, ends = _now(device) - began, _ends(target)
    return Run(seconds, 0.0, [_cut(text[widest:], ends) for text in out.tolist()])


def _ends(target: Any) -> frozenset[int]:
    ends = target.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [ends])


def _cut(text: list[int], ends: frozenset[int]) -> list[int]:
    """Up to its end-of-text token, which counts."""
    at = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
    return text[:at]


@dataclass(frozen=True)
class Run:
    """A timed generation."""

    seconds: float
    outside: float
    """Seconds outside passes."""
    texts: list[list[int]]
    rounds: int = 0
    """Of all texts, where they are known."""


def _in_turns(
    groups: Sequence[Sequence[Task]],
    methods: Sequence[str | None],
    run: Callable[[Sequence[Task], str | None], Run],
    warm: int | None = None,
) -> dict[str, Any]:
    """Every method on every group, the first method again in every other order; before that once,
    with `warm` tokens per text if that is less."""
    first = [replace(t, max_new_tokens=min(t.max_new_tokens, warm or 1 << 30)) for t in groups[0]]
    for method in methods:
        run(first, method)
    runs: dict[str | None, list[Run]] = {method: [] for method in methods}
    for i, group in enumerate(groups):
        for method in methods if i % 2 else methods[::-1]:
            runs[method].append(run(group, method))
    plain = runs[None]
    base = _rate(plain)
    out = {}
    for method, mine in runs.items():
        pairs = [
            x == y
            for a, b in zip(mine, plain, strict=True)
            for x, y in zip(a.texts, b.texts, strict=True)
        ]
        out[method or "plain"] = {
            "tokens/s": _rate(mine),
            "over plain": _rate(mine) / base,
            "outside passes": sum(r.outside for r in mine) / sum(r.seconds for r in mine),
            "identical": f"{sum(pairs)}/{len(pairs)}",
        }
        if rounds := sum(run.rounds for run in mine):
            out[method or "plain"]["tokens a round"] = (
                sum(len(text) for run in mine for text in run.texts) / rounds
            )
    return out


def _rate(runs: Sequence[Run]) -> float:
    """Tokens per second."""
    return sum(len(text) for run in runs for text in run.texts) / sum(run.seconds for run in runs)


class Call:
    """Stands in for a captured graph where there is none."""

    pool = None

    def __init__(self, step: Any, inputs: torch.Tensor, pool: Any) -> None:
        self._step = step

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run it again."""
        return self._step(inputs)


def _in_passes(model: forerun.Model) -> float:
    return model.target.seconds + model.drafter.rows.seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset(device: torch.device) -> int:
    """Forget the peak; bytes held now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _text(parts: dict[str, Any]) -> str:
    """One table: a line per part and what it holds."""
    lines = []
    for name, part in parts.items():
        if not isinstance(part, dict):
            lines.append([name, "", f"{part / 1e12:.2f} TB/s read and written"])
            continue
        for key, cell in part.items():
            if isinstance(cell, dict):
                cell = ", ".join(f"{what} {_number(value)}" for what, value in cell.items())
            lines.append([name, key, _number(cell)])
    return table(["part", "of", "measured"], lines)


def _short(value: Any) -> Any:
    """Numbers of four digits, inside whatever holds them."""
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    import typer

    def command(
        folder: Path,
        seconds: float = 200,
        compile: bool = False,
        tiny: bool = False,
        texts: bool = False,
    ) -> None:
        """As `python -m benchmarks.run gpu`, without what the other benchmarks need."""
        main(folder, seconds, compile, tiny, texts)

    typer.run(command)
