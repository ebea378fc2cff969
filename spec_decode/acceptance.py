"""What the accepted lengths of many rounds say. Always sums over rounds, never a mean of means.

accepted[r] is the number of drafts accepted in round r, without the bonus token; offered[r] the depth of its tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def tau(accepted: Sequence[int]) -> float:
    """Acceptance length: tokens committed for each target forward, bonus token included; nan without rounds."""
    return (sum(accepted) + len(accepted)) / len(accepted) if accepted else math.nan


def acceptance_by_position(accepted: Sequence[int], offered: Sequence[int]) -> list[float]:
    """alpha[k - 1] = P(draft k accepted | drafts 1..k-1 accepted), over the rounds whose tree reached depth k.

    Ends at the last position that some round got to.
    """
    alphas = []
    for k in range(1, max(offered, default=0) + 1):
        reached = [a for a, o in zip(accepted, offered, strict=True) if o >= k and a >= k - 1]
        if not reached:
            break
        alphas.append(sum(a >= k for a in reached) / len(reached))
    return alphas


def histogram(accepted: Sequence[int]) -> list[int]:
    """Rounds that accepted 0, 1, … max(accepted) drafts."""
    counts = [0] * (max(accepted, default=-1) + 1)
    for a in accepted:
        counts[a] += 1
    return counts
