"""Running models over ragged rows: `Rows` over an executor, rollback by moving a length."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.runtime.base import Best, Executor, Facts, Rows
from forerun.runtime.load import load_model, load_tokenizer
from forerun.runtime.runtimes import RUNTIMES

if TYPE_CHECKING:
    from forerun.runtime.torch_executor import TorchExecutor, torch_rows

__all__ = [
    "RUNTIMES",
    "Best",
    "Executor",
    "Facts",
    "Rows",
    "TorchExecutor",
    "load_model",
    "load_tokenizer",
    "torch_rows",
]


def __getattr__(name: str) -> Any:
    if name in ("TorchExecutor", "torch_rows"):
        return getattr(import_module("forerun.runtime.torch_executor"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
