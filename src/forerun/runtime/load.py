"""Loading models and tokenizers, with errors a person can act on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ModelError, SettingError

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; None and "auto" mean the checkpoint's own."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise SettingError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """A usable device; None means CUDA if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"device {str(device)!r} cannot be used: {reason}") from error
    return resolved


def load_model(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a causal language model from a folder or a Hugging Face id (safetensors only).

    Raises:
        ModelError: missing, corrupt, or not a causal language model; one line says which.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from forerun.runtime.support import refusal

    where, options = resolve_device(device), {"trust_remote_code": trust_remote_code}
    _check_path(name)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(str(name), **options)
        if reason := refusal(config.get_text_config(decoder=True)):
            raise ModelError(f"{config.model_type} models cannot run here: {reason}")
        model = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=resolve_dtype(dtype) or "auto", use_safetensors=True, **options
        )
    except ModelError:
        raise
    except SafetensorError as error:
        raise ModelError(f"the weights in {str(name)!r} are corrupt: {error}") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"cannot load the model {str(name)!r}: {_first_line(error)}") from error
    return model.to(where).eval()


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer that belongs to a model."""
    from transformers import AutoTokenizer

    _check_path(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise bare Exception for a damaged file
        raise ModelError(
            f"cannot load the tokenizer of {str(name)!r}: {_first_line(error)}"
        ) from error
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return tokenizer


def _check_path(name: str | Path) -> None:
    text = str(name)
    looks_local = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{text!r} holds no model: config.json is missing")
    if looks_local and not path.is_dir():
        raise ModelError(f"no model folder at {text!r}; give a folder or a Hugging Face id")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
