"""GGUF files: what one says of its model, without reading a weight.

The package `gguf` takes 4 to 15 s of CPU time for the tokens of a vocabulary; what is read here
takes 0.2 s.
"""

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ModelError, first_line
from forerun.runtime.base import Facts, identity

_SCALARS = dict(zip(range(8), ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"), strict=True))
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
MAGIC = b"GGUF"
NORM, ALIGNMENT = "output_norm.weight", 32
ROTATIONS = "rope_freqs.weight", "rope_factors_short.weight"
"""What wavelengths of rotations are multiplied by: Llama 3's from version 3.1 on, and those of
Phi 3 in texts no longer than the context that it was first made for."""
SERVED = "llama", "qwen2", "qwen3", "gemma3", "phi3"
"""Architectures that OpenVINO runs; tests compare each with `transformers`."""
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "repetition_penalty": "penalty_repeat"}  # fmt: skip
"""Settings of sampling, and what files call them behind `general.sampling.`."""
TYPES = {
    0: ("F32", 4.0),
    1: ("F16", 2.0),
    2: ("Q4_0", 18 / 32),
    3: ("Q4_1", 20 / 32),
    6: ("Q5_0", 22 / 32),
    7: ("Q5_1", 24 / 32),
    8: ("Q8_0", 34 / 32),
    10: ("Q2_K", 84 / 256),
    11: ("Q3_K", 110 / 256),
    12: ("Q4_K", 144 / 256),
    13: ("Q5_K", 176 / 256),
    14: ("Q6_K", 210 / 256),
    30: ("BF16", 2.0),
}
"""Types of tensors by their number: the name, and bytes per weight."""
KINDS = dict(TYPES.values())  # bytes per weight by name


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # as rows and columns, the last one contiguous
    kind: str  # of `TYPES`, or ``type N`` for one that is not there
    offset: int  # of its first byte behind the metadata

    @property
    def nbytes(self) -> int:
        """Bytes in the file; those of unknown types count as 16 bits a weight."""
        return int(prod(self.shape) * KINDS.get(self.kind, 2.0))


@dataclass(frozen=True)
class GGUF:
    """A file's metadata and its list of tensors."""

    path: Path
    metadata: dict[str, Any]  # numbers, texts, and lists of them
    tensors: tuple[Tensor, ...]
    begin: int = 0  # of their bytes

    @property
    def architecture(self) -> str:
        """As llama.cpp names it: ``"llama"``, ``"qwen2"``, ..."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture's own: `name` without its prefix."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @cached_property
    def kind(self) -> str:
        """The type that most weights have."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.kind] += prod(tensor.shape)
        return sizes.most_common(1)[0][0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def identity(self) -> str:
        norm = self.floats(NORM)
        if norm is not None and self.architecture == "gemma3":
            norm -= 1  # which the model adds, and llama.cpp has added before
        return "" if norm is None else identity(norm)

    def floats(self, name: str) -> NDArray[np.float32] | None:
        """The numbers of a tensor in F32; None if there is none of this name."""
        own = next((t for t in self.tensors if t.name == name and t.kind == "F32"), None)
        if own is None:
            return None
        return np.fromfile(self.path, "<f4", prod(own.shape), offset=self.begin + own.offset)

    @property
    def rotations(self) -> NDArray[np.float32] | None:
        factors = (self.floats(name) for name in ROTATIONS)
        return next((numbers for numbers in factors if numbers is not None), None)

    @cached_property
    def limit(self) -> int:
        """Tokens of the longest text; 0 if the file does not say."""
        context = int(self.get("context_length", 0))
        if any(tensor.name == ROTATIONS[1] for tensor in self.tensors):
            return int(self.get("rope.scaling.original_context_length", context))
        return context

    @property
    def window(self) -> int:
        """Tokens that a layer with a window sees; 0 if that is all."""
        window = int(self.get("attention.sliding_window", 0))
        return window if window < self.limit else 0

    @property
    def scale(self) -> float | None:
        """What attention is scaled by where another width than a head's says it: in the largest
        Gemma 3, which llama.cpp tells by its layers, too, as the file does not say."""
        if (self.architecture, self.get("block_count")) != ("gemma3", 62):
            return None
        return float((self.get("embedding_length") / self.get("attention.head_count")) ** -0.5)

    @property
    def eos(self) -> frozenset[int] | None:
        """Ids that end a text or a turn; None if the file names none."""
        names = ("eos", "eot", "eom")
        ids = [self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        return frozenset(i for i in ids if i is not None) or None

    @property
    def sampling(self) -> dict[str, float]:
        """How its makers would sample, as fields of `Sampling`; empty if the file does not say."""
        named = {k: self.metadata.get(f"general.sampling.{name}") for k, name in SAMPLING.items()}
        return {k: value for k, value in named.items() if value is not None}

    @property
    def refusal(self) -> str | None:
        """Why OpenVINO does not run it, and the way out; None if it does."""
        if self.architecture not in SERVED:
            return (
                f"GGUF files of the architecture {self.architecture!r} are not served by openvino "
                f"(served: {', '.join(SERVED)}); use the runtime torch, or the model's safetensors"
            )
        if self.get("expert_count"):
            return "a mixture of experts is not served by openvino; use the runtime torch"
        if odd := sorted({t.kind for t in self.tensors} - set(KINDS)):
            return (
                f"its weights are of {', '.join(odd)}, which is not served; use a file in Q4_K_M, "
                "Q6_K or Q8_0"
            )
        return None

    def facts(self) -> Facts:
        """What there is to know of its model; `ModelError` if the metadata lacks what every model
        has."""
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        layers, limit = self.get("block_count"), self.limit
        heads, width = self.get("attention.head_count"), self.get("embedding_length")
        if "token_embd.weight" not in shapes or not (layers and limit and heads and width):
            raise ModelError(
                f"{str(self.path)!r} holds no language model: its metadata names no layers, heads, "
                f"width or context (architecture {self.architecture or 'unknown'})"
            )
        key_heads = self.get("attention.head_count_kv", heads)
        sizes = [self.get(f"attention.{name}_length", width // heads) for name in ("key", "value")]
        table = shapes["token_embd.weight"]
        every = sum(prod(shape) for shape in shapes.values())
        return Facts(
            vocab_size=table[0],
            limit=limit,
            layers=int(layers),
            weights=every - prod(table) if "output.weight" in shapes else every,
            token_bytes=4 * int(key_heads) * sum(map(int, sizes)) * int(layers),
            eos=self.eos,
            precision=self.kind,
            name=str(self.path),
            identity=self.identity,
        )


def read(path: Path) -> GGUF:
    """Read what comes before the weights; `ModelError` if it is no GGUF file, or cut short."""
    try:
        about = path.stat()
        return _read(path, about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read as a GGUF file: {error}") from error


@lru_cache(1)
def _read(path: Path, *_: int) -> GGUF:
    """Read a file that was changed then and has so many bytes, once: a load asks in several places,
    and `forget` gives its 10 MB back."""
    try:
        with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
            file = _Reader(data).file(path)
    except (OSError, ValueError, struct.error, KeyError, IndexError) as error:
        why = "it is cut short" if isinstance(error, struct.error) else error
        raise ModelError(
            f"{str(path)!r} cannot be read as a GGUF file: {why}; download it again"
        ) from error
    parts = file.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{str(path)!r} is one of {parts} parts of a model; join them by llama-gguf-split, "
            "or get it in one file"
        )
    return file


forget = _read.cache_clear


class _Reader:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def file(self, path: Path) -> GGUF:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        _, version, tensors, pairs = self._unpack("<4sIQQ")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, not 2 or 3")
        metadata = {self._text(): self._value(*self._unpack("<I")) for _ in range(pairs)}
        listed = tuple(self._tensors(tensors))
        step = metadata.get("general.alignment", ALIGNMENT)
        begin = -(-self.at // step) * step
        last = max((t.offset + t.nbytes for t in listed if t.kind in KINDS), default=0)
        if begin + last > len(self.data):
            raise ValueError(f"it is cut short, by {begin + last - len(self.data)} bytes")
        return GGUF(path, metadata, listed, begin)

    def _tensors(self, count: int) -> Iterator[Tensor]:
        for _ in range(count):
            name, (rank,) = self._text(), self._unpack("<I")
            shape = self._unpack(f"<{rank}Q")[::-1]
            kind, offset = self._unpack("<IQ")
            called = TYPES[kind][0] if kind in TYPES else f"type {kind}"
            yield Tensor(name, shape, called, offset)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def _text(self) -> str:
        (size,) = self._unpack("<Q")
        if self.at + size > len(self.data):
            raise ValueError("it is cut short")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self._unpack("<IQ")
        if kind in _SCALARS:
            return self._numbers(kind, count)
        return [self._value(kind) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        numbers = np.frombuffer(self.data, np.dtype(_SCALARS[kind]), count, self.at)
        self.at += numbers.nbytes
        return list(numbers.tolist())


def locate(name: str | Path) -> Path | None:
    """The GGUF file that a name means, or None if it means none.

    Args:
        name: a file, a folder that holds one and no other weights, or ``hub-id:file.gguf``.

    Raises:
        ModelError: no such file, a folder with several, or a file that cannot be downloaded.
    """
    text = str(name)
    named = text.lower().endswith(".gguf")
    with suppress(OSError, ValueError, RuntimeError):  # no name of a file
        path = Path(text).expanduser()
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():  # others store them under names of their own
            with path.open("rb") as raw:
                if named or raw.read(4) == MAGIC:
                    return path
    if not named:
        return None
    hub, colon, file = text.rpartition(":")
    if colon and hub.count("/") <= 1 and not hub.startswith((".", "/", "~")):
        return _download(hub, file)
    raise ModelError(f"no GGUF file at {text!r}; give a file, a folder or hub-id:file.gguf")


def _in_folder(folder: Path) -> Path | None:
    """The only GGUF file of a folder that holds no other weights."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("openvino*.xml")):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ModelError(f"{str(folder)!r} holds several GGUF files; name one of {names}")
    return files[0] if files else None


def _download(hub: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub, file))
    except Exception as error:  # whatever a network does
        raise ModelError(f"cannot get {file!r} of {hub!r}: {first_line(error)}") from error
