"""A target that keeps the last hidden states of each row's newest tokens, for heads on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forerun.errors import UnsupportedModelError
from forerun.runtime.base import Columns, Pieces, Rows
from forerun.runtime.torch_executor import TorchExecutor


class StatesExecutor(TorchExecutor):
    """A `TorchExecutor` that also says what its last layer left behind.

    Kept are the states of the tokens whose logits were wanted in a row's newest pass, or else of
    the last token fed: after the final norm, what the model's own head reads. It takes no pass of
    its own.

    Args:
        model: any supported decoder-only Hugging Face model.

    Raises:
        UnsupportedModelError: its head does not read what its decoder stack returns.
    """

    def __init__(self, model: Any) -> None:
        self._body = body_of(model)
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}
        """Per row the place of the first kept state, and `(n, H)` states."""
        super().__init__(model)

    def state(self, row: int, place: int) -> torch.Tensor | None:
        """`(H,)` state after the token at a place of a row's text; None if it is not kept.

        The caller knows that the row's text still begins as it was fed up to this place.
        """
        first, states = self._kept.get(row, (0, None))
        if states is None or not 0 <= place - first < len(states):
            return None
        return states[place - first]

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Reorder the cache and the states."""
        kept = self._kept
        self._kept = {new: kept[old] for new, old in enumerate(rows) if old in kept}
        super().keep(rows, lengths)

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        """Into the cache; what a row has not read itself it has no states of."""
        self._kept.pop(row, None)
        super().copy_in(row, first, columns)

    def _pass(
        self, rows: list[int], starts: Sequence[int], pieces: Pieces, wanted: Sequence[int]
    ) -> torch.Tensor:
        def note(_module: Any, _inputs: Any, output: Any) -> None:
            for i, row in enumerate(rows):
                count = len(pieces[i])
                begin = count - max(wanted[i], 1)
                self._kept[row] = starts[i] + begin, output[0][i, begin:count].clone()

        # For this pass alone: the model may also be used by others.
        hook = self._body.register_forward_hook(note)
        try:
            return super()._pass(rows, starts, pieces, wanted)
        finally:
            hook.remove()


def body_of(model: Any) -> Any:
    """The decoder stack of a model, whose output its head reads.

    Raises:
        UnsupportedModelError: it has none apart from its head.
    """
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None:
        raise UnsupportedModelError(
            f"this {model.config.model_type} model has no decoder stack apart from its head, whose "
            "hidden states could be read"
        )
    return body


def state_rows(model: Any) -> Rows:
    """Rows of a Hugging Face model that keep hidden states."""
    return Rows(StatesExecutor(model))


def states_of(rows: Rows) -> StatesExecutor:
    """The executor of such rows."""
    assert isinstance(rows.executor, StatesExecutor), "rows that keep hidden states"
    return rows.executor
