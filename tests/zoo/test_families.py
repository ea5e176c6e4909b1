"""Generators: deterministic, self-consistent, never in the held-out part."""

from __future__ import annotations

import random
import re

import pytest

from forerun.zoo import families, prompts
from forerun.zoo.tasks import FAMILIES, arithmetic, chat, extraction, rewriting
from forerun.zoo.tasks.base import Example, Pool, split_of

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
)
GENERATED = ("arithmetic", "extraction", "rewriting", "chat")


def draw(family: str, count: int, seed: int = 3, split: str = "train") -> list[Example]:
    rng = random.Random(seed)
    return [FAMILIES[family].sample(rng, split, POOL) for _ in range(count)]


def test_registry_and_prompt_files_name_the_same_families() -> None:
    assert tuple(FAMILIES) == families()


@pytest.mark.parametrize("family", families())
def test_the_seed_decides(family: str) -> None:
    assert draw(family, 20) == draw(family, 20)
    if family != "translation":
        assert draw(family, 20) != draw(family, 20, seed=4)


@pytest.mark.parametrize("family", families())
def test_prompt_and_answer_meet_at_white_space(family: str) -> None:
    for example in draw(family, 50):
        assert example.prompt == example.prompt.rstrip()
        assert example.answer[0].isspace()
        assert example.answer == example.answer.rstrip()


def test_arithmetic_steps_and_answers_are_right() -> None:
    for split in ("train", "test"):
        for example in draw("arithmetic", 300, split=split):
            steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", example.answer)
            assert (example.level == "easy" and len(steps) in (1, 2)) or len(steps) in (3, 4)
            last = None
            for left, sign, right, result in steps:
                a, b = int(left), int(right)
                value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
                assert value == int(result) >= 0
                assert sign != "/" or a % b == 0
                assert last is None or last == a
                last = value
            assert arithmetic.final_number(example.answer) == last


def test_arithmetic_numbers_are_all_in_the_text() -> None:
    for example in draw("arithmetic", 200):
        given = set(re.findall(r"\d+", example.prompt)) | {"2"}  # "doubles"
        results = set()
        for left, right, result in re.findall(r"(\d+) [-+*/] (\d+) = (\d+)", example.answer):
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
