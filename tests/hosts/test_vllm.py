"""`forerun.vllm` inside vLLM: `make test HOST=vllm`, in an environment of its own."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

prometheus_client = pytest.importorskip("prometheus_client")
vllm = pytest.importorskip("vllm", reason="needs vLLM: make test HOST=vllm")

import forerun.vllm  # noqa: E402
from forerun import zoo  # noqa: E402
from forerun.controllers import CONTROLLERS as NAMED  # noqa: E402
from forerun.costs import Costs  # noqa: E402
from forerun.errors import SettingError  # noqa: E402
from forerun.lab.traces.costs import Cell  # noqa: E402
from forerun.lab.traces.exports import ExportJob, export  # noqa: E402
from forerun.lab.traces.replay import replay  # noqa: E402
from forerun.lab.traces.trace import Trace  # noqa: E402
from hosts import own_policy  # noqa: E402
from made_traces import periodic  # noqa: E402

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


def engine(speculates: bool, **draft: Any) -> Any:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip
    more: dict[str, Any] = {}
    if speculates:
        draft = draft or {"method": "draft_model", "model": str(zoo.DRAFT)}
        draft["num_speculative_tokens"] = MOST
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


def counted(what: str, spec: str) -> float:
    """What Prometheus has of a controller."""
    name = {"controller": NAMED.text(NAMED.make(spec))}
    counts = prometheus_client.REGISTRY.get_sample_value(f"forerun_{what}_tokens_total", name)
    return counts or 0.0


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    texts, _ = run(engine(speculates=False), [None])
    gc.collect()
    return texts


@pytest.fixture(params=["Sync", "Async"])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The scheduler to run. On a CPU vLLM switches the asynchronous one off, the usual on GPUs."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = request.param == "Async"

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep))
    yield request.param
    gc.collect()


def test_greedy_text_is_plain_text_under_every_controller(
    plain: list[list[int]], scheduling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_policy.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forerun.vllm.register()
    llm = engine(speculates=True)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == f"Policy{scheduling}Scheduler"
    drafted, before = {}, counted("drafted", "fixed(6)")
    for specs in CONTROLLERS:
        texts, steps = run(llm, specs)
        assert texts == plain, specs
        assert not scheduler.broken
        drafted[specs[0]] = steps
    assert {n for steps in drafted["fixed(6)"] for n in steps[1:-2]} == {MOST}
    assert counted("drafted", "fixed(6)") - before == sum(map(sum, drafted["fixed(6)"]))
    assert 0 < counted("accepted", "fixed(6)") < counted("drafted", "fixed(6)")
    assert drafted["fixed(0)"][0] == []
    assert set(drafted["fixed(0)"][1][:-2]) == {2}
    assert len({n for steps in drafted["gammatune"] for n in steps}) > 2
    assert any(drafted["auto"])
    assert {n for steps in drafted["alternating(one=3)"] for n in steps[:-2]} <= {1, 3}
    refuses_what_cannot_be_served(llm)


@pytest.mark.parametrize("draft", ["suffix", "lookup(n=3)"])
def test_drafts_without_a_model_change_no_text(
    plain: list[list[int]], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_DRAFT", draft)
    llm = engine(speculates=True, method="custom_class", model="forerun.vllm.Proposer")
    before = counted("accepted", "fixed(4)")
    for spec in ("fixed(4)", "auto"):
        assert run(llm, [spec])[0] == plain
    assert counted("accepted", "fixed(4)") > before
    gc.collect()


def test_drafters_with_a_model_are_no_custom_proposers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_DRAFT", "lookahead")
    with pytest.raises(SettingError, match="draft must be suffix, lookup or rest"):
        forerun.vllm.Proposer(SimpleNamespace(additional_config=None))


def refuses_what_cannot_be_served(llm: Any) -> None:
    """Each for its request alone: the next one runs."""
    for spec in ("gamatune", "hf-threshold", 3):
        with pytest.raises(vllm.exceptions.VLLMValidationError):
            vllm.SamplingParams(extra_args={"forerun_controller": spec})
    with pytest.raises(vllm.exceptions.VLLMValidationError, match="rules run in forerun"):
        vllm.SamplingParams(extra_args={"forerun_rule": "easd"})
    assert len(run(llm, ["fixed(1)"])[0]) == len(PROMPTS)


def test_a_recorded_trace_replays_the_live_rounds(
    plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a policy that learns nothing: what others know here is a round behind, as is what a
    text has left to write."""
    monkeypatch.setenv("FORERUN_RECORD", str(tmp_path / "trace.parquet"))
    assert run(engine(speculates=True), ["auto"])[0] == plain
    monkeypatch.delenv("FORERUN_RECORD")
    trace = Trace.read(tmp_path / "trace.parquet")
    assert trace.about["draft"]["name"] == str(zoo.DRAFT)
    texts = [row[:size].tolist() for row, size in zip(trace.tokens, trace.sizes, strict=True)]
    order = [texts.index(text) for text in plain]
    llm = engine(speculates=True)
    for length in (2, 5):
        rounds: list[list[int]] = [[] for _ in texts]

        def watch(seen: Any, rounds: list[list[int]] = rounds) -> None:
            for prompt, drafted in zip(seen.prompt, seen.drafted, strict=True):
                rounds[prompt] += [int(drafted)] * bool(drafted)

        replay(trace, f"fixed({length})", Costs.synthetic(5), watch)
        live, replayed = run(llm, [f"fixed({length})"])[1], [rounds[prompt] for prompt in order]
        assert list(map(len, live)) == list(map(len, replayed))
        assert [steps[:-1] for steps in live] == [steps[:-1] for steps in replayed]


@pytest.mark.parametrize("changed", ["asynchronous", "drawn"])
def test_what_cannot_be_recorded_is_said(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.hosts import vllm_scheduler

    drawn = SimpleNamespace(draft_sample_method="probabilistic")
    kind = vllm_scheduler.PolicySyncScheduler
    if changed == "asynchronous":
        kind = vllm_scheduler.PolicyAsyncScheduler
    reason = vllm_scheduler.unrecorded(
        kind.__new__(kind), SimpleNamespace(speculative_config=drawn)
    )
    assert {"asynchronous": "--no-async-scheduling", "drawn": "greedy"}[changed] in str(reason)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"speculative_config": None}, "nothing drafts"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "data-parallel ranks"),
        ({"compilation_config": SimpleNamespace(cudagraph_mode="FULL")}, "full CUDA graphs"),
    ],
)
def test_where_lengths_must_not_vary_it_is_vllms_own(
    changes: dict[str, Any], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.core.sched.scheduler import Scheduler

    from forerun.hosts import vllm_scheduler

    lines: list[str] = []
    monkeypatch.setattr(vllm_scheduler.logger, "warning", lambda *line: lines.append(str(line)))

    if graphs := changes.get("compilation_config"):
        graphs.cudagraph_mode = CUDAGraphMode.FULL
    good: dict[str, Any] = {
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "speculative_config": object(),
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        "use_v2_model_runner": False,
    }
    ours = vllm_scheduler.PolicySyncScheduler
    assert vllm_scheduler.scheduler_class(SimpleNamespace(**good)) is ours
    assert vllm_scheduler.scheduler_class(SimpleNamespace(**good | changes)) is Scheduler
    (line,) = lines
    assert shown in line


@pytest.mark.parametrize("drafts", ["model", "model, sampled", "lookup(n=4)"])
def test_exports_are_what_vllm_takes(drafts: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    about: dict[str, Any] = {"drafter": drafts}
    if drafts.startswith("model"):
        about = {"draft": {"name": "shipped"}, "sampling": {"temperature": "," in drafts}}
    cells = [replace(Cell.synthetic(10, slope=s), batch=b) for b, s in [(1, 0), (8, 0.35)]]
    job = ExportJob(replace(periodic(4), about=about), cells[0], cells)
    config = json.loads(export("vllm", job).text)["speculative_config"]
    args = EngineArgs(model=str(zoo.TARGET), dtype="float32", speculative_config=dict(config))
    read = args.create_engine_config().speculative_config
    for name, value in config.items():
        assert json.loads(json.dumps(getattr(read, name))) == value
