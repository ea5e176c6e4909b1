"""Paired timing, spread, and results that say how they were made."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

import forerun
from forerun import zoo
from forerun.engine import Sampling
from forerun.governors.renewal import Renewal
from forerun.lab.traces import record
from forerun.lab.traces.results import geometric as geometric
from forerun.lab.traces.trace import Trace

RESULTS = Path(__file__).parent / "results"
BLOCK = 4
"""Items that a method runs one after the other before the next one's turn."""
console = Console(stderr=True)


@dataclass(frozen=True)
class Task:
    """One prompt of a family, as token ids."""

    family: str
    tokens: list[int]
    max_new_tokens: int
    repetition_penalty: float = 1.0


PENALTY = zoo.PENALTY


def tasks(
    model: forerun.Model, split: str, per_family: int, cap: int = 64, long: bool = False
) -> list[Task]:
    """The first prompts of each family, with short outputs (at most `cap` tokens) or long ones."""
    return [
        Task(
            family,
            model.encode(p.prompt),
            p.max_new_tokens if long else min(cap, p.max_new_tokens),
            PENALTY.get(family, 1.0),
        )
        for family in (zoo.long_families() if long else zoo.families())
        for p in zoo.prompts(family, split, limit=per_family)
    ]


def generate(
    model: forerun.Model,
    task: Task,
    controller: str | None,
    temperature: float = 0.0,
    rule: str = "gumbel",
) -> forerun.Completion:
    """One timed generation; `controller=None` is plain decoding through the same engine.

    Sampled ones draw by the noise of a seed, so that all methods write the same text, unless `rule`
    tosses coins.
    """
    done: forerun.Completion = model.generate(
        [task.tokens],
        controller=controller or "fixed(0)",
        rule=rule,
        plain=controller is None,
        max_new_tokens=task.max_new_tokens,
        repetition_penalty=task.repetition_penalty,
        temperature=temperature,
        seed=len(task.tokens),
    )[0]
    return done


def interleaved(
    work: Sequence[Any],
    methods: Sequence[Any],
    run: Callable[[Any, Any], Any],
    label: str,
    seed: int = 0,
) -> list[list[Any]]:
    """`run(item, method)` for every pair. Methods take turns, each for a block of items, in an
    order drawn anew per block: a machine that gets slower favours none, no method always follows
    another, and most runs find in the caches what a method in use finds there, its own graphs."""
    rng = random.Random(f"{seed}/{label}")
    out: list[list[Any]] = [[None] * len(methods) for _ in work]
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(label, total=len(work) * len(methods))
        for first in range(0, len(work), BLOCK):
            for index in rng.sample(range(len(methods)), len(methods)):
                for item, row in zip(work[first : first + BLOCK], out[first:], strict=False):
                    row[index] = run(item, methods[index])
                    progress.advance(bar)
    return out


def recorded(model: forerun.Model, work: Sequence[Task]) -> Trace:
    """A trace of greedy texts, as deep as `auto` drafts."""
    how = [
        Sampling(max_new_tokens=t.max_new_tokens, repetition_penalty=t.repetition_penalty)
        for t in work
    ]
    return record.record(
        model,
        [
            record.Task(t.family, str(i), t.tokens, sampling)
            for i, (t, sampling) in enumerate(zip(work, how, strict=True))
        ],
        depth=Renewal().high,
    )


def show(cell: dict[str, float]) -> str:
    """`1.85 [1.71, 2.00]`."""
    return f"{cell['mean']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]"


def chat(tokenizer: Any, text: str) -> list[int]:
    """What a user says as the ids of a prompt, in the tokenizer's chat template."""
    turns = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def commit() -> str:
    """The short name of the commit that is measured."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def _local(argument: str) -> str:
    """Without the folder of an absolute path, which says nothing elsewhere."""
    return Path(argument).name if argument.startswith("/") else argument


def provenance(model: forerun.Model, **settings: Any) -> dict[str, Any]:
    """What was measured on what, and the command that did it."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            s.partition(":")[2].strip() for s in info.read_text().splitlines() if "model name" in s
        ]
        cpu = f"{names[0]} × {len(names)}" if names else cpu
    return {
        "command": " ".join(
            [f"python -m benchmarks.{Path(sys.argv[0]).stem}", *map(_local, sys.argv[1:])]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": str(model.target.device),
        "dtype": model.target.facts.precision,
        "runtime": model.target.facts.executor,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "versions": {
            "forerun": forerun.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        **settings,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def resumed(name: str, **settings: Any) -> dict[str, Any]:
    """What an interrupted run of the same commit, and so of the same models, and with the same
    settings has written; nothing if there was none."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    wanted = {"commit": commit(), **settings}
    same = all(document["provenance"].get(key) == value for key, value in wanted.items())
    results: dict[str, Any] = document["results"] if same else {}
    return results


def save(name: str, made: dict[str, Any], results: Any, text: str) -> None:
    """Write `NAME.json` and `NAME.md` under benchmarks/results and print the latter."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"provenance": made, "results": results}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    head = (
        f"`{made['command']}`  \n{made['date']}, commit {made['commit']}, {made['dtype']} by "
        f"{made['runtime']} on {made['device']} ({made['cpu']}, {made['threads']} threads), "
        f"torch {made['versions']['torch']}, transformers {made['versions']['transformers']}.\n"
    )
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{head}\n{text}\n")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"[dim]wrote {RESULTS / name}.json and .md")
