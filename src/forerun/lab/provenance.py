"""Provenance of figures: the models, the machine, the versions."""

import platform
from datetime import UTC, datetime
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from forerun import __version__, zoo
from forerun.drafters.model import ModelDrafter
from forerun.model import Model
from forerun.runtime.base import Rows
from forerun.runtime.load import local_folder
from forerun.runtime.timing import machine as machine_name

HASHED = 4 << 30  # weights files of more bytes than this are not read in full to name a model


def of(model: Model, draft: Any = None) -> dict[str, Any]:
    """Target, draft and machine; `draft` stands for a drafter that is no model."""
    drafter = model.drafter
    own = identity(drafter.rows) if isinstance(drafter, ModelDrafter) else draft
    return {"target": identity(model.target), "draft": own, **machine(model.target)}


def machine(runtime: Rows) -> dict[str, Any]:
    """Date, device, dtype, CPU, threads and versions."""
    libraries = ["forerun", "torch", "transformers"]
    if runtime.facts.executor == "openvino":
        libraries.append("openvino")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": str(runtime.device),
        "dtype": runtime.facts.precision,
        "cpu": machine_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{n: version(n) for n in libraries}},
    }


def versions() -> dict[str, str]:
    """Versions of all packages that may matter to a result."""
    out = {"forerun": __version__, "python": platform.python_version()}
    out |= {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return out | {"platform": platform.platform()}


def identity(runtime: Rows) -> dict[str, Any]:
    """Name and hash of a model.

    The name is ``"shipped"``, a Hugging Face id, or that of the folder, without its path. The
    hash is SHA-256 over the safetensors files in the order of their names, or the GGUF file;
    `hashed` says so with ``"weights"``. Of safetensors of more than 4 GiB only `config.json` and
    the first file are read (``"config and first shard"``); of a model that is in no folder here
    nothing is.
    """
    name = runtime.facts.name
    if name.endswith(".gguf"):
        with Path(name).open("rb") as file:
            whole = file_digest(file, "sha256").hexdigest()
        return {"name": Path(name).name, "sha256": whole, "hashed": "weights"}
    folder = local_folder(name) if name else None
    shipped = folder is not None and folder in (zoo.TARGET, zoo.DRAFT)
    shown = "shipped" if shipped else (Path(name).name if Path(name).is_dir() else name)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if folder is None or not files:
        return {"name": shown or "unnamed", "sha256": None, "hashed": None}
    hashed = "weights"
    if sum(file.stat().st_size for file in files) > HASHED:
        files, hashed = [folder / "config.json", files[0]], "config and first shard"
    digest = sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return {"name": shown, "sha256": digest.hexdigest(), "hashed": hashed}
