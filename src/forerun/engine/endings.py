"""Where a draft and a text end: the one place that decides it, live and in every replay.

Live these are numbers; a replay asks for many rows at once, with arrays `(rows,)`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.controllers.elementwise import where
from forerun.types import Stop


def draft_limit(wanted: Any, room: Any) -> tuple[Any, Any]:
    """The most tokens to draft, and why a draft that gets there stopped.

    >>> draft_limit(4, 2)
    (2, <Stop.BUDGET: 5>)
    """
    short = room < wanted
    return where(short, room, wanted), _why(short, Stop.BUDGET, Stop.LIMIT)


def draft_stop(goes_on: Any, trimmed: Any, end_of_text: Any) -> Any:
    """Why drafting stops behind a token, by whether its policy wants another and how many of the
    newest it leaves out (where tokens are sampled, that is decided before anyone looks at which
    ones they are: keeping only some is a bias); None (in arrays -1) if it goes on.

    >>> draft_stop(True, 0, True), draft_stop(False, 1, True)
    (<Stop.END_OF_TEXT: 4>, <Stop.CONFIDENCE: 1>)
    """
    if isinstance(goes_on, np.ndarray):
        ends = end_of_text & (np.asarray(trimmed) == 0)
        stops = np.where(goes_on & (np.asarray(trimmed) == 0), -1, +Stop.CONFIDENCE)
        return np.where(ends, +Stop.END_OF_TEXT, stops)
    if end_of_text and not trimmed:
        return Stop.END_OF_TEXT
    return None if goes_on and not trimmed else Stop.CONFIDENCE


def proposal_stop(drafted: Any, limit: Any, why: Any) -> Any:
    """Why a draft of so many tokens stopped that neither its controller nor its drafter ended;
    `limit` and `why` are as by `draft_limit`.

    >>> proposal_stop(2, 4, Stop.BUDGET)
    <Stop.EXHAUSTED: 3>
    """
    return _why(drafted == limit, why, Stop.EXHAUSTED)


def reading(unread: Sequence[int], budget: int) -> list[int]:
    """How many of its unread tokens each row reads in a round: prompts in chunks, under one budget
    for all, and the single one of rows that decode in any case.

    >>> reading([1, 700, 300], 512)
    [1, 512, 0]
    """
    out = []
    for count in unread:
        if count > 1:
            count = min(count, budget)
            budget -= count
        out.append(count)
    return out


def _why(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return np.where(condition, +yes, +no)  # whole numbers: numpy is slow with enumerations
    return yes if condition else no
