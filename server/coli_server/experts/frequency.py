"""Eviction policies that look further back than the last use: how often, lately, an expert was wanted."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import islice

# Uses of a layer's experts, for each expert ever seen, after which an old use counts half.
LFU_HALF_LIFE = 16
LEARNED_HALF_LIVES = (4, 16, 64, 256)

_SAMPLE = 16  # experts that `Learned` compares: those unused for longest
_RESCALE = 1e100


class LFU:
    """Gives up the expert used least often lately; of several, the one whose last use is longest ago.

    Counts are halved from time to time, and remembered of experts that were given up.
    """

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        self._bucket: dict[int, OrderedDict[int, None]] = {}  # by count, oldest first
        self._filled = 0  # bit n: bucket n holds somebody
        self._offered: OrderedDict[int, None] = OrderedDict()
        self._uses = 0

    def insert(self, expert: int) -> None:
        self._count[expert] = self._count.get(expert, 0) + 1
        self._put(expert)
        self._uses += 1
        if self._uses >= LFU_HALF_LIFE * len(self._count):
            self._halve()

    def offer(self, expert: int) -> None:
        self._offered[expert] = None

    def touch(self, expert: int) -> None:
        self.remove(expert)
        self.insert(expert)

    def remove(self, expert: int) -> None:
        if expert in self._offered:
            del self._offered[expert]
            return
        count = self._count[expert]
        bucket = self._bucket[count]
        del bucket[expert]
        if not bucket:
            self._filled &= ~(1 << count)

    def victim(self, *keep: Container[int]) -> int | None:
        return next((e for e in self if not any(e in kept for kept in keep)), None)

    def __iter__(self) -> Iterator[int]:
        """From the one to give up first to the one to give up last."""
        yield from self._offered
        filled = self._filled
        while filled:
            lowest = filled & -filled
            yield from self._bucket[lowest.bit_length() - 1]
            filled ^= lowest

    def _put(self, expert: int) -> None:
        count = self._count[expert]
        self._bucket.setdefault(count, OrderedDict())[expert] = None
        self._filled |= 1 << count

    def _halve(self) -> None:
        held = [expert for expert in self if expert not in self._offered]
        self._bucket.clear()
        self._filled = self._uses = 0
        self._count = {expert: count // 2 for expert, count in self._count.items()}
        for expert in held:
            self._put(expert)


class Learned:
    """Gives up the expert whose next use is least likely, by a time scale learned from the layer's own use.

    For each of some half-lives it keeps the decaying rate of every expert, which predicts the next use. The
    half-life that has lately predicted best (highest likelihood of what was then used) decides. Victims are
    sought among the experts unused for longest.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._offered: OrderedDict[int, None] = OrderedDict()
        self._scales = [_Scale(each) for each in LEARNED_HALF_LIVES]
        self._best = self._scales[1]
        self._seen: set[int] = set()

    def insert(self, expert: int) -> None:
        self._order[expert] = None
        self._learn(expert)

    def offer(self, expert: int) -> None:
        self._offered[expert] = None

    def touch(self, expert: int) -> None:
        self.remove(expert)
        self.insert(expert)

    def remove(self, expert: int) -> None:
        if expert in self._offered:
            del self._offered[expert]
        else:
            del self._order[expert]

    def victim(self, *keep: Container[int]) -> int | None:
        def free(expert: int) -> bool:
            return not any(expert in kept for kept in keep)

        offered = next(filter(free, self._offered), None)
        if offered is not None:
            return offered
        return min(islice(filter(free, self._order), _SAMPLE), key=self._best.weight, default=None)

    def __iter__(self) -> Iterator[int]:
        yield from self._offered
        yield from self._order

    def _learn(self, expert: int) -> None:
        self._seen.add(expert)
        for scale in self._scales:
            scale.use(expert, len(self._seen))
        self._best = max(self._scales, key=_Scale.likelihood)


class _Scale:
    """Decaying rates of use with one half-life.

    A later use weighs more, so that the weights of all others need not change with time.
    """

    def __init__(self, half_life: int) -> None:
        self._half_life = half_life
        self._weight: dict[int, float] = {}
        self._total = 0.0
        self._next = 1.0
        self._score = 0.0

    def weight(self, expert: int) -> float:
        """Proportional to the rate at which the expert is used."""
        return self._weight.get(expert, 0.0)

    def likelihood(self) -> float:
        """Mean log-likelihood of the latest uses, given those before them."""
        return self._score

    def use(self, expert: int, experts: int) -> None:
        """`expert`, one of `experts` seen so far, is used; how well was that predicted?"""
        # Half a use for everybody: an expert never used before is unlikely, not impossible.
        doubt = 0.5 * self._next
        chance = (self.weight(expert) + doubt) / (self._total + doubt * experts)
        window = 16 * experts  # the same for all half-lives, so that they are compared on the same uses
        self._score += (math.log(chance) - self._score) / window
        self._weight[expert] = self.weight(expert) + self._next
        self._total += self._next
        self._next *= 2.0 ** (1.0 / (self._half_life * experts))
        if self._next > _RESCALE:
            self._weight = {each: weight / self._next for each, weight in self._weight.items()}
            self._total /= self._next
            self._next = 1.0
