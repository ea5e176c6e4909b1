"""Reads the data folder (books, sentence pairs) into one pool of text per split."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from recipes.tasks import stories
from recipes.tasks.base import SPLITS, Pool

SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)\s+(?=[A-Z])")


def read_book(path: Path) -> list[str]:
    """A book's paragraphs without contents, chapter headings and the editor's notes at the end."""
    paragraphs = []
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    for place, block in enumerate(blocks):
        if block.strip() == "NOTES AND REFERENCES" and place > len(blocks) // 2:
            break
        text = " ".join(block.replace("_", "").split())
        heading = text.isupper() or (len(text) < 25 and not re.search(r"[.!?\"']$", text))
        contents = "CONTENTS" in text[:40] or text.startswith("--To My Readers--")
        if text and not heading and not contents and "[Illustration" not in text:
            paragraphs.append(text)
    return paragraphs


def read_pairs(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """English sentences with all their German translations, in file order."""
    grouped: dict[str, list[str]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            english, german = line.rstrip("\n").split("\t")[:2]
            grouped.setdefault(english, []).append(german)
    return [(english, tuple(german)) for english, german in grouped.items()]


def sentences_of(paragraphs: list[str]) -> list[str]:
    """Sentences of 20 to 140 characters that stand on their own (balanced quotation marks)."""
    kept = []
    for paragraph in paragraphs:
        for sentence in SENTENCE_END.split(paragraph):
            plain = not re.search(r"[\"'“”‘’()\[\]:;*]", sentence.replace("'s ", " "))
            if 20 <= len(sentence) <= 140 and plain and re.fullmatch(r"[A-Z].*[.!?]", sentence):
                kept.append(sentence)
    return kept


def load_pools(data: Path) -> dict[str, Pool]:
    """The pools of all splits; raises ``FileNotFoundError`` in one line if something is missing."""
    for needed in (data / "books", data / "tatoeba" / "train.tsv.gz"):
        if not needed.exists():
            raise FileNotFoundError(f"no training data at {needed} (give --data the data folder)")
    books: dict[str, dict[str, list[str]]] = {split: {} for split in SPLITS}
    for path in sorted((data / "books").glob("*.txt")):
        if path.stem not in stories.LEFT_OUT:
            books[stories.HELD_OUT.get(path.stem, "train")][path.stem] = read_book(path)
    pools = {}
    for split in SPLITS:
        pairs = read_pairs(data / "tatoeba" / f"{split}.tsv.gz")
        own = [s for title in sorted(books[split]) for s in sentences_of(books[split][title])]
        short = [english for english, _ in pairs if 20 <= len(english) <= 140]
        pools[split] = Pool(books=books[split], pairs=pairs, sentences=own + short, prose=own)
    return pools
