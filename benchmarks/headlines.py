"""The papers' headlines: the commands behind each row of docs/papers.md, run one after another."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from benchmarks.common import console

PAIR = (
    "overhead",
    "plain --prompts 12",
    "speedup --prompts 20 --tokens 128",
    "gumbel",
    "rules --prompts 4 --problems 100",
)
"""Tables of the shipped pair that no paper has."""
HEADLINES = (
    "starting-lengths --prompts 2",
    "starting-lengths --long --prompts 2",
    "starting-lengths-replay --prompts 4",
    "starting-lengths-pairs PAIRS --prompts 4",
    "starting-lengths-real SMOLLM2 TRACE",
    "starting-lengths-real SMOLLM2 LONG --per-kind 1 --tokens 128",
    "translator --data DATA",
    "translator --target digest",
    "translator-quality --data DATA",
    "translator-quality --target digest",
    "cm-asd --least 1 --tokens 24 --batches 1,16",
    "cm-asd-quality --prompts 60",
    "cm-asd-batches --count 64",
    "cm-asd-captions QWEN SMOLLM2 DATA --count 200",
    "specbound",
    "specbound-real SMOLLM2 --exits EXITS",
    "forerun layers 'The capital of France is' --target SMOLLM2 --output build/bench/layers.svg",
    "easd 0.2498 --problems 500",
    "easd-speed 0.2498 --problems 20",
    "easd-gsm8k QWEN SMOLLM2 DATA --count 200",
    "ears-accuracy --problems 60",
    "ears-pairs --problems 1000",
    "ears-throughput",
    "rules-real SMOLLM2 SAMPLED --live eagle",
    "rules-real SMOLLM2 TRACE --temperature 0",
    "priced",
    "rules-replay",
    "overhead --rules --runtime torch",
    "overhead --rules --runtime openvino",
    "overhead --rules --runtime torch --target translator",
    "overhead --rules --runtime openvino --target translator",
)
"""Arguments of `python -m benchmarks.run`, or a command of `forerun`, as docs/papers.md has them.
Words in capitals stand for what `measure` is given."""


def measure(places: Mapping[str, Sequence[str]], only: Collection[str] = ()) -> None:
    """Run every command, each by itself; what lacks a model or data is left out, by name.

    Args:
        places: by word in capitals what takes its place; nothing if it is not there.
        only: first words of the commands that are meant; all by default.

    Raises:
        SystemExit: a command failed; the others were run.
    """
    failed, tell = [], partial(console.print, markup=False, soft_wrap=True)
    for line in (*PAIR, *HEADLINES):
        words = shlex.split(line)
        if only and words[0] not in only:
            continue
        if lacking := [word for word in words if not places.get(word, [word])]:
            tell(f"left out: {line}: no {', '.join(lacking)}")
            continue
        arguments = [part for word in words for part in places.get(word, [word])]
        module = [] if words[0] == "forerun" else ["benchmarks.run"]
        console.rule(line)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", *module, *arguments], check=False)
        tell(f"{time.perf_counter() - began:,.0f} s: {line}")
        if done.returncode:
            failed.append(line)
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))
