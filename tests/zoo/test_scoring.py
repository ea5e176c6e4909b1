"""score() and the statistics of the report, on cases worked out by hand."""

from __future__ import annotations

import sys

import pytest

from forerun.zoo import Prompt, prompts, score


def item(family: str, answer: str, **more: object) -> Prompt:
    return Prompt(family, "test", "x", "p", answer, 8, **more)  # type: ignore[arg-type]


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


def test_statistics() -> None:
    from forerun.zoo.evaluate import block_efficiency, bootstrap, wilson

    assert block_efficiency([[True] * 10], 4) == 5  # two rounds of 4 + 1
    assert block_efficiency([[False] * 6], 4) == 1
    assert block_efficiency([[True, False, True, True]], 2) == 2  # (T F) (T T)
    low, high = wilson(50, 100)
    assert low == pytest.approx(0.404, abs=1e-3)
    assert high == pytest.approx(0.596, abs=1e-3)
    low, high = bootstrap(lambda at: sum(at) / len(at), 101)
    assert low < 50 < high
