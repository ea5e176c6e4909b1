"""Where the real models are that some tests need: `dev/fetch_models.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FORERUN_MODELS") or Path.home() / ".cache" / "forerun" / "models")


def smollm2() -> Path:
    """The file, or the test is skipped."""
    path = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {FOLDER}: python dev/fetch_models.py")
    return path
