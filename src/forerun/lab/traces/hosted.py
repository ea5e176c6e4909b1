"""Traces of what drafts in another engine."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from forerun.lab.traces.trace import Trace, compared, concatenate, pyarrow_modules, text_trace
from forerun.types import Stop

PAUSE = 10.0
"""Times what the file took to be written until it is written again."""


class HostRecorder:
    """A trace of texts that another engine decodes plainly, while it drafts before every token.

    What the draft says of its tokens is not known: to policies that read it this drafter is one
    without a distribution.

    Args:
        path: of the file; written when no text is under way, and by `write`.
        depth: K ≥ 1, the most tokens of a draft.
        about: of the trace: who target and draft are.
    """

    def __init__(self, path: str, depth: int, about: Mapping[str, Any]) -> None:
        pyarrow_modules()  # missing, it is missed now
        self._path, self._depth, self._about = Path(path), depth, about
        self._drafts: dict[str, dict[int, Sequence[int]]] = defaultdict(dict)
        self._done: list[Trace] = []
        self._next = 0.0

    def add(self, text: str, position: int, draft: Sequence[int]) -> None:
        """What was drafted where token `position` of a text, by its id, is to come; −1 ends it."""
        self._drafts[text][position] = [*takewhile(lambda token: token >= 0, draft)]

    def end(self, text: str, tokens: Sequence[int], counts: tuple[int, int]) -> None:
        """A text has ended, with these tokens; `counts` as of `text_trace`."""
        drafts = self._drafts.pop(text, {})
        if tokens:
            runs = compared(tokens, [drafts.get(p, ()) for p in range(len(tokens))], self._depth)
            stops = np.where(runs["lengths"] < self._depth, int(Stop.EXHAUSTED), 0)
            made = text_trace(("all", text), counts, tokens, runs | {"stops": stops})
            self._done.append(made)
        if not self._drafts and time.monotonic() > self._next:
            self.write()

    def write(self) -> None:
        """Write what is complete; nothing if nothing is."""
        if not self._done:
            return
        began = time.monotonic()
        about = {
            **self._about, "blind": True, "trees": False, "depth": self._depth, "complete": True,
            "sampling": {}, "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }  # fmt: skip
        self._done = [replace(concatenate(self._done), about=about)]
        self._done[0].write(self._path)
        now = time.monotonic()
        self._next = now + PAUSE * (now - began)
