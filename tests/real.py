"""Where models are: those that ship, and the real ones of `dev/fetch_models.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun import zoo

LASTING = {str(folder) for folder in (zoo.TARGET, zoo.DRAFT, zoo.TRANSLATOR, zoo.DIGEST)}
"""Folders that no test changes: what they hold is read once (`conftest`)."""
FOLDER = Path(os.environ.get("FORERUN_MODELS") or Path.home() / ".cache" / "forerun" / "models")


def smollm2() -> Path:
    """The file, or the test is skipped."""
    return _file("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")


def qwen() -> Path:
    """Likewise; 1.1 GB."""
    return _file("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen")


def _file(name: str, called: str) -> Path:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {name} in {FOLDER}: python dev/fetch_models.py {called}")
    return path
