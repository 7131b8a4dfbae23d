"""What a step says about itself, and which figures mean trouble.

Mismatch is the distance between trainer and engine *for the same weights*, so it is measured on tokens sampled by the
version trained from; only a step that has none falls back to all of its tokens, where staleness is in the figure too.
With Δ = log π − log μ:  k1 = mean(−Δ),  k3 = mean(e^Δ − 1 − Δ),  and the 99th percentile and maximum of |Δ|.
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
    current: np.ndarray  # bool: sampled by the version trained from


def token_figures(parts: Sequence[TokenMeasures]) -> dict[str, Any]:
    """The per-token part of the `step` event, over all micro-batches. A step that trains on nothing has no figures."""
    if not parts:
        return {"trained_tokens": 0, "staleness_counts": {}, **dict.fromkeys(_FIGURES)}
    columns = (np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TokenMeasures))
    measures = TokenMeasures(*columns)
    weights = np.exp(np.minimum(measures.log_weights.astype(np.float64), 60.0))
    ages, counts = np.unique(measures.staleness, return_counts=True)
    return {
        "trained_tokens": int(measures.log_weights.size),
        "staleness_mean": float(measures.staleness.mean()),
        "staleness_max": int(measures.staleness.max()),
        "staleness_counts": {str(age): int(count) for age, count in zip(ages, counts, strict=True)},
        **_mismatch(measures.log_weights[measures.current] if measures.current.any() else measures.log_weights),
        "mismatch_tokens": int(measures.current.sum()),  # 0: the mismatch figures are over all tokens
        "ess": float(weights.sum() ** 2 / (weights.size * np.square(weights).sum())),
        "mask_fraction": float(1 - measures.kept.mean()),
        "entropy": float(measures.entropies.mean()),
    }


_FIGURES = (
    "staleness_mean",
    "staleness_max",
    "mismatch_k1",
    "mismatch_k3",
    "mismatch_p99",
    "mismatch_max",
    "mismatch_tokens",
    "ess",
    "mask_fraction",
    "entropy",
)


def _mismatch(log_weights: np.ndarray) -> dict[str, float]:
    delta = log_weights.astype(np.float64)
    size = np.abs(delta)
    return {
        "mismatch_k1": float(-delta.mean()),
        "mismatch_k3": float((np.expm1(np.minimum(delta, 60.0)) - delta).mean()),
        "mismatch_p99": float(np.quantile(size, 0.99)),
        "mismatch_max": float(size.max()),
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
        if limit.figure == "mismatch_k3" and not figures.get("mismatch_tokens"):
            continue  # that is how far the policy has moved, not a disagreement
        if limit.above is not None and value > limit.above:
            found.append(f"{limit.figure} is {value:.3g}, above {limit.above:g}: {limit.advice}")
        if limit.below is not None and value < limit.below:
            found.append(f"{limit.figure} is {value:.3g}, below {limit.below:g}: {limit.advice}")
    return found
