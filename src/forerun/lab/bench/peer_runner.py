"""A peer behind a pipe: run by a Python that has the peer's library, which need not have forerun.

JSON lines. In, first: `{"engine", "model", "draft", "tokens", ...}`: one of `ENGINES`, folders or
ids of the models (`draft` null: plain decoding), tokens drafted per round, and what else the engine
reads. Out: `{"ready": true, "versions": {...}}` or `{"error": "..."}`. Then per request in:
`{"prompts", "max_new_tokens", "repetition_penalty"}`, out: `{"tokens", "seconds"}` or `{"error"}`.
Seconds are measured here, so the pipe costs nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class VLLM:
    """vLLM in this process; `memory` is the share of the device's that it may take."""

    def __init__(self, first: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # faster for single texts
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self.vllm: Any = importlib.import_module("vllm")
        settings: dict[str, Any] = {
            "model": first["model"],
            "dtype": first["dtype"],
            "gpu_memory_utilization": first["memory"],  # of a CPU's memory, where it runs on one
        }
        if first["draft"] is not None:
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


class GenAI:
    """OpenVINO GenAI's continuous batching on a CPU in fp32, as forerun's own executor runs.

    Models are folders of `genai_model.write`; their tokenizers are converted here, since GenAI
    compares them before it drafts. `threshold` above 0 drafts while the draft is that sure.
    """

    def __init__(self, first: dict[str, Any]) -> None:
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        self.genai: Any = importlib.import_module("openvino_genai")
        self.ov: Any = importlib.import_module("openvino")
        self.numpy: Any = importlib.import_module("numpy")
        self.tokens, self.threshold = first["tokens"], first["threshold"]
        self.eos, self.speculates = set(first["eos"]), first["draft"] is not None
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": first["threads"],
            "ENABLE_CPU_PINNING": False,
        }
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = False  # prompts are read anew, as by the others
        models = [Path(name) for name in (first["model"], first["draft"]) if name is not None]
        for folder in models if self.speculates else ():
            self._add_tokenizer(folder)
        more = {}
        if self.speculates:
            more["draft_model"] = self.genai.draft_model(str(models[1]), "CPU", **settings)
        self.pipe = self.genai.ContinuousBatchingPipeline(
            str(models[0]), scheduler, "CPU", {**settings, **more}
        )

    def _add_tokenizer(self, folder: Path) -> None:
        convert = importlib.import_module("openvino_tokenizers").convert_tokenizer
        fast = importlib.import_module("transformers").PreTrainedTokenizerFast
        both = convert(fast.from_pretrained(str(folder)), with_detokenizer=True)
        for name, graph in zip(("tokenizer", "detokenizer"), both, strict=True):
            self.ov.save_model(graph, folder / f"openvino_{name}.xml")

    def versions(self) -> dict[str, str]:
        """Of both libraries."""
        return {"openvino-genai": self.genai.__version__, "openvino": self.ov.__version__}

    def generate(self, prompts: list[list[int]], most: int, penalty: float) -> list[list[int]]:
        """Continue prompts greedily."""
        how = self.genai.GenerationConfig()
        how.max_new_tokens, how.do_sample, how.repetition_penalty = most, False, penalty
        how.stop_token_ids, how.apply_chat_template = self.eos, False
        if self.speculates and self.threshold > 0:
            how.assistant_confidence_threshold = self.threshold
        elif self.speculates:
            how.num_assistant_tokens = self.tokens
        ids = [self.ov.Tensor(self.numpy.array([p], dtype=self.numpy.int64)) for p in prompts]
        done = self.pipe.generate(ids, [how] * len(ids))
        return [list(one.m_generation_ids[0]) for one in done]


class LlamaCpp:
    """llama.cpp's server in this process (`xllamacpp`), on a CPU, weights and cache in fp32.

    Models are folders of the Llama family, whose GGUF file is written here with `gguf`.
    `threshold`: draft on while the draft's top probability is at least this.
    """

    def __init__(self, first: dict[str, Any]) -> None:
        self.cpp: Any = importlib.import_module("xllamacpp")
        self.folder = tempfile.TemporaryDirectory()
        params = self.cpp.CommonParams()
        params.model.path = self._gguf(first["model"], "target")
        params.n_parallel = first["rows"]
        params.n_ctx = first["rows"] * first["context"]
        params.cache_type_k = params.cache_type_v = self.cpp.ggml_type.GGML_TYPE_F32
        params.n_gpu_layers, params.fit_params, params.cache_prompt = 0, False, False
        params.verbosity = -1
        threads = [params.cpuparams, params.cpuparams_batch]
        if first["draft"] is not None:
            draft = params.speculative.draft
            draft.mparams.path = self._gguf(first["draft"], "draft")
            draft.n_max, draft.p_min = first["tokens"], first["threshold"]
            draft.cache_type_k = draft.cache_type_v = self.cpp.ggml_type.GGML_TYPE_F32
            kinds = self.cpp.common_speculative_type
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            threads += [draft.cpuparams, draft.cpuparams_batch]
        for cpu in threads:
            cpu.n_threads = first["threads"]
        self.server = self.cpp.Server(params)
        self.pool = ThreadPoolExecutor(first["rows"])

    def _gguf(self, name: str, called: str) -> str:
        path = str(Path(self.folder.name) / f"{called}.gguf")
        write_gguf(Path(name), path)
        return path

    def versions(self) -> dict[str, str]:
        """Of the bindings, which carry their own llama.cpp."""
        return {"xllamacpp": self.cpp.__version__}

    def generate(self, prompts: list[list[int]], most: int, penalty: float) -> list[list[int]]:
        """Continue prompts greedily, each in a slot of the server."""

        def one(ids: list[int]) -> list[int]:
            body = {
                "prompt": ids,
                "n_predict": most,
                "samplers": ["penalties", "top_k"] if penalty != 1 else ["top_k"],
                "top_k": 1,
                "repeat_penalty": penalty,
                "repeat_last_n": 1 << 20,  # all of the text
                "return_tokens": True,
                "cache_prompt": False,
            }
            where = f"{self.server.listening_address}/completion"
            kind = {"Content-Type": "application/json"}
            try:
                with urlopen(Request(where, json.dumps(body).encode(), kind)) as answer:
                    return list(json.loads(answer.read())["tokens"])
            except HTTPError as error:
                raise RuntimeError(error.read().decode()) from error

        return list(self.pool.map(one, prompts))


def write_gguf(folder: Path, path: str) -> None:
    """Write a model of the Llama family, its weights as they are but in fp32, with its tokens."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"no way from {config['model_type']} to GGUF here; Llama models have one")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    pairs = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(pairs)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokens(gguf, writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rotated by pairs there
            n = heads if "q_proj" in name else pairs
            halves = tensor.reshape(n, 2, len(tensor) // n // 2, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape).copy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(gguf: Any, writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """A byte-level vocabulary; prompts come as ids, so how text is cut does not matter."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = config["vocab_size"]
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = tokenizer["model"].get("merges", [])
    ends = config["eos_token_id"]
    end = ends[0] if isinstance(ends, list) else ends
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and fp32 values of all tensors, without torch."""
    numpy: Any = importlib.import_module("numpy")
    kinds = {"F32": numpy.float32, "F16": numpy.float16}
    for file in sorted(folder.glob("*.safetensors")):
        raw = numpy.memmap(file, dtype=numpy.uint8, mode="r")
        begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        for name, about in json.loads(raw[8:begin].tobytes()).items():
            if name == "__metadata__":
                continue
            first, last = about["data_offsets"]
            data = raw[begin + first : begin + last]
            if about["dtype"] == "BF16":
                values = (data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            else:
                values = data.view(kinds[about["dtype"]]).astype(numpy.float32)
            yield name, values.reshape(about["shape"])


ENGINES = {"vllm": VLLM, "openvino-genai": GenAI, "llama-cpp": LlamaCpp}


def main() -> None:
    """Serve requests until the pipe closes."""
    # Libraries print to stdout; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        first = json.loads(sys.stdin.readline())
        engine: Any = ENGINES[first["engine"]](first)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True, "versions": engine.versions()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            began = time.perf_counter()
            tokens = engine.generate(
                request["prompts"], request["max_new_tokens"], request["repetition_penalty"]
            )
            answer({"tokens": tokens, "seconds": time.perf_counter() - began})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # engines leave threads behind that do not end


if __name__ == "__main__":
    main()
