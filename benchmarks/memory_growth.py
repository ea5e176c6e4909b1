"""Tokens a round of the drafter `memory` over 100 chats of one person's work, by counting: the
table that ships alone, and with the one that grows from chat to chat.

``python -m benchmarks.memory_growth MODEL.gguf [--chats 100] [--tokens 80] [--save FILE]`` writes
the answers (greedy, plain: what a draft is compared with changes no text) and counts;
``--texts FILE`` counts on answers that were saved. Ten chats a day: functions of one program,
their tests and comments, mails, minutes, records, translations, and a question of some days ago
asked again. No clock: busy machines count as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forerun
from forerun.drafters.base import Proposal, Step
from forerun.drafters.memory import TABLES, fingerprint
from forerun.drafters.ngrams import NGrams
from forerun.drafters.suffix import SuffixDrafter
from forerun.runtime.load import load_tokenizer

DRAFTED = 4
DAY = 10
"""Chats."""
ITEMS = ("invoice", "order", "customer", "parcel", "supplier", "price", "warehouse", "return",
         "payment", "contract")  # fmt: skip
PEOPLE = ("Anna", "Mr Okafor", "the accountants", "Dr Lindqvist", "the night shift", "Maria",
          "the landlord", "our supplier", "the whole team", "Mrs Tanaka")  # fmt: skip
MATTERS = ("the late delivery", "the broken scanner", "the new shelf plan", "the holiday rota",
           "the wrong address", "the fire drill", "the unpaid bill", "the team lunch",
           "the stock count", "the training day")  # fmt: skip


def questions(day: int) -> Iterator[str]:
    """The ten of a day."""
    item, other = ITEMS[day % 10], ITEMS[(day + 3) % 10]
    person, matter = PEOPLE[day % 10], MATTERS[(3 * day) % 10]
    minutes = (
        f"Present: Anna, Maria, Tom. {matter.capitalize()} was discussed; Tom reports by Friday. "
        f"The {item} list has {17 + 6 * day} entries, {day + 2} of them wrong. Next meeting Monday."
    )
    yield f"Write a Python function load_{item}s(path) that reads a CSV file of {item}s."
    yield f"Write a Python function find_{item}(items, number) that returns the {item} or None."
    yield f"Write a pytest test for find_{item}(items, number)."
    yield f"Write a docstring for def merge_{item}s(old, new): return {{**old, **new}}"
    yield f"Write a short polite mail to {person} about {matter}."
    yield f"Summarise the minutes in two sentences: {minutes}"
    yield f"Write a JSON list of three records of a {item} with id, date and amount."
    yield f"Translate to French: Please send the {item} and the {other} to {person} by Friday."
    yield f"List five things to check before a {item} is sent to {person}."
    before = (day * 7) % DAY if day else 0
    yield [*questions(max(day - 2, 0))][before] if day and before < 9 else f"What is a {item}?"


class Greedy:
    """The least that a drafter is lent: its surest token, up to a limit."""

    clock = staticmethod(time.perf_counter)
    greedy: frozenset[str] = frozenset()

    def choose(self, step: Step, texts: Any, active: Any, proposal: Proposal) -> list[int]:
        for row in active:
            (token,) = step.best.tokens[row]
            proposal.tokens[row].append(token)
            texts[row].append(token)
        return list(active)

    def settle(self, active: Any, most: Any, proposal: Proposal, free: bool = False) -> list[int]:
        return [row for row in active if len(proposal.tokens[row]) < most[row]]


def answers(model: str, chats: int, tokens: int) -> list[dict[str, Any]]:
    """Prompt and text of each chat, as ids."""
    loaded = forerun.load(model, "memory", runtime="openvino")
    out = []
    for day in range(-(-chats // DAY)):
        for text in questions(day):
            messages = [{"role": "user", "content": text}]
            ids = loaded.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            made = loaded.generate(list(ids), plain=True, max_new_tokens=tokens)
            out.append({"ids": [*ids, *made.tokens], "prompt": len(ids)})
    return out[:chats]


def rounds(drafter: SuffixDrafter, ids: Sequence[int], prompt: int) -> int:
    """Rounds of an answer whose first token is the prompt's pass."""
    drafter.keep([])
    drafter.join([ids[: prompt + 1]], 0)
    at, count = prompt + 1, 0
    while at < len(ids):
        draft = drafter.propose([list(ids[:at])], [DRAFTED], Greedy()).tokens[0]
        kept = next((i for i, x in enumerate(draft) if ids[at + i : at + i + 1] != [x]), len(draft))
        at, count = at + kept + 1, count + 1
    return count


def main(options: argparse.Namespace) -> None:
    """Write or read the answers, and print the curve."""
    if options.texts:
        tokenizer, texts = json.loads(Path(options.texts).read_text())
    else:
        texts = answers(options.model, options.chats, options.tokens)
        tokenizer = fingerprint(load_tokenizer(options.model))
        if options.save:
            Path(options.save).write_text(json.dumps([tokenizer, texts]))
    shipped = [NGrams.load(path, tokenizer) for path in TABLES.glob(f"{tokenizer}.*")]
    growing = NGrams()
    alone, grown = (SuffixDrafter(16, 0.05, [*shipped, *more]) for more in ([], [growing]))
    print("| chats | tokens | table that ships | grown | grown over it |\n|---|---|---|---|---|")
    every = [0, 0, 0]
    for first in range(0, len(texts), DAY):
        counts = [0, 0, 0]
        for text in texts[first : first + DAY]:
            ids, prompt = text["ids"], text["prompt"]
            of_text = (
                max(len(ids) - prompt - 1, 0),
                *(rounds(d, ids, prompt) for d in (alone, grown)),
            )
            counts = [a + b for a, b in zip(counts, of_text, strict=True)]
            growing.learn(ids, prompt)
        every = [a + b for a, b in zip(every, counts, strict=True)]
        _show(f"{first + 1}–{min(first + DAY, len(texts))}", counts)
    _show("all", every)


def _show(name: str, counts: Sequence[int]) -> None:
    tokens, alone, grown = counts
    print(
        f"| {name} | {tokens} | {tokens / alone:.2f} | {tokens / grown:.2f} | {alone / grown:.3f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--texts", metavar="FILE")
    parser.add_argument("--save", metavar="FILE")
    main(parser.parse_args())
