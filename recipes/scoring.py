"""Scores outputs of the pair (or of any model) on the shipped prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from forerun.zoo import ShippedPrompt, families, long_families


def _words(text: str) -> list[str]:
    return text.split()


BOYS = _words(
    "Tom Ben Sam Max Leo Jack Noah Finn Adam Paul Peter Oliver Henry George David Simon Oscar Hugo "
    "Felix Jonas Emil Anton Karl Robert Martin Alfred Arthur Walter Daniel Theo"
)
GIRLS = _words(
    "Anna Mia Emma Lily Lucy Ella Clara Sarah Nora Ida Rose Alice Julia Maria Helen Grace Ruth Eva "
    "Olga Marta Sophie Laura Hanna Greta Paula Dora Betty Jane Kate Molly"
)
"""The names of people in tales."""


def matches(family: str, answer: str, output: str) -> bool:
    """Whether an output is right, in a family that is scored right or wrong.

    arithmetic: its final number is the answer's; tales: see `holds`; else: it is the answer, up to
    white space.
    """
    if family == "arithmetic":
        return final_number(answer) == final_number(output)
    return holds(answer, output) if family == "tales" else answer.split() == output.split()


def verdicts(family: str, prompts: Sequence[ShippedPrompt], outputs: Sequence[str]) -> list[bool]:
    """Whether each output is right; see `matches`."""
    return [matches(family, p.answer, output) for p, output in zip(prompts, outputs, strict=True)]


def score(
    family: str, prompts: Sequence[ShippedPrompt], outputs: Sequence[str]
) -> dict[str, float]:
    """Metrics of the outputs (continuations without the prompt, in the order of ``prompts``).

    All: ``n``. translation: ``bleu`` in percent. arithmetic: ``accuracy`` and one
    ``accuracy_<level>`` per level. stories: ``repetition``, the share of 4-grams of words that
    occurred before in the same output. tales: ``holds``, the share that hold together as a tale.
    The others: ``exact_match``. Shares are in [0, 1].
    """
    if len(prompts) != len(outputs):
        raise ValueError(f"{len(prompts)} prompts but {len(outputs)} outputs")
    known = (*families(), *long_families())
    if family not in known:
        raise ValueError(f"unknown family {family!r}: one of {', '.join(known)}")
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


def final_number(text: str) -> int | None:
    """The number after "The answer is", if any.

    >>> final_number("2 + 3 = 5. The answer is 5.")
    5
    """
    match = re.search(r"The answer is (-?\d+)", text)
    return int(match.group(1)) if match else None


def holds(answer: str, output: str) -> bool:
    """Whether an output holds together as a tale.

    It has at least eight sentences, none of them twice, ends with one, and names no person but
    the one whom the tale is about.
    """
    sentences = re.split(r"(?<=[.!?])\"?\s+", output.strip())
    plots = [s for s in sentences if not s.endswith("?")]
    return (
        len(plots) >= 8
        and len(set(plots)) == len(plots)
        and output.rstrip().endswith((".", "!"))
        and _people(output) == _people(answer)
    )


def _people(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Z][a-z]+\b", text)) & {*BOYS, *GIRLS}


def bleu(references: Sequence[Sequence[str]], outputs: Sequence[str]) -> float:
    """Corpus BLEU in percent (sacrebleu's default tokenisation), any number of references."""
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU needs sacrebleu: pip install 'forerun[eval]'") from None
    most = max(len(refs) for refs in references)
    # sacrebleu wants one stream per reference index; None marks a sentence with fewer of them.
    streams = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    return float(sacrebleu.corpus_bleu([out.strip() for out in outputs], streams).score)


def _repetition(text: str) -> float:
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
