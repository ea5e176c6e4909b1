"""Which executor runs a model, by name: `--runtime`, `load(runtime=...)`."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forerun.errors import ForerunWarning, MissingExtraError, SettingError, UnsupportedModelError
from forerun.lazy import threads, torch
from forerun.registry import Registry
from forerun.runtime import gguf
from forerun.runtime.base import Rows
from forerun.runtime.load import (
    check_path,
    checkpoint_files,
    exported,
    is_float32,
    load_model,
    read_json,
    resolve_device,
    resolve_dtype,
    run_once,
)


@dataclass(frozen=True)
class Source:
    """Where a model comes from and where it shall be."""

    name: str | Path  # a folder or a Hugging Face id
    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    trust_remote_code: bool = False
    drafts: bool = False  # whether it only runs ahead, so that its rounding changes no greedy text
    depths: tuple[int, ...] = ()  # whose hidden states will be read (`Executor.tap`)


class RuntimeSpec(ABC):
    """The settings of an executor: a frozen dataclass, built before any model is loaded."""

    @abstractmethod
    def load(self, source: Source) -> Rows:
        """Load a model; `ModelError` if it is missing, corrupt, or cannot be served by this
        executor, `SettingError` for a device or dtype that it does not have."""


@dataclass(frozen=True)
class TorchRuntime(RuntimeSpec):
    """PyTorch runs the Hugging Face model as it is: every device, dtype and drafter. On an x86 CPU
    its linear layers are packed (`packing`)."""

    def load(self, source: Source) -> Rows:
        from forerun.runtime.packing import pack, unpacked
        from forerun.runtime.torch_executor import torch_rows

        model = load_model(source.name, source.device, source.dtype, source.trust_remote_code)
        try:
            run_once(pack(model))
        except Exception:  # its code reads weights itself, and gets packed ones
            model = unpacked(model)
        return torch_rows(model)


@dataclass(frozen=True)
class OpenVINORuntime(RuntimeSpec):
    """OpenVINO's paged attention on a CPU: the passes themselves faster, in one ragged pass.

    Args:
        precision: "fp32" (its cache, too), "bf16" (both) or "int8" (weights, all else in fp32). The
            last two are other models than the one in fp32, and reports name them. None: fp32, and
            of a GGUF file the file's own, which is the only one it has.
        threads: of OpenVINO, ≥ 1; None: as many as torch has.
        draft_precision: of draft models; None: the same. Greedy text is the target's in any.
    """

    precision: str | None = None
    threads: int | None = None
    draft_precision: str | None = None

    def load(self, source: Source) -> Rows:
        """Export and compile it, or take the exported graph from the cache."""
        if find_spec("openvino") is None:
            raise MissingExtraError.of("openvino", "openvino")
        device = resolve_device(source.device)
        if device != "cpu":
            raise SettingError(f"runtime openvino runs on the CPU, got the device {device!r}")
        if not is_float32(source.dtype):
            raise SettingError(
                f"runtime openvino takes its precision from its own setting, got the dtype "
                f"{str(resolve_dtype(source.dtype)).removeprefix('torch.')}; write "
                "openvino(precision='bf16')"
            )
        from forerun.runtime.openvino.executor import settings
        from forerun.runtime.openvino.load import from_name

        if self.draft_precision:  # the target is loaded first, and takes long
            settings(self.draft_precision, self.threads or threads())
        precision = (source.drafts and self.draft_precision) or self.precision
        trusted, depths = source.trust_remote_code, source.depths
        return Rows(from_name(source.name, precision, self.threads, trusted, depths))


@dataclass(frozen=True)
class CudaGraphsRuntime(RuntimeSpec):
    """PyTorch's own kernels, a pass of each shape captured once as a CUDA graph.

    Decoder-only models on an NVIDIA GPU.

    Args:
        compile: fuse kernels by `torch.compile` under the graphs: faster passes after 30 to 50 s
            for each shape when it is first needed, kept where PyTorch keeps them.
    """

    compile: bool = False

    def load(self, source: Source) -> Rows:
        if not (device := resolve_device(source.device)).startswith("cuda"):
            raise SettingError(
                f"runtime cudagraphs needs an NVIDIA GPU, got the device {device!r}; use the "
                "runtime torch"
            )
        from forerun.runtime.cuda_graphs import CudaGraphExecutor

        if self.compile and find_spec("triton") is None:
            raise SettingError("cudagraphs(compile=true) needs triton: pip install triton")
        model = load_model(source.name, source.device, source.dtype, source.trust_remote_code)
        return Rows(CudaGraphExecutor(model, self.compile))


@dataclass(frozen=True)
class AutoRuntime(RuntimeSpec):
    """OpenVINO where it is installed, serves the model and is faster; else PyTorch. That is on a
    CPU, in float32, for models on this machine that pass its probe."""

    def load(self, source: Source) -> Rows:
        fits = resolve_device(source.device) == "cpu" and is_float32(source.dtype)
        if fits and find_spec("openvino") is not None and _exportable(source):
            try:
                return OpenVINORuntime().load(source)
            except (UnsupportedModelError, MissingExtraError) as error:
                warnings.warn(f"runtime torch: {error}", ForerunWarning, stacklevel=2)
        return TorchRuntime().load(source)


def _exportable(source: Source) -> bool:
    """Whether a model is on this machine."""
    if gguf.locate(source.name) or exported(source.name):
        return True
    check_path(source.name)
    here = checkpoint_files(source.name)
    # A bias by distance is in no graph, as is known of T5: not worth a line.
    return bool(here) and "relative_attention_num_buckets" not in read_json(here[0])


RUNTIMES = Registry(
    "runtime",
    "forerun.runtimes",
    {
        "auto": "forerun.runtime.runtimes:AutoRuntime",
        "torch": "forerun.runtime.runtimes:TorchRuntime",
        "openvino": "forerun.runtime.runtimes:OpenVINORuntime",
        "cudagraphs": "forerun.runtime.runtimes:CudaGraphsRuntime",
    },
    RuntimeSpec,
)


def default_runtime() -> str:
    """What runs models where nobody said: `FORERUN_RUNTIME`, else "auto"."""
    return os.environ.get("FORERUN_RUNTIME") or "auto"
