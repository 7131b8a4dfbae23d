"""What a step says about itself, and which figures mean trouble. With Δ = log π − log μ of a token, μ the engine's:

    drift       π is the version trained from, over all trained tokens: how far the policy has moved since it sampled
                them. Grows with staleness and learning rate; ess and mask_fraction say when it is too much.
    mismatch    π is the very version that sampled the token, over a few trajectories (training/mismatch.py): how far
                trainer and engine disagree on the same weights. Rounding alone; more is a bug or another precision.

Each as  k1 = mean(−Δ),  k3 = mean(e^Δ − 1 − Δ), an estimate of the KL divergence,  p99 and max of |Δ|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TokenMeasures:
    """Per trained token, measured in the forward pass; all arrays are [M]."""

    log_weights: np.ndarray  # Δ
    kept: np.ndarray  # bool: the loss did not mask it
    entropies: np.ndarray
    staleness: np.ndarray


def token_figures(parts: Sequence[TokenMeasures]) -> dict[str, Any]:
    """The per-token part of the `step` event, over all micro-batches. A step that trains on nothing has no figures."""
    if not parts:
        return {
            "trained_tokens": 0,
            "staleness_counts": {},
            **distance("drift", np.empty(0)),
            **dict.fromkeys(_FIGURES),
        }
    columns = (np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TokenMeasures))
    measures = TokenMeasures(*columns)
    weights = np.exp(np.minimum(measures.log_weights.astype(np.float64), 60.0))
    ages, counts = np.unique(measures.staleness, return_counts=True)
    return {
        "trained_tokens": int(measures.log_weights.size),
        "staleness_mean": float(measures.staleness.mean()),
        "staleness_max": int(measures.staleness.max()),
        "staleness_counts": {str(age): int(count) for age, count in zip(ages, counts, strict=True)},
        **distance("drift", measures.log_weights),
        "ess": float(weights.sum() ** 2 / (weights.size * np.square(weights).sum())),
        "mask_fraction": float(1 - measures.kept.mean()),
        "entropy": float(measures.entropies.mean()),
    }


_FIGURES = ("staleness_mean", "staleness_max", "ess", "mask_fraction", "entropy")


def mismatch_figures(deltas: np.ndarray, left_out: Mapping[str, int]) -> dict[str, Any]:
    """The mismatch part of the `step` event. `left_out`: tokens looked at that could not be measured, by reason."""
    return {
        **distance("mismatch", deltas),
        "mismatch_tokens": int(deltas.size),
        "mismatch_left_out": {reason: count for reason, count in left_out.items() if count},
    }


def distance(name: str, deltas: np.ndarray) -> dict[str, float | None]:
    """NAME_k1, NAME_k3, NAME_p99, NAME_max; None without tokens, for no measurement is not the same as agreement."""
    if deltas.size == 0:
        return {f"{name}_{figure}": None for figure in ("k1", "k3", "p99", "max")}
    delta = deltas.astype(np.float64)
    size = np.abs(delta)
    return {
        f"{name}_k1": float(-delta.mean()),
        f"{name}_k3": float((np.expm1(np.minimum(delta, 60.0)) - delta).mean()),
        f"{name}_p99": float(np.quantile(size, 0.99)),
        f"{name}_max": float(size.max()),
    }


@dataclass(frozen=True)
class _Limit:
    figure: str
    above: float | None
    below: float | None
    advice: str


_LIMITS = (
    _Limit(
        "mismatch_k3",
        0.015,
        None,
        "trainer and engine disagree on the same weights: compare their model code, precision and expert routes",
    ),
    _Limit("ess", None, 0.3, "most of the weight is on few tokens: lower max_staleness or the learning rate"),
    _Limit("mask_fraction", 0.5, None, "most tokens have moved too far to be learnt from: lower the learning rate"),
    _Limit("router_zero_overlap", 0.01, None, "recorded routes do not fit the tokens: check how they are aligned"),
)


def warnings(figures: Mapping[str, Any]) -> list[str]:
    """The figures that are out of bounds, in words."""
    found = []
    for limit in _LIMITS:
        value = figures.get(limit.figure)
        if not isinstance(value, float):
            continue
        if limit.above is not None and value > limit.above:
            found.append(f"{limit.figure} is {value:.3g}, above {limit.above:g}: {limit.advice}")
        if limit.below is not None and value < limit.below:
            found.append(f"{limit.figure} is {value:.3g}, below {limit.below:g}: {limit.advice}")
    return found
