"""The figures of a step, and which of them mean trouble. With Δ = log π − log μ of a token, μ from the engine:

    drift       π is the version trained from, over all trained tokens: how far the policy has moved since it sampled
                them. Grows with staleness and learning rate; ess and mask_fraction show when it is too much.
    mismatch    π is the version that sampled the token, over a few trajectories (numerics/logprob_check.py): how far
                trainer and engine disagree on the same weights. More than rounding is a bug or another precision.
    reference   Δ = log reference − log π, over all trained tokens; only in runs with a KL reference.

Each has  k1 = mean(−Δ),  k3 = mean(e^Δ − 1 − Δ), an estimate of the KL divergence,  p99 and max of |Δ|,  and outside:
the share of ratios e^Δ below ½ or above 2.

Staleness has two parts. In flight: versions published while the rest of the trajectory was sampled; shorter episodes
lower it. Queue: versions published after its last token; fewer waiting groups lower it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rollmill.errors import TrainingError
from rollmill.trajectories.results import Result


@dataclass(frozen=True)
class TokenMeasures:
    """Per trained token, measured in the forward pass; all arrays are [M]."""

    log_weights: np.ndarray  # Δ
    kept: np.ndarray  # bool: the loss did not mask it
    clipped: np.ndarray  # bool: its ratio or weight was bounded
    vetoed: np.ndarray  # bool: its whole sequence was dropped
    advantages: np.ndarray
    entropies: np.ndarray
    staleness: np.ndarray
    queued: np.ndarray  # the part of the staleness since the trajectory's last token


def token_figures(parts: Sequence[TokenMeasures]) -> dict[str, Any]:
    """The per-token figures of the `step` event, over all micro-batches. None in a step that trains on nothing."""
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
    drift, entropy = distance("drift", measures.log_weights), float(measures.entropies.mean())
    assert drift["drift_k3"] is not None
    return {
        "trained_tokens": int(measures.log_weights.size),
        **_staleness(measures),
        **drift,
        "ess": float(weights.sum() ** 2 / (weights.size * np.square(weights).sum())),
        **_by_sign("mask_fraction", ~measures.kept, measures.advantages),
        **_by_sign("clip_fraction", measures.clipped, measures.advantages),
        "veto_share": float(measures.vetoed.mean()),
        "entropy": entropy,
        "kl_entropy": drift["drift_k3"] / entropy if entropy > 0 else None,
    }


_STALENESS = ("staleness_mean", "staleness_max", "staleness_queue", "staleness_flight")
_SIGNED = tuple(f"{name}_fraction{sign}" for name in ("mask", "clip") for sign in ("", "_positive", "_negative"))
_FIGURES = (*_STALENESS, "ess", *_SIGNED, "veto_share", "entropy", "kl_entropy")


def _staleness(measures: TokenMeasures) -> dict[str, Any]:
    ages, counts = np.unique(measures.staleness, return_counts=True)
    return {
        "staleness_mean": float(measures.staleness.mean()),
        "staleness_max": int(measures.staleness.max()),
        "staleness_counts": {str(age): int(count) for age, count in zip(ages, counts, strict=True)},
        "staleness_queue": float(measures.queued.mean()),
        "staleness_flight": float((measures.staleness - measures.queued).mean()),
    }


def _by_sign(name: str, hit: np.ndarray, advantages: np.ndarray) -> dict[str, float | None]:
    """The share of all tokens, of those to be made likelier, and of those to be made less likely."""
    signs = {name: np.ones(hit.shape, np.bool_), f"{name}_positive": advantages > 0, f"{name}_negative": advantages < 0}
    return {key: float(hit[of].mean()) if of.any() else None for key, of in signs.items()}


def mismatch_figures(
    deltas: np.ndarray, left_out: Mapping[str, int], by_form: Mapping[str, np.ndarray] | None = None
) -> dict[str, Any]:
    """The mismatch part of the `step` event. `left_out`: tokens looked at that could not be measured, by reason.
    `by_form`: the same differences for engines of other forms than the trainer's."""
    others = {
        form: finite({**distance("", found), "tokens": int(found.size)}) for form, found in (by_form or {}).items()
    }
    return {
        **distance("mismatch", deltas),
        "mismatch_tokens": int(deltas.size),
        "mismatch_left_out": {reason: count for reason, count in left_out.items() if count},
        **({"mismatch_by_form": others} if others else {}),
    }


def distance(name: str, deltas: np.ndarray) -> dict[str, float | None]:
    """NAME_k1, _k3, _p99, _max, _outside; None without tokens, for no measurement is not the same as agreement. Without
    a name: k1, k3 …"""
    name = f"{name}_" if name else ""
    if deltas.size == 0:
        return {f"{name}{figure}": None for figure in ("k1", "k3", "p99", "max", "outside")}
    delta = deltas.astype(np.float64)
    size = np.abs(delta)
    return {
        f"{name}k1": float(-delta.mean()),
        f"{name}k3": float((np.expm1(np.minimum(delta, 60.0)) - delta).mean()),
        f"{name}p99": float(np.quantile(size, 0.99)),
        f"{name}max": float(size.max()),
        f"{name}outside": float((size > np.log(2.0)).mean()),
    }


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for events: None instead of numbers that are not finite, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
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
        "trainer and engine disagree on the same weights: {mismatch}",
    ),
    _Limit(
        "mismatch_outside",
        0.01,
        None,
        "on the same weights the engine finds many tokens more than twice or less than half as likely: compare "
        "precision and quantisation",
    ),
    _Limit("ess", None, 0.3, "few tokens carry most of the weight: lower {staleness} or the learning rate"),
    _Limit("mask_fraction", 0.5, None, "most tokens have moved too far and are masked: lower the learning rate"),
    _Limit(
        "mask_fraction_positive",
        0.5,
        None,
        "most tokens of good answers are masked, so the policy is mostly pushed away: lower the learning rate",
    ),
    _Limit(
        "mask_fraction_negative",
        0.5,
        None,
        "most tokens of bad answers are masked, which lets the entropy fall: lower the learning rate",
    ),
    _Limit(
        "groups_missing",
        0,
        None,
        "the step ran short: too many groups have equal rewards or too few graded trajectories. Choose tasks that are "
        "neither always nor never solved, raise group_size, or allow more replacements: stages.rl.replacement",
    ),
    _Limit(
        "masked_stale",
        0,
        None,
        "tokens over max_staleness were left out. Groups of this run never have any, because steps take them by "
        "deadline: check which weights sampled these trajectories",
    ),
    _Limit(
        "abandoned_share",
        0.5,
        None,
        "most sampled tokens were not on the way to an outcome and learn nothing: see with `rollmill trajectories "
        "show` which answer trajectories came to, and declare it with x-rollmill-outcome if it is another one",
    ),
    _Limit("clip_fraction", 0.5, None, "most ratios are clipped: lower {staleness} or widen the clip"),
    _Limit(
        "veto_share",
        0.05,
        None,
        "sequences have tokens that the trainer finds nearly impossible: check the recorded sampling and weights",
    ),
    _Limit("entropy", None, 0.01, "the policy hardly explores any more: raise stages.rl.entropy_factor"),
    _Limit("router_zero_overlap", 0.01, None, "{alignment}"),
    _Limit(
        "router_replaced",
        0.02,
        None,
        "the live router finds recorded experts implausible: the record is damaged, or the router has moved far",
    ),
    _Limit(
        "experts_dead",
        0.0,
        None,
        "some experts get no tokens and learn nothing: mid-train with a higher stages.midtrain.balance",
    ),
    _Limit("expert_load_max", 16.0, None, "one expert gets many times its share of tokens, which slows every step"),
)
# figure → another figure; if the limits of both are broken, the first one says nothing new and is left out
_IMPLIED = {
    "mismatch_outside": "mismatch_k3",
    "mask_fraction_positive": "mask_fraction",
    "mask_fraction_negative": "mask_fraction",
}


def warnings(figures: Mapping[str, Any], *, exact: bool = False) -> list[str]:
    """Warnings about figures beyond their limits, with the likely cause. `exact`: with exact numerics."""
    broken = {limit.figure: limit for limit in _LIMITS if _is_broken(limit, figures.get(limit.figure))}
    causes = {
        "staleness": _staleness_cause(figures),
        "alignment": _alignment_cause(figures),
        "mismatch": "most likely because of the expert routes, which do not fit either"
        if "router_zero_overlap" in broken
        else "compare their model code, precision and quantisation",
    }
    found = []
    for name, limit in broken.items():
        if _IMPLIED.get(name) not in broken:
            side = f"above {limit.above:g}" if limit.above is not None else f"below {limit.below:g}"
            found.append(f"{name} is {figures[name]:.3g}, {side}: {limit.advice.format(**causes)}")
    if exact and (figures.get("mismatch_max") or 0.0) > 0:
        found.append(
            f"mismatch_max is {figures['mismatch_max']:.3g}, but numerics is 'exact': engine and trainer need the same "
            "kind of CPU, the same torch and the same release"
        )
    return found


def nothing_left(step: int, results: Sequence[Result], replacement: float) -> TrainingError:
    """Why step `step` has no group to train on, and no further one may start. `results`: the last ones."""
    solved = sum(result.solved for result in results) / max(1, len(results))
    what = f"{solved:.0%} of the last {len(results)} graded attempts are solved" if results else "no attempt was graded"
    if not results:
        remedy = "see with `rollmill trajectories list` why attempts failed"
    elif solved > 0.5:
        remedy = "choose harder tasks, or be content: it has learnt these"
    else:
        remedy = "choose easier tasks, imitate first (a stage `sft`), or reward parts of a solution"
    return TrainingError(
        f"step {step} has no group with anything to learn from, and no further one may start; {what}",
        hint=f"{remedy}; a larger group_size or `replacement` (now {replacement:g}) finds signal in rarer cases",
    )


def _is_broken(limit: _Limit, value: object) -> bool:
    if not isinstance(value, int | float):
        return False
    return (limit.above is not None and value > limit.above) or (limit.below is not None and value < limit.below)


def _staleness_cause(figures: Mapping[str, Any]) -> str:
    queue, flight = figures.get("staleness_queue") or 0.0, figures.get("staleness_flight") or 0.0
    if flight > queue:
        return "max_staleness (most staleness arises in flight, while long episodes are sampled)"
    if queue > 0:
        return "max_staleness (most staleness arises in the queue, after sampling)"
    return "max_staleness"


def _alignment_cause(figures: Mapping[str, Any]) -> str:
    """Routes that are off by one place fit the live router once they are moved back; other routes do not."""
    general = "recorded routes do not fit the tokens: check how they are aligned"
    fit: Mapping[str, float] = figures.get("router_fit") or {}
    if not fit:
        return general
    best, second, *_ = sorted(fit, key=lambda name: -fit[name])
    if fit[best] < 1.5 * fit[second]:  # chance raises all of them equally
        by_layer = figures.get("router_zero_overlap_by_layer") or [0.0]
        worst = int(np.argmax(by_layer))
        return f"{general}; moved by one token or layer they fit no better; the worst is mixture layer {worst}"
    what = "token" if "token" in best else "layer"
    return (
        f"recorded routes are off by one {what}: they are {best}. Moved back, {fit[best]:.0%} of the experts agree "
        "where none did"
    )
