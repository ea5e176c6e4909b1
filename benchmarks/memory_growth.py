"""Tokens a round of the drafter `memory` over 100 chats of one person's work, by counting: the
table that ships alone, and with the one that grows from chat to chat.

``python -m benchmarks.memory_growth MODEL.gguf [--chats 100] [--tokens 48]`` writes the answers
(greedy, plain: what a draft is compared with changes no text), counts, and writes
``results/memory-growth.json``. Ten chats a day: functions of one program, their tests and comments,
mails, minutes, records, translations, and a question of some days ago asked again. No clock: busy
machines count as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import forerun
from benchmarks.common import chat, provenance, save, table
from forerun.drafters.base import Proposal, Step
from forerun.drafters.memory import TABLES, fingerprint
from forerun.drafters.ngrams import NGrams
from forerun.drafters.suffix import SuffixDrafter

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


def answers(model: forerun.Model, chats: int, tokens: int) -> Iterator[tuple[list[int], int]]:
    """Ids of a chat's prompt and text, and how many are the prompt's."""
    for text in islice(chain.from_iterable(map(questions, count())), chats):
        ids = chat(model.tokenizer, text)
        made = model.generate(ids, plain=True, max_new_tokens=tokens)
        yield [*ids, *made.tokens], len(ids)


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
    """Write the answers, count, and save the curve."""
    model = forerun.load(options.model, "memory", runtime="openvino")
    tokenizer = fingerprint(model.tokenizer)
    shipped = [NGrams.load(path, tokenizer) for path in TABLES.glob(f"{tokenizer}.*")]
    growing = NGrams()
    alone, grown = (SuffixDrafter(16, 0.05, [*shipped, *more]) for more in ([], [growing]))
    days: list[list[int]] = []  # tokens, rounds with the table that ships, and with both
    for i, (ids, prompt) in enumerate(answers(model, options.chats, options.tokens)):
        counts = max(len(ids) - prompt - 1, 0), *(rounds(d, ids, prompt) for d in (alone, grown))
        growing.learn(ids, prompt)
        if i % DAY == 0:
            days.append([0, 0, 0])
        days[-1] = [a + b for a, b in zip(days[-1], counts, strict=True)]
    named = {f"{DAY * i + 1}–{min(DAY * (i + 1), options.chats)}": d for i, d in enumerate(days)}
    named["all"] = [sum(column) for column in zip(*days, strict=True)]
    rows = [
        [name, str(n), f"{n / old:.2f}", f"{n / new:.2f}", f"{old / new:.3f}"]
        for name, (n, old, new) in named.items()
    ]
    header = ["chats", "tokens", "table that ships", "grown", "grown over it"]
    made = provenance(model, chats=options.chats, tokens=options.tokens)
    text = f"Tokens a round at {DRAFTED} drafted.\n\n{table(header, rows)}"
    save("memory-growth", made, named, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=48)
    main(parser.parse_args())
