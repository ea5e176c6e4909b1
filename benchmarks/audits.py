"""Speculative text beside plain text in every precision of a target: `forerun audit`, as far as
there is time, and further when it is run again.

``python -m benchmarks.audits [--only NAMES] [--smollm2 FILE] [--seconds 240]`` audits 300 prompts
in ragged batches of eight and alone, greedily: the shipped target in each precision that this
machine runs (of the types of GGUF files by a file that is made of it), and a file of SmolLM2.
Batches are drafted for by `fixed(4)` and by `auto` in turn. What was compared is kept in
``results/audits.json``; a precision of other sources or settings begins anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import forerun
from benchmarks.common import RESULTS, chat, provenance, save, table
from benchmarks.peers.llama_cpp_server import write_gguf
from benchmarks.real_models import KINDS
from forerun import Sampling, zoo
from forerun.lab import audit
from forerun.runtime.load import load_tokenizer
from forerun.runtime.openvino.blocks import rounds_inputs

PROMPTS, ROWS = 300, 8
CONTROLLERS = "fixed(4)", "auto"
SHIPPED: dict[str, dict[str, Any]] = {
    "float32": {"runtime": "openvino"},
    "int8": {"runtime": "openvino(precision='int8')"},
    "Q8_0": {"runtime": "openvino"},
    "Q4_1": {"runtime": "openvino"},
    "Q4_0": {"runtime": "openvino"},
    "bfloat16": {"runtime": "torch", "dtype": "bfloat16"},
}
"""Names of rows, and how the shipped pair is loaded; of a GGUF type the target is such a file."""
SMOLLM2 = "SmolLM2 Q4_1"
ROUNDED = f"{SMOLLM2} in 8-bit products"
"""Its row on a CPU that multiplies 8-bit numbers (VNNI), where the arithmetic is another."""
COUNTS = "compared", "identical", "near_ties", "bugs"


def model_of(name: str, smollm2: str | None, folder: Path) -> forerun.Model:
    """Target and draft of a row."""
    if name.startswith(SMOLLM2):
        return forerun.load(smollm2, runtime="openvino")
    target = zoo.TARGET
    if name.startswith("Q"):
        target = folder / f"{name}.gguf"
        write_gguf(zoo.TARGET, str(target), name)
    return forerun.load(target, str(zoo.DRAFT), **SHIPPED[name])


def prompts_of(name: str, model: forerun.Model) -> list[list[int]]:
    """As ids, families in turn; a chat model's are chats."""
    shipped = [zoo.prompts(family, "test", limit=PROMPTS // 6) for family in zoo.families()]
    texts = [prompt.prompt for row in zip(*shipped, strict=True) for prompt in row]
    if not name.startswith(SMOLLM2):
        return [list(load_tokenizer(zoo.TARGET).encode(text)) for text in texts]
    own = [kind.format(x) for kind, fillers in KINDS.values() for x in fillers]
    return [chat(model.tokenizer, text) for text in (*own, *texts[: PROMPTS - len(own)])]


def sources() -> str:
    """A name for what is audited: the package's sources."""
    digest = sha256()
    for path in sorted(Path(forerun.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def go_on(model: forerun.Model, prompts: Sequence[list[int]], row: dict[str, Any]) -> None:
    """Audit the next batch."""
    batch = prompts[row["prompts"] : row["prompts"] + ROWS]
    controller = CONTROLLERS[row["prompts"] // ROWS % len(CONTROLLERS)]
    samplings = [Sampling(max_new_tokens=row["tokens"])] * len(batch)
    done = list(audit.audit(model, batch, samplings, controller=controller, batch_size=ROWS))
    row["counts"] = dict(Counter(row["counts"]) + Counter(audit.counts(done)))
    row["differences"] += [
        {"prompt": row["prompts"] + c.prompt, "check": c.check, "controller": controller,
         "kind": str(c.kind), **c.difference.to_json()}
        for c in done if c.difference
    ]  # fmt: skip
    row["prompts"] += len(batch)


def text_of(results: dict[str, Any]) -> str:
    """The table."""
    rows = [
        [name, row["runtime"], row["prompts"], row["tokens"]]
        + [row["counts"].get(kind, 0) for kind in COUNTS]
        for name, row in results.items()
    ]
    return (
        "Greedy texts with drafts beside plain decoding of the prompt alone: alone, in ragged "
        f"batches of {ROWS}, and plain in such batches; `{'` and `'.join(CONTROLLERS)}` in turn. "
        "A difference is a near-tie where the logits, computed again in several shapes, are as "
        "close as roundings move them, else a bug.\n\n"
        + table(["precision", "runtime", "prompts", "tokens", *COUNTS], rows)
    )


def main(options: argparse.Namespace) -> None:
    """Go on where the last run ended."""
    torch.set_num_threads(options.threads)
    until, file = time.monotonic() + options.seconds, RESULTS / "audits.json"
    own = ROUNDED if rounds_inputs() else SMOLLM2
    every = [*SHIPPED, *([own] if options.smollm2 else [])]
    about = {"sources": sources(), "tokens": options.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(",") if options.only else every:
            results = json.loads(file.read_text())["results"] if file.is_file() else {}
            row = results.get(name, {})
            if any(row.get(key) != value for key, value in about.items()):
                row = {**about, "prompts": 0, "counts": {}, "differences": []}
            if row["prompts"] >= PROMPTS or time.monotonic() >= until:
                continue
            model = model_of(name, options.smollm2, Path(folder))
            prompts = prompts_of(name, model)
            made = provenance(model)
            row["runtime"] = made["runtime"]
            while row["prompts"] < PROMPTS and time.monotonic() < until:
                go_on(model, prompts, row)
                results = json.loads(file.read_text())["results"] if file.is_file() else {}
                known = {**results, name: row}
                results = {n: known[n] for n in (*SHIPPED, SMOLLM2, ROUNDED) if n in known}
                save("audits", made, results, text_of(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of rows, with commas")
    parser.add_argument("--smollm2", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=240, help="after which no batch begins")
    parser.add_argument("--threads", type=int, default=1)
    main(parser.parse_args())
