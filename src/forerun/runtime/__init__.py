"""Stepping Hugging Face models: a row cache, ragged forwards, rollback by moving a length."""

from forerun.runtime.cache import RowCache
from forerun.runtime.load import load_model, load_tokenizer
from forerun.runtime.model import RowModel

__all__ = ["RowCache", "RowModel", "load_model", "load_tokenizer"]
