"""Folders of exported OpenVINO models; the one of the tests is made by `dev/exported_model.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import ForerunError, ModelError, SettingError, UnsupportedModelError
from forerun.runtime.load import load_model
from forerun.runtime.preview import preview

pytest.importorskip("openvino")

from forerun.runtime.openvino.executor import OpenVINOExecutor
from forerun.runtime.openvino.load import from_name

FOLDER = Path(__file__).parent / "data" / "exported"


@pytest.fixture(scope="module")
def executor() -> OpenVINOExecutor:
    return from_name(FOLDER)


def test_logits_are_those_of_optimum(executor: OpenVINOExecutor) -> None:
    made = json.loads((FOLDER / "logits.json").read_text())
    ids, read = made["ids"], 0
    for count in (9, 1, 5, 1, 8):  # a prompt, and rounds
        got = executor.run([read], [ids[read : read + count]], [count])[0, :, :8]
        for row, wanted in zip(got.tolist(), made["logits"][read:], strict=False):
            assert row == pytest.approx(wanted, abs=0.03)  # inputs may be rounded to 8 bits
        read += count
    executor.keep([], [])


def test_its_facts(executor: OpenVINOExecutor) -> None:
    facts = executor.facts
    assert (facts.vocab_size, facts.layers, facts.limit) == (300, 2, 256)
    assert (facts.precision, facts.eos) == ("int8", {2})
    assert facts.token_bytes == 2 * 2 * 2 * 16 * 4
    assert facts.identity
    lines = preview(FOLDER)
    assert "qwen3" in lines[0]
    assert lines[-1] == "on a CPU: openvino, weights as they are (int8)"


def _windowed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"]
    config |= {"sliding_window": 8, "use_sliding_window": True}
    (folder / "config.json").write_text(json.dumps(config))


def _damaged(folder: Path) -> None:
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text()[:5000])


def _no_cache(folder: Path) -> None:
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text().replace("position_ids", "places"))


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        (_windowed, UnsupportedModelError, "sliding window"),
        (_damaged, ModelError, "cannot be read"),
        (_no_cache, UnsupportedModelError, "it has no input position_ids"),
        (lambda folder: (folder / "config.json").unlink(), ModelError, "lacks config.json"),
    ],
)
def test_others_are_refused_by_name(
    change: Callable[[Path], None], error: type[ForerunError], line: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    change(folder)
    with pytest.raises(error, match=line):
        from_name(folder)


def test_torch_and_other_precisions_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="which the runtime openvino runs"):
        load_model(FOLDER)
    with pytest.raises(SettingError, match="precision of its weights"):
        from_name(FOLDER, "int8")


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_folder_that_changes_does_not_change_a_model_that_runs(
    executor: OpenVINOExecutor, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    copied = from_name(tmp_path)
    weights = tmp_path / "openvino_model.bin"
    with weights.open("r+b") as file:
        if damage == "cut":
            file.truncate(512)
        else:
            file.write(b"\x3f" * weights.stat().st_size)
    for ids in ([5, 6, 7], list(range(40))):
        run = [model.run([0], [ids], [1]) for model in (executor, copied)]
        assert run[0].tolist() == run[1].tolist()
        executor.keep([], [])
        copied.keep([], [])
