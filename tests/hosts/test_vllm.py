"""`forerun.vllm` inside vLLM: `make test HOST=vllm`, in an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test HOST=vllm")

import forerun.vllm  # noqa: E402
from forerun import zoo  # noqa: E402
from hosts import own_policy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
PROMPTS = [
    "User: How many legs does a bear have?\nAssistant:",
    "Once upon a time",
    "12 + 30 =",
    "English: I like apples.\nGerman:",
]
TOKENS, MOST = 40, 6
CONTROLLERS: list[list[str | None]] = [
    ["fixed(6)"],
    ["gammatune"],
    ["fixed(0)", "fixed(2)", "gammatune", "hf-heuristic"],
    ["exllama-ema", "sglang-ema", "goodput", "bandit"],
    ["auto"],
    [None],
    ["alternating(one=3)"],
]


def engine(speculates: bool) -> Any:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip
    more: dict[str, Any] = {}
    if speculates:
        draft = {"method": "draft_model", "model": str(zoo.DRAFT), "num_speculative_tokens": MOST}
        more = {
            "speculative_config": draft,
            "scheduler_cls": "forerun.vllm.Scheduler",
            "per_request_spec_decode_metrics": "detailed",
        }
    return vllm.LLM(
        model=str(zoo.TARGET), max_model_len=512, enforce_eager=True, dtype="float32", seed=0,
        max_num_seqs=8, disable_log_stats=False, enable_prefix_caching=False, **more,
    )  # fmt: skip


def run(llm: Any, specs: list[str | None]) -> tuple[list[list[int]], list[list[int]]]:
    """Texts, and the tokens drafted in each of their steps."""
    settings = [
        vllm.SamplingParams(
            max_tokens=TOKENS,
            temperature=0,
            extra_args=None if spec is None else {"forerun_controller": spec},
        )
        for spec in (specs[i % len(specs)] for i in range(len(PROMPTS)))
    ]
    outputs = [out.outputs[0] for out in llm.generate(PROMPTS, settings, use_tqdm=False)]
    steps = [getattr(out, "spec_decode_metrics", None) for out in outputs]
    return (
        [list(out.token_ids) for out in outputs],
        [list(metrics.per_step_drafted) if metrics else [] for metrics in steps],
    )


def test_greedy_text_is_plain_text_under_every_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_policy.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forerun.vllm.register()
    plain, _ = run(engine(speculates=False), [None])
    llm = engine(speculates=True)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == "PolicySyncScheduler"
    drafted = {}
    for specs in CONTROLLERS:
        texts, steps = run(llm, specs)
        assert texts == plain, specs
        assert not scheduler.broken
        drafted[specs[0]] = steps
    assert {n for steps in drafted["fixed(6)"] for n in steps[1:-2]} == {MOST}
    assert drafted["fixed(0)"][0] == []
    assert set(drafted["fixed(0)"][1][:-2]) == {2}
    assert len({n for steps in drafted["gammatune"] for n in steps}) > 2
    assert any(drafted["auto"])
    assert {n for steps in drafted["alternating(one=3)"] for n in steps[:-2]} <= {1, 3}
    refuses_what_cannot_be_served(llm)


def refuses_what_cannot_be_served(llm: Any) -> None:
    """Each for its request alone: the next one runs."""
    for spec in ("gamatune", "hf-threshold", 3):
        with pytest.raises(vllm.exceptions.VLLMValidationError):
            vllm.SamplingParams(extra_args={"forerun_controller": spec})
    with pytest.raises(vllm.exceptions.VLLMValidationError, match="rules run in forerun"):
        vllm.SamplingParams(extra_args={"forerun_rule": "easd"})
    assert len(run(llm, ["fixed(1)"])[0]) == len(PROMPTS)
