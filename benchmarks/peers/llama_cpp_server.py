"""llama.cpp's server in this process (`xllamacpp`), on a CPU.

``python -m benchmarks.peers.llama_cpp_server MODEL.gguf ROWS CONTEXT THREADS [ngram]`` serves a
file until it is ended.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class LlamaCpp:
    """A GGUF file as its users run it, or a Llama's folder with weights and cache in fp32.

    Of a folder the GGUF file is written here with `gguf`. `threshold`: draft on while the draft's
    top probability is at least this; "ngram" drafts from the text itself.
    """

    def __init__(self, first: Mapping[str, Any], kind: str) -> None:
        self.cpp: Any = importlib.import_module("xllamacpp")
        self.folder, self.rows = tempfile.TemporaryDirectory(), first["rows"]
        params = self.cpp.CommonParams()
        params.model.path = first.get("gguf") or self._gguf(first["model"], "target")
        params.n_parallel = first["rows"]
        params.n_ctx = first["rows"] * first["context"]
        params.n_gpu_layers, params.fit_params, params.cache_prompt = 0, False, False
        params.verbosity = -1
        caches, threads = [params], [params.cpuparams, params.cpuparams_batch]
        kinds = self.cpp.common_speculative_type
        if kind == "draft":
            draft = params.speculative.draft
            draft.mparams.path = self._gguf(first["draft"], "draft")
            draft.n_max, draft.p_min = first["tokens"], first["threshold"]
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            caches.append(draft)
            threads += [draft.cpuparams, draft.cpuparams_batch]
        elif kind == "ngram":
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        if not first.get("gguf"):
            for cached in caches:
                cached.cache_type_k = cached.cache_type_v = self.cpp.ggml_type.GGML_TYPE_F32
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


def make(name: str, first: Mapping[str, Any]) -> LlamaCpp:
    """The peer of a name, its models loaded."""
    return LlamaCpp(first, name.removeprefix("llama-cpp").removeprefix("-"))


def write_gguf(folder: Path, path: str, kind: str = "F32") -> None:
    """Write a model of the Llama family with its tokens, matrices in a type of `gguf`'s, the table
    of embeddings in no fewer than 8 bits."""
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
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        own = "Q8_0" if kind.startswith("Q") and called.startswith("token_embd") else kind
        held = gguf.GGMLQuantizationType[own if tensor.ndim > 1 else "F32"]
        writer.add_tensor(called, gguf.quantize(tensor, held), raw_dtype=held)
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


if __name__ == "__main__":
    path, *numbers, kind = sys.argv[1:6]
    rows, context, threads = map(int, numbers)
    made = LlamaCpp({"gguf": path, "rows": rows, "context": context, "threads": threads}, kind)
    print(made.server.listening_address, flush=True)
    signal.pause()
