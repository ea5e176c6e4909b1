"""JSON schemas, regular expressions, choices and grammars, on the shipped pair."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import forerun
from forerun.engine.results import Origin
from forerun.errors import SettingError

pytest.importorskip("llguidance", reason="needs the extra: pip install 'forerun[grammar]'")

from forerun.grammar import ITEMS, Grammar, Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> forerun.Model:
    return forerun.load()


@pytest.fixture(scope="module")
def grammars(model: forerun.Model) -> Grammars:
    return Grammars.of(model)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"controller": "fixed(3)", "seed": 1, "temperature": 0.7},
    ],
    ids=["greedy", "sampled", "fixed"],
)
def test_json_is_valid_and_much_of_it_is_forced(
    model: forerun.Model, grammars: Grammars, how: dict[str, Any]
) -> None:
    done = model.generate("A person:", max_new_tokens=60, constraint=grammars.json(SCHEMA), **how)
    assert done.finish_reason == "eos"
    person = json.loads(done.text)
    assert set(person) == {"name", "age", "colour"}
    assert person["colour"] in ("red", "green", "blue")
    origins = [p.origin for p in done.pieces]
    assert origins.count(Origin.GRAMMAR) >= 10
    if not how:
        plain = model.generate(
            "A person:", max_new_tokens=60, constraint=grammars.json(SCHEMA), plain=True
        )
        assert plain.tokens == done.tokens
        assert done.stats.rounds < plain.stats.rounds


def test_a_target_that_drafts_writes_the_same(model: forerun.Model, grammars: Grammars) -> None:
    other = forerun.load(draft="specbound")
    one, two = (
        m.generate("A person:", max_new_tokens=60, constraint=grammars.json(SCHEMA))
        for m in (model, other)
    )
    assert one.tokens == two.tokens
    assert Origin.GRAMMAR in [p.origin for p in two.pieces]


def test_regex_choice_and_lark(model: forerun.Model, grammars: Grammars) -> None:
    lark = 'start: "(" WORD (" " WORD)* ")"\nWORD: /[a-z]{1,6}/'
    constraints = [
        grammars.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        grammars.choice(["yes", "no", 'don\'t "k"']),
        grammars.lark(lark),
        grammars.json(),
    ]
    samplings = [
        forerun.Sampling(constraint=c, max_new_tokens=40, temperature=1.0, seed=2)
        for c in constraints
    ]
    done = model.generate(["Answer:"] * 4, sampling=samplings)
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", done[0].text)
    assert done[1].text in ("yes", "no", 'don\'t "k"')
    assert re.match(r"\([a-z]{1,6}", done[2].text)
    assert done[3].text.startswith("{")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda g: g.json({"type": "objet"}), "json constraint"),
        (lambda g: g.json("{"), "cannot be read"),
        (lambda g: g.regex("(ab"), "regex constraint"),
        (lambda g: g.choice([]), "none of them empty"),
        (lambda g: g.lark("begin: /a/"), "lark constraint"),
    ],
)
def test_what_is_no_constraint_is_refused(grammars: Grammars, make: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make(grammars)


def test_a_constraint_serves_many_requests(model: forerun.Model, grammars: Grammars) -> None:
    constraint = grammars.choice(["left", "right"])
    assert isinstance(constraint, Grammar)
    done = model.generate(["Go"] * 5, constraint=constraint, temperature=2.0, max_new_tokens=9)
    assert {c.text for c in done} <= {"left", "right"}
    with pytest.raises(SettingError, match="end-of-text"):
        Grammars(model.tokenizer, model.target.vocab_size, [])


@pytest.mark.parametrize(
    "rules", ["s: s s s | s s | /[a-z ]/", "s: s s | /[a-z ]/", "s: s s s s | s s s | s s | /./"]
)
def test_an_ambiguous_grammar_ends_after_so_many_items(grammars: Grammars, rules: str) -> None:
    matcher = grammars.lark(f"start: s\n{rules}").begin()

    def walk() -> None:
        for n in range(100):
            allowed = matcher.allowed().nonzero()[0]
            matcher.advance(int(allowed[61 * n % len(allowed)]))

    with pytest.raises(
        SettingError, match=f"constraint cannot be followed: .*Too many items .limit {ITEMS}"
    ):
        walk()


def test_grammars_of_many_rules_stay_within_them(grammars: Grammars) -> None:
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(300)}, "type": "object"}
    words = 'start: line ("\\n" line)*\nline: char+\nchar: /[a-zA-Z0-9 .,]/'
    for constraint in (grammars.json(wide), grammars.lark(words)):
        matcher, wrote = constraint.begin(), 0
        while wrote < 80 and (allowed := matcher.allowed().nonzero()[0]).size:
            assert matcher.advance(int(allowed[-1]))
            wrote += 1
        assert wrote > 3
