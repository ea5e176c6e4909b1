"""Generators: deterministic, self-consistent, never in the held-out part."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest

from forerun.zoo import families, long_families, prompts, sources
from recipes.build_prompts import training_prompts
from recipes.recipe import Recipe
from recipes.scoring import final_number, holds
from recipes.tasks import (
    FAMILIES,
    LONG_FAMILIES,
    arithmetic,
    chat,
    digest,
    extraction,
    revision,
    rewriting,
)
from recipes.tasks.base import Example, Pool, split_of

POOL = Pool(
    books={
        "a book": [f"Once upon a time number {i} there was a king who sang." for i in range(80)]
    },
    pairs=[("I like apples.", ("Ich mag Äpfel.", "Ich mag die Äpfel."))],
    sentences=[
        "Tom said that he had lost his hat near the river.",
        "The little dog ran quickly through the garden gate.",
        "Anna wanted to see the old house again before winter.",
    ],
    prose=["It rained.", *[f"On day {i} the old king sang again." for i in range(80)]],
)
GENERATED = ("arithmetic", "extraction", "rewriting", "chat")
EVERY = (*families(), *long_families())
LONG_POOL = Pool(
    books={
        "a book": [
            " ".join([f"Tom had {i} goats, and he took them over the mountain."] * (2 + i % 9))
            for i in range(80)
        ]
    }
)


def draw(family: str, count: int, seed: int = 3, split: str = "train") -> list[Example]:
    rng = random.Random(seed)
    module, pool = (FAMILIES.get(family), POOL) if family in FAMILIES else (None, LONG_POOL)
    return [(module or LONG_FAMILIES[family]).sample(rng, split, pool) for _ in range(count)]


def test_registry_and_prompt_files_name_the_same_families() -> None:
    assert tuple(FAMILIES) == families()
    assert tuple(LONG_FAMILIES) == long_families()


@pytest.mark.parametrize("family", EVERY)
def test_the_seed_decides(family: str) -> None:
    assert draw(family, 20) == draw(family, 20)
    if family != "translation":
        assert draw(family, 20) != draw(family, 20, seed=4)


@pytest.mark.parametrize("family", EVERY)
def test_prompt_and_answer_meet_at_white_space(family: str) -> None:
    for example in draw(family, 50):
        assert example.prompt == example.prompt.rstrip()
        assert example.answer[0].isspace()
        assert example.answer == example.answer.rstrip()


def test_arithmetic_steps_and_answers_are_right() -> None:
    for split in ("train", "test"):
        for example in draw("arithmetic", 300, split=split):
            steps = re.findall(r"(\d+) ([-+*/]) (\d+)(?: \(.+?\))? = (\d+)\.", example.answer)
            assert (example.level == "easy" and len(steps) in (1, 2)) or len(steps) in (3, 4)
            last = None
            for left, sign, right, result in steps:
                a, b = int(left), int(right)
                value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
                assert value == int(result) >= 0
                assert sign != "/" or a % b == 0
                assert last is None or last == a
                last = value
            assert final_number(example.answer) == last


@pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
def test_the_columns_of_a_sum_are_right_and_give_its_result(sign: str) -> None:
    rng = random.Random(2)
    for _ in range(300):
        left, right = rng.randint(0, 300), rng.randint(0, 99)
        if sign == "-":
            left = max(left, right)
        if sign in "*/":
            right = rng.randint(2, 9)
        if sign == "/":
            left *= right
        text = arithmetic.worked(left, sign, right)
        value = arithmetic.result(left, sign, right)
        assert text.endswith(f" = {value}.")
        if "(" not in text:
            assert text == f"{left} {sign} {right} = {value}."
            assert max(left, right) <= 12 or (sign == "/" and value <= 10)
            continue
        columns = text[text.index("(") + 1 : text.index(")")].split(", ")
        for column in columns:
            asked, answer = column.split(" = ")
            if sign == "/":
                top, bottom = map(int, asked.split(" / "))
                quotient, _, rest = answer.partition(" rest ")
                assert top == int(quotient) * bottom + int(rest or 0)
            else:
                assert eval(asked) == int(answer)
        results = [column.split(" = ")[1] for column in columns]
        if sign == "/":
            assert int("".join(r.split(" ")[0] for r in results)) == value
        else:
            digits = [r[-1] for r in results[:-1]]
            assert int(results[-1] + "".join(reversed(digits))) == value


def test_arithmetic_numbers_are_all_in_the_text() -> None:
    for example in draw("arithmetic", 200):
        given = set(re.findall(r"\d+", example.prompt)) | {"2"}  # "doubles"
        results = set()
        steps = re.findall(r"(\d+) [-+*/] (\d+)(?: \(.+?\))? = (\d+)\.", example.answer)
        assert steps
        for left, right, result in steps:
            assert left in given | results
            assert right in given
            results.add(result)


def test_extraction_answers_are_copied_from_the_passage() -> None:
    glue = {"has", "lived", "in", "is", "It", "of", "was", "on", "the", "The", "belongs", "to"}
    for example in draw("extraction", 300):
        passage = example.prompt.splitlines()[0]
        answer = example.answer.strip()
        words = set(re.findall(r"\w+", passage)) | glue | {"works", "as", "near", "a"}
        assert answer in passage or set(re.findall(r"\w+", answer)) <= words


def test_extraction_questions_have_one_answer() -> None:
    for example in draw("extraction", 300):
        passage, question = example.prompt.splitlines()[:2]
        for name in re.findall(r"\b[A-Z]\w+", question)[2:]:
            assert len(re.findall(rf"\b{name}\b", passage)) == 1


def test_rewriting_references_follow_from_the_instruction() -> None:
    for example in draw("rewriting", 200):
        instruction, text, _ = example.prompt.splitlines()
        change = rewriting.apply(instruction.removeprefix("Rewrite: "), text.removeprefix("Text: "))
        assert example.answer == f" {change}"


def test_rewriting_changes_whole_words_only() -> None:
    assert rewriting.replace_word("cat catches cat", "cat", "dog") == "dog catches dog"
    assert rewriting.he_to_she("He lost his hat; they saw him there.") == (
        "She lost her hat; they saw her there."
    )
    with pytest.raises(ValueError, match="unknown instruction"):
        rewriting.apply("sing it.", "text")


def test_chat_questions_are_split_once_and_for_all() -> None:
    asked = {split: {q for q, _ in chat.questions(split)} for split in ("train", "val", "test")}
    assert not asked["train"] & (asked["val"] | asked["test"])
    assert not asked["val"] & asked["test"]
    taught = {answer for _, answer in chat.questions("train")}
    known = sum(answer in taught for _, answer in chat.questions("test"))
    assert known / len(chat.questions("test")) > 0.95


@pytest.mark.parametrize("family", GENERATED)
def test_training_text_never_contains_a_shipped_prompt(family: str) -> None:
    held_out = {p.prompt for split in ("val", "test") for p in prompts(family, split)}
    assert not held_out & {example.prompt for example in draw(family, 2000)}
    if family in ("arithmetic", "extraction", "rewriting"):
        for split in ("val", "test"):
            assert {split_of(p.prompt) for p in prompts(family, split)} == {split}


def test_chat_training_never_contains_a_held_out_question() -> None:
    held_out = {q for split in ("val", "test") for q, _ in chat.questions(split)}
    turns = [
        line.removeprefix("User: ")
        for example in draw("chat", 2000)
        for line in example.prompt.splitlines()
        if line.startswith("User: ")
    ]
    assert not any(turn.endswith(question) for turn in set(turns) for question in held_out)


def test_extraction_passages_have_distractors() -> None:
    assert all(
        len(extraction.generate(random.Random(i)).prompt.split(". ")) >= 3 for i in range(50)
    )


def test_tales_hold_together_and_name_what_was_asked_for() -> None:
    examples = draw("tales", 200)
    answers = [example.answer for example in examples]
    assert all(map(holds, answers, answers))
    for example in examples:
        asked = re.match(r"Tell a tale of (.+), the (.+) and (.+)\.\nTale:$", example.prompt)
        assert asked
        for part in asked.groups():
            for word in re.findall(r"\w+", part.replace("the ", "")):
                assert word in example.answer
        assert 70 <= len(example.answer.split()) <= 330


def test_tours_are_decided_by_their_prompt() -> None:
    made = {}
    for example in draw("tours", 3000):
        assert made.setdefault(example.prompt, example.answer) == example.answer
    assert len(made) > 2000
    assert min(len(answer.split()) for answer in made.values()) >= 20


def test_tours_never_ask_a_held_out_chat_question() -> None:
    held_out = {q for split in ("val", "test") for q, _ in chat.questions(split)}
    for example in draw("tours", 2000):
        text = example.prompt + example.answer
        assert not any(question in text for question in held_out if len(question) > 12)


def test_revisions_follow_from_their_instructions() -> None:
    for example in draw("revision", 50):
        instructions, text, _ = example.prompt.splitlines()
        result = text.removeprefix("Text: ")
        assert revision.LENGTHS[0] <= len(result) <= revision.LENGTHS[1]
        changes = re.findall(r'(?:[^".]|"[^"]*")+\.', instructions.removeprefix("Rewrite: "))
        assert 1 <= len(changes) <= 3
        for change in changes:
            result = rewriting.apply(change.strip(), result)
        assert example.answer == f" {result}"


def test_a_digest_says_every_fact_once_in_order_and_nothing_else() -> None:
    counts, others = set(), set()
    for split in ("train", "test"):
        for i in range(300):
            example = digest.sample(random.Random(i), split, POOL)
            assert split_of(example.prompt) == split
            facts = digest.facts(example.prompt)
            assert example.answer == "; ".join(map(digest.condensed, facts)) + "."
            counts.add((split, len(facts)))
            others.add((split, example.prompt.count("king")))
            assert "rained" not in example.prompt  # too short
    assert {n for split, n in counts if split == "test"} == {2, 3, 4}
    assert {n for split, n in others if split == "test"} == {3, 4, 5, 6}
    assert ("train", 1) in counts
    assert ("train", 0) in others


def test_the_facts_of_a_digest_are_those_of_people() -> None:
    for i in range(200):
        facts = [sentence for sentence, _ in extraction.person_facts(random.Random(i), 4)]
        assert digest.facts(" It rained. ".join(facts)) == facts


def test_passages_for_digests_are_held_out() -> None:
    for split, count in (("val", 100), ("test", 250)):
        items = sources(split, family="digest")
        assert len({p.prompt for p in items}) == len(items) == count
        assert {split_of(p.prompt) for p in items} == {split}
        for p in items:
            assert p.answer == "; ".join(map(digest.condensed, digest.facts(p.prompt))) + "."


def test_training_prompts_are_of_every_family_and_the_seed_decides() -> None:
    round_of = 2 + len(Recipe().task_weights)

    def first(seed: int) -> list[tuple[str, Example, int]]:
        return list(islice(training_prompts(POOL, seed), 3 * round_of))

    names = [name for name, _, _ in first(3)]
    assert names[:round_of] == names[round_of : 2 * round_of]
    assert set(names) == set(families())
    assert all(1 <= most <= 96 for _, _, most in first(3))
    assert first(3) == first(3) != first(4)
    more = [name for name, _, _ in islice(training_prompts(POOL, 3, tasks=4), 22)]
    assert {more.count(name) for name in families()} == {2, 4}
