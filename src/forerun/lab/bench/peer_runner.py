"""vLLM behind a pipe: run by a Python that has vLLM, which need not have forerun.

JSON lines. In, first: `{"model", "draft", "tokens", "dtype", "memory"}` (`draft` null: plain
decoding; `memory`: the share of the device's that it may take). Out:
`{"ready": true, "versions": {...}}` or `{"error": "..."}`. Then per request in:
`{"prompts", "max_new_tokens", "repetition_penalty"}`, out: `{"tokens", "seconds"}` or `{"error"}`.
Seconds are measured here, so the pipe costs nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve requests until the pipe closes."""
    # Libraries print to stdout; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # faster for single texts
    try:
        vllm: Any = importlib.import_module("vllm")
        model = _load(vllm, json.loads(sys.stdin.readline()))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True, "versions": {"vllm": str(getattr(vllm, "__version__", "unknown"))}})
    for line in sys.stdin:
        try:
            answer(_generate(vllm, model, json.loads(line)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def _load(vllm: Any, wanted: dict[str, Any]) -> Any:
    settings: dict[str, Any] = {
        "model": wanted["model"],
        "dtype": wanted["dtype"],
        "gpu_memory_utilization": wanted["memory"],  # of a CPU's memory, where it runs on one
    }
    if wanted["draft"] is not None:
        settings["speculative_config"] = {
            "method": "draft_model",
            "model": wanted["draft"],
            "num_speculative_tokens": wanted["tokens"],
        }
    return vllm.LLM(**settings)


def _generate(vllm: Any, model: Any, request: dict[str, Any]) -> dict[str, Any]:
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        repetition_penalty=request["repetition_penalty"],
    )
    began = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    out = model.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"tokens": [list(o.outputs[0].token_ids) for o in out], "seconds": seconds}


if __name__ == "__main__":
    main()
