"""vLLM in this process; `memory` is the share of the device's that it may take."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any


class VLLM:
    """Its own continuous batching."""

    rows = None

    def __init__(self, first: Mapping[str, Any], speculates: bool) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # faster for single texts
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self.vllm: Any = importlib.import_module("vllm")
        settings: dict[str, Any] = {
            "model": first["model"],
            "dtype": first["dtype"],
            "gpu_memory_utilization": first["memory"],  # of a CPU's memory, where it runs on one
        }
        if speculates:
            settings["speculative_config"] = {
                "method": "draft_model",
                "model": first["draft"],
                "num_speculative_tokens": first["tokens"],
            }
        self.model = self.vllm.LLM(**settings)

    def versions(self) -> dict[str, str]:
        """Of the library."""
        return {"vllm": str(getattr(self.vllm, "__version__", "unknown"))}

    def generate(self, prompts: list[list[int]], most: int, penalty: float) -> list[list[int]]:
        """Continue prompts greedily."""
        sampling = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=most, repetition_penalty=penalty
        )
        texts = [{"prompt_token_ids": ids} for ids in prompts]
        done = self.model.generate(texts, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]


def make(name: str, first: Mapping[str, Any]) -> VLLM:
    """The peer of a name, its models loaded."""
    return VLLM(first, name.endswith("-draft"))
