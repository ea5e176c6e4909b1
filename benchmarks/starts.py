"""What starting costs: processor seconds, seconds and memory to the first token of a short prompt.

A process of its own for each start, in turns: forerun with its default draft and without one, the
first time (nothing kept) and the second, and what people run else on a GGUF file, which keep
nothing. Processor time says most where a machine is shared. forerun makes graphs for its commonest
passes when it has written for a while: what it takes with all of them is said besides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import provenance, save, table
from forerun.runtime import gguf

END = """
import json, time
lines = open("/proc/self/status").read().splitlines()
held = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in lines if line.startswith("Vm")}
print(json.dumps({"cpu": time.process_time(), "seconds": time.time() - began,
                  "held": held["VmRSS"], "peak": held["VmHWM"]}))
"""
FORERUN = """
import sys
path, began, threads, draft = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import forerun
model = forerun.load(path, draft or None, runtime="openvino")
model.generate([{"role": "user", "content": "Why is the sky blue?"}], max_new_tokens=1)
"""
WHOLE = """
model.target.executor.finish()
model.generate("Hello", max_new_tokens=16)
"""
GENAI = """
import sys
path, began, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
import openvino_genai
pipe = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
pipe.generate("Why is the sky blue?", max_new_tokens=1, do_sample=False)
"""
LLAMA_CPP = """
import json, sys
path, began, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
from urllib.request import urlopen
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_parallel, options.n_ctx = path, 1, 8192
options.n_gpu_layers, options.fit_params, options.verbosity = 0, False, -1
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(options)
asked = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 1}
urlopen(server.listening_address + "/v1/chat/completions", json.dumps(asked).encode()).read()
"""
WAYS = {
    "forerun": (FORERUN, "", None),
    "forerun without a draft": (FORERUN, "none", None),
    "GenAI": (GENAI, "", "openvino_genai"),
    "llama.cpp": (LLAMA_CPP, "", "xllamacpp"),
}
"""By name: what is run, with which draft, and the package it needs."""
KINDS = {
    "cpu": "{:.1f}",
    "seconds": "{:.1f}",
    "held": "{:.2f}",
    "peak": "{:.2f}",
    "whole": "{:.2f}",
}
"""What is measured: seconds, and resident gigabytes after the first token, at most until then, and
with all graphs."""


def started(code: str, path: Path, draft: str, threads: int, cache: str) -> dict[str, float]:
    """One start in a process of its own."""
    own = {**os.environ, "FORERUN_CACHE": cache, "OMP_NUM_THREADS": str(threads)}
    arguments = [str(path), str(time.time()), str(threads), draft]
    code += END + (WHOLE + END if code == FORERUN else "")
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=own, check=True, stdout=subprocess.PIPE, text=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {**said[0], "whole": said[-1]["held"]}


def main(paths: Sequence[Path], turns: int, threads: int) -> None:
    """Measure and write `starts.json`: the least of several turns."""
    torch.set_num_threads(threads)
    ways = {name: way for name, way in WAYS.items() if not way[2] or find_spec(way[2])}
    results: dict[str, dict[str, Any]] = {}
    for path in paths:
        seen: dict[str, list[dict[str, float]]] = {}
        for _ in range(turns):
            for name, (code, draft, package) in ways.items():
                with tempfile.TemporaryDirectory() as cache:
                    for start in (name,) if package else (f"{name}, first", f"{name}, second"):
                        found = started(code, path, draft, threads, cache)
                        seen.setdefault(start, []).append(found)
        results[path.name] = {
            name: {kind: min(one[kind] for one in every) for kind in KINDS}
            for name, every in seen.items()
        }
    header = ["file", "start", "processor s", "× GenAI", "s", "GB", "GB at most", "GB, all graphs"]
    rows = []
    for file, every in results.items():
        for name, found in every.items():
            cells = [form.format(found[kind]) for kind, form in KINDS.items()]
            over = f"{found['cpu'] / every['GenAI']['cpu']:.2f}" if "GenAI" in every else ""
            rows.append([file, name, cells[0], over, *cells[1:]])
    facts = SimpleNamespace(precision=gguf.read(paths[0]).kind, executor="openvino")
    made = provenance(SimpleNamespace(target=SimpleNamespace(device="cpu", facts=facts)))
    text = f"To the first token of a short prompt, least of {turns} turns.\n\n{table(header, rows)}"
    save("starts", made | {"turns": turns}, results, text)
