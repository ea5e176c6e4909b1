"""OpenVINO GenAI on a CPU: on a GGUF file as its users run it, or in forerun's arithmetic."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WRITER = Path(__file__).with_name("genai_model.py")


class AsUsed:
    """A GGUF file with the defaults of its pipeline: quantised weights, activations and cache.

    One prompt after another. With `lookup` it drafts `tokens` from the n-grams of the prompt and
    the text so far.
    """

    rows = 1

    def __init__(self, first: Mapping[str, Any], lookup: bool) -> None:
        self.genai, self.ov, self.numpy = _libraries()
        more = {"prompt_lookup": True} if lookup else {}
        self.pipe = self.genai.LLMPipeline(
            first["gguf"], "CPU", INFERENCE_NUM_THREADS=first["threads"], **more
        )
        self.lookup, self.eos = lookup, set(first["eos"])
        self.tokens, self.ngram = first.get("tokens", 0), first.get("ngram", 0)

    def versions(self) -> dict[str, str]:
        """Of both libraries."""
        return {"openvino-genai": self.genai.__version__, "openvino": self.ov.__version__}

    def generate(self, prompts: list[list[int]], most: int, penalty: float) -> list[list[int]]:
        """Continue prompts greedily."""
        how = _greedy(self.genai, most, penalty, self.eos)
        if self.lookup:
            how.num_assistant_tokens, how.max_ngram_size = self.tokens, self.ngram
        ids = [self.ov.Tensor(self.numpy.array([p], dtype=self.numpy.int64)) for p in prompts]
        return [list(self.pipe.generate(one, how).tokens[0]) for one in ids]


class Same:
    """Continuous batching in fp32, as forerun's own executor runs.

    The graphs are written by the bench's Python, which has forerun; tokenizers are converted here,
    since GenAI compares them before it drafts. `threshold` above 0 drafts while the draft is that
    sure.
    """

    rows = None

    def __init__(self, first: Mapping[str, Any], kind: str) -> None:
        self.genai, self.ov, self.numpy = _libraries()
        self.first, self.kind, self.eos = first, kind, set(first["eos"])
        self.folder = tempfile.TemporaryDirectory()
        roles = ["model", *(["draft"] if kind == "draft" else [])]
        paths = [Path(self.folder.name) / role for role in roles]
        for role, path in zip(roles, paths, strict=True):
            subprocess.run(
                [first["python"], str(WRITER), first[role], str(path)], check=True, stdout=2
            )
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": first["threads"],
            "ENABLE_CPU_PINNING": False,
        }
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = False  # prompts are read anew, as by the others
        for path in paths if kind else ():
            self._add_tokenizer(path)
        more: dict[str, Any] = {"prompt_lookup": True} if kind == "lookup" else {}
        if kind == "draft":
            more["draft_model"] = self.genai.draft_model(str(paths[1]), "CPU", **settings)
        self.pipe = self.genai.ContinuousBatchingPipeline(
            str(paths[0]), scheduler, "CPU", {**settings, **more}
        )

    def _add_tokenizer(self, folder: Path) -> None:
        convert = importlib.import_module("openvino_tokenizers").convert_tokenizer
        fast = importlib.import_module("transformers").PreTrainedTokenizerFast
        both = convert(fast.from_pretrained(str(folder)), with_detokenizer=True)
        for name, graph in zip(("tokenizer", "detokenizer"), both, strict=True):
            self.ov.save_model(graph, folder / f"openvino_{name}.xml")

    versions = AsUsed.versions

    def generate(self, prompts: list[list[int]], most: int, penalty: float) -> list[list[int]]:
        """Continue prompts greedily."""
        how = _greedy(self.genai, most, penalty, self.eos)
        if self.kind == "draft" and self.first["threshold"] > 0:
            how.assistant_confidence_threshold = self.first["threshold"]
        elif self.kind:
            how.num_assistant_tokens = self.first["tokens"]
        if self.kind == "lookup":
            how.max_ngram_size = self.first["ngram"]
        ids = [self.ov.Tensor(self.numpy.array([p], dtype=self.numpy.int64)) for p in prompts]
        done = self.pipe.generate(ids, [how] * len(ids))
        return [list(one.m_generation_ids[0]) for one in done]


def make(name: str, first: Mapping[str, Any]) -> AsUsed | Same:
    """The peer of a name, its models loaded."""
    kind = name.removeprefix("openvino-genai").removeprefix("-")
    return AsUsed(first, kind == "lookup") if first.get("gguf") else Same(first, kind)


def _libraries() -> tuple[Any, Any, Any]:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    genai = importlib.import_module("openvino_genai")
    return genai, importlib.import_module("openvino"), importlib.import_module("numpy")


def _greedy(genai: Any, most: int, penalty: float, eos: set[int]) -> Any:
    how = genai.GenerationConfig()
    how.max_new_tokens, how.do_sample, how.repetition_penalty = most, False, penalty
    how.stop_token_ids, how.apply_chat_template = eos, False
    return how
