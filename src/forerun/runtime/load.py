"""Loading models and tokenizers, with errors a person can act on."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forerun.errors import (
    ForerunWarning,
    MissingExtraError,
    ModelError,
    SettingError,
    UnsupportedModelError,
    first_line,
)
from forerun.lazy import torch
from forerun.runtime import gguf
from forerun.runtime.base import Rows
from forerun.runtime.drafts import widened

EXPORTED = "openvino_model.xml"  # what optimum calls the graph of an exported model
INT8 = "model.int8.safetensors"
"""Weights whose matrices are in 8 bits (`drafts.rounded`). Other libraries, which would read them
without their scales, look for another name."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling settings that a model's generation_config may have an opinion on."""
GENERIC = "PreTrainedTokenizerFast", "TokenizersBackend"  # classes of tokenizers of any family
LARGEST_HEADER = 1 << 26  # bytes; more says that it is none
DTYPES = {
    "auto": None,
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
GPUS = "/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd"
"""One of these is there where Linux has a GPU that PyTorch may use as CUDA's."""


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; None and "auto" mean the checkpoint's own."""
    if dtype is None or (isinstance(dtype, str) and dtype in DTYPES):
        return getattr(torch, name) if dtype and (name := DTYPES[dtype]) else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise SettingError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")


def is_float32(dtype: str | torch.dtype | None) -> bool:
    """Whether a dtype is float32, or may be; `SettingError` if there is no such."""
    named = isinstance(dtype, str) and DTYPES.get(dtype) == "float32"
    return named or (kind := resolve_dtype(dtype)) is None or kind == torch.float32


def resolve_device(device: str | torch.device | None) -> str:
    """The name of a usable device; None means CUDA if there is one, else the CPU."""
    if device is None:
        able = sys.platform == "win32" or any(map(os.path.exists, GPUS))
        return "cuda" if able and torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return "cpu"
    try:
        name = str(torch.device(device))
        torch.empty(0, device=name)
    except Exception as error:  # torch raises whatever a backend does
        reason = first_line(error)
        raise SettingError(f"device {str(device)!r} cannot be used: {reason}") from error
    return name


def load_model(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    mapped: bool = False,
) -> Any:
    """Load a language model from a folder or a Hugging Face id (safetensors), or a GGUF file.

    Args:
        name: the folder, id or file (`gguf.locate`).
        device: None: CUDA if there is one, else the CPU.
        dtype: None: the checkpoint's own; of a GGUF file bfloat16, to which it is widened.
        trust_remote_code: run code that comes with the model.
        mapped: leave weights that are not converted in the mapping of their file, which takes no
            memory and changes with the file: for those who are soon done with the model.

    Raises:
        ModelError: missing, corrupt, incomplete, or none that writes text; one line says which.

    Warns:
        ForerunWarning: the checkpoint holds tensors that the model has no place for, or is widened.
    """
    from safetensors import SafetensorError

    where, path, wanted = resolve_device(device), gguf.locate(name), resolve_dtype(dtype)
    options: dict[str, Any] = {"dtype": wanted or "auto", "use_safetensors": True}
    if exported(name):
        raise UnsupportedModelError(
            f"{str(name)!r} holds an exported OpenVINO model, which the runtime openvino runs"
        )
    if path is None:
        check_path(name)
    else:
        options = {"dtype": wanted or torch.bfloat16, "gguf_file": path.name}
        _warn_of_widening(path, options["dtype"])
    try:
        model = _pretrained(name if path is None else path.parent, trust_remote_code, options)
        model = model.to(where).eval()
        for tensor in () if mapped or where != "cpu" else (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()  # in a mapping it would change with the file
        run_once(model)
    except ModelError:
        raise
    except SafetensorError as error:
        raise ModelError(f"the weights in {str(name)!r} are corrupt: {error}") from error
    except Exception as error:  # whatever it is, this model cannot be used
        why = first_line(error)
        if str(error).startswith("Unrecognized configuration class"):
            why = "it is not a language model that writes text; use a decoder-only model"
        elif not isinstance(error, (OSError, ValueError, KeyError, RuntimeError)):
            kind = "" if "alidation error" in str(error) else f"{type(error).__name__}: "
            why = f"its config.json cannot be right ({kind}{why})"
        raise ModelError(f"cannot load the model {str(name)!r}: {why}") from error
    if path is not None:
        model.hf_quantizer.remove_quantization_config(model)  # it is widened, and may be copied
        model.name_or_path = str(path)
    return model


def _pretrained(name: str | Path, trusted: bool, options: dict[str, Any]) -> Any:
    """What `transformers` loads, complete and of a kind that can be served."""
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging as transformers_logging

    from forerun.runtime.support import refusal

    transformers_logging.disable_progress_bar()
    named = {k: v for k, v in options.items() if k == "gguf_file"} | {"trust_remote_code": trusted}
    config = AutoConfig.from_pretrained(str(name), **named)
    if reason := refusal(config, encoders=True):
        raise UnsupportedModelError(f"{config.model_type} models cannot run here: {reason}")
    if reason := _quantised(getattr(config, "quantization_config", None)):
        raise UnsupportedModelError(f"{str(name)!r} {reason}")
    if "gguf_file" not in options:
        _check_generation_config(name)
    encodes = getattr(config, "is_encoder_decoder", False)
    kind = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    source: str | None = str(name)
    if (eight := Path(name, INT8)).is_file():
        kind, source = getattr(transformers, config.architectures[0]), None
        # The same bfloat16 numbers whatever type is asked for: executors read these in 16 bits.
        weights = {n: tensor.bfloat16() for n, tensor in widened(load_file(eight)).items()}
        generation = transformers.GenerationConfig.from_pretrained(str(name))
        options |= {"config": config, "state_dict": weights, "generation_config": generation}
    model, report = kind.from_pretrained(
        source,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, and refused
        trust_remote_code=trusted,
        **options,
    )
    model.name_or_path = str(name)
    _check_complete(name, report)
    return model


def _warn_of_widening(path: Path, dtype: torch.dtype) -> None:
    """Say that a GGUF file's weights are widened, which needs an extra."""
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise MissingExtraError.of("gguf", "gguf")
    file, kind = gguf.read(path), str(dtype).removeprefix("torch.")
    scaled = file.get("rope.scaling.type", "none") != "none"
    if scaled or file.scale or file.rotations is not None:
        raise UnsupportedModelError(
            f"{path.name}: its rotations are stretched, or its attention scaled, which PyTorch is "
            "not told of; use the runtime openvino, or the model's safetensors"
        )
    if {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(file.kind) != kind:
        warnings.warn(
            f"{path.name}: PyTorch widens its {file.kind} weights to {kind}, "
            f"{file.facts().weights * dtype.itemsize >> 20:,} MiB and more; on a CPU the runtime "
            "openvino runs them as they are",
            ForerunWarning,
            stacklevel=3,
        )


def run_once(model: Any) -> None:
    """A pass of one token, which raises whatever is wrong with a model."""
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    encodes = getattr(model.config, "is_encoder_decoder", False)
    with torch.inference_mode():
        model(input_ids=one, **({"decoder_input_ids": one} if encodes else {}))


def _check_complete(name: str | Path, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights as they were made up; tied ones are none of these."""
    if wrong := sorted(report["mismatched_keys"]):
        key, given, needed = wrong[0]
        raise ModelError(
            f"the weights in {str(name)!r} do not fit their config.json: {key} is "
            f"{tuple(given)} where the model has {tuple(needed)} ({len(wrong)} in all)"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the weights in {str(name)!r} are incomplete: {_listed(missing)} missing; "
            "download or save the model again"
        )
    if extra := sorted(report["unexpected_keys"]):
        message = f"the model {str(name)!r} has no place for {_listed(extra)} of its checkpoint"
        warnings.warn(message, ForerunWarning, stacklevel=3)


def _check_generation_config(name: str | Path) -> None:
    """Refuse a file that cannot be read: without its end-of-text ids, texts may never end."""
    from transformers.utils import cached_file

    path = cached_file(
        str(name),
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8")).get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
            return
        wrong = f"eos_token_id is {ids!r}, not one or more token ids"
    except ValueError as error:
        wrong = str(error)
    except AttributeError:
        wrong = "it is not an object"
    raise ModelError(
        f"generation_config.json of {str(name)!r} cannot be used: {wrong}; repair it, or delete it "
        "to take the end-of-text ids of config.json"
    )


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer that belongs to a model."""
    if path := gguf.locate(name):
        from forerun.runtime.gguf_tokenizer import tokenizer_of

        return tokenizer_of(gguf.read(path))
    check_path(name)
    try:
        settings = read_json(Path(name).expanduser() / "tokenizer_config.json")
        generic = settings.get("tokenizer_class") in GENERIC
        if generic and "auto_map" not in settings and _is_plain_llama(name):
            # What `AutoTokenizer` would load. It imports the configuration class of the family, and
            # with it compilers and distributed tensors: 2 to 3 s of CPU time that running a stored
            # graph does not need.
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(name))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(name), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # tokenizers raise bare Exception for a damaged file
        kinds, here = ("*token*", "vocab*", "merges*", "spiece*"), Path(str(name))
        if here.is_dir() and not any(any(here.glob(kind)) for kind in kinds):
            raise ModelError(
                f"{str(name)!r} holds no tokenizer: tokenizer.json is missing; copy the "
                "tokenizer's files there from the model it was made from"
            ) from error
        raise ModelError(
            f"cannot load the tokenizer of {str(name)!r}: {first_line(error)}"
        ) from error
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return tokenizer


def read_config(name: str | Path) -> Any:
    """The configuration of a model whose weights are not loaded; `ModelError`, `OSError`, or what
    its class raises, if it cannot be read."""
    if _is_plain_llama(name):
        from transformers import PreTrainedConfig

        return PreTrainedConfig(**read_json(Path(name).expanduser() / "config.json"))
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(name), trust_remote_code=False)


def _is_plain_llama(name: str | Path) -> bool:
    """Whether a folder's config.json can be read as it is, without the family's class."""
    config = read_json(Path(name).expanduser() / "config.json")
    plain = config.get("model_type") == "llama" and "auto_map" not in config
    return plain and "max_position_embeddings" in config


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file; empty if there is none."""
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def counted(paths: Sequence[Path]) -> dict[str, int]:
    """Numbers by type, from the headers of safetensors files."""
    counts: Counter[str] = Counter()
    for path in paths:
        for tensor in header(path).values():
            counts[tensor["dtype"]] += prod(tensor["shape"])
    return counts


def header(path: Path) -> dict[str, Any]:
    """Types and shapes of a safetensors file's tensors by name; `ModelError` if it is damaged."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            tensors: dict[str, Any] = json.loads(file.read(size if size < LARGEST_HEADER else 0))
        except ValueError as error:
            raise ModelError(f"{str(path)!r} is damaged: {error}") from error
    tensors.pop("__metadata__", None)
    return tensors


def exported(name: str | Path) -> Path | None:
    """The folder of an exported OpenVINO model that a name means, or None if it means none."""
    with suppress(OSError, ValueError, RuntimeError):  # no name of a folder
        folder = Path(name).expanduser()
        if (folder / EXPORTED).is_file() and not list(folder.glob("*.safetensors")):
            return folder
    return None


def local_folder(name: str | Path) -> Path | None:
    """The folder of a model's files on this machine, by its path or its Hugging Face id."""
    here = Path(name).expanduser()
    if here.is_dir():
        return here
    from transformers.utils import cached_file

    try:
        return Path(cached_file(str(name), "config.json", local_files_only=True)).parent
    except (OSError, ValueError, TypeError):  # none is kept
        return None


def checkpoint_files(name: str | Path) -> list[Path]:
    """Configuration and weights of a model that is on this machine, else nothing."""
    if (here := local_folder(name)) is None:
        return []
    weights, config = list(here.glob("*.safetensors")), here / "config.json"
    good = weights and config.is_file()
    return [config, *here.glob("generation_config.json"), *weights] if good else []


def check_path(name: str | Path) -> None:
    """Refuse what is surely no folder with a model that is read here, and say the way out."""
    text = str(name)
    looks_local = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    try:
        path = Path(text).expanduser()
        folder, file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, or nobody's home
        folder, file, looks_local = False, False, True
    if folder and (reason := _other_format(path)):
        raise UnsupportedModelError(f"{text!r} {reason}")
    if folder and not (path / "config.json").is_file():
        raise ModelError(f"{text!r} holds no model: config.json is missing")
    if file:
        raise ModelError(f"{text!r} is a file, and no GGUF file; give the folder of a model")
    if ":" in text and not (looks_local or folder):
        raise ModelError(f"{text!r} names no file; a GGUF file of the hub is hub-id:FILE.gguf")
    if looks_local and not folder:
        raise ModelError(f"no model folder at {text!r}; give a folder or a Hugging Face id")


def _other_format(folder: Path) -> str | None:
    """What a folder holds that is not read here, and the way out; None: nothing of the kind."""
    if (folder / "adapter_config.json").is_file() and not list(folder.glob("model*.safetensors")):
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"holds a LoRA adapter of {base or 'a model it does not name'}; merge it first: "
            "PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)"
        )
    return _quantised(read_json(folder / "config.json").get("quantization_config"))


def _quantised(how: Any) -> str | None:
    """Why weights with this `quantization_config` are not read, and the way out; None: they are."""
    method = how.get("quant_method") if isinstance(how, dict) else None
    if method in ("awq", "gptq"):
        return (
            f"holds weights quantised by {method}, which is not read here; use the checkpoint it "
            "was made from, or a GGUF file of it"
        )
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def generation_config(target: Rows) -> Any:
    """The generation_config of a loaded model, or the one beside its weights; None if neither."""
    config = getattr(target.executor.module(), "generation_config", None)
    return saved_generation_config(target.facts.name) if config is None else config


def saved_generation_config(name: str) -> Any:
    """The generation_config that lies beside a model's weights, or what a GGUF file says instead;
    None if there is neither."""
    try:
        if name and (path := gguf.locate(name)):
            own = gguf.read(path).sampling
            return SimpleNamespace(do_sample=True, **own) if own else None
        from transformers import GenerationConfig

        return GenerationConfig.from_pretrained(name, local_files_only=True) if name else None
    except (OSError, ValueError, ModelError):
        return None


def sampling_settings(config: Any) -> dict[str, float]:
    """What a generation_config says, as fields of `Sampling`; greedy where it says so."""
    values = {name: getattr(config, name, None) for name in SAMPLED}
    settings = {name: value for name, value in values.items() if value is not None}
    if getattr(config, "do_sample", None) is False:
        settings["temperature"] = 0.0
    return settings
