"""`forerun serve` beside llama.cpp's server on one GGUF file, by numbers of clients.

``python -m benchmarks.serve_real MODEL.gguf [--clients 1,4,16] [--seconds 8] [--turns 2]``: six
minutes on two cores. Clients send chat prompts of eight kinds, each its next one when the last was
answered; servers take turns, and tokens that came within a turn count, of answers that were cut
off at its end, too. forerun drafts as it does by default (`auto`) or not (`plain`); llama.cpp comes
with `xllamacpp`, with drafts of n-grams and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.closed_loop import Answer, Body, closed_loop
from benchmarks.common import chat, console, geometric, provenance, save, show, table
from benchmarks.real_models import KINDS
from benchmarks.serve_load import idle, serving
from forerun.runtime import gguf
from forerun.runtime.load import load_tokenizer

ROWS, TOKENS, CONTEXT = 16, 48, 512
OURS: dict[str, Body] = {"plain": {"speculative": False}, "auto": {}}
PEERS = {"llama.cpp": "", "llama.cpp n-grams": "ngram"}
WARMING = 30.0
"""Seconds that every server is busy before anything counts: in the first of them graphs for the
sizes of passes are made."""


def prompts(model: str) -> list[list[int]]:
    """As ids with the chat template, kinds in turn."""
    tokenizer = load_tokenizer(model)
    every = zip(*([k.format(x) for x in fillers] for k, fillers in KINDS.values()), strict=True)
    return [chat(tokenizer, text) for text in itertools.chain(*every)]


def came(answer: Answer, until: float) -> int:
    """Tokens that were there by then, as the server counts them."""
    count = 0
    for at, frame in answer.frames():
        if at <= until:
            counts = frame.get("usage") or {}, frame.get("timings") or {}
            count = counts[0].get("completion_tokens") or counts[1].get("predicted_n") or count
    return count


def text(answer: Answer) -> str:
    """Of a stream."""
    return "".join(c["text"] for _, frame in answer.frames() for c in frame.get("choices", ()))


def measured(
    urls: dict[str, tuple[str, Body]],
    asked: list[list[int]],
    clients: int,
    seconds: float,
    turns: int,
) -> dict[str, Any]:
    """All servers in turns, with so many clients: tokens a second of each turn."""
    speeds: dict[str, list[float]] = {name: [] for name in urls}
    texts: dict[str, dict[int, str]] = {name: {} for name in urls}
    for turn, step in itertools.product(range(turns), range(len(urls))):
        name = list(urls)[(turn + step) % len(urls)]
        url, more = urls[name]

        def request(index: int, more: Body = more) -> Body:
            return {
                "prompt": asked[index % len(asked)], "max_tokens": TOKENS, "temperature": 0,
                "stream": True, "stream_options": {"continuous_usage_stats": True},
                "timings_per_token": True, "cache_prompt": False, **more,
            }  # fmt: skip

        began, answers = asyncio.run(closed_loop(url, request, clients, seconds))
        for answer in answers:
            assert answer.status in (0, 200), answer.got
            if answer.complete:
                texts[name][answer.index % len(asked)] = text(answer)
        speeds[name].append(sum(came(a, began + seconds) for a in answers) / seconds)
        console.print(f"{clients} clients, {name}: {speeds[name][-1]:.1f} tokens/s")
        idle(10.0)
    both = texts["plain"].keys() & texts["auto"].keys()
    return {
        "speeds": speeds,
        "compared": len(both),
        "identical": sum(texts["plain"][i] == texts["auto"][i] for i in both),
    }


def main(options: argparse.Namespace) -> None:
    """Start all servers, measure, print and save the table."""
    asked = prompts(options.model)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving("--target", options.model, "--prefix-cache", "0", "--max-rows", str(ROWS))
        )
        urls = {name: (server.url, more) for name, more in OURS.items()}
        for name, kind in PEERS.items():
            command = (sys.executable, "-m", "benchmarks.peers.llama_cpp_server", options.model,
                       str(ROWS), str(CONTEXT), str(options.threads), kind)  # fmt: skip
            urls[name] = (stack.enter_context(serving(command=command)).url, {})
        for server in {url: (url, more) for url, more in urls.values()}.values():
            measured({"plain": server, "auto": server}, asked, ROWS, WARMING / 2, 1)
        cells = {
            str(n): measured(urls, asked, n, options.seconds, options.turns)
            for n in map(int, options.clients.split(","))
        }
    torch.set_num_threads(options.threads)
    facts = SimpleNamespace(precision=gguf.read(Path(options.model)).kind, executor="openvino")
    made = provenance(SimpleNamespace(target=SimpleNamespace(device="cpu", facts=facts)))
    save(f"serve-{Path(options.model).stem.lower()}", made, cells, described(cells, options))


def described(cells: dict[str, Any], options: argparse.Namespace) -> str:
    """The table."""
    rows = [
        [count, name, f"{np.mean(own):.1f}",
         *(show(geometric([a / b for a, b in zip(own, cell["speeds"][other], strict=True)]))
           for other in ("plain", *PEERS)),
         f"{cell['identical']} of {cell['compared']}" if name == "auto" else ""]
        for count, cell in cells.items()
        for name, own in cell["speeds"].items()
    ]  # fmt: skip
    return (
        f"Chat prompts of eight kinds, greedy, {TOKENS} tokens an answer, {ROWS} rows, no prefix "
        f"cache; {options.turns} turns of {options.seconds:g} seconds; over each server without "
        "and with drafts, turn by turn; answers of `auto` that are those of `plain`.\n\n"
        + table(["clients", "server", "tokens/s", "over plain", *(f"over {x}" for x in PEERS),
                 "identical"], rows)
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    main(parser.parse_args())
