"""The public names: adding or removing one is a decision."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forerun

NAMES = [
    "AcceptanceRule",
    "CONTROLLERS",
    "Completion",
    "DRAFTERS",
    "Drafter",
    "Engine",
    "Event",
    "ForerunError",
    "LengthPolicy",
    "MissingExtraError",
    "Model",
    "ModelError",
    "Piece",
    "PromptError",
    "RULES",
    "Round",
    "Sampling",
    "SettingError",
    "Stats",
    "UnknownNameError",
    "UnsupportedModelError",
    "__version__",
    "load",
]


def test_the_public_names_are_these() -> None:
    assert sorted(forerun.__all__) == sorted(NAMES) == dir(forerun)
    for name in NAMES:
        assert getattr(forerun, name) is not None


def test_there_is_no_other() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Turbo'"):
        _ = forerun.Turbo


def test_importing_forerun_loads_nothing_heavy() -> None:
    code = "import forerun, sys; print(sorted({'torch', 'transformers', 'numpy'} & {*sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
