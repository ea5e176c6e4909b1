"""Writes a trained model in the Hugging Face format, weights in bfloat16."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from forerun.zoo.tokenizer import wrap


def export_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Saves a copy in bfloat16, with its tokenizer, to ``folder``, replacing file by file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).to("cpu", torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        path = Path(beside)
        model.generation_config.do_sample = False
        model.save_pretrained(path)
        (tokenizer if hasattr(tokenizer, "save_pretrained") else wrap(tokenizer)).save_pretrained(
            path
        )
        _tidy(path / "config.json", drop=("_name_or_path",), dtype="bfloat16")
        # The class every transformers release knows, so that older hosts can load it too.
        _tidy(
            path / "tokenizer_config.json",
            drop=("_name_or_path", "backend", "is_local", "name_or_path"),
            tokenizer_class="PreTrainedTokenizerFast",
        )
        # Indented, it is more than twice as long.
        pieces = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        compact = json.dumps(pieces, ensure_ascii=False, separators=(",", ":"))
        (path / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
        for file in path.iterdir():
            os.chmod(file, 0o644)
            os.replace(file, folder / file.name)


def _tidy(path: Path, drop: tuple[str, ...], **values: str) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in drop:
        settings.pop(key, None)
    settings.update(values)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
