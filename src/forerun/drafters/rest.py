"""`rest`: continue as a datastore of texts most often does; no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from forerun.checks import Count, Named
from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.datastore import SORTED, Datastore
from forerun.drafters.free import FreeDrafter
from forerun.errors import ModelError


class RESTDrafter(FreeDrafter):
    """Proposes what most often follows the text's last tokens in a datastore."""

    def __init__(self, store: Datastore, n: int, least: int, most: int) -> None:
        super().__init__()
        self._store, self._n, self._least, self._most = store, n, least, most

    def draft(self, row: int, text: list[int], most: int) -> tuple[list[int], list[float]]:
        """The most frequent continuation of the longest run that occurs."""
        return self._store.follow(self._match(text), most), []

    def _match(self, text: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Places after the longest run of the last tokens that occurs, at most `most` of them."""
        matches = np.empty(0, dtype=np.int64)
        low, high = self._least, min(self._n, len(text))
        while low <= high:  # a run that occurs has shorter ones that do
            middle = (low + high) // 2
            places = self._store.find(text[len(text) - middle :])
            if len(places):
                matches, low = places, middle + 1
            else:
                high = middle - 1
        return matches[:: -(-len(matches) // self._most) or 1]


@dataclass(frozen=True)
class REST(DrafterSpec):
    """Retrieval: continue the text as a datastore of texts most often does. No model.

    Args:
        datastore: its file.
        n: longest run to look up, tokens, `least ≤ n ≤ 32` (ours).
        least: shortest, ≥ 1 (ours).
        most: occurrences that are counted, evenly spaced among all, ≥ 1 (ours).

    Reference: He et al. 2024 (REST) [rest2024].
    """

    datastore: Annotated[str, Named("the file of a datastore")]
    n: Count = 16
    least: Count = 2
    most: Count = 2000
    longest = SORTED
    rising = ("least", "n", "longest")

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        store = Datastore.load(self.datastore)
        if target is not None and store.highest >= target.vocab_size:
            raise ModelError(
                f"{self.datastore} holds token ids up to {store.highest} and the target has "
                f"{target.vocab_size}: it was made with another tokenizer; make one with this"
            )
        return RESTDrafter(store, self.n, self.least, self.most)
