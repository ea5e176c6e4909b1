"""Whatever the Python API is given, it works or raises an error of `forerun.errors`.

A few hundred cases run here. For more, by hand::

    FORERUN_FUZZ=10000 python -m pytest tests/test_fuzz.py
"""

from __future__ import annotations

import os
import string
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forerun
from forerun.controllers import CONTROLLERS
from forerun.drafters import DRAFTERS
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.model import ModelDrafter
from forerun.engine import Sampling
from forerun.errors import ForerunError, ForerunWarning
from forerun.model import Model
from forerun.rules import RULES
from forerun.runtime.load import (
    check_path,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from forerun.testing import ScriptedModel
from test_engine import SPECS, V, chaotic, noisy
from test_loading import save
from test_prompts import Letters
from test_rules import SPECS as RULE_SPECS
from tiny import build

CASES = int(os.environ.get("FORERUN_FUZZ", "300"))
SCRIPT = chaotic(1)


def fuzz(share: float = 1.0) -> settings:
    return settings(
        max_examples=max(1, int(CASES * share)),
        deadline=None,
        derandomize="FORERUN_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates, too
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-9, 9), st.floats(), TEXT,
    st.binary(max_size=3), st.just(10**400), st.just(object()), st.just(float), st.just(1j),
    st.lists(st.integers(-2, V + 1) | st.floats() | TEXT | st.none(), max_size=3),
    st.dictionaries(st.integers(-1, V) | TEXT, st.floats() | st.none(), max_size=2),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.nan, np.array(1), Path("x")]),
)  # fmt: skip
IDS = st.lists(st.integers(0, V - 1), min_size=1, max_size=5)
PROMPT = st.one_of(
    IDS, IDS.map(np.array), IDS.map(torch.tensor), TEXT, st.text("abcdefg", min_size=1, max_size=5),
    IDS.map(lambda ids: (i for i in ids)), IDS.map(lambda ids: torch.tensor(ids) / 2), ODD,
)  # fmt: skip
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 3),
    "top_k": st.integers(0, 9),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 3),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "logit_bias": st.dictionaries(st.integers(0, V), st.floats(), max_size=V),
    "seed": st.integers(),
    "max_new_tokens": st.integers(0, 12),
    "min_new_tokens": st.integers(0, 5),
    "stop": st.lists(st.text("abcdefg", max_size=2), max_size=2),
    "eos": st.lists(st.integers(-1, V), max_size=2),
    "ignore_eos": st.booleans(),
    "controller": st.sampled_from(SPECS),
    "rule": st.sampled_from(RULE_SPECS),
    "batch_size": st.integers(0, 3),
    "plain": st.booleans(),
    "sampling": st.builds(Sampling, max_new_tokens=st.integers(1, 9)) | st.lists(st.none()),
}


def few(odd: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Some settings, sensible ones or any."""
    values = {name: s | ODD if odd else s for name, s in SENSIBLE.items()}
    return st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )


def model(drafter: str) -> Model:
    draft = LookupDrafter(3, 1)
    if drafter == "model":
        draft = ModelDrafter(ScriptedModel(noisy(SCRIPT, 2, 0.5), 20), V)
    return Model(ScriptedModel(SCRIPT, 24), draft, Letters())


MODELS = {name: model(name) for name in ("model", "lookup")}


@fuzz()
@given(
    prompt=PROMPT | st.lists(PROMPT, max_size=3),
    how=few(odd=False) | few(odd=True) | st.dictionaries(TEXT, ODD, max_size=1),
    which=st.sampled_from(sorted(MODELS)),
    stream=st.booleans(),
)
def test_generate_and_stream(prompt: Any, how: Any, which: str, stream: bool) -> None:
    used = MODELS[which]
    with suppress(ForerunError):
        if stream:
            for i, _ in enumerate(used.stream(prompt, **how)):
                if i == 3:
                    break
        else:
            used.generate(prompt, **how)
    assert used.target.lengths == []
    assert used.generate([1, 2], max_new_tokens=3, rule="standard").stats.tokens == 3


NAMES = [*CONTROLLERS.names(), *RULES.names(), *DRAFTERS.names(), "low", "high", "rule", "none"]
WORDS = [
    *NAMES,
    *string.punctuation,
    *"(),=()",
    "true",
    "inf",
    "nan",
    " ",
    "1",
    "2.5",
    "1e999",
    "-3",
]
MARKS = st.lists(st.sampled_from(WORDS) | TEXT, max_size=9).map("".join)


@fuzz(0.5)
@given(spec=MARKS | ODD, registry=st.sampled_from([CONTROLLERS, RULES, DRAFTERS]))
def test_specs(spec: Any, registry: Any) -> None:
    made = None
    with suppress(ForerunError):
        made = registry.make(spec)
    if made is not None:
        assert registry.make(registry.text(made)) == made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target; nothing is looked up elsewhere."""
    where = save(build("llama"), tmp_path_factory.mktemp("target"))
    patch = pytest.MonkeyPatch()
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model, tokenizer = load_model(where), load_tokenizer(where)
    patch.setattr(
        "forerun.runtime.runtimes.load_model",
        lambda name, device, dtype, code: (
            model if (resolve_device(device), resolve_dtype(dtype), check_path(name)) else None
        ),
    )
    patch.setattr("forerun.model.load_tokenizer", lambda name, code: tokenizer)
    yield where
    patch.undo()


@fuzz(0.25)
@given(
    how=st.fixed_dictionaries(
        {"draft": st.sampled_from(["lookup", "none"]) | MARKS | ODD},
        optional={
            name: st.sampled_from(good) | ODD
            for name, good in {
                "settings": [None], "device": [None, "cpu"],
                "dtype": [None, "float32"], "trust_remote_code": [False],
            }.items()
        },
    )
)  # fmt: skip
def test_load(how: dict[str, Any], folder: Path) -> None:
    with suppress(ForerunError), warnings.catch_warnings():
        warnings.simplefilter("ignore", ForerunWarning)
        forerun.load(folder, **how)
