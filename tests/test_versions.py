"""The range of transformers releases that is promised is the range that is tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
import transformers

from forerun.runtime.cache import cache_argument
from forerun.runtime.torch_executor import torch_rows
from tiny import build, texts

ROOT = Path(__file__).parent.parent


def test_pyproject_promises_what_make_versions_tries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = next(line for line in project["dependencies"] if line.startswith("transformers"))
    tried = re.search(r"^TRANSFORMERS := (\S+) (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert tried is not None
    oldest, newest = ([int(part) for part in version.split(".")] for version in tried.groups())
    assert promised == f"transformers>=5.{oldest[1]},<5.{newest[1] + 1}"


@pytest.mark.transformers_versions
def test_the_cache_is_passed_by_its_name_in_this_release() -> None:
    """Warnings are errors here: the old name would fail on a new release."""
    model, (prompt,) = build("llama"), texts(7)
    new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    assert cache_argument(model) == ("cache" if new else "past_key_values")
    rows = torch_rows(model)
    rows.read([prompt])
    got = rows.feed([prompt[-1:]])[0, -1]
    torch.testing.assert_close(got, model(torch.tensor([prompt])).logits[0, -1])
