"""Prompts of many kinds, to have a target write answers to: `python -m recipes.smollm2.prompts`.

Material whose licences allow it: books in the public domain, GSM8K (MIT), Tatoeba (CC-BY 2.0 FR),
functions of installed packages (BSD, MIT, Apache-2.0, PSF), and what is made up here. Multi30k,
HumanEval, Spec-Bench and the prompts of `benchmarks.real_models` are held out.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.real_models import KINDS

HELD_OUT_BOOKS = {"alice-s-adventures-in-wonderland", "treasure-island"}
MATERIAL: dict[str, list[str]] = json.loads(Path(__file__).with_name("material.json").read_text())
"""Templates and words; `kinds` in turn, and `packages` whose functions are shown."""
LONGEST = 230
"""Tokens of a prompt."""


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


class Sources(NamedTuple):
    """What others wrote."""

    code: list[str]
    passages: list[str]
    sums: list[str]
    sentences: list[str]


def sources(data: Path) -> Sources:
    """Of a folder with books/, gsm8k/ and tatoeba/, and of installed packages."""
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
    return Sources(functions(40_000, random.Random(7)), passages, sums, sentences)


def notice(rng: random.Random) -> str:
    """A made-up piece of local news."""

    def pick(words: str) -> str:
        return rng.choice(MATERIAL[words])

    text = " ".join([pick("groups"), pick("deeds"), pick("reasons")]) + "."
    for sequel in rng.sample(MATERIAL["sequels"], rng.randint(2, 4)):
        text += " " + sequel.format(
            month=pick("months"), number=rng.randint(2, 30), city=pick("cities"),
            name=pick("names"), surname=pick("surnames"),
        )  # fmt: skip
    return text


def prompt_of(kind: str, rng: random.Random, given: Sources) -> str:
    """A prompt of a kind."""

    def pick(words: str) -> str:
        return rng.choice(MATERIAL[words])

    parts: Sequence[str]
    if kind == "chat":
        if rng.random() < 0.25:
            return rng.choice(given.sums)
        return pick("about").format(*rng.sample(MATERIAL["topics"], 2))
    if kind == "code":
        if rng.random() < 0.4:
            return pick("code").format(pick("tasks"))
        return f"{pick('edit')}\n\n```python\n{rng.choice(given.code)}\n```"
    if kind in ("summary", "rewrite", "extract"):
        text = record(rng) if kind == "extract" else rng.choice(given.passages)
        return f"{pick(kind)}\n\n{text}"
    if kind == "translate":
        text = " ".join(rng.sample(given.sentences, rng.randint(1, 4)))
        parts = pick("languages"), text
    elif kind == "sentence":
        noun, place, quality = pick("nouns"), pick("places"), pick("qualities")
        made = f"The {noun} is {place}.", f"The {noun} {place} is {quality}."
        text = rng.choice([*made, f"The {noun} is {place}, and it is {quality}."])
        parts = pick("languages"), rng.choice([text, rng.choice(given.sentences)])
    elif kind == "function":
        parts = [pick("actions").format(pick("objects"))]
    elif kind == "explain":
        parts = [pick(rng.choice(["subjects", "topics"]))]
    elif kind == "story":
        parts = [f"{pick('traits')} {pick('heroes')} {pick('settings')}".strip()]
    elif kind == "json":
        parts = [pick("numbers"), pick("things"), *rng.sample(MATERIAL["fields"], 3)]
    elif kind == "list":
        parts = pick("numbers"), pick("lists")
    else:
        parts = pick("audiences" if kind == "notice" else "styles"), notice(rng)
    return pick(kind).format(*parts)


def prompts(count: int, given: Sources) -> Iterator[dict[str, str]]:
    """Up to `count` prompts without doubles, each with its kind; the same ones every time."""
    written = {prompt for _, prompt in held_out()}
    for i in range(count):
        kind = MATERIAL["kinds"][i % len(MATERIAL["kinds"])]
        prompt = prompt_of(kind, random.Random(1000 + i), given)
        if prompt not in written:
            written.add(prompt)
            yield {"kind": kind, "prompt": prompt}


def held_out() -> list[tuple[str, str]]:
    """Kinds and prompts that no head is made from."""
    return [(kind, form.format(x)) for kind, (form, fillers) in KINDS.items() for x in fillers]


def save(path: Path, tokenizer: Any, asked: Iterable[dict[str, str]]) -> None:
    """Write ids of prompts in the chat template, those that are held out first."""
    held = [{"kind": kind, "prompt": prompt} for kind, prompt in held_out()]
    every = [*held, *asked]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt["prompt"]}],
            tokenize=False, add_generation_prompt=True,
        )
        for prompt in every
    ]  # fmt: skip
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    fit = [i for i, own in enumerate(ids) if len(own) <= LONGEST]
    names = sorted({prompt["kind"] for prompt in every})
    np.savez_compressed(
        path,
        ids=np.concatenate([np.array(ids[i], np.uint16) for i in fit]),
        lengths=np.array([len(ids[i]) for i in fit], np.int16),
        kinds=np.array([names.index(every[i]["kind"]) for i in fit], np.int8),
        names=np.array(names),
        held=sum(i < len(held) for i in fit),
    )


def main(
    data: Annotated[Path, typer.Option(help="Folder with books/, gsm8k/ and tatoeba/.")],
    count: Annotated[int, typer.Option(help="Prompts to make; doubles are left out.")] = 220_000,
    target: Annotated[Path | None, typer.Option(help="SmolLM2-135M-Instruct, a GGUF file.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --target: .npz of ids to write.")] = None,
) -> None:
    """Write prompts as JSON lines to stdout, or their ids to a file."""
    made = prompts(count, sources(data))
    if target is not None and out is not None:
        from transformers import AutoTokenizer

        save(out, AutoTokenizer.from_pretrained(target.parent, gguf_file=target.name), made)
        return
    for line in made:
        print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
