"""English to German: short sentence pairs (Tatoeba), split by English sentence."""

from __future__ import annotations

import random

from forerun.zoo.tasks.base import Example, Pool

NAME = "translation"
MAX_NEW_TOKENS = 48


def prompt_for(english: str) -> str:
    """The prompt for one English sentence."""
    return f"English: {english}\nGerman:"


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """One pair of the pool (which is of ``split``), with all its German references."""
    english, german = rng.choice(pool.pairs)
    return Example(prompt_for(english), f" {rng.choice(german)}", references=german)


def bleu(references: list[tuple[str, ...]], outputs: list[str]) -> float:
    """Corpus BLEU in percent (sacrebleu's default tokenisation), any number of references."""
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU needs sacrebleu: pip install 'forerun[eval]'") from None
    most = max(len(refs) for refs in references)
    # sacrebleu wants one stream per reference index; None marks a sentence with fewer of them.
    streams = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    return float(sacrebleu.corpus_bleu([out.strip() for out in outputs], streams).score)
