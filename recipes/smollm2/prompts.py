"""Prompts of six kinds, to have a target write answers to: `python -m recipes.smollm2.prompts`.

Material whose licences allow it: books in the public domain, GSM8K (MIT), Tatoeba (CC-BY 2.0 FR),
functions of installed packages (BSD, MIT, Apache-2.0, PSF), made-up records. Multi30k,
HumanEval and Spec-Bench are held out.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

HELD_OUT_BOOKS = {"alice-s-adventures-in-wonderland", "treasure-island"}
MATERIAL: dict[str, list[str]] = json.loads(Path(__file__).with_name("material.json").read_text())
"""Templates and words; `kinds` has the kind of every tenth prompt, `packages` those whose functions
are shown."""


def functions(most: int, rng: random.Random) -> list[str]:
    """Source text of short functions of installed packages and of Python's own library."""
    paths = sysconfig.get_paths()
    files = [f for name in MATERIAL["packages"] for f in Path(paths["purelib"], name).rglob("*.py")]
    files += Path(paths["stdlib"]).glob("*.py")
    rng.shuffle(files)
    out: list[str] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue
        lines, taken = text.split("\n"), 0
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not node.end_lineno:
                continue
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            short = 4 <= node.end_lineno - node.lineno <= 18 and 120 < len(code) < 600
            if short and max(map(len, code.split("\n"))) < 100:
                out.append(code)
                taken += 1
            if taken > 6:
                break
        if len(out) >= most:
            break
    rng.shuffle(out)
    return out


def record(rng: random.Random) -> str:
    """A made-up invoice, person, meeting or flight."""

    def pick(words: str) -> str:
        return rng.choice(MATERIAL[words])

    name, surname, city = pick("names"), pick("surnames"), pick("cities")
    items, number = rng.sample(MATERIAL["items"], 3), rng.randint
    day = f"{number(1, 28)} {pick('months')} {number(2019, 2025)}"
    bought = ", ".join(f"{number(1, 9)} {item} at {number(2, 90)}.50 each" for item in items)
    return rng.choice(
        [
            f"Invoice {number(1000, 9999)} dated {day}. Customer: {name} {surname}, {city}, email "
            f"{name.lower()}.{surname.lower()}@example.com. Items: {bought}. Shipping "
            f"{number(3, 9)}.90. Payment due within {rng.choice([14, 30])} days.",
            f"{name} {surname}, {number(21, 70)}, lives in {city} and works as a {pick('jobs')} "
            f"since {day}. Phone {number(100, 999)}-{number(1000, 9999)}.",
            f"Meeting on {day} in {city}. Present: {name} {surname} and {pick('names')} "
            f"{pick('surnames')}. Decided: buy {number(2, 20)} {items[0]}s, sell the old "
            f"{items[1]}s, and hire {number(1, 4)} people by {pick('months')}. The budget is "
            f"{number(2, 90)},000 dollars. Next meeting in {number(2, 6)} weeks.",
            f"From {city} to {pick('cities')}: flight {rng.choice(['LH', 'BA', 'AF', 'UA'])}"
            f"{number(100, 999)}, {day}, departure {number(6, 21)}:45, gate {rng.choice('ABCD')}"
            f"{number(1, 40)}, passenger {name} {surname}, seat {number(1, 38)}C, price "
            f"{number(60, 900)} euros.",
        ]
    )


def prompts(count: int, data: Path) -> Iterator[dict[str, str]]:
    """Up to `count` prompts without doubles, each with its kind; the same ones every time."""
    rng = random.Random(7)
    code = functions(40_000, rng)
    passages = [
        " ".join(part.split())
        for book in sorted((data / "books").glob("*.txt"))
        if book.stem not in HELD_OUT_BOOKS
        for part in book.read_text(encoding="utf-8").split("\n\n")
        if 300 < len(part) < 900
    ]
    sums = [json.loads(line)["question"] for line in (data / "gsm8k/train.jsonl").open()]
    with gzip.open(data / "tatoeba/train.tsv.gz", "rt", encoding="utf-8") as file:
        sentences = list(dict.fromkeys(line.split("\t")[0] for line in file if "\t" in line))
    written: set[str] = set()
    for i in range(count):
        rng, kind = random.Random(1000 + i), MATERIAL["kinds"][i % 10]
        if kind == "chat" and rng.random() < 0.25:
            prompt = rng.choice(sums)
        elif kind == "chat":
            prompt = rng.choice(MATERIAL["about"]).format(*rng.sample(MATERIAL["topics"], 2))
        elif kind == "code" and (i % 10 == 1 or rng.random() < 0.25):
            prompt = rng.choice(MATERIAL["code"]).format(rng.choice(MATERIAL["tasks"]))
        elif kind == "code":
            prompt = f"{rng.choice(MATERIAL['edit'])}\n\n```python\n{rng.choice(code)}\n```"
        elif kind == "translate":
            text = " ".join(rng.sample(sentences, rng.randint(1, 4)))
            language = rng.choice(["French", "German", "Spanish"])
            prompt = rng.choice(MATERIAL["translate"]).format(language, text)
        else:
            text = record(rng) if kind == "extract" else rng.choice(passages)
            prompt = f"{rng.choice(MATERIAL[kind])}\n\n{text}"
        if prompt not in written:
            written.add(prompt)
            yield {"kind": kind, "prompt": prompt}


def main(
    data: Annotated[Path, typer.Option(help="Folder with books/, gsm8k/ and tatoeba/.")],
    count: Annotated[int, typer.Option(help="Prompts to make; doubles are left out.")] = 110_000,
) -> None:
    """Write prompts as JSON lines to stdout."""
    for line in prompts(count, data):
        print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
