"""A trained draft on disk: `draft.json` says what it is, `draft.safetensors` holds its tensors."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.arrays import copied, library
from forerun.cache import replacing, write_json
from forerun.errors import ForerunWarning, ModelError, SettingError, first_line
from forerun.lazy import torch
from forerun.types import Array

ABOUT, WEIGHTS = "draft.json", "draft.safetensors"
FORMAT = "forerun draft 1"
TOKENS = "tokens"  # the tensor of `(V,)` rising token ids of a draft that knows some
SCALE = ".int8_scale"  # behind a matrix in 8 bits' name: that of its `(outputs, 1)` scales

Tensors = dict[str, Array]


@dataclass(frozen=True)
class About:
    """What a folder with a draft says of itself."""

    kind: str  # the drafter that uses it
    target: str | None  # fingerprint of the target it was trained for; None if it names none
    settings: dict[str, Any] = field(default_factory=dict)  # of its form: layers, width, depths
    trained: dict[str, Any] = field(default_factory=dict)  # how, and what was measured then


def save_draft(folder: str | Path, about: About, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a draft; `OSError` if it cannot be written."""
    write_tensors(Path(folder, WEIGHTS), tensors)
    save_about(folder, about)


def save_about(folder: str | Path, about: About) -> None:
    """Write what a draft says of itself; `OSError` if it cannot be written."""
    document = {"format": FORMAT, "kind": about.kind, "target": about.target, **about.settings}
    write_json(Path(folder, ABOUT), document | {"trained": about.trained})


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file of tensors, whole or not at all, and its folder; `OSError` if that fails."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as beside:
        beside.write_bytes(save(own, metadata={"format": "pt"}))


def read_about(folder: str | Path, kind: str | None = None) -> About:
    """What the draft in a folder says of itself; `ModelError` if there is none of the kind, or it
    cannot be read."""
    path = Path(folder).expanduser() / ABOUT
    if not path.is_file():
        raise ModelError(
            f"{str(folder)!r} holds no draft: {ABOUT} is missing; forerun train-draft makes one"
        )
    try:
        given = dict(json.loads(path.read_text(encoding="utf-8")))
        if given.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}")
        named, target, trained = given.pop("kind"), given.pop("target"), given.pop("trained", {})
        about = About(named, target, given, trained)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if kind not in (None, about.kind):
        raise ModelError(
            f"{str(folder)!r} holds a draft for the drafter {about.kind!r}, not {kind!r}"
        )
    return about


def load_draft(
    folder: str | Path,
    kind: str,
    shapes: Callable[[About, Tensors], Mapping[str, tuple[int, ...]]],
    model: Any = None,
    vocab_size: int = 0,
    host: bool = False,
) -> tuple[About, Tensors, Array | None]:
    """A draft for the drafter `kind`, and the `(V,)` ids of its vocabulary if it has one of its
    own, on the device of the target's module; matrices in 8 bits are widened to float32.

    Args:
        folder: where it is.
        kind: the drafter it must be for.
        shapes: from what it says of itself and its tensors to the shapes that they must have.
        model: the target's module, if it is at hand; else it is on the CPU.
        vocab_size: of the target, above all ids in `TOKENS`; 0 if there are none.
        host: give arrays of numpy, wherever the module is.

    Raises:
        ModelError: missing, damaged, of another kind, or not of this target's sizes.

    Warns:
        ForerunWarning: it was trained for another target of the same sizes.
    """
    about = read_about(folder, kind)
    tensors = widened(read_tensors(folder, [Path(folder).expanduser() / WEIGHTS], host))
    try:
        with naming_target(folder):
            wanted = shapes(about, tensors)
    except (ValueError, KeyError, TypeError) as error:
        why = first_line(error)
        raise ModelError(f"cannot read the weights in {str(folder)!r}: {why}") from error
    tokens = tensors.pop(TOKENS, None)
    good = tokens is None or (len(tokens) and 0 <= int(tokens[0]) <= int(tokens[-1]) < vocab_size)
    check_shapes(folder, tensors, wanted if good else {**wanted, TOKENS: "ids of this vocabulary"})
    if model is not None and about.target not in (None, fingerprint(model)):
        warnings.warn(
            f"the draft in {str(folder)!r} was trained for another target (or for this one in "
            "another precision); where it agrees less, drafts are shorter",
            ForerunWarning,
            stacklevel=4,
        )
    if host:
        return about, tensors, None if tokens is None else tokens.astype(np.int64)
    device = "cpu" if model is None else model.device
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    return about, there, None if tokens is None else tokens.long().to(device)


def read_tensors(folder: str | Path, files: Sequence[Path], host: bool = False) -> Tensors:
    """All tensors of a folder's files, on the CPU, or as arrays of numpy; `ModelError` if they are
    damaged."""
    from safetensors import SafetensorError, safe_open

    out: Tensors = {}
    try:
        for file in files:
            with safe_open(file, "numpy" if host else "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    out[name] = copied(tensors.get_tensor(name))  # or it changes with the file
    except TypeError:  # numpy has no bfloat16
        own = read_tensors(folder, files).items()
        return {n: (t.float() if t.is_floating_point() else t).numpy() for n, t in own}
    except (OSError, ValueError, SafetensorError) as error:
        why = first_line(error)
        raise ModelError(f"cannot read the weights in {str(folder)!r}: {why}") from error
    if damaged := [n for n, t in out.items() if not bool(library(t).isfinite(t).all())]:
        what = f"the draft in {str(folder)!r} is damaged"
        raise ModelError(f"{what}: {damaged[0]} holds NaN or infinity")
    return out


def shapes_of(own: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in own.items()}


def check_shapes(folder: str | Path, own: Tensors, wanted: Mapping[str, object]) -> None:
    """Refuse tensors of other names or shapes: raises `ModelError`."""
    shapes = shapes_of(own)
    if differing := sorted(n for n in {*shapes, *wanted} if shapes.get(n) != wanted.get(n)):
        first = differing[0]
        raise ModelError(
            f"the draft in {str(folder)!r} does not fit this target: {first} is "
            f"{shapes.get(first, 'missing')}, wanted {wanted.get(first, 'none')}; it was trained "
            f"for {_target_named(folder) or 'another one'}"
        )


@contextmanager
def naming_target(folder: str | Path) -> Iterator[None]:
    """Say of a `SettingError` for which target the draft in a folder was trained, if it says."""
    try:
        yield
    except SettingError as error:
        name = _target_named(folder)
        whose = f"; the draft in {str(folder)!r} was trained for {name}" if name else ""
        raise SettingError(f"{error}{whose}") from error


def _target_named(folder: str | Path) -> str:
    """The target that the draft in a folder was trained for, as messages say it, if known."""
    for file in (ABOUT, "config.json"):
        with suppress(OSError, ValueError, TypeError, AttributeError):
            about = json.loads(Path(folder, file).expanduser().read_text(encoding="utf-8"))
            trained = about.get("trained") or {}
            if name := trained.get("target_name"):
                return f"the target {name!r}"
            if known := about.get("target") or trained.get("target"):
                return f"the target of the fingerprint {known}"
    return ""


def fill(own: Mapping[str, torch.Tensor], folder: str | Path, kind: str, model: Any) -> None:
    """Read the draft in a folder into tensors of the same names; raises as `load_draft`."""
    _, tensors, _ = load_draft(folder, kind, lambda *_: shapes_of(own), model)
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def spread(logits: torch.Tensor, tokens: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """`(n, V)` logits from `(n, k)` of the tokens `(k,)` that a draft knows, −inf for others."""
    if logits.shape[-1] == vocab_size:
        return logits
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    out[..., tokens] = logits
    return out


def rounded(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors with the matrices among them in 8 bits, symmetrically, with a scale per output."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            wide = tensor.detach().float()
            scale = wide.abs().amax(1, keepdim=True) / 127
            scale[scale == 0] = 1.0
            out[name], out[name + SCALE] = (wide / scale).round().to(torch.int8), scale
        else:
            out[name] = tensor
    return out


def widened(tensors: Mapping[str, Array]) -> Tensors:
    """Tensors with the matrices that are in 8 bits in float32."""
    return {
        name: tensor * tensors[name + SCALE] if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }


def no_encoder(drafter: str) -> SettingError:
    """Why a drafter on the target's encoder is refused where there is none."""
    return SettingError(
        f"drafter {drafter} decodes on the states of the target's encoder, and this target "
        "has none; use a draft model or lookup"
    )


def own_draft(target: str | Path, kind: str) -> str | None:
    """The draft that comes with a target: the folder of that kind in its own, if any."""
    folder = Path(target, kind)
    try:
        there = str(target) and any((folder / name).is_file() for name in (ABOUT, "config.json"))
        return str(folder) if there else None
    except (OSError, ValueError):  # no name of a file
        return None


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
