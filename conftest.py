"""What makes every worker of a test run quicker."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Doctests are sought where there is a prompt: searching every file takes seconds."""
    made = yield
    if file_path.suffix != ".py" or ">>>" in file_path.read_text(encoding="utf-8"):
        return made
    return [collector for collector in made if type(collector).__name__ != "DoctestModule"]


def pytest_collection_finish() -> None:
    """What is imported is no garbage: collections need not look through it."""
    gc.freeze()
