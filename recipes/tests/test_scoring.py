"""score() on cases worked out by hand."""

from __future__ import annotations

import re
import sys

import pytest

from forerun.zoo import ShippedPrompt, prompts
from recipes.scoring import BOYS, GIRLS, holds, score


def item(family: str, answer: str, **more: object) -> ShippedPrompt:
    return ShippedPrompt(family, "test", "x", "p", answer, 8, **more)  # type: ignore[arg-type]


def test_exact_match_ignores_white_space_only() -> None:
    items = [item("chat", " A dog has four legs."), item("chat", " Yes.")]
    assert score("chat", items, ["A dog  has four legs. ", " yes."]) == {"n": 2, "exact_match": 0.5}


def test_arithmetic_counts_the_final_number_per_level() -> None:
    items = [
        item("arithmetic", " 2 + 3 = 5. The answer is 5.", level="easy"),
        item("arithmetic", " 2 + 4 = 6. The answer is 6.", level="easy"),
        item("arithmetic", " 9 * 9 = 81. The answer is 81.", level="hard"),
    ]
    outputs = [" 3 + 2 = 5. The answer is 5.", " The answer is 7.", " I do not know."]
    result = score("arithmetic", items, outputs)
    assert result == {
        "n": 3,
        "accuracy": pytest.approx(1 / 3),
        "accuracy_easy": 0.5,
        "accuracy_hard": 0,
    }


def test_bleu_uses_every_reference() -> None:
    items = [
        item("translation", " a b c d e", references=("a b c d e", "f g h i j")),
        item("translation", " k l m n o", references=("k l m n o",)),
    ]
    assert score("translation", items, [" f g h i j", " k l m n o"])["bleu"] == pytest.approx(100)
    assert score("translation", items, ["x", "y"])["bleu"] < 1


def test_bleu_without_sacrebleu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError, match=r"forerun\[eval\]"):
        score("translation", [item("translation", " a")], ["a"])


def test_story_repetition() -> None:
    items = [item("stories", " x")]
    assert score("stories", items, ["a b c d e f"])["repetition"] == 0
    assert score("stories", items, ["a b c d a b c d"])["repetition"] == pytest.approx(0.2)


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="1 prompts but 0 outputs"):
        score("chat", [item("chat", " a")], [])
    with pytest.raises(ValueError, match="unknown family"):
        score("poems", [], [])
    with pytest.raises(ValueError, match="no prompts"):
        score("chat", [], [])


METRICS = {"arithmetic": "accuracy", "tales": "holds"}


@pytest.mark.parametrize(
    "family", ["arithmetic", "extraction", "rewriting", "chat", "tales", "tours", "revision"]
)
def test_the_reference_scores_one(family: str) -> None:
    items = prompts(family)
    result = score(family, items, [p.answer for p in items])
    assert result[METRICS.get(family, "exact_match")] == 1


def test_tales_that_do_not_hold_together_are_seen() -> None:
    good = prompts("tales", limit=1)[0].answer
    first = good.split(". ")[0]
    (name,) = set(re.findall(r"[A-Z]\w+", good)) & {*BOYS, *GIRLS}
    other = next(n for n in BOYS if n != name)
    for bad in (
        f"{good}{first}.",  # twice
        good[: len(good) // 2].rsplit(" ", 1)[0],  # cut
        good.replace(name, other, 1),  # another hero
        "The end.",
    ):
        assert not holds(good, bad)
