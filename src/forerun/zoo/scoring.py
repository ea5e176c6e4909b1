"""Scores outputs of the pair (or of any model) on the shipped prompts."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.zoo.promptset import Prompt
from forerun.zoo.tasks import FAMILIES, LONG_FAMILIES
from forerun.zoo.tasks.translation import bleu

_ALL = {**FAMILIES, **LONG_FAMILIES}


def verdicts(family: str, prompts: Sequence[Prompt], outputs: Sequence[str]) -> list[bool]:
    """Per prompt: is the output right? For the families that are scored right or wrong."""
    return list(_ALL[family].matches([p.answer for p in prompts], outputs))


def score(family: str, prompts: Sequence[Prompt], outputs: Sequence[str]) -> dict[str, float]:
    """Metrics of the outputs (continuations without the prompt, in the order of ``prompts``).

    All: ``n``. translation: ``bleu`` in percent. arithmetic: ``accuracy`` and one
    ``accuracy_<level>`` per level. stories: ``repetition``, the share of 4-grams of words that
    occurred before in the same output. tales: ``holds``, the share that hold together as a tale.
    The others: ``exact_match``. Shares are in [0, 1].
    """
    if len(prompts) != len(outputs):
        raise ValueError(f"{len(prompts)} prompts but {len(outputs)} outputs")
    if family not in _ALL:
        raise ValueError(f"unknown family {family!r}: one of {', '.join(_ALL)}")
    if not prompts:
        raise ValueError("nothing to score: no prompts")
    result = {"n": float(len(prompts))}
    if family == "translation":
        references = [p.references or (p.answer.strip(),) for p in prompts]
        return result | {"bleu": bleu(references, list(outputs))}
    if family == "stories":
        return result | {"repetition": sum(map(_repetition, outputs)) / len(outputs)}
    right = verdicts(family, prompts, outputs)
    if family == "tales":
        return result | {"holds": sum(right) / len(right)}
    if family != "arithmetic":
        return result | {"exact_match": sum(right) / len(right)}
    result["accuracy"] = sum(right) / len(right)
    for level in sorted({p.level for p in prompts if p.level}):
        at = [ok for p, ok in zip(prompts, right, strict=True) if p.level == level]
        result[f"accuracy_{level}"] = sum(at) / len(at)
    return result


def _repetition(text: str) -> float:
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
