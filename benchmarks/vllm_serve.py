"""`vllm bench serve` over `forerun.vllm.Scheduler`, by requests at a time and who drafts.

In the environment of `make test HOST=vllm`: `build/vllm/bin/python -m benchmarks.vllm_serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from benchmarks.common import console, provenance, save, table
from benchmarks.serve_load import serving
from forerun import zoo

DRAFTS: dict[str, dict[str, Any]] = {
    "shipped pair": {"method": "draft_model", "model": str(zoo.DRAFT)},
    "vLLM's n-grams": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2},
}
MODES = ("fixed(0)", "fixed(2)", "fixed(4)", "auto")
MOST, TOKENS, ROWS = 4, 48, 16
REQUESTS = {1: 8, 4: 20, 16: 48}
"""By requests at a time how many are sent in a run."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip


def command(draft: dict[str, Any], port: int) -> tuple[str, ...]:
    """vLLM's server, whose requests say themselves how far drafts run."""
    speculative = json.dumps({**draft, "num_speculative_tokens": MOST})
    return (
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(zoo.TARGET),
        "--scheduler-cls", "forerun.vllm.Scheduler", "--speculative-config", speculative,
        "--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(ROWS),
        "--max-model-len", "512", "--no-enable-prefix-caching",
        "--host", "127.0.0.1", "--port", str(port),
    )  # fmt: skip


def asked(prompts: Sequence[str], url: str, mode: str, clients: int) -> dict[str, Any]:
    """What `vllm bench serve` measures of these prompts."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    tokenizer, target = get_tokenizer(str(zoo.TARGET)), str(zoo.TARGET)
    requests = [SampleRequest(text, len(tokenizer.encode(text)), TOKENS) for text in prompts]
    body = {"temperature": 0, "vllm_xargs": {"forerun_controller": mode}}
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = asyncio.run(
            benchmark(
                TaskType.GENERATION, "openai", f"{url}/v1/completions", url, target, target,
                tokenizer, requests, logprobs=None, request_rate=float("inf"), burstiness=1.0,
                disable_tqdm=True, num_warmups=0, profile=False, selected_percentile_metrics=[],
                selected_percentiles=[99.0], ignore_eos=False, goodput_config_dict={},
                max_concurrency=clients, lora_modules=None, extra_headers=None, extra_body=body,
                ready_check_timeout_sec=0,
            )
        )  # fmt: skip
    assert result["completed"] == len(prompts), result["errors"]
    return result


def main(
    turns: Annotated[int, typer.Option(help="Runs of every cell.")] = 2,
    share: Annotated[float, typer.Option(help="Of the requests of a run.")] = 1.0,
) -> None:
    """Measure and write `vllm-serve.json`: all modes in turns on one server for each draft."""
    import vllm

    os.environ.update(ENVIRONMENT)
    families = [zoo.prompts(family, "test", limit=ROWS) for family in zoo.families()]
    texts = [prompt.prompt for mixed in zip(*families, strict=True) for prompt in mixed]
    cells = []
    for port, (name, draft) in enumerate(DRAFTS.items(), 8441):
        with serving(command=command(draft, port)) as server:
            for clients, count in REQUESTS.items():
                prompts = texts[: max(int(share * count), clients)]
                for mode in MODES:  # what compiles, and what steps of this batch cost
                    asked(prompts[:clients], server.url, mode, clients)
                runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
                for turn in range(turns):
                    for step in range(len(MODES)):
                        mode = MODES[(turn + step) % len(MODES)]
                        runs[mode].append(asked(prompts, server.url, mode, clients))
                        rate = runs[mode][-1]["output_throughput"]
                        console.print(f"{name}, {clients} at a time, {mode}: {rate:.0f} tokens/s")
                cells.append(_cell(name, clients, runs))
    facts = SimpleNamespace(precision="float32", executor=f"vLLM {vllm.__version__}, eager")
    model: Any = SimpleNamespace(target=SimpleNamespace(device="cpu", facts=facts))
    header = ["draft", "requests at a time", *(f"`{mode}`" for mode in MODES)]
    header += ["`auto` over `fixed(0)`", "over the best length"]
    text = (
        f"Output tokens/s of `vllm bench serve`, {turns} runs of each cell in turns on one server, "
        f"test prompts of all families in turn, {TOKENS} tokens at most, greedy, "
        f"`num_speculative_tokens` {MOST}. Texts equal to those of `fixed(0)`: "
        f"{fmean(c['same'] for c in cells):.1%}.\n\n{table(header, [*map(_row, cells)])}"
    )
    save("vllm-serve", provenance(model, turns=turns, share=share), cells, text)


def _cell(name: str, clients: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = {mode: [run["output_throughput"] for run in of] for mode, of in runs.items()}
    fixed = [mode for mode in MODES if mode != "auto"]
    best = max(fixed, key=lambda mode: fmean(rates[mode]))
    plain = [run["generated_texts"] for run in runs["fixed(0)"]]
    return {
        "draft": name,
        "clients": clients,
        "rates": rates,
        "best": best,
        "over_plain": [a / b for a, b in zip(rates["auto"], rates["fixed(0)"], strict=True)],
        "over_best": [a / b for a, b in zip(rates["auto"], rates[best], strict=True)],
        "acceptance": {
            mode: [run.get("spec_decode_acceptance_rate") for run in of]
            for mode, of in runs.items()
        },
        "same": fmean(
            float(a == b)
            for of in runs.values()
            for run, whole in zip(of, plain, strict=True)
            for a, b in zip(run["generated_texts"], whole, strict=True)
        ),
    }


def _row(cell: dict[str, Any]) -> list[str]:
    def shown(values: Sequence[float], digits: int) -> str:
        each = ", ".join(f"{value:.{digits}f}" for value in values)
        return f"{fmean(values):.{digits}f} ({each})"

    rates = [shown(cell["rates"][mode], 0) for mode in MODES]
    over = f"{shown(cell['over_best'], 2)} `{cell['best']}`"
    return [cell["draft"], str(cell["clients"]), *rates, shown(cell["over_plain"], 2), over]


if __name__ == "__main__":
    typer.run(main)
