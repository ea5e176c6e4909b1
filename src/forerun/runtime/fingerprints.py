"""Names for models by what they are, not by where they lie."""

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray


def identity(norm: NDArray[np.float32]) -> str:
    """A name for a model in any precision: by the weights of its final norm, which none rounds."""
    return hashlib.sha256(np.ascontiguousarray(norm, np.float32).tobytes()).hexdigest()[:16]


def fingerprint(model: Any) -> str:
    """A name for a model's configuration and weights, from a sample of every tensor."""
    config = model.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{sample.tolist()}".encode())
    return digest.hexdigest()[:16]
