"""`python -m benchmarks.run all`, or one measurement by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import forerun
from benchmarks import (
    attached,
    auto_replay,
    cmasd,
    cmasd_batches,
    drafters,
    ears,
    easd,
    easd_baselines,
    fairness,
    gpu,
    grown_trees,
    gumbel,
    headlines,
    leaves,
    leniency,
    live,
    overhead,
    plain,
    readings,
    real_tasks,
    rsd,
    rule_costs,
    rules,
    runtimes,
    serve_load,
    shapes,
    shares,
    specbound,
    specbound_real,
    speedup,
    starting_lengths,
    starts,
    sweep,
    translator,
    trees,
)
from forerun import zoo

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Runtime = Annotated[str, typer.Option(help="torch or openvino; auto: openvino if installed")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Processor time in place of clock.")]
Long = Annotated[bool, typer.Option("--long", help="the families with long outputs instead")]


@app.command("speedup")
def _speedup(
    prompts: int = 10,
    tokens: int = 64,
    temperature: float = 0.0,
    long: Long = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
):
    """Speed-up over plain decoding per task family and controller (test prompts)."""
    speedup.main(forerun.load(dtype=dtype, device=device), prompts, tokens, temperature, long)


@app.command("gumbel")
def _gumbel(prompts: int = 10, tokens: int = 64):
    """Sampled text by common noise and by coins."""
    gumbel.main(forerun.load(dtype="float32"), prompts, tokens)


@app.command("leaves")
def _leaves(
    prompts: int = 10, tokens: int = 64, temperature: float = 0.0, runtime: Runtime = "auto"
):
    """Second choices in the target's pass: tokens a round and time, with and without."""
    leaves.main(forerun.load(dtype="float32", runtime=runtime), prompts, tokens, temperature)


@app.command("leaves-replay")
def _leaves_replay(prompts: int = 20, tokens: int = 64):
    """The same by replay, at the costs of both executors, also with a poor draft."""
    leaves.replayed(prompts, tokens)


@app.command("trees")
def _trees(prompts: int = 2, tokens: int = 48, target: str | None = None):
    """What trees of 8 to 32 nodes would bring over leaves, by replay: shipped target, or a GGUF
    file's."""
    trees.main(prompts, tokens, target)


@app.command("trees-live")
def _trees_live(prompts: int = 2, tokens: int = 48, target: str | None = None):
    """Tokens a round with trees of 8 to 32 nodes, counted in the engine: shipped target, or a GGUF
    file's."""
    trees.live(prompts, tokens, target)


@app.command("grown-trees")
def _grown_trees(target: str, prompts: int = 3, tokens: int = 64):
    """What trees grown by the head's own probabilities would bring over chains, for a GGUF file."""
    grown_trees.main(target, prompts, tokens)


@app.command("drafters")
def _drafters(
    prompts: int = 2,
    tokens: int = 48,
    target: str | None = None,
    eagle3: str | None = None,
    kangaroo: str | None = None,
    medusa: str | None = None,
    timed: bool = False,
    cpu: Cpu = False,
):
    """Everybody who drafts for the shipped target, the translator, or a real one (a GGUF file), by
    replay; `--timed`: live, against plain decoding. `--eagle3`, `--kangaroo` and `--medusa` name
    folders of drafts that are trained for it."""
    trained = {"eagle3": eagle3, "kangaroo": kangaroo, "medusa": medusa}
    own = {kind: folder for kind, folder in trained.items() if folder}
    drafters.main(prompts, tokens, target, own, timed, cpu)


@app.command("engines-replay")
def _engines(prompts: int = 2, tokens: int = 48):
    """`auto` beside the rules of exllamav3, SGLang, vLLM and transformers, by replay."""
    drafters.engines(prompts, tokens)


@app.command("starting-lengths")
def _starting(
    prompts: int = 3,
    tokens: int = 64,
    long: Long = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
):
    """The GammaTune experiment: twelve starting lengths, throughput relative to fixed."""
    starting_lengths.main(forerun.load(dtype=dtype, device=device), prompts, tokens, long)


@app.command("starting-lengths-replay")
def _starting_replay(prompts: int = 6, tokens: int = 96, cost: float = 6, dtype: Dtype = "float32"):
    """The same by replay, also with windows that persist from request to request."""
    starting_lengths.replayed(forerun.load(dtype=dtype), prompts, tokens, cost)


@app.command("starting-lengths-pairs")
def _starting_pairs(folders: list[Path], prompts: int = 6, tokens: int = 96):
    """The replay on the shipped pair and on others: folders with target/ and draft/."""
    starting_lengths.pairs(folders, prompts, tokens)


@app.command("starting-lengths-real")
def _starting_real(model: str, trace: Path, per_kind: int = 3, tokens: int = 48):
    """The replay on a GGUF file's model with its default draft; its texts are kept in a trace."""
    starting_lengths.of_file(model, trace, per_kind, tokens)


@app.command("starts")
def _starts(models: list[Path], turns: int = 3, threads: int = 1):
    """What a first and a second start of GGUF files cost, beside GenAI and llama.cpp."""
    starts.main(models, turns, threads)


@app.command("plain")
def _plain(prompts: int = 6, tokens: int = 64, dtype: Dtype = "float32", device: Device = "cpu"):
    """Plain decoding through the engine against transformers' own `generate`."""
    plain.main(forerun.load(dtype=dtype, device=device, runtime="torch"), prompts, tokens)


@app.command("attached")
def _attached(
    prompts: int = 2, tokens: int = 32, batch: str = "1,16", threads: int = 1, cpu: Cpu = False
):
    """transformers' generate with `attach`, beside itself, assisted, and the engine alone."""
    attached.main(prompts, tokens, [int(size) for size in batch.split(",")], threads, cpu)


@app.command("runtimes")
def _runtimes(prompts: int = 2, tokens: int = 32, batch: str = "1,16", threads: int = 1):
    """Whole generations of the shipped pair on torch and OpenVINO."""
    runtimes.main(prompts, tokens, [int(size) for size in batch.split(",")], threads)


@app.command("shapes")
def _shapes(
    sizes: str = "0.1B,0.5B,1.5B",
    precisions: str = "fp32,bf16,int8",
    threads: int = 2,
    trace: Path | None = None,
):
    """Passes of random models of real shapes, and a trace replayed at these costs."""
    shapes.main(sizes.split(","), precisions.split(","), threads, trace)


@app.command("gpu")
def _gpu(
    folder: Path,
    seconds: float = 200,
    compile: bool = False,
    tiny: bool = False,
    texts: bool = False,
):
    """The shipped pair enlarged to 14 and 0.6 billion weights on one GPU, beside its floors and
    transformers; texts: 128 tokens by plain decoding, fixed(4) and auto at 1, 4, 8, 16 rows alone;
    tiny: as it is on the CPU, to see that it all runs."""
    gpu.main(folder, seconds, compile, tiny, texts)


@app.command("overhead")
def _overhead(
    prompts: int = 6,
    tokens: int = 64,
    of_rules: Annotated[bool, typer.Option("--rules", help="of acceptance rules")] = False,
    target: Annotated[
        str, typer.Option(help="With --rules: translator or digest, drafted for in blocks.")
    ] = "",
    runtime: Runtime = "auto",
    dtype: Dtype = "float32",
    device: Device = "cpu",
):
    """Share of a round spent outside model forwards, and the cost of one forward by width; with
    --rules what lossy rules cost where they change nothing."""
    draft = "block" if target else None
    model = forerun.load(target or None, draft, dtype=dtype, device=device, runtime=runtime)
    if of_rules:
        rule_costs.main(model, prompts, tokens, target)
    else:
        overhead.main(model, prompts, tokens)


@app.command("live")
def _live(
    prompts: int = 8,
    tokens: int = 64,
    long: Long = False,
    runtime: Runtime = "auto",
    dtype: Dtype = "float32",
    device: Device = "cpu",
):
    """Live speed-ups beside replay's predictions, ten controllers (test prompts)."""
    model = forerun.load(dtype=dtype, device=device, runtime=runtime)
    live.predicted(model, prompts, tokens, long)


@app.command("auto-replay")
def _auto_replay(traces: list[Path], bounds: bool = False):
    """`auto` by replay of traces of `forerun record`, and three streams that it must not make
    slower under made-up clocks; `--bounds`: its share of the informed bound, which takes longer."""
    auto_replay.main(traces, bounds)


@app.command("never-slower")
def _never_slower(prompts: int = 6, tokens: int = 64):
    """The default controller on pairs made bad on purpose, live, against plain decoding."""
    live.hopeless(prompts, tokens)


@app.command("shares")
def _shares(val: Path, test: Path, costs: Path, name: str = "greedy", budget: int = 60):
    """Share of the bounds of every controller, by replay (traces of `forerun record`)."""
    shares.main(val, test, costs, budget, name)


@app.command("regret")
def _regret(test: Path, costs: Path, name: str = "greedy"):
    """Time lost against the bounds as texts grow, by replay of a trace."""
    shares.regrets(test, costs, name)


@app.command("specbound")
def _specbound(prompts: int = 12, tokens: int = 64, mode_prompts: int = 8):
    """SpecBound on the shipped target: variants, modes, latencies, counts, peers (test prompts)."""
    specbound.main(prompts, tokens, mode_prompts)


@app.command("specbound-real")
def _specbound_real(target: str, per_kind: int = 3, tokens: int = 48, exits: Path | None = None):
    """SpecBound on a real model by exact replay: annealing, and heads of a small vocabulary.

    `--exits` names a folder of trained heads; if it holds none, they are trained there.
    """
    specbound_real.main(target, per_kind, tokens, exits)


@app.command("specbound-relatives")
def _specbound_relatives(prompts: int = 5, tokens: int = 64, full: Path | None = None):
    """Other drafters beside SpecBound: AdaDecode, Kangaroo, Medusa, Lookahead, lookup.

    `--full` names a folder of full exit heads that `forerun sweep specbound --keep` was run on.
    """
    specbound.relatives(prompts, tokens, full)


@app.command("specbound-sweep")
def _specbound_sweep(limit: int = 6, budget: int = 400):
    """SpecBound's settings on validation prompts (`forerun sweep specbound`), and their curves."""
    specbound.sweep(limit, budget)


@app.command("sweep")
def _sweep(prompts: int = 16, tokens: int = 96, dtype: Dtype = "float32", device: Device = "cpu"):
    """Choose GammaTune's defaults on validation prompts (replayed, so free of noise)."""
    sweep.main(forerun.load(dtype=dtype, device=device), prompts, tokens)


@app.command("readings")
def _readings(prompts: int = 4, tokens: int = 48, dtype: Dtype = "float32"):
    """Readings of EARS, EASD and CM-ASD on the same positions."""
    readings.main(forerun.load(dtype=dtype, runtime="torch"), prompts, tokens)


@app.command("rules")
def _rules(
    prompts: int = 4,
    tokens: int = 64,
    problems: int = 250,
    dtype: Dtype = "float32",
    device: Device = "cpu",
):
    """Every acceptance rule side by side: speed, drift, accuracy; greedy and sampled."""
    rules.main(forerun.load(dtype=dtype, device=device), prompts, tokens, problems)


@app.command("priced")
def _priced(
    prompts: int = 6,
    replayed: int = 60,
    tokens: int = 64,
    seeds: int = 3,
    batch: int = 1,
    cpu: Cpu = False,
):
    """`priced` beside `ears` at equal drift and `gumbel`: by replay, and live with seeds."""
    leniency.main(forerun.load(), prompts, replayed, tokens, seeds, batch, cpu)


@app.command("rules-replay")
def _rules_replay(prompts: int = 20, tokens: int = 32, seeds: int = 6):
    """Tokens a round live and by replay: six rules at three lengths; goes on if interrupted."""
    leniency.compared(forerun.load(), prompts, tokens, seeds)


@app.command("rules-real")
def _rules_real(
    model: str,
    trace: Path,
    temperature: float = 1.0,
    per_kind: int = 3,
    tokens: int = 48,
    live: Annotated[str, typer.Option(help="A draft with a distribution, to run live with.")] = "",
):
    """Lenient rules on a GGUF file's model: by replay of a trace, which is kept, and live."""
    leniency.of_file(model, trace, temperature, per_kind, tokens, live)


@app.command("cm-asd")
def _cmasd(
    least: int = 3,
    tokens: int = 32,
    batches: str = "1,2,4,8,16",
    dtype: Dtype = "float32",
    device: Device = "cpu",
):
    """CM-ASD's ablation (Table III) in kind: speed at batch 1 and others (Fig. 2), drift."""
    sizes = [int(size) for size in batches.split(",")]
    cmasd.main(forerun.load(dtype=dtype, device=device, runtime="torch"), least, tokens, sizes)


@app.command("cm-asd-batches")
def _cmasd_batches(
    count: int = 128,
    batches: str = "1,2,4,8,16,32",
    cpu: Cpu = False,
):
    """CM-ASD's Figure 2: latency against throughput of the translator over batch sizes."""
    cmasd_batches.main(count, [int(size) for size in batches.split(",")], cpu)


@app.command("cm-asd-captions")
def _cmasd_captions(target: str, draft: str, data: Path, count: int = 20, tokens: int = 48):
    """CM-ASD with a real model as a translator of captions; goes on where it was interrupted."""
    real_tasks.captions(target, draft, data, count, tokens)


@app.command("cm-asd-quality")
def _cmasd_quality(
    prompts: int = 150, tokens: int = 64, dtype: Dtype = "float32", device: Device = "cpu"
):
    """CM-ASD's ablation: quality per family."""
    cmasd.scores(forerun.load(dtype=dtype, device=device), tokens, prompts)


@app.command("cm-asd-modes")
def _modes(prompts: int = 100, tokens: int = 64, dtype: Dtype = "float32", device: Device = "cpu"):
    """CM-ASD's two readings and constant margins, on validation prompts."""
    cmasd.modes(forerun.load(dtype=dtype, device=device), prompts, tokens)


@app.command("easd")
def _easd(calibrated: float, problems: int = 500, dtype: Dtype = "float32", device: Device = "cpu"):
    """EASD: accuracy against target, draft, SD and majority voting; ablations; thresholds."""
    easd.main(forerun.load(dtype=dtype, device=device), problems, calibrated)


@app.command("easd-baselines")
def _easd_baselines(calibrated: float, problems: int = 200):
    """EASD beside its paper's baselines, RSD and beams included: accuracy, tokens, words."""
    easd_baselines.main(forerun.load(), problems, calibrated)


@app.command("rsd-scorer")
def _rsd_scorer(problems: int = 400):
    """Train RSD's reward on steps of both models; the other commands load it."""
    rsd.train(problems)


@app.command("easd-bonus")
def _easd_bonus(
    calibrated: float, problems: int = 100, dtype: Dtype = "float32", device: Device = "cpu"
):
    """What follows a draft that is kept whole, and whether the output depends on γ."""
    easd.bonus(forerun.load(dtype=dtype, device=device), problems, calibrated)


@app.command("easd-gsm8k")
def _easd_gsm8k(
    target: str, draft: str, data: Path, count: int = 20, tokens: int = 256, calibrated: int = 12
):
    """EASD with a real model on GSM8K; goes on where it was interrupted."""
    real_tasks.gsm8k(target, draft, data, count, tokens, calibrated)


@app.command("easd-speed")
def _easd_speed(
    calibrated: float, problems: int = 40, dtype: Dtype = "float32", device: Device = "cpu"
):
    """EASD: speed relative to standard speculative decoding."""
    easd.speed(forerun.load(dtype=dtype, device=device), problems, calibrated)


@app.command("easd-corrections")
def _easd_corrections(
    calibrated: float, problems: int = 500, dtype: Dtype = "float32", device: Device = "cpu"
):
    """EASD when sampling: a correction from the target against one from the residual."""
    easd.corrections(forerun.load(dtype=dtype, device=device), problems, calibrated)


@app.command("ears")
def _ears(prompts: int = 3, tokens: int = 64, dtype: Dtype = "float32", device: Device = "cpu"):
    """EARS over tolerance and temperature: speed and drift."""
    ears.main(forerun.load(dtype=dtype, device=device), prompts, tokens)


@app.command("ears-pairs")
def _ears_pairs(problems: int = 2000):
    """EARS at the paper's settings against β = 0: accuracy on many paired problems."""
    ears.pairs(forerun.load(), problems)


@app.command("ears-throughput")
def _ears_throughput(groups: int = 3, tokens: int = 64):
    """EARS at the paper's settings: output and total tokens per second, latency of a request."""
    ears.throughput(forerun.load(), groups, tokens)


@app.command("ears-accuracy")
def _ears_accuracy(problems: int = 250, dtype: Dtype = "float32", device: Device = "cpu"):
    """EARS over tolerance and temperature: accuracy and drift."""
    ears.accuracy(forerun.load(dtype=dtype, device=device), problems)


Data = Annotated[
    Path | None, typer.Option(help="Folder with tatoeba/ and multi30k/, for the translator.")
]
Of = Annotated[str, typer.Option(help="translator or digest.")]
Sets = Annotated[
    str,
    typer.Option(help="Test sets; default: all of the target's, of sentences, texts, multi30k."),
]
Add = Annotated[bool, typer.Option("--add", help="Keep what else is in the results.")]


@app.command("translator")
def _translator(
    data: Data = None,
    target: Of = "translator",
    sets: Sets = "",
    batches: str = "1,16",
    prompts: int = 5,
    seeds: str = "0,1,2",
    add: Add = False,
):
    """Speed of the translator or the digest: beams, greedy, SpecDec, CM-ASD, ablations, `auto`.

    Of every seed `prompts` sources one by one, and a batch of each other size.
    """
    sizes = [int(size) for size in batches.split(",")]
    drawn = [int(seed) for seed in seeds.split(",")]
    chosen = sets.split(",") if sets else translator.OF[target]
    translator.speed(data, target, chosen, sizes, prompts, drawn, add)


@app.command("translator-quality")
def _translator_quality(
    data: Data = None,
    target: Of = "translator",
    sets: Sets = "",
    prompts: int = 1000,
    add: Add = False,
):
    """The same methods: SacreBLEU or ROUGE, relative BLEU, drift."""
    chosen = sets.split(",") if sets else translator.OF[target]
    translator.quality(data, target, chosen, prompts, add)


@app.command("serve-load")
def _serve_load(
    part: list[str] = ["curve", "beside", "prefix", "overload", "soak"],  # noqa: B006
    prompts: int = 4,
    tokens: int = 48,
    seconds: float = 10.0,
    turns: int = 3,
    clients: list[int] = [1, 4, 16, 64],  # noqa: B006
    soak_seconds: float = 600.0,
    vllm: Path | None = None,
):
    """`forerun serve` under load: a curve over clients, ten times too much, 10,000 requests.

    `--vllm` names the program of an environment with vLLM, for the part `beside`.
    """
    lengths = serve_load.Lengths(seconds, turns, soak_seconds)
    serve_load.main(forerun.load(), part, prompts, tokens, lengths, clients, vllm)


@app.command("fairness")
def _fairness(attack: list[str] = []):  # noqa: B006
    """What a client waits beside requests that are small and cost much, and ten times too much.

    `--attack` names one of them; without, all.
    """
    fairness.main(forerun.load(), attack)


@app.command("all")
def _all(
    only: Annotated[str, typer.Option(help="First words of commands, with commas.")] = "",
    data: Annotated[Path, typer.Option(help="Folder with tatoeba/, multi30k/ and gsm8k/.")] = Path(
        "../shared/data"
    ),
    pairs: Annotated[list[Path] | None, typer.Option(help="Of starting-lengths-pairs.")] = None,
):
    """The shipped pair's tables, and every headline of docs/papers.md: hours.

    Models are those of `python dev/fetch_models.py`; traces are kept in build/bench.
    """
    kept = Path("build/bench")
    kept.mkdir(parents=True, exist_ok=True)
    models = Path(os.environ.get("FORERUN_MODELS") or Path.home() / ".cache" / "forerun" / "models")
    there = {
        "DATA": [data],
        "SMOLLM2": [zoo.smollm2() or models / "SmolLM2-135M-Instruct.Q4_1.gguf"],
        "QWEN": [models / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"],
        "PAIRS": pairs or [],
    }
    places = {word: [str(p) for p in paths if p.exists()] for word, paths in there.items()}
    traces = {
        "TRACE": "smollm2.parquet",
        "LONG": "smollm2-long.parquet",
        "SAMPLED": "smollm2-sampled.parquet",
        "EXITS": "smollm2-exits",
    }
    places |= {word: [str(kept / name)] for word, name in traces.items()}
    headlines.measure(places, [name for name in only.split(",") if name])


if __name__ == "__main__":
    app()
