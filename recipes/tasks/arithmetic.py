"""Word problems with worked steps and a final number, in two levels.

``easy``: one or two steps, numbers up to 20. ``hard``: three or four steps, numbers up to 99.
"""

from __future__ import annotations

import random

from recipes.tasks import words
from recipes.tasks.base import Example, Pool, draw

NAME = "arithmetic"
MAX_NEW_TOKENS = 192
LEVELS = ("easy", "hard")

_GAIN = (
    "{name} {buys} {k} more.",
    "Then {name} {finds} {k} more {things}.",
    "A friend gives {name} {k} {things}.",
    "{Pron} gets another {k} {things}.",
)
_LOSE = (
    "{Pron} gives {k} of them to {other}.",
    "Then {name} loses {k} {things}.",
    "{Pron} sells {k} of the {things}.",
    "{other} takes {k} of the {things}.",
)


def result(left: int, sign: str, right: int) -> int:
    """The value of ``left sign right``; division is of whole numbers."""
    values = {"+": left + right, "-": left - right, "*": left * right}
    return left // right if sign == "/" else values[sign]


def worked(left: int, sign: str, right: int) -> str:
    """``left sign right = result.``, with its columns and carries where it is not a known fact.

    >>> worked(47, "+", 36)
    '47 + 36 (7 + 6 = 13, 4 + 3 + 1 = 8) = 83.'
    >>> worked(104, "-", 97)
    '104 - 97 (14 - 7 = 7, 9 - 9 = 0, 0 - 0 = 0) = 7.'
    >>> worked(27, "*", 8)
    '27 * 8 (7 * 8 = 56, 2 * 8 + 5 = 21) = 216.'
    >>> worked(216, "/", 8)
    '216 / 8 (21 / 8 = 2 rest 5, 56 / 8 = 7) = 27.'
    >>> worked(7, "+", 6)
    '7 + 6 = 13.'
    """
    steps = {"+": _columns, "-": _columns, "*": _product, "/": _quotient}[sign](left, sign, right)
    between = f" ({', '.join(steps)})" if steps else ""
    return f"{left} {sign} {right}{between} = {result(left, sign, right)}."


def _columns(left: int, sign: str, right: int) -> list[str]:
    """Column by column from the ones, with the carry or what was borrowed."""
    if max(left, right) < 10:
        return []
    steps, carry = [], 0
    while left or right:
        a, b = left % 10, right % 10
        if sign == "+":
            extra = f" + {carry}" if carry else ""
            steps.append(f"{a} + {b}{extra} = {a + b + carry}")
            carry = (a + b + carry) // 10
        else:
            a, carry = (a - carry + 10, 1) if a - carry < b else (a - carry, 0)
            steps.append(f"{a} - {b} = {a - b}")
        left, right = left // 10, right // 10
    return steps


def _product(left: int, sign: str, right: int) -> list[str]:
    """Digits of ``left`` from the ones, times ``right`` below 10; known up to 12 times 12."""
    if max(left, right) <= 12 or right > 9:
        return []
    steps, carry = [], 0
    while left:
        extra = f" + {carry}" if carry else ""
        value = left % 10 * right + carry
        steps.append(f"{left % 10} * {right}{extra} = {value}")
        left, carry = left // 10, value // 10
    return steps


def _quotient(left: int, sign: str, right: int) -> list[str]:
    """Long division; quotients up to 10 are known."""
    if left <= 10 * right:
        return []
    steps: list[str] = []
    rest = 0
    for digit in str(left):
        rest = 10 * rest + int(digit)
        if rest >= right or steps:
            quotient, left_over = divmod(rest, right)
            over = f" rest {left_over}" if left_over else ""
            steps.append(f"{rest} / {right} = {quotient}{over}")
            rest = left_over
    return steps


class _Story:
    """A problem under construction: sentences of the text and of the solution, and the value."""

    def __init__(self, rng: random.Random, hard: bool) -> None:
        self.rng = rng
        self.hard = hard
        boy = rng.random() < 0.5
        self.name = rng.choice(words.BOYS if boy else words.GIRLS)
        self.pron = "he" if boy else "she"
        self.other = rng.choice([n for n in words.BOYS + words.GIRLS if n != self.name])
        self.things = rng.choice(words.THINGS)
        self.text: list[str] = []
        self.work: list[str] = []
        self.value = 0

    def number(self) -> int:
        return self.rng.randint(11, 99) if self.hard else self.rng.randint(2, 20)

    def step(self, left: int, sign: str, right: int) -> None:
        self.value = result(left, sign, right)
        self.work.append(worked(left, sign, right))

    def say(self, template: str, **numbers: int | str) -> None:
        pron = self.pron.capitalize()
        self.text.append(
            template.format(
                name=self.name,
                other=self.other,
                things=self.things,
                Pron=pron,
                pron=self.pron,
                buys=self.rng.choice(("buys", "gets", "collects")),
                finds=self.rng.choice(("finds", "makes", "wins")),
                **numbers,
            )
        )


def _open_count(s: _Story) -> int:
    s.value = s.number()
    s.say("{name} has {n} {things}.", n=s.value)
    return 0


def _open_boxes(s: _Story) -> int:
    box = s.rng.choice(words.CONTAINERS)
    top = 12 if s.hard else 6
    boxes, inside = s.rng.randint(2, top), s.rng.randint(2, top)
    s.say(
        "{name} has {boxes} {plural} with {inside} {things} in each {box}.",
        boxes=boxes,
        inside=inside,
        box=box,
        plural=words.PLURAL_CONTAINERS[box],
    )
    s.step(boxes, "*", inside)
    return 1


def _open_compare(s: _Story) -> int:
    n, k = s.number(), s.number()
    more = s.rng.random() < 0.5 or n <= k
    kind = "more" if more else "fewer"
    s.say(
        "{other} has {n} {things}. {name} has {k} {kind} {things} than {other}.",
        n=n,
        k=k,
        kind=kind,
    )
    s.step(n, "+" if more else "-", k)
    return 1


def _change(s: _Story) -> None:
    top = 99 if s.hard else 20
    if s.value > 3 and s.rng.random() < 0.5:
        k = s.rng.randint(2, min(s.value - 1, top))
        s.say(s.rng.choice(_LOSE), k=k)
        s.step(s.value, "-", k)
    elif s.value <= 40 and s.rng.random() < 0.2:
        s.say("Then {name} doubles the number of {things}.")
        s.step(s.value, "*", 2)
    else:
        k = s.number()
        s.say(s.rng.choice(_GAIN), k=k)
        s.step(s.value, "+", k)


def _close(s: _Story) -> bool:
    """Ends with sharing or selling when the numbers allow it; True if it used a step."""
    divisors = [d for d in range(2, 11) if s.value % d == 0 and s.value > d]
    if divisors and s.rng.random() < 0.6:
        d = s.rng.choice(divisors)
        s.say(
            "{Pron} shares the {things} equally among {d} children. "
            "How many {things} does each child get?",
            d=d,
        )
        s.step(s.value, "/", d)
        return True
    if 2 <= s.value <= 30:
        d = s.rng.randint(2, 9 if s.hard else 5)
        s.say(
            "{Pron} sells all the {things} for {d} dollars each. How many dollars does {pron} get?",
            d=d,
        )
        s.step(s.value, "*", d)
        return True
    return False


def generate(rng: random.Random, level: str) -> Example:
    """One problem of the given level."""
    hard = level == "hard"
    s = _Story(rng, hard)
    steps = rng.randint(3, 4) if hard else rng.randint(1, 2)
    opening = rng.choice((_open_count, _open_count, _open_boxes, _open_compare))
    done = opening(s)
    closing = rng.random() < 0.3 and steps - done >= 1
    while done < steps - (1 if closing else 0):
        _change(s)
        done += 1
    closed = closing and _close(s)
    if closing and not closed:
        _change(s)
    if not closed:
        ask = ("How many {things} does {name} have?", "How many {things} does {pron} have now?")
        s.say(rng.choice(ask))
    solution = " ".join(s.work)
    return Example(
        prompt=f"Problem: {' '.join(s.text)}\nSolution:",
        answer=f" {solution} The answer is {s.value}.",
        level=level,
    )


def sample(rng: random.Random, split: str, pool: Pool, level: str | None = None) -> Example:
    """A problem of ``split``; levels are equally likely unless one is given."""
    chosen = level or rng.choice(LEVELS)
    return draw(lambda: generate(rng, chosen), split)
