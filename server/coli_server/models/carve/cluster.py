"""Put feed-forward neurons into one shared and several routed experts of equal size.

A SwiGLU layer is a sum over neurons, and a routed expert that is not chosen takes its neurons' share away.
So everything here works on energies: `energy[t, n]`, the squared norm of what neuron n adds at token t.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Owners = NDArray[np.int64]
"""Owner of each neuron, [neurons]: 0 is the shared expert, 1 + e the routed expert e."""


def neuron_energy(activation: Float32, down: Float32) -> Float32:
    """Squared norm of each neuron's output, [tokens, neurons].

    activation: [tokens, neurons]; down: [hidden, neurons].
    """
    return np.asarray(np.square(activation * np.linalg.norm(down, axis=0)))


def swiglu(u: Float32, gate: Float32, up: Float32) -> Float32:
    """silu(u @ gate.T) * (u @ up.T), [tokens, neurons]."""
    activation = u @ gate.T
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        activation /= 1 + np.exp(-activation)
    activation *= u @ up.T
    return np.asarray(activation, dtype=np.float32)


def expert_energy(energy: Float32, owners: Owners, experts: int) -> Float32:
    """Energy of each routed expert, its neurons' outputs taken as orthogonal, [tokens, experts]."""
    membership = (owners[:, None] == 1 + np.arange(experts)).astype(np.float32)
    return np.asarray(energy @ membership)


def top_mask(scores: Float32, k: int) -> Float32:
    """1 for the k best of each row, else 0, [tokens, experts]."""
    mask = np.zeros_like(scores)
    np.put_along_axis(mask, np.argpartition(-scores, k - 1, axis=1)[:, :k], np.float32(1), axis=1)
    return mask


def initial_owners(energy: Float32, shared: int, experts: int, seed: int = 0, rounds: int = 6) -> Owners:
    """The neurons of most energy are shared; the rest is clustered by when it is active."""
    random = np.random.default_rng(seed)
    quiet = np.argsort(energy.mean(axis=0))[: energy.shape[1] - shared]
    profile = np.sqrt(energy[:, quiet])
    profile /= np.linalg.norm(profile, axis=0) + 1e-20
    profile -= profile.mean(axis=0)
    centres = profile[:, random.choice(len(quiet), experts, replace=False)]
    sizes = np.full(experts, len(quiet) // experts)
    for _ in range(rounds):
        found = balanced_assignment(-(profile.T @ centres), sizes)
        centres = np.stack([profile[:, found == e].mean(axis=1) for e in range(experts)], axis=1)
        centres /= np.linalg.norm(centres, axis=0) + 1e-20
    owners = np.zeros(energy.shape[1], dtype=np.int64)
    owners[quiet] = 1 + found
    return owners


def improved_owners(energy: Float32, kept: Float32, shared: int, caution: float) -> Owners:
    """Owners that lose least energy when the experts of `kept` [tokens, experts] are the chosen ones.

    A neuron in expert e loses its energy where e is not kept, and a part `caution` of it elsewhere: routers
    err, and under cache-aware routing experts are replaced, so what is rarely absent had better be shared.
    """
    neurons, experts = energy.shape[1], kept.shape[1]
    cost = np.zeros((neurons, 1 + experts))
    cost[:, 1:] = energy.T @ (1 - kept + np.float32(caution))
    sizes = np.full(1 + experts, (neurons - shared) // experts)
    sizes[0] = shared
    return balanced_assignment(cost, sizes)


def balanced_assignment(cost: NDArray[Any], sizes: NDArray[np.int64]) -> Owners:
    """Owners of least total cost found by swaps, group g owning exactly `sizes[g]` items.

    cost: [items, groups]. Starts greedily, dearest regret first, then makes the best swap of two items
    until none helps, so no exchange of a pair can improve the result.
    """
    cost = np.asarray(cost, dtype=np.float64)
    owners = _greedy(cost, sizes)
    items = np.arange(len(cost))
    # change[i, g]: what moving item i to group g would cost; best[a, b]: the cheapest move from a to b.
    change = cost - cost[items, owners][:, None]
    groups = range(len(sizes))
    best = np.array([change[owners == a].min(axis=0) for a in groups])
    tolerance = 1e-9 * np.abs(cost).max()
    while True:
        swap = best + best.T
        a, b = np.unravel_index(np.argmin(swap), swap.shape)
        if swap[a, b] >= -tolerance:
            return owners
        i = _cheapest(change, owners, a, b)
        j = _cheapest(change, owners, b, a)
        owners[i], owners[j] = b, a
        for item in (i, j):
            change[item] = cost[item] - cost[item, owners[item]]
        for group in (a, b):
            best[group] = change[owners == group].min(axis=0)


def _cheapest(change: NDArray[np.float64], owners: Owners, source: np.intp, target: np.intp) -> np.intp:
    return np.argmin(np.where(owners == source, change[:, target], np.inf))


def _greedy(cost: NDArray[np.float64], sizes: NDArray[np.int64]) -> Owners:
    """Items choose their cheapest group that has room, those with most to lose first."""
    if sizes.sum() != len(cost):
        raise ValueError(f"{len(cost)} items do not fill groups of {sizes.tolist()}")
    two = np.partition(cost, 1, axis=1)
    room = sizes.copy()
    owners = np.empty(len(cost), dtype=np.int64)
    for item in np.argsort(two[:, 0] - two[:, 1]):
        group = np.argmin(np.where(room > 0, cost[item], np.inf))
        owners[item] = group
        room[group] -= 1
    return owners
