"""Python's garbage collector beside a loop that must answer at once."""

from __future__ import annotations

import gc


def settle() -> int:
    """Leave all objects that exist now out of later collections; how many they are.

    A loaded model and its compiled kernels are more than a hundred thousand objects that stay. Each full
    collection looked at all of them, and nobody got an answer for 50 to 100 ms.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
