"""SpecBound on the shipped target: variants, decoding modes, latencies, counts, and peers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import forerun
from benchmarks.common import (
    RESULTS,
    Task,
    console,
    geometric,
    interleaved,
    provenance,
    save,
    show,
    table,
    tasks,
)
from benchmarks.speed_model import Shape, speedup
from forerun import zoo
from forerun.cli import main as cli
from forerun.drafters.datastore import Datastore
from forerun.runtime.exits import layers_of
from forerun.runtime.layers import LayerAccess

LAYERS = 12
"""Of the shipped target: as the depth, no bound."""
LONG = 64
"""No width bound: as many tokens as a text is long."""
PEER = 4
"""Layers and tokens of transformers' early exit."""
RELATIVES = {"AdaDecode": "adadecode", "Kangaroo": "kangaroo"}
"""Other papers' drafters of the target's own layers, as they are by default."""
OTHERS = {"Medusa, chain": "medusa", "Lookahead, chain": "lookahead", "lookup": "lookup"}
"""Drafters without a model that run none of its layers."""
REST = "REST"
"""Retrieval, from the shipped validation texts."""
LIGHT, RESTING = "SpecBound, light heads", "SpecBound under auto"
"""SpecBound's own lengths; and a controller over them, which rests where they do not pay."""
AGAIN = "plain decoding again"
"""How often a prompt is slower by chance."""
TURNS = 9
"""Runs of every prompt, whose medians say how often a prompt is slower than plainly."""
MODES: dict[str, dict[str, float]] = {
    "greedy": {},
    "T = 0.3": {"temperature": 0.3},
    "T = 1.0": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
BANDS = (0.98, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Of per-prompt speed-ups (the paper's Table 5)."""


def variants(tuned: dict[str, Any], lens: dict[str, Any]) -> dict[str, str]:
    """Specs by name: the full method, without one part each, and relatives."""

    def spec(**settings: Any) -> str:
        return "specbound(" + ",".join(f"{k}={v!r}" for k, v in settings.items()) + ")"

    bonus = tuned.get("bonus", True)
    return {
        LIGHT: spec(**tuned),
        "SpecBound, logit lens": spec(exits="", **lens),
        # The sweep may have switched annealing off already: then the ablation is to switch it on.
        **(
            {"without ACT": spec(**{**tuned, "anneal": 0.0})}
            if tuned["anneal"]
            else {"with ACT, a = 0.5": spec(**{**tuned, "anneal": 0.5})}
        ),
        "without depth bound": spec(**{**tuned, "depth": LAYERS}),
        "without width bound": spec(**{**tuned, "width": LONG}),
        f"with{'out' * bonus} bonus token": spec(**{**tuned, "bonus": not bonus}),
        **RELATIVES,
    }


@dataclass(frozen=True)
class Run:
    """One generation."""

    tokens: list[int]
    seconds: float
    completion: forerun.Completion | None = None
    calls: tuple[int, ...] = ()
    """Layers called, tokens × layers, projections, exit projections."""


def main(prompts: int, tokens: int, mode_prompts: int) -> None:
    """Measure and write `specbound.json`, its tables and plots."""
    plain = forerun.load(draft="none", dtype="float32", runtime="torch")
    tuned, lens, sampled = zoo_settings(), swept("lens"), swept("sampled")
    models = loaded({
        **variants(tuned, lens), RESTING: variants(tuned, lens)[LIGHT], **OTHERS,
    })  # fmt: skip
    models[REST] = retrieving(plain)
    work = tasks(plain, "test", prompts, tokens)
    methods = ["plain", *models, "transformers", "transformers early exit"]

    def one(task: Task, method: str, **sampling: float) -> Run:
        if method.startswith("transformers"):
            return peer(plain, task, PEER if "early" in method else None)
        how = "auto" if method == RESTING else None
        return ours(models.get(method, plain), task, how, **sampling)

    for method in methods:
        one(work[0], method)
    results: dict[str, Any] = {
        "settings": {"light": tuned, "lens": lens, "sampled": sampled}, "greedy": {}
    }  # fmt: skip
    runs = interleaved(work, methods, one, "greedy")
    by_method = {m: [r[i] for r in runs] for i, m in enumerate(methods)}
    for method in methods:
        base = "transformers" if method.startswith("transformers") else "plain"
        results["greedy"][method] = cells(
            work, by_method[base], by_method[method], by_method["plain"]
        )
    specs = variants(sampled, lens)
    models["sampled"] = forerun.load(draft=specs[LIGHT], runtime="torch", dtype="float32")
    results["latency"] = {m: latency(by_method[m]) for m in ("plain", LIGHT)}
    results["per prompt"] = repeated(work, ["plain", LIGHT, RESTING, AGAIN], one)
    results["agreement"] = agreement(models[LIGHT], work, by_method["plain"])
    results["counts"] = {m: counted(by_method[m], models[m]) for m in variants(tuned, lens)}
    results["modes"] = {}
    few = tasks(plain, "test", mode_prompts, tokens)
    for mode, how in MODES.items():
        pair = interleaved(
            few,
            ["plain", "sampled" if how else LIGHT],
            lambda t, m, how=how: one(t, m, **how),
            mode,
        )
        results["modes"][mode] = cells(few, [p[0] for p in pair], [p[1] for p in pair])
    made = provenance(plain, prompts=prompts, tokens=tokens, mode_prompts=mode_prompts)
    save("specbound", made, results, text(results, len(work), plain))
    plots(results)


def loaded(specs: dict[str, str]) -> dict[str, forerun.Model]:
    """The shipped target by name, with a drafter each."""
    return {
        name: forerun.load(draft=spec, runtime="torch", dtype="float32")
        for name, spec in specs.items()
    }


def retrieving(model: forerun.Model) -> forerun.Model:
    """The shipped target with `rest` over the shipped validation prompts and their answers."""
    texts = [
        model.encode(p.prompt + p.answer)
        for family in (*zoo.families(), *zoo.long_families())
        for p in zoo.prompts(family, "val")
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "texts"
        Datastore.build(texts).save(path)
        return loaded({REST: f"rest({str(path)!r})"})[REST]


@torch.inference_mode()
def agreement(model: forerun.Model, work: Sequence[Task], runs: list[Run]) -> dict[str, Any]:
    """Per depth and family: how often the exit head there says what the last layer does, on what
    plain decoding wrote."""
    access, heads = layers_of(model.target).access, model.drafter.heads  # type: ignore[attr-defined]
    hits: dict[int, dict[str, list[torch.Tensor]]] = {LAYERS // 4: {}, LAYERS // 2: {}}
    for task, run in zip(work, runs, strict=True):
        hidden, at = access.open(torch.tensor([[*task.tokens, *run.tokens]]))
        before, predicted = 0, {}
        for depth in (*hits, LAYERS):
            hidden, before = access.run(hidden, before, depth, at), depth
            states = hidden[0, len(task.tokens) - 1 : -1]
            last = depth == LAYERS
            best = (access.logits(states) if last else heads.logits(depth, states)).argmax(-1)
            predicted[depth] = best if last or heads.tokens is None else heads.tokens[best]
        for depth, families in hits.items():
            right = (predicted[depth] == predicted[LAYERS]).float()
            families.setdefault(task.family, []).append(right)
    out: dict[str, Any] = {}
    for depth, families in hits.items():
        shares = {family: float(torch.cat(agreed).mean()) for family, agreed in families.items()}
        out[str(depth)] = shares | {"all": float(np.mean(list(shares.values())))}
    return out


def repeated(
    work: Sequence[Task], methods: Sequence[str], one: Callable[[Task, str], Run]
) -> dict[str, list[float]]:
    """Per method but the first, each prompt's median speed-up over the first, of `TURNS` turns."""
    turns = [interleaved(work, methods, one, "every prompt again") for _ in range(TURNS)]
    ratios = [[[r[0].seconds / own.seconds for own in r[1:]] for r in runs] for runs in turns]
    middle = np.median(ratios, axis=0)
    return {method: middle[:, i].tolist() for i, method in enumerate(methods[1:])}


def relatives(prompts: int, tokens: int, full: Path | None) -> None:
    """SpecBound's relatives beside it, greedy and short; writes `specbound-relatives.json`.

    ``full``: full heads, swept (`train-draft exits --head full`,
    `sweep specbound --exits … --keep`).
    """
    plain = forerun.load(draft="none", dtype="float32", runtime="torch")
    specs = {LIGHT: "specbound"}
    if full is not None:
        specs["SpecBound, full heads"] = f"specbound(exits={str(full)!r})"
    models = loaded(specs | RELATIVES | OTHERS)
    models[REST] = retrieving(plain)
    work, methods = tasks(plain, "test", prompts, tokens), ["plain", *models]

    def one(task: Task, method: str) -> Run:
        return ours(models.get(method, plain), task)

    for method in methods:
        one(work[0], method)
    runs = interleaved(work, methods, one, "greedy")
    by_method = {m: [r[i] for r in runs] for i, m in enumerate(methods)}
    greedy = {m: cells(work, by_method["plain"], by_method[m], by_method["plain"]) for m in methods}
    layered = [m for m in models if m not in (*OTHERS, REST)]
    counts = {m: counted(by_method[m], models[m]) for m in layered}
    text = "\n\n".join(
        [
            f"Batch 1, {len(work)} test prompts, greedy, every drafter with its own defaults. "
            "Speed-up over plain decoding through the same engine, tokens per second, prefill "
            "included; geometric mean over prompts, 95 % bootstrap interval.",
            *comparison(greedy, len(work)),
            "Per token, plain decoding calls 12 layers and projects once. Predicted: the speed-up "
            "if reading weights were all that costs (Kangaroo's adapter left out), on this target "
            "and with the same counts at the same share of a 7B model's layers.",
            count_table(counts, greedy),
        ]
    )
    made = provenance(plain, prompts=prompts, tokens=tokens)
    save("specbound-relatives", made, {"greedy": greedy, "counts": counts}, text)


def comparison(greedy: dict[str, Any], work: int) -> list[str]:
    """Speed-ups, compression rates and sameness of methods over `work` prompts."""
    families, names = (*zoo.families(), "all"), list(greedy)
    return [
        table(["greedy", *families],
              [[n, *[show(greedy[n][f]) for f in families]] for n in names if n != "plain"]),
        "Compression rate (tokens committed per round):",
        table(["greedy", *families],
              [[n, *[f"{greedy[n][f]['compression']:.2f}" for f in families]]
               for n in names if "compression" in greedy[n]["all"]]),
        "Outputs identical to plain decoding: "
        + ", ".join(f"{n} {greedy[n]['all']['identical']}/{work}"
                    for n in names if n != "plain") + ".",
    ]  # fmt: skip


def count_table(counts: dict[str, Any], greedy: dict[str, Any]) -> str:
    """Of `counted`, beside what was measured."""
    return table(["", *next(iter(counts.values())), "measured"],
                 [[n, *[f"{v:.2f}" for v in row.values()], f"{greedy[n]['all']['mean']:.2f}"]
                  for n, row in counts.items()])  # fmt: skip


SEARCHES: tuple[tuple[str, list[str]], ...] = (
    ("light", []), ("lens", ["--exits", ""]), ("sampled", ["--temperature", "1"])
)  # fmt: skip


def sweep(limit: int, budget: int) -> None:
    """`forerun sweep specbound` on validation text, with light heads and with the logit lens."""
    results: dict[str, Any] = {}
    for name, exits in SEARCHES:
        with redirect_stdout(StringIO()) as out:
            argv = ["sweep", "specbound", *exits, "--limit", str(limit), "--budget", str(budget)]
            if cli([*argv, "--dtype", "float32", "--json"]):
                raise SystemExit(1)
        results[name] = json.loads(out.getvalue())
        about = results[name]["about"]
        results[name]["settings"] = about.pop("settings")
        about.pop("exits")
    names = {"light": "light heads", "lens": "logit lens", "sampled": "light heads, T = 1"}
    best = [
        [names[n], f"`{d['settings']}`", f"{d['about']['predicted']:.2f}",
         show(d["confirmed"][0]["speedup"]), f"{d['confirmed'][0]['tokens_per_round']:.2f}",
         *[f"{share:.0%}" for share in d["time"].values()]]
        for n, d in results.items()
    ]  # fmt: skip
    text = (
        f"`forerun sweep specbound` on {results['light']['about']['prompts_used']} validation "
        "prompts: settings found by exact replay of counts, speed-up predicted from the cost of "
        "each piece and confirmed live; where the time goes.\n\n"
        + table(
            ["", "best", "predicted", "live", "tokens per round", *results["light"]["time"]], best
        )
        + "\n\nSensitivity around the best (predicted): ![](specbound-sensitivity.png)"
    )
    save("specbound-sweep", provenance(forerun.load(), limit=limit, budget=budget), results, text)
    sensitivity(results["light"])


def sensitivity(result: dict[str, Any]) -> None:
    """The paper's Figure 3, of predicted speed-ups."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 3), sharey=True, layout="constrained")
    labels = ("threshold τ", "anneal a", "depth D", "width W")
    for axis, name, label in zip(axes, ("threshold", "anneal", "depth", "width"), labels,
                                 strict=True):  # fmt: skip
        values, scores = zip(*result["sensitivity"][name], strict=True)
        axis.plot(values, scores, marker="o", markersize=3)
        axis.axvline(result["settings"][name], color="grey", linewidth=1, linestyle=":")
        axis.axhline(1.0, color="black", linewidth=1, linestyle="--")
        axis.set(xlabel=label)
    axes[0].set_ylabel("predicted speed-up")
    figure.suptitle("SpecBound with light heads, validation text: one setting at a time")
    figure.savefig(RESULTS / "specbound-sensitivity.png", dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def zoo_settings() -> dict[str, Any]:
    """The shipped values."""
    document = json.loads((zoo.EXITS / "draft.json").read_text())
    return dict(document["settings"])


def swept(name: str) -> dict[str, Any]:
    """The best that `specbound-sweep` found on validation text."""
    path = RESULTS / "specbound-sweep.json"
    return dict(json.loads(path.read_text())["results"][name]["settings"])


def ours(model: forerun.Model, task: Task, controller: str | None = None, **sampling: float) -> Run:
    """Through the engine; without a controller the length is left to SpecBound, by `fixed(64)`."""
    work = getattr(model.target.executor, "work", None)
    before = _work(work)
    began = time.perf_counter()
    (done,) = model.generate(
        [task.tokens],
        controller=controller or f"fixed({LONG})",
        max_new_tokens=task.max_new_tokens,
        repetition_penalty=task.repetition_penalty,
        seed=len(task.tokens),
        **sampling,
    )
    seconds = time.perf_counter() - began
    calls = tuple(b - a for a, b in zip(before, _work(work), strict=True))
    return Run(done.tokens, seconds, done, calls)


def _work(work: Any) -> tuple[int, ...]:
    if work is None:
        return ()
    layers = ("draft", "verify")
    return work.calls(*layers), work.passes(*layers), work.passes("project"), work.passes("exit")


def peer(model: forerun.Model, task: Task, layer: int | None) -> Run:
    """`generate` of transformers, plainly or with the first layers as its assistant."""
    hf: Any = model.target.executor.module()
    hf.generation_config.num_assistant_tokens = PEER
    hf.generation_config.num_assistant_tokens_schedule = "constant"
    ids = torch.tensor([task.tokens], device=model.target.device)
    began = time.perf_counter()
    with torch.inference_mode():
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=task.max_new_tokens,
            do_sample=False,
            repetition_penalty=task.repetition_penalty,
            pad_token_id=0,
            **({} if layer is None else {"assistant_early_exit": layer}),
        )
    return Run(out[0, ids.shape[1] :].tolist(), time.perf_counter() - began)


def cells(
    work: Sequence[Task], base: list[Run], runs: list[Run], plain: list[Run] | None = None
) -> dict[str, Any]:
    """Per family and over all: speed-up in tokens per second, compression rate, sameness."""
    out: dict[str, Any] = {}
    for family in (*zoo.families(), "all"):
        at = [i for i, t in enumerate(work) if family in (t.family, "all")]
        rate = [
            (len(runs[i].tokens) / runs[i].seconds) / (len(base[i].tokens) / base[i].seconds)
            for i in at
        ]
        done = [runs[i].completion for i in at]
        out[family] = geometric(rate)
        if all(done):
            stats = [c.stats for c in done if c]
            out[family] |= {
                "compression": sum(s.tokens for s in stats) / sum(s.rounds for s in stats),
                "acceptance": sum(s.accepted for s in stats) / max(1, sum(
                    min(r.accepted + 1, r.drafted) for c in done if c for r in c.rounds
                )),
                "drafted": sum(s.drafted for s in stats) / sum(s.rounds for s in stats),
            }  # fmt: skip
        if plain is not None:
            out[family]["identical"] = sum(runs[i].tokens == plain[i].tokens for i in at)
    return out


def latency(runs: list[Run]) -> dict[str, float]:
    """The paper's Table 3: medians over prompts."""
    stats = [r.completion.stats for r in runs if r.completion]
    return {
        "time to first token, ms": float(np.median([s.first_token_seconds for s in stats]) * 1e3),
        "per token after it, ms": float(np.median(
            [(s.seconds - s.first_token_seconds) / max(s.tokens - 1, 1) for s in stats]) * 1e3),
        "tokens per second": float(
            sum(s.tokens for s in stats) / sum(s.seconds for s in stats)),
        "end to end, ms": float(np.median([s.seconds for s in stats]) * 1e3),
    }  # fmt: skip


SEVEN_B = Shape.of(32, 4096, 11008, 32000)
"""Llama 2 7B."""


def counted(runs: list[Run], model: forerun.Model) -> dict[str, float]:
    """Layers and projections per token; the speed-up where reading weights is all that costs.

    For 7B, each exit stands at the same share of the layers and takes the same tokens: what the
    shipped target's counts would give where a projection is a smaller part.
    """
    access: LayerAccess = layers_of(model.target).access
    heads: Any = model.drafter.heads  # type: ignore[attr-defined]
    config = model.target.executor.module().config
    stats = [r.completion.stats for r in runs if r.completion]
    size, rounds = sum(s.tokens for s in stats), sum(s.rounds for s in stats)
    calls, passes, projections, exits = (sum(r.calls[i] for r in runs) for i in range(4))
    vocab, layers = len(access.unembedding), access.layers
    share = (vocab if heads.tokens is None else len(heads.tokens)) / vocab
    out = {
        "layer calls": calls / size, "layer passes": passes / size,
        "projections": projections / size, "exit projections": exits / size,
    }  # fmt: skip
    own = Shape.of(layers, config.hidden_size, config.intermediate_size, vocab)
    for name, shape in (("weights alone", own), ("7B", SEVEN_B)):
        grown = shape.layers / layers
        cheap = Shape(shape.layers, shape.projection, shape.projection * share)
        out[name] = (
            size
            * shape.plain()
            / cheap.layers_of(calls * grown, passes * grown, rounds, projections, exits)
        )
    return out


def text(results: dict[str, Any], work: int, plain: forerun.Model) -> str:
    """Tables."""
    families = (*zoo.families(), "all")
    greedy = results["greedy"]
    layers = LayerAccess(plain.target.executor.module()).layers
    tuned = results["settings"]["light"]
    depth = tuned["depth"]
    whole = greedy[LIGHT]["all"]
    wide = max(1, round(whole["drafted"]))
    model = speedup(min(whole["acceptance"], 1.0), wide, depth, layers)
    seen = {name: np.array(ratios) for name, ratios in results["per prompt"].items()}
    edges = (0.0, *BANDS, np.inf)
    shares = [np.histogram(ratios, edges)[0] / len(ratios) for ratios in seen.values()]
    bands = [
        [f"{low:g} to {high:g}" if high < np.inf else f"above {low:g}", *map("{:.0%}".format, row)]
        for low, high, row in zip(edges, edges[1:], zip(*shares, strict=True), strict=False)
    ]
    lowest = [["lowest", *(f"{ratios.min():.2f}" for ratios in seen.values())],
              ["median", *(f"{np.median(ratios):.2f}" for ratios in seen.values())]]  # fmt: skip
    counts = results["counts"]
    return "\n\n".join(
        [
            f"Batch 1, {work} test prompts, light heads `{tuned}`, logit lens "
            f"`{results['settings']['lens']}`. Speed-up over plain decoding through the same "
            "engine (transformers' early exit: over transformers), tokens per second, prefill "
            "included; geometric mean over prompts, 95 % bootstrap interval.",
            *comparison(greedy, work),
            "With light heads, by decoding mode; sampled ones with "
            f"`{results['settings']['sampled']}`:",
            table(["mode", *families, "compression"],
                  [[m, *[show(c[f]) for f in families], f"{c['all']['compression']:.2f}"]
                   for m, c in results["modes"].items()]),
            "Latency, medians over prompts:",
            table(["", *results["latency"]["plain"]],
                  [[n, *[f"{v:.1f}" for v in row.values()]]
                   for n, row in results["latency"].items()]),
            f"Speed-up per prompt, greedy, each the median of {TURNS} runs: share of the prompts",
            table(["speed-up", *seen], bands + lowest),
            "How often light heads say what the last layer does (all: mean of the families):",
            table(["after layers", *families],
                  [[depth, *[f"{row[f]:.1%}" for f in families]]
                   for depth, row in results["agreement"].items()]),
            f"Per token, plain decoding calls {layers} layers and projects once. Predicted: the "
            "speed-up if reading weights were all that costs, on this target and with the same "
            "counts at the same share of a 7B model's layers. Measured: as above.",
            count_table(counts, greedy),
            f"The paper's model (eq. 5) at the measured acceptance {whole['acceptance']:.2f}, "
            f"{wide} drafted a round (mean {whole['drafted']:.2f}) and D = {depth}: "
            f"**{model:.2f}**; measured **{whole['mean']:.2f}**. It knows no projections, no "
            "difficult tokens and no cost of width.",
        ]
    )  # fmt: skip


def plots(results: dict[str, Any]) -> None:
    """Per-prompt distribution, as PNG."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    seen = {name: ratios for name, ratios in results["per prompt"].items() if name != AGAIN}
    bins = np.arange(0.7, max(map(max, seen.values())) + 0.1, 0.05)
    axes.hist(list(seen.values()), bins, label=list(seen), color=["#4c72b0", "#dd8452"])
    axes.legend()
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set(xlabel="speed-up over plain decoding", ylabel="prompts",
             title="SpecBound, greedy: every test prompt")  # fmt: skip
    figure.savefig(RESULTS / "specbound-prompts.png", dpi=120)
    pyplot.close(figure)
    console.print(f"[dim]wrote {RESULTS / 'specbound-prompts.png'}")
