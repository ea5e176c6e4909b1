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


def test_pyproject_promises_what_is_tried() -> None:
    """The oldest by `make versions`, the newest by `make test`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = next(line for line in project["dependencies"] if line.startswith("transformers"))
    [oldest] = re.findall(r"^TRANSFORMERS := 5\.(\d+)", (ROOT / "Makefile").read_text(), re.M)
    pins = (ROOT / "constraints.txt").read_text()
    [newest] = re.findall(r"^transformers==5\.(\d+)", pins, re.M)
    assert promised == f"transformers>=5.{oldest},<5.{int(newest) + 1}"


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
