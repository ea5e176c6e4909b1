"""Generated tales with a plot that holds together: long outputs a small model can learn to write.

The prompt names who and what must occur; names, things, places and debts stay consistent to the
end. Three plots: a chain of exchanges, a search from place to place, three strangers helped.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from recipes.tasks import words
from recipes.tasks.base import Example, Pool, article, draw, pick_distinct

NAME = "tales"
MAX_NEW_TOKENS = 512

_ADJECTIVES = [*words.COLORS[:4], "silver", "golden", "old", "wooden", "shiny", "little", "broken"]
_TREATS = (
    "a loaf of bread",
    "a jug of milk",
    "a bag of corn",
    "a pot of honey",
    "a warm blanket",
    "a new rope",
    "a basket of apples",
    "a bundle of wood",
    "a piece of cheese",
    "a sharp knife",
    "a pair of shoes",
    "a bucket of water",
    "a sack of flour",
    "a dozen eggs",
    "a ball of wool",
    "a bunch of flowers",
)
_WEATHER = (
    "The sun was shining.",
    "It was a cold and windy day.",
    "It had rained all night.",
    "The snow lay deep on the fields.",
    "A thick mist hung over the road.",
    "The birds were singing in the trees.",
)
_ENDS = (
    "And they were friends for ever after.",
    "And if they are not asleep, they are still talking.",
    "From that day on {name} was never afraid again.",
    "That night {name} slept very well.",
    "And so the tale ends.",
    "{name} never forgot that day.",
)


class _Cast:
    """Who and what a tale is about."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        boy = rng.random() < 0.5
        self.name = rng.choice(words.BOYS if boy else words.GIRLS)
        self.he, self.him, self.his = ("he", "him", "his") if boy else ("she", "her", "her")
        self.job = rng.choice(words.JOBS)
        self.town = rng.choice(words.TOWNS)
        self.animal = rng.choice(words.ANIMALS)
        self.thing = f"{rng.choice(_ADJECTIVES)} {rng.choice(words.OBJECTS)}"
        self.a_thing = article(self.thing)

    def one_of(self, *texts: str) -> str:
        return self.rng.choice(texts).format(**{k: v for k, v in vars(self).items() if k != "rng"})


def _opening(c: _Cast) -> list[str]:
    return [
        c.one_of(
            "Once upon a time there was a {job} named {name} who lived in {town}.",
            "In the town of {town} there lived a {job} whose name was {name}.",
            "There was once a {job} called {name}, and {his} house stood in {town}.",
        ),
        c.one_of(*_WEATHER),
    ]


def _ending(c: _Cast) -> str:
    return c.one_of(*_ENDS)


def _exchange(c: _Cast) -> list[str]:
    """To get the thing, one gift must be fetched for another; then all debts are paid."""
    count = c.rng.randint(2, 4)
    owners = [
        f"the {kind}" for kind in pick_distinct(c.rng, [j for j in words.JOBS if j != c.job], count)
    ]
    gifts = pick_distinct(c.rng, _TREATS, count)
    text = _opening(c)
    text.append(
        c.one_of(
            "{name} wanted to have {a_thing} for {his} {animal}.",
            "{name} loved {his} {animal} and wished to give it {a_thing}.",
        )
    )
    wanted = f"the {c.thing}"
    for place, (owner, gift) in enumerate(zip(owners, gifts, strict=True)):
        text.append(
            f"So {c.name} went to {owner}." if place else f"{c.name} went to {owner} first."
        )
        text.append(f'"Please give me {wanted}," said {c.name}.')
        text.append(
            c.rng.choice(
                (
                    f'"I will give you {wanted} if you bring me {gift}," said {owner}.',
                    f'"First bring me {gift}," said {owner}, "and then you shall have {wanted}."',
                )
            )
        )
        wanted = gift
    text.append(f"At last {c.name} found {wanted} at home, for {c.his} mother had kept it.")
    for place in reversed(range(count)):
        got = gifts[place - 1] if place else f"the {c.thing}"
        owner, gift = owners[place], gifts[place]
        text.append(f"{c.name} gave {gift} to {owner}, and {owner} gave {c.him} {got}.")
    text.append(f"So {c.name} went home to {c.town} with the {c.thing}.")
    return [*text, _ending(c)]


def _search(c: _Cast) -> list[str]:
    """The thing is lost; the animal helps to look for it in several places."""
    places = pick_distinct(c.rng, words.PLACES, c.rng.randint(3, 5))
    others = pick_distinct(c.rng, words.OBJECTS, len(places) - 1)
    text = _opening(c)
    text.append(f"{c.name} had {c.a_thing} and {article(c.animal)}.")
    text.append(f"One morning the {c.thing} was gone.")
    text.append(
        c.rng.choice(
            (
                f'"Where is my {c.thing}?" cried {c.name}.',
                f'"Somebody has taken my {c.thing}!" said {c.name}, and {c.he} began to weep.',
            )
        )
    )
    text.append(f'"Do not weep," said the {c.animal}. "We will look for it together."')
    orders = ("First", "Then", "After that", "Next")
    for order, place, noun in zip(orders, places, others, strict=False):
        other = f"{c.rng.choice(words.SIZES)} {noun}"
        text.append(f"{order} they looked {place}.")
        text.append(
            c.rng.choice(
                (
                    f"There they saw only {article(other)}.",
                    f"But there was nothing there except {article(other)}.",
                )
            )
        )
    text.append(f"At last they looked {places[-1]}, and there lay the {c.thing}!")
    text.append(f'"Thank you, dear {c.animal}," said {c.name}.')
    text.append(f"{c.name} took the {c.thing} and put it {places[0]}, where it is to this day.")
    return [*text, _ending(c)]


def _strangers(c: _Cast) -> list[str]:
    """Three animals are helped on the way, and each of them helps in turn."""
    one, two = pick_distinct(c.rng, [a for a in words.ANIMALS if a != c.animal], 2)
    animals = (one, two, c.animal)
    treats = pick_distinct(c.rng, _TREATS, 3)
    text = _opening(c)
    text.append(f'One day the king said: "Whoever brings me the {c.thing} shall be rich."')
    text.append(
        f"So {c.name} took {treats[0]}, {treats[1]} and {treats[2]} and went out into the world."
    )
    for order, animal, treat in zip(("first", "second", "third"), animals, treats, strict=True):
        text.append(f"On the {order} day {c.name} met {article(animal)}.")
        text.append(f'"I am hungry and cold," said the {animal}. "What can you give me?"')
        text.append(f"{c.name} gave the {animal} {treat}.")
        text.append('"Call me when you need me," said the ' + animal + ".")
    text.append(f"On the fourth day {c.name} came to a high wall, and could not go on.")
    deeds = ("showed the way to the gate", "opened the gate", f"found the {c.thing} behind it")
    text.append(f"{c.name} called, and all three came.")
    for animal, deed in zip(animals, deeds, strict=True):
        text.append(f"The {animal} {deed}.")
    text.append(f"{c.name} brought the {c.thing} to the king and became rich.")
    text.append(f"{c.name} shared everything with the {one}, the {two} and the {c.animal}.")
    return [*text, _ending(c)]


_PLOTS: tuple[Callable[[_Cast], list[str]], ...] = (_exchange, _search, _strangers)


def generate(rng: random.Random) -> Example:
    """One tale; a paragraph ends after every three to five sentences."""
    cast = _Cast(rng)
    sentences = rng.choice(_PLOTS)(cast)
    paragraphs: list[str] = []
    at = 0
    while at < len(sentences):
        size = rng.randint(3, 5)
        paragraphs.append(" ".join(sentences[at : at + size]))
        at += size
    prompt = cast.one_of(
        "Tell a tale of {name} the {job}, the {animal} and the {thing}.\nTale:",
        "Tell a tale of the {thing}, the {animal} and {name} the {job}.\nTale:",
    )
    return Example(prompt=prompt, answer=" " + "\n\n".join(paragraphs))


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A tale of ``split``."""
    return draw(lambda: generate(rng), split)
