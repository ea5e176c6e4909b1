"""How near a GGUF file's best tokens on openvino, and its peers', are to those of `transformers`'
dequantised model in float32.

``python -m benchmarks.gguf_agreement MODEL.gguf``: for each, the share of positions with the same
best token, and how far apart the reference's two best were where another won. Peers (OpenVINO GenAI
and llama.cpp, with their users' defaults) are there if their packages are; they say no logits, so
each position is a request for one token behind the text before it: ten minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import torch

from benchmarks.common import provenance, save, table
from forerun.runtime import gguf, load_model, load_tokenizer
from forerun.runtime.openvino.load import from_name

CHUNK = 100
"""Tokens of a text; each is read by itself."""
Best = Callable[[Sequence[int]], list[int]]
"""From a text to the best token behind each of its tokens."""


def texts_of(name: str, positions: int) -> list[list[int]]:
    """Pieces of this repository's documents."""
    root = Path(__file__).parent.parent
    text = "\n".join(path.read_text() for path in sorted((root / "docs").glob("*.md")))
    ids = load_tokenizer(name).encode(text)[:positions]
    return [ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK)]


def forerun(name: str, threads: int) -> Best:
    """As files are run by default."""
    executor = from_name(name, threads=threads)

    def best(text: Sequence[int]) -> list[int]:
        logits = executor.run([0], [text], [len(text)])[0]
        executor.keep([], [])
        return list(logits.argmax(-1).tolist())

    return best


def prefixes(text: Sequence[int]) -> Iterator[list[int]]:
    return (list(text[: n + 1]) for n in range(len(text)))


def genai(name: str, threads: int) -> Best:
    """Its pipeline over a GGUF file: 8-bit inputs and cache, the rest in bfloat16 where it can."""
    import openvino as ov
    import openvino_genai

    pipe = openvino_genai.LLMPipeline(name, "CPU", INFERENCE_NUM_THREADS=threads)
    config = openvino_genai.GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True)

    def best(text: Sequence[int]) -> list[int]:
        asked = (ov.Tensor(np.array([prefix])) for prefix in prefixes(text))
        return [int(pipe.generate(prefix, config).tokens[0][0]) for prefix in asked]

    return best


def llama_cpp(name: str, threads: int) -> Best:
    """Its server: 8-bit inputs, cache in 16 bits."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx = name, 1, 1024
    options.n_gpu_layers, options.fit_params, options.verbosity = 0, False, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(options)
    asked = {"n_predict": 1, "n_probs": 1, "temperature": 0, "cache_prompt": True}

    def token(prefix: list[int]) -> int:
        body = json.dumps({**asked, "prompt": prefix}).encode()
        with urlopen(server.listening_address + "/completion", body) as reply:
            return int(json.load(reply)["completion_probabilities"][0]["id"])

    return lambda text: list(map(token, prefixes(text)))


PEERS = {"GenAI": (genai, "openvino_genai"), "llama.cpp": (llama_cpp, "xllamacpp")}


def reference(name: str, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """`(positions, 3)`: the best token, and the logits of the two best."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(name, "cpu", "float32")
    rows = []
    for text in texts:
        with torch.inference_mode():
            two = model(input_ids=torch.tensor([text])).logits[0].double().topk(2)
        rows.append(torch.cat([two.indices[:, :1].double(), two.values], 1))
    return torch.cat(rows)


def main(name: str, positions: int, threads: int) -> None:
    """Measure and write a table."""
    torch.set_num_threads(threads)
    texts = texts_of(name, positions)
    ways: dict[str, Callable[[str, int], Best]] = {"forerun": forerun}
    ways |= {peer: make for peer, (make, package) in PEERS.items() if find_spec(package)}
    wanted = reference(name, texts)
    results: dict[str, dict[str, float]] = {}
    for way, make in ways.items():
        best = make(name, threads)
        found = torch.tensor([token for text in texts for token in best(text)])
        other = found != wanted[:, 0]
        gaps = (wanted[:, 1] - wanted[:, 2])[other].tolist()
        results[way] = {"positions": len(found), "same": 1 - len(gaps) / len(found)}
        results[way]["gap"] = max(gaps, default=0.0)
        print(way, results[way], flush=True)
    facts = SimpleNamespace(precision=gguf.read(Path(name)).kind, executor="openvino")
    made = provenance(SimpleNamespace(target=SimpleNamespace(device="cpu", facts=facts)))
    rows = [[way, f"{x['same']:.2%}", f"{x['gap']:.2f}"] for way, x in results.items()]
    header = ["", "same best token", "its two best apart where another won, at most"]
    text = (
        f"Best tokens at {sum(map(len, texts)):,} positions of this repository's documents beside "
        f"`transformers`' dequantised model in float32.\n\n{table(header, rows)}"
    )
    save(f"agreement-{Path(name).stem.lower()}", made, results, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    main(given.model, given.positions, given.threads)
