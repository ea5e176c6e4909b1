"""`forerun lm-eval`: the texts of lm-eval's own model, and what speculation did, in its results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: make test HOST=lm-eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from forerun import zoo  # noqa: E402
from forerun.cli import main  # noqa: E402
from forerun.errors import ForerunWarning, SettingError  # noqa: E402
from forerun.hosts.lm_eval import Evaluated, evaluate  # noqa: E402
from forerun.runtime.load import load_model, load_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default", "error::forerun.errors.ForerunWarning")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
doc_to_target: {target}
metadata: {{version: 1}}
"""
WRITES = """
generation_kwargs: {until: ["\\n", "User:"], do_sample: false, max_gen_toks: 24}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSES = """
doc_to_choice: ["1", "2"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLS = """
metric_list: [{metric: word_perplexity}]
"""
MODEL = Evaluated(str(zoo.TARGET), str(zoo.DRAFT), "fixed(4)", dtype="float32", batch_size=4)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "sums.jsonl"
    pairs = [(17 + 7 * i % 61, 23 + 11 * i % 59) for i in range(12)]
    asked = [
        {"q": f"User: What is {a} plus {b}?\nAssistant:", "a": str(a + b), "c": 1} for a, b in pairs
    ]
    file.write_text("\n".join(map(json.dumps, asked)))
    kinds = {
        "sums": ("generate_until", '"{{a}}"', WRITES),
        "choices": ("multiple_choice", "c", CHOOSES),
        "likely": ("loglikelihood_rolling", '"{{q}}"', ROLLS),
    }
    for name, (kind, target, more) in kinds.items():
        text = TASK.format(name=name, kind=kind, target=target, file=file)
        (tmp_path / f"{name}.yaml").write_text(text + more)
    return str(tmp_path)


def plainly(tasks: str, names: list[str]) -> dict[str, Any]:
    """By lm-eval's own model, which does not speculate."""
    model, tokenizer = load_model(zoo.TARGET, dtype="float32"), load_tokenizer(zoo.TARGET)
    results: dict[str, Any] = lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4), tasks=names,
        task_manager=TaskManager(include_path=tasks, include_defaults=False), log_samples=True,
    )  # fmt: skip
    return results


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_texts_and_scores_are_those_of_the_plain_model(
    tasks: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    wanted = plainly(tasks, ["sums", "choices", "likely"])
    kept: dict[str, Any] = {}
    real = lm_eval.simple_evaluate

    def keeping(**given: Any) -> Any:
        kept.update(real(**given | {"log_samples": True}))
        return kept

    monkeypatch.setattr(lm_eval, "simple_evaluate", keeping)
    done = evaluate(replace(MODEL, runtime=runtime), ["sums", "choices", "likely"], None, tasks)

    def texts(results: dict[str, Any]) -> list[str]:
        rows = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
        return [row["resps"][0][0].strip() for row in rows]

    assert len(texts(wanted)) == 12
    assert texts(kept) == texts(wanted)
    for task, metric in (("choices", "acc,none"), ("likely", "word_perplexity,none")):
        ours, theirs = (r["results"][task][metric] for r in (done, wanted))
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert 0 < done["forerun"]["acceptance_rate"] <= 1
    assert done["forerun"]["tokens_per_second"] > 0
    assert (done["forerun"]["texts"], done["forerun"]["drift_mean"]) == (12, None)


def test_a_rule_has_a_price_and_judges_no_given_text(tasks: str) -> None:
    lossy = replace(MODEL, rule="cm-asd")
    with pytest.warns(ForerunWarning, match="choices: the target alone scores given texts"):
        done = evaluate(lossy, ["sums", "choices"], 6, tasks)
    assert done["forerun"]["drift_mean"] >= 0
    assert not done["forerun"]["lossless"]
    with pytest.raises(SettingError, match="no task summs"):
        evaluate(MODEL, ["summs"], 1, tasks)


def test_the_command_saves_and_prints(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    given = ["--include-path", tasks, "--limit", "2", "--controller", "fixed(2)", "-o", str(out)]
    assert main(["lm-eval", "--tasks", "sums", *given]) == 0
    assert "acceptance_rate: " in capsys.readouterr().out
    assert json.loads(out.read_text())["forerun"]["texts"] == 2
