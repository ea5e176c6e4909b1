"""What runs without torch: greedy decoding of a GGUF file on OpenVINO, from the first start on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from forerun.runtime.drafts import About, rounded, save_draft
from forerun.runtime.eagle import EagleHead

pytest.importorskip("gguf", reason="needs the package gguf: pip install 'forerun[gguf]'")
pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")

from gguf_files import TOKENS, write
from marks import slow_but

DEPTHS, WIDTH = [1, 2], 256
PROMPTS = ["the 12 in the 12 in", "in the th"]
HOW: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "controller": "fixed(3)"}
SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 5}
CODE = """
import json, sys
import forerun

file, draft, prompts, how, sampled = map(json.loads, sys.argv[1:])
model = forerun.load(file, draft, runtime="openvino")
said = []
for more in ({}, sampled):
    done = model.generate(prompts, **how, **more)
    said.append(([list(c.tokens) for c in done], sum(c.stats.drafted for c in done)))
    said.append("torch" in sys.modules)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A file, and a folder with a head for it."""
    folder = tmp_path_factory.mktemp("without-torch")
    with torch.no_grad():
        write(folder / "tiny.gguf")
        torch.manual_seed(1)
        head = EagleHead(64, 80, len(TOKENS) - 3, len(DEPTHS) * WIDTH)
        tensors = {**head.state_dict(), "tokens": torch.arange(3, len(TOKENS), dtype=torch.int32)}
    about = About("eagle", None, {"depths": DEPTHS})
    save_draft(folder / "head", about, rounded(tensors))
    return str(folder / "tiny.gguf"), str(folder / "head")


def run(code: str, *given: Any, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(json.dumps, given)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "draft", slow_but(["memory", "memory+eagle(path={head!r})"], lambda draft: "+" in draft)
)
def test_greedy_text_needs_no_torch(made: tuple[str, str], draft: str, tmp_path: Path) -> None:
    """Not even at the first start, which finds nothing in the cache; sampled text does, and is that
    of a process that had it from the beginning."""
    file, head = made
    draft = draft.format(head=head)
    said = run(CODE, file, draft, PROMPTS, HOW, SAMPLED, FORERUN_CACHE=str(tmp_path))
    (greedy, drafted), before, (sampled, _), after = said
    assert (before, after) == (False, True)
    assert drafted > 0
    model = forerun.load(file, draft, runtime="openvino")
    for tokens, more in ((greedy, {}), (sampled, SAMPLED)):
        assert tokens == [list(c.tokens) for c in model.generate(PROMPTS, **HOW, **more)]
        assert tokens == [
            list(c.tokens) for c in model.generate(PROMPTS, plain=True, **HOW, **more)
        ]


@pytest.mark.parametrize("named", slow_but(["", "3"], bool))
def test_threads_are_those_that_torch_would_compute_on(named: str) -> None:
    code = (
        "import json, sys; from forerun.lazy import threads; count = threads()\n"
        "assert 'torch' not in sys.modules; import torch\n"
        "torch_has = torch.get_num_threads(); torch.set_num_threads(5)\n"
        "print(json.dumps([count, torch_has, threads()]))"
    )
    count, wanted, now = run(code, OMP_NUM_THREADS=named)
    assert (count, now) == (wanted, 5)
