"""Running models over ragged rows: `Rows` over an executor, rollback by moving a length."""

from forerun.runtime.base import Best, Executor, Facts, Rows
from forerun.runtime.load import load_model, load_tokenizer
from forerun.runtime.runtimes import RUNTIMES
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
