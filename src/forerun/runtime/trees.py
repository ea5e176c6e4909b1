"""Token trees: pieces of which not every token follows the one before it."""

from collections.abc import Sequence

import torch

from forerun.errors import SettingError

Parents = Sequence[Sequence[int]]
"""Per row, for each token of its piece, the place in the piece of the token that it follows, an
earlier one; −1: the one before it. Rows without any are chains."""
FARTHEST = 63  # places before a token, the farther ones of which it sees, all of them


def branches(parents: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Where the `count` tokens of a row's piece stand in the text, and which of those before them
    they see; without `Parents` they are a chain.

    Returns:
        Per token how many of the piece precede it in the text; and an integer of 64 bits, of which
        bit n says whether it sees what is held n places before it, the last one also for all
        farther ones; `SettingError` if it would have to differ there.

    >>> branches([-1, -1, 0], 3)    # the third follows the first, as the second does
    ([0, 1, 1], [-1, -1, -3])
    """
    if not parents:
        return list(range(count)), [-1] * count
    depths: list[int] = []
    seen: list[int] = []
    for place, parent in enumerate(parents):
        parent = place - 1 if parent < 0 else parent
        word = -1 if parent < 0 else seen[parent] << (place - parent) | 1
        if word < -1 << FARTHEST:
            raise SettingError(
                f"token {place} of a tree lies more than {FARTHEST} places behind one that it does "
                "not follow; make the tree smaller"
            )
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        seen.append(word)
    return depths, seen


def trees_of(
    starts: Sequence[int], counts: Sequence[int], parents: Parents, width: int
) -> torch.Tensor:
    """`(2, rows, width)` positions in the text and what each token sees, as by `branches`, of rows
    that hold `starts` tokens and are fed `counts`, padded on the right to `width`."""
    out = torch.full((2, len(starts), width), -1)
    out[0] = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        depths, seen = branches(parents[row], count)
        out[0, row, :count] = start + torch.tensor(depths)
        out[1, row, :count] = torch.tensor(seen)
    return out
