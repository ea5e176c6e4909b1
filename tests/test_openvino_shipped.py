"""The shipped pair on OpenVINO says what it says on torch, however it is decoded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")

from forerun import zoo
from forerun.controllers import CONTROLLERS
from forerun.drafters import Drafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NoDraft
from forerun.engine import Engine
from forerun.errors import SettingError
from forerun.model import load
from forerun.requests import Request, Sampling
from forerun.rules import RULES
from forerun.runtime import Executor, load_model, load_tokenizer
from forerun.runtime.openvino.load import from_name
from forerun.runtime.torch_executor import TorchExecutor
from marks import spread

FAMILIES = ("arithmetic", "chat", "rewriting", "translation")
TOKENS = 16


@pytest.fixture(scope="module")
def pair() -> tuple[Executor, Executor]:
    return from_name(zoo.TARGET), from_name(zoo.DRAFT)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer, folder = load_tokenizer(zoo.TARGET), Path(zoo.__file__).parent / "prompts"
    lines = [(folder / f"{name}.jsonl").read_text().splitlines()[0] for name in FAMILIES]
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def texts(
    target: Executor, drafter: Drafter, prompts: list[list[int]], controller: Any, rows: int
) -> list[list[int]]:
    engine = Engine(target, drafter, eos=frozenset([0]), max_rows=rows)
    how = Sampling(max_new_tokens=TOKENS)
    for prompt in prompts:
        engine.submit(Request(prompt, how, CONTROLLERS.make(controller), RULES.make("standard")))
    done = {e.request: e.completion.tokens for e in engine.run() if e.completion is not None}
    return [list(done[i]) for i in sorted(done)]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[list[int]]:
    target = TorchExecutor(load_model(zoo.TARGET, "cpu", "fp32"))
    return texts(target, NoDraft().build(None, None), prompts, "fixed(0)", 1)


@pytest.mark.parametrize(
    ("controller", "rows"), spread(2, ["fixed(0)", "fixed(4)", "auto"], [1, 3])
)
def test_greedy_text_is_torchs(
    pair: tuple[Any, Executor],
    prompts: list[list[int]],
    reference: list[list[int]],
    controller: str,
    rows: int,
) -> None:
    target, draft = pair
    plain = controller == "fixed(0)"
    drafter = NoDraft().build(None, None) if plain else ModelDrafter(draft, target.facts.vocab_size)
    assert texts(target, drafter, prompts, controller, rows) == reference
    assert len(target.pool._free) == target.pool.total


def test_a_draft_of_its_own_precision_changes_no_text(
    prompts: list[list[int]], reference: list[list[int]]
) -> None:
    model = load(runtime="openvino(draft_precision='int8')")
    drafter: Any = model.drafter
    facts = model.target.facts, drafter.rows.facts
    assert [part.precision for part in facts] == ["float32", "int8"]
    done = model.generate(prompts, max_new_tokens=TOKENS, controller="fixed(4)")
    assert [completion.tokens for completion in done] == reference
    assert sum(completion.stats.accepted for completion in done) > TOKENS
    with pytest.raises(SettingError, match=r"precision must be .* got 'q4'"):
        load(draft="lookup", runtime="openvino(draft_precision='q4')")


def test_a_stored_graph_starts_without_what_compiles_torch_models(pair: Any) -> None:
    """Imports are most of the time to the first token; nearly a half of them are not needed."""
    lines = [
        "import sys, forerun, forerun.prompts as prompts",
        "model = forerun.load(runtime='openvino')",
        "[prompt] = prompts.Reader.of(model, None).prepare([prompts.Prompt('Once')])",
        "assert len(model.generate(prompt.ids, max_new_tokens=2).tokens) == 2",
        "heavy = ('torch._dynamo', 'torch.distributed.tensor', 'transformers.models.llama')",
        "sends = ('openvino_telemetry',)",  # an event at every start, from a fork
        "print([name for name in heavy + sends if sys.modules.get(name)])",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
