"""Which files pytest looks for doctests in."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Those with a prompt: to import and search every file takes each worker seconds."""
    made = yield
    if file_path.suffix != ".py" or ">>>" in file_path.read_text(encoding="utf-8"):
        return made
    return [collector for collector in made if type(collector).__name__ != "DoctestModule"]
