"""forerun beside OpenVINO GenAI and llama.cpp on one GGUF file, as their users run them: chat
prompts of eight kinds, in turns, tokens/s with the prompt.

``python -m benchmarks.real_models MODEL.gguf [--threads 2] [--tokens 96] [--prompts 10]``; with
``--sampled T`` forerun alone, greedy and at temperature T (SmolLM2's card: 0.2), top_p 0.9 and a
seed of each prompt's own; with ``--long`` prompts of 2,000 and 6,000 tokens. Peers are there if
their packages `openvino-genai` and `xllamacpp` are. Text that runs in circles flatters lookups: the
share of repeated 4-grams is beside each kind and below each method, whose texts differ.

Kinds may be measured by several processes on cores of their own: ``--kinds story,json --save
A.json`` in each, then ``--merge A.json B.json ...`` prints the table of all.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import exp, log, sqrt
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

import forerun
from benchmarks.common import chat

TEXT = (
    "The committee met on Tuesday to discuss the new library. The budget of 40,000 euros was "
    "approved, but the opening hours remain unclear. Two members asked for a survey of readers, "
    "and the chair promised results by March. The next meeting is on the third of February."
)
KINDS: dict[str, tuple[str, Sequence[str]]] = {
    "function": (
        "Write a Python function that {}.",
        (
            "reverses a string", "sorts a list of dates", "counts the words of a file",
            "checks for prime numbers", "merges two dictionaries", "computes a moving average",
            "parses a CSV line", "finds the longest word", "flattens nested lists",
            "converts Celsius to Fahrenheit",
        ),
    ),
    "explain": (
        "Explain {} to a beginner.",
        (
            "photosynthesis", "recursion", "inflation", "tides", "vaccines", "gravity",
            "compound interest", "the internet", "rainbows", "batteries",
        ),
    ),
    "summary": (
        f"Summarise for {{}}: {TEXT}",
        (
            "a busy reader", "a child", "the mayor", "a newspaper", "the minutes", "an e-mail",
            "a tweet", "a colleague", "the archive", "a notice board",
        ),
    ),
    "rewrite": (
        f"Rewrite {{}}: {TEXT}",
        (
            "in the past tense", "politely", "as a list", "in simpler words", "for a speech",
            "without numbers", "in the first person", "more formally", "as a letter",
            "with a headline",
        ),
    ),
    "json": (
        "Write a JSON list of five {} with name, colour and price.",
        (
            "fruits", "cars", "flowers", "chairs", "birds", "shirts", "pens", "lamps", "boats",
            "toys",
        ),
    ),
    "list": (
        "List ten {}.",
        (
            "European capitals", "kinds of cheese", "programming languages", "rivers", "trees",
            "musical instruments", "sports", "planets and moons", "spices", "board games",
        ),
    ),
    "translation": (
        "Translate to French: The {} is on the table near the window, and it is very old.",
        (
            "book", "lamp", "clock", "cup", "letter", "map", "key", "photograph", "vase", "radio",
        ),
    ),
    "story": (
        "Write a short story about {}.",
        (
            "a lost dog", "a lighthouse", "two sisters", "a train at night", "a clever fox",
            "the last bookshop", "a storm", "a letter from abroad", "a garden", "an old sailor",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A text, and what it took."""

    tokens: list[int]
    seconds: float
    cpu: float


Method = Callable[[str, list[int]], list[int]]
"""From a prompt and its ids with the chat template to the ids that are written."""
Encode = Callable[[str], list[int]]
"""From what a user says to the ids of a prompt."""
Runs = dict[str, dict[str, list[Answer]]]
"""By kind and method."""
OWN = ("plain", "lookup auto", "auto", "fixed(4)", "plain sampled", "auto sampled")


def methods(
    path: str, threads: int, count: int, sampled: float | None
) -> tuple[dict[str, Method], Encode]:
    """Those that can run here by name, and what makes prompts of texts."""
    torch.set_num_threads(threads)
    lookup, default = (forerun.load(path, draft, runtime="openvino") for draft in ("lookup", None))

    for model in (lookup, default):  # what they do behind their first passes is not the peers'
        model.target.executor.finish()
        model.generate("Hello", max_new_tokens=192, plain=True, ignore_eos=True)
    for thread in threading.enumerate():
        if thread.name == "pages":
            thread.join()

    def own(model: forerun.Model, **more: Any) -> Method:
        def run(text: str, ids: list[int]) -> list[int]:
            seed = sum(text.encode())  # one of each prompt's own
            return list(model.generate(ids, max_new_tokens=count, seed=seed, **more).tokens)

        return run

    def encode(text: str) -> list[int]:
        return chat(default.tokenizer, text)

    made = {"plain": own(default, plain=True), "auto": own(default, controller="auto")}
    if sampled is not None:
        settings = {"temperature": sampled, "top_p": 0.9}
        made["plain sampled"] = own(default, plain=True, **settings)
        made["auto sampled"] = own(default, controller="auto", **settings)
        return made, encode
    made |= {
        "lookup auto": own(lookup, controller="auto"),
        "fixed(4)": own(default, controller="fixed(4)"),
    }
    if find_spec("openvino_genai") is not None:
        made["GenAI"] = genai(path, threads, count, False, default.encode)
        made["GenAI lookup"] = genai(path, threads, count, True, default.encode)
    if find_spec("xllamacpp") is not None:
        made["llama.cpp"] = llama_cpp(path, threads, count, None)
        made["llama.cpp n-grams"] = llama_cpp(path, threads, count, "NGRAM_SIMPLE")
    return made, encode


def genai(
    path: str, threads: int, count: int, lookup: bool, encode: Callable[[str], Sequence[int]]
) -> Method:
    """OpenVINO GenAI with its users' defaults: 8-bit cache and inputs; lookup as it documents."""
    import openvino_genai

    options: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
    pipe = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = count, False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = 4, 3
    return lambda text, _: list(encode(str(pipe.generate(text, config))))


def llama_cpp(path: str, threads: int, count: int, drafts: str | None) -> Method:
    """llama.cpp's server with its defaults, plain or with drafts of a kind of its own."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx = path, 1, 8192
    options.n_gpu_layers, options.fit_params, options.verbosity = 0, False, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    if drafts:
        kinds = xllamacpp.common_speculative_type
        options.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{drafts}")]
    server = xllamacpp.Server(options)

    def run(_: str, ids: list[int]) -> list[int]:
        body = {
            "prompt": ids, "n_predict": count, "temperature": 0, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        with urlopen(server.listening_address + "/completion", json.dumps(body).encode()) as reply:
            return list(json.load(reply)["tokens"])

    return run


def repeated(ids: Sequence[int], width: int = 4) -> float:
    """The share of `width`-grams that stood in the text before."""
    grams = [tuple(ids[i : i + width]) for i in range(len(ids) - width + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return exp(sum(map(log, values)) / len(values))


def paired(speeds: dict[str, list[float]], one: str, other: str) -> str:
    """Mean ratio by prompt, and its 95 % interval."""
    logs = [log(a / b) for a, b in zip(speeds[one], speeds[other], strict=True)]
    centre = sum(logs) / len(logs)
    variance = sum((x - centre) ** 2 for x in logs) / max(len(logs) - 1, 1)
    spread = 1.96 * sqrt(variance / len(logs))
    return f"{exp(centre):.2f} [{exp(centre - spread):.2f}, {exp(centre + spread):.2f}]"


def measured(run: Method, text: str, ids: list[int]) -> Answer:
    """One request."""
    began, cpu = time.perf_counter(), time.process_time()
    tokens = run(text, ids)
    return Answer(tokens, time.perf_counter() - began, time.process_time() - cpu)


def in_turns(made: dict[str, Method], encode: Encode, texts: dict[str, list[str]]) -> Runs:
    """Every method on every prompt of each kind; who is first changes from prompt to prompt."""
    names = list(made)
    for name in names:  # the first request of each is not measured
        made[name]("Hello", encode("Hello"))
    runs: Runs = {}
    for kind, prompts in texts.items():
        runs[kind] = {name: [] for name in names}
        for turn, text in enumerate(prompts):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                runs[kind][name].append(measured(made[name], text, encode(text)))
    return runs


def show(runs: Runs, title: str) -> None:
    """Print the table."""
    names = list(next(iter(runs.values())))
    print(f"{title}\n\n| kind | " + " | ".join(names) + " | repeated 4-grams |")
    print("|---" * (len(names) + 2) + "|")
    for kind, row in runs.items():
        cells = [mean([len(a.tokens) / a.seconds for a in row[name]]) for name in names]
        circles = sum(repeated(a.tokens) for a in row["plain"]) / len(row["plain"])
        print(f"| {kind} | " + " | ".join(f"{x:.3g}" for x in cells) + f" | {circles:.0%} |")
    every = {name: [a for row in runs.values() for a in row[name]] for name in names}
    speeds = {n: [len(a.tokens) / a.seconds for a in every[n]] for n in names}
    print("| **mean** | " + " | ".join(f"{mean(speeds[n]):.3g}" for n in names) + " | |")
    ratios = [mean([a / b for a, b in zip(speeds[n], speeds["plain"], strict=True)]) for n in names]
    print("| × plain | " + " | ".join(f"{x:.2f}" for x in ratios) + " | |")
    cpu = [mean([1e3 * a.cpu / len(a.tokens) for a in every[n]]) for n in names]
    print("| CPU ms per token | " + " | ".join(f"{x:.1f}" for x in cpu) + " | |")
    again = [sum(repeated(a.tokens) for a in every[n]) / len(every[n]) for n in names]
    print("| repeated 4-grams | " + " | ".join(f"{x:.0%}" for x in again) + " | |")
    for plain in ("plain", "plain sampled"):
        own = [n for n in names if n in OWN and n.endswith("sampled") == plain.endswith("sampled")]
        pairs = [zip(every[n], every[plain], strict=True) for n in own if n != plain]
        if same := [a.tokens == b.tokens for pair in pairs for a, b in pair]:
            print(f"\nidentical to {plain}: {sum(same)} of {len(same)}")
    if "GenAI lookup" in names:
        both = zip(every["GenAI lookup"], every["GenAI"], strict=True)
        same = [a.tokens == b.tokens for a, b in both]
        print(f"GenAI's lookup, identical to GenAI: {sum(same)} of {len(same)}")
    if "auto sampled" in names:
        print(f"auto sampled over plain sampled: {paired(speeds, 'auto sampled', 'plain sampled')}")
        gains = {
            way: [a / b for a, b in zip(speeds[f"auto{way}"], speeds[f"plain{way}"], strict=True)]
            for way in ("", " sampled")
        }
        print(f"of the greedy gain: {paired(gains, ' sampled', '')}")
    print(f"auto over plain: {paired(speeds, 'auto', 'plain')}")
    for peer in ("GenAI", "llama.cpp"):
        if arms := [name for name in names if name.startswith(peer)]:
            best = max(arms, key=lambda name: mean(speeds[name]))
            print(
                f"plain over {peer}: {paired(speeds, 'plain', peer)}; "
                f"auto over its best, {best}: {paired(speeds, 'auto', best)}"
            )


def long_texts(encode: Encode, lengths: Sequence[int], prompts: int) -> dict[str, list[str]]:
    """A question behind so many tokens of numbered sentences, several of each length."""
    made: dict[str, list[str]] = {}
    for length in lengths:
        made[f"{length:,} tokens"] = []
        for start in range(1, 1000 * prompts, 1000):
            note = "Note {}: shelf {} holds {} boxes of letters from the year {}. "
            parts: list[str] = []
            while len(encode("".join(parts))) < length:
                at = start + len(parts)
                parts += [
                    note.format(n, n * 7 % 31, n * 13 % 97, 1800 + n * 11 % 200)
                    for n in range(at, at + 16)
                ]
            made[f"{length:,} tokens"].append("".join(parts) + "\nSummarise these notes.")
    return made


def main(options: argparse.Namespace) -> None:
    """Measure, or merge what was measured."""
    if options.merge:
        runs: Runs = {}
        for file in options.merge:
            for kind, row in json.loads(Path(file).read_text()).items():
                runs[kind] = {name: [Answer(**a) for a in row[name]] for name in row}
        runs = {
            kind: runs[kind] for kind in (*KINDS, *sorted(set(runs) - set(KINDS))) if kind in runs
        }
        return show(runs, "tokens/s")
    made, encode = methods(options.model, options.threads, options.tokens, options.sampled)
    if options.only:
        made = {name: made[name] for name in options.only.split(",")}
    if options.long:
        texts = long_texts(encode, [2000, 6000], options.prompts)
    else:
        kinds = options.kinds.split(",") if options.kinds else list(KINDS)
        texts = {
            kind: [KINDS[kind][0].format(x) for x in KINDS[kind][1][: options.prompts]]
            for kind in kinds
        }
    runs = in_turns(made, encode, texts)
    if options.save:
        plain = {k: {n: [asdict(a) for a in row[n]] for n in row} for k, row in runs.items()}
        Path(options.save).write_text(json.dumps(plain))
    show(runs, f"tokens/s, {options.threads} threads, {options.tokens} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=10, help="of each kind, 1 to 10")
    parser.add_argument("--kinds", help="of prompts, with commas; default: all")
    parser.add_argument("--sampled", type=float, metavar="T")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--only", help="names of methods, with commas; default: all")
    parser.add_argument("--save", metavar="FILE")
    parser.add_argument("--merge", nargs="+", metavar="FILE")
    main(parser.parse_args())
