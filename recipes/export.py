"""Writes a trained model in the Hugging Face format, weights in bfloat16 or 8 bits."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from forerun.runtime.drafts import WEIGHTS, rounded
from forerun.runtime.load import INT8
from recipes.tokenizer import wrap


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


def round_to_8_bits(folder: Path) -> None:
    """Store the matrices of an exported model, or of a draft, in 8 bits."""
    from safetensors.torch import load_file, save_file

    whole, draft = folder / "model.safetensors", folder / WEIGHTS
    read, written = (draft, draft) if draft.is_file() else (whole, folder / INT8)
    tensors = {name: tensor.clone() for name, tensor in load_file(read).items()}
    read.unlink()
    save_file(rounded(tensors), written, metadata={"format": "pt"})
    os.chmod(written, 0o644)


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Export the mean of two models' weights, ``share`` of it the second's.

    Of a model and what further training made of it, it can be better than both: the noise of the
    steps cancels, and less is forgotten (Wortsman et al., 2022).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not 0 <= share <= 1:
        raise ValueError(f"the share must be between 0 and 1, got {share}")
    for folder in (first, second):
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"no exported model at {folder}")
    one, two = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (first, second)
    )
    weights, others = one.state_dict(), two.state_dict()
    shapes = [{name: value.shape for name, value in part.items()} for part in (weights, others)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{first} and {second} are of different shapes")
    one.load_state_dict({name: torch.lerp(weights[name], others[name], share) for name in weights})
    export_model(one, AutoTokenizer.from_pretrained(first), out)


def _tidy(path: Path, drop: tuple[str, ...], **values: str) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in drop:
        settings.pop(key, None)
    settings.update(values)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
