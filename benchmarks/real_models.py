"""forerun beside OpenVINO GenAI on one GGUF file, as their users run them: chat prompts of eight
kinds, in turns, tokens/s with the prompt.

``python -m benchmarks.real_models MODEL.gguf [--quick] [--threads 2] [--tokens 96]``. Without the
package `openvino-genai` only forerun's columns are there. Text that runs in circles flatters every
lookup: the share of repeated 4-grams is beside each kind.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import exp, log
from typing import Any

import torch

import forerun

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


def methods(path: str, threads: int, count: int) -> tuple[dict[str, Method], Any]:
    """Those that can run here by name, and the tokenizer."""
    torch.set_num_threads(threads)
    model = forerun.load(path, "lookup", runtime="openvino")
    ours: dict[str, dict[str, Any]] = {
        "plain": {"plain": True},
        "lookup auto": {"controller": "auto"},
        "lookup fixed(4)": {"controller": "fixed(4)"},
    }
    made: dict[str, Method] = {
        name: lambda _, ids, more=more: list(
            model.generate(ids, max_new_tokens=count, **more).tokens
        )
        for name, more in ours.items()
    }
    if find_spec("openvino_genai") is not None:
        import openvino_genai as genai

        def peer(lookup: bool) -> Method:
            options: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
            pipe = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **options)
            config = genai.GenerationConfig()
            config.max_new_tokens, config.do_sample = count, False
            if lookup:
                config.num_assistant_tokens, config.max_ngram_size = 4, 3

            def run(text: str, _: list[int]) -> list[int]:
                return list(model.encode(str(pipe.generate(text, config))))

            return run

        made |= {"GenAI": peer(False), "GenAI lookup": peer(True)}
    return made, model.tokenizer


def repeated(ids: Sequence[int], width: int = 4) -> float:
    """The share of `width`-grams that stood in the text before."""
    grams = [tuple(ids[i : i + width]) for i in range(len(ids) - width + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return exp(sum(map(log, values)) / len(values))


def measured(run: Method, text: str, ids: list[int]) -> Answer:
    """One request."""
    began, cpu = time.perf_counter(), time.process_time()
    tokens = run(text, ids)
    return Answer(tokens, time.perf_counter() - began, time.process_time() - cpu)


def main(path: str, threads: int, count: int, per_kind: int) -> None:
    """Print the table."""
    made, tokenizer = methods(path, threads, count)
    names = list(made)
    print(f"tokens/s, {threads} threads, {count} tokens, {per_kind} prompts of each kind\n")
    print("| kind | " + " | ".join(names) + " | repeated 4-grams |")
    print("|---" * (len(names) + 2) + "|")
    every: dict[str, list[Answer]] = {name: [] for name in names}
    for name in names:  # the first request of each is not measured
        made[name]("Hello", list(tokenizer.encode("Hello")))
    for kind, (template, fillers) in KINDS.items():
        row: dict[str, list[Answer]] = {name: [] for name in names}
        for turn, filler in enumerate(fillers[:per_kind]):
            text = template.format(filler)
            messages = [{"role": "user", "content": text}]
            ids = list(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
            )
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                row[name].append(measured(made[name], text, ids))
        cells = [mean([len(a.tokens) / a.seconds for a in row[name]]) for name in names]
        circles = sum(repeated(a.tokens) for a in row["plain"]) / per_kind
        print(f"| {kind} | " + " | ".join(f"{x:.1f}" for x in cells) + f" | {circles:.0%} |")
        for name in names:
            every[name] += row[name]
    speeds = {n: [len(a.tokens) / a.seconds for a in every[n]] for n in names}
    print("| **mean** | " + " | ".join(f"{mean(speeds[n]):.1f}" for n in names) + " | |")
    ratios = [mean([a / b for a, b in zip(speeds[n], speeds["plain"], strict=True)]) for n in names]
    print("| × plain | " + " | ".join(f"{x:.2f}" for x in ratios) + " | |")
    cpu = [mean([1e3 * a.cpu / len(a.tokens) for a in every[n]]) for n in names]
    print("| CPU ms per token | " + " | ".join(f"{x:.1f}" for x in cpu) + " | |")
    drafted = [name for name in names if name.startswith("lookup")]
    same = [
        a.tokens == b.tokens for n in drafted for a, b in zip(every[n], every["plain"], strict=True)
    ]
    print(f"\nidentical to plain: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--quick", action="store_true", help="one prompt of each kind, 48 tokens")
    given = parser.parse_args()
    if given.quick:
        main(given.model, given.threads, 48, 1)
    else:
        main(given.model, given.threads, given.tokens, 10)
