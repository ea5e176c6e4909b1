"""Where a draft and a text end: the one place that decides it, live and in every replay."""

from __future__ import annotations

from forerun.types import Stop


def draft_limit(wanted: int, room: int) -> tuple[int, Stop]:
    """The most tokens to draft, and why a draft that gets there stopped.

    Args:
        wanted: by the row's controller.
        room: what the token budget and the contexts leave.

    >>> draft_limit(4, 2)
    (2, <Stop.BUDGET: 5>)
    """
    return (room, Stop.BUDGET) if room < wanted else (wanted, Stop.LIMIT)


def draft_stop(
    drafted: int, goes_on: bool, drops_last: bool, end_of_text: bool
) -> tuple[int, Stop | None]:
    """How many of the drafted tokens stay, and why drafting stops here; None if it goes on.

    Args:
        drafted: tokens so far, the newest included.
        goes_on: whether the row's controller wants another.
        drops_last: whether the token at which it does not is left out. That is decided before
            anyone looks at which token it is: keeping only some would bias what is sampled.
        end_of_text: whether the newest is an end-of-text token.

    >>> draft_stop(3, goes_on=False, drops_last=True, end_of_text=True)
    (2, <Stop.CONFIDENCE: 1>)
    """
    if not goes_on and drops_last:
        return drafted - 1, Stop.CONFIDENCE
    if end_of_text:
        return drafted, Stop.END_OF_TEXT
    return drafted, None if goes_on else Stop.CONFIDENCE
