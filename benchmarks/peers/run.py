"""`run.py NAME SETTING=JSON...`: a peer that speaks the JSON lines of `forerun.lab.bench.peers`.

It is run by a Python that has the peer's library, which need not have forerun. Names, settings and
their defaults: `names.json`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODULES = {
    "transformers": "hugging_face",
    "vllm": "vllm_engine",
    "openvino-genai": "genai",
    "llama-cpp": "llama_cpp_server",
}


def settings(words: list[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Name, settings with their defaults, and those that were given."""
    name, *pairs = words
    given = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    known = json.loads((HERE / "names.json").read_text(encoding="utf-8"))
    return name, known[name]["settings"] | given, given


def shown(name: str, how: dict[str, Any]) -> str:
    """Name and settings as the results call them; a file's without its folder."""
    values = {key: Path(v).name if key == "gguf" else v for key, v in how.items() if v is not None}
    inside = ",".join(
        f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()
    )
    return f"{name}({inside})" if inside else name


def main() -> None:
    """Serve requests until the pipe closes."""
    # Libraries print to stdout; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        name, how, given = settings(sys.argv[1:])
        kind = next(k for k in MODULES if name.startswith(k))
        first = json.loads(sys.stdin.readline()) | how
        if "gguf" in how and not how["gguf"] and first["model"].endswith(".gguf"):
            how["gguf"] = first["gguf"] = first["model"]
        if name.endswith("-draft") and first["draft"] is None:
            raise ValueError(f"{name} needs a draft model, and the drafter is none")
        engine: Any = importlib.import_module(MODULES[kind]).make(name, first)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    ready = {"ready": True, "name": shown(name, given), "versions": engine.versions()}
    ready["rows"] = engine.rows
    ready["plain"] = kind if name != kind and not name.startswith("transformers-beam") else None
    ready["arithmetic"] = "own" if how.get("gguf") else "same"
    answer(ready)
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
