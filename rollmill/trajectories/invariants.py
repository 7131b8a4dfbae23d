"""The invariants of a trajectory's record: what every reader of a payload can rely on.

Arrays have the right types and lengths, a segment copies its parent's tokens, only sampled tokens have a log-prob and a
policy, and spans cover exactly the sampled tokens. Each sampled token belongs to one segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import numpy as np

from rollmill.errors import TrajectoryError
from rollmill.trajectories.allowed_tokens import LARGEST_SET
from rollmill.trajectories.facts import DTYPES
from rollmill.types import Segment, Trajectory

_OPTIONAL = ("routes", "routes_valid", "kept_sizes", "kept")
_ROUNDING = 1e-3  # a log-softmax may round to slightly above zero


def check_trajectory(trajectory: Trajectory) -> None:
    """Checks every invariant of the record. TrajectoryError names the one that is broken."""
    seen: dict[str, Segment] = {}
    for segment in trajectory.segments:
        refuse = partial(refuse_record, f"{trajectory.id}: segment {segment.id!r}")
        if segment.id in seen:
            refuse("its id is used twice")
        _check_arrays(segment, refuse)
        _check_parent(segment, seen, refuse)
        _check_policies(segment, refuse)
        _check_spans(segment, refuse)
        seen[segment.id] = segment


def _check_arrays(segment: Segment, refuse: Callable[[str], NoReturn]) -> None:
    length = len(segment.tokens) if segment.tokens is not None else 0
    for name, dtypes in DTYPES.items():
        array = getattr(segment, name)
        if array is None:
            if name not in _OPTIONAL:
                refuse(f"{name} is missing")
            continue
        if array.dtype.name not in dtypes:
            refuse(f"{name} is {array.dtype.name}, not {' or '.join(dtypes)}")
        if array.ndim != (3 if name == "routes" else 1) or (name != "kept" and array.shape[0] != length):
            refuse(f"{name} has shape {array.shape} for {length} tokens")
        if array.dtype == np.bool_ and length and array.view(np.uint8).max() > 1:
            refuse(f"{name} holds bytes that are neither true nor false")
    if (segment.routes is None) != (segment.routes_valid is None):
        refuse("routes and routes_valid come together")
    _check_kept(segment, refuse)
    if length and segment.tokens.min() < 0:
        refuse("a token id is negative")


def _check_kept(segment: Segment, refuse: Callable[[str], NoReturn]) -> None:
    sizes, kept = segment.kept_sizes, segment.kept
    if sizes is None or kept is None:
        if sizes is not kept:
            refuse("kept_sizes and kept come together")
        return
    if len(sizes) and not 0 <= sizes.min() <= sizes.max() <= LARGEST_SET:
        refuse(f"kept_sizes must be from 0 to {LARGEST_SET}")
    if int(sizes.sum(dtype=np.int64)) != len(kept):
        refuse(f"kept has {len(kept)} bytes, kept_sizes add up to {int(sizes.sum(dtype=np.int64))}")
    if sizes[~segment.sampled].any():
        refuse("a token that was not sampled has a set of kept tokens")


def _check_parent(segment: Segment, seen: dict[str, Segment], refuse: Callable[[str], NoReturn]) -> None:
    if segment.parent is None:
        return
    name, offset = segment.parent
    parent = seen.get(name)
    if segment.cause == "start":
        refuse("a segment with a parent needs a cause other than 'start'")
    if parent is None:
        refuse(f"its parent {name!r} does not come before it")
    if not 0 <= offset <= min(len(parent.tokens), len(segment.tokens)):
        refuse(f"it shares {offset} tokens with a parent of {len(parent.tokens)} and has {len(segment.tokens)}")
    if not np.array_equal(segment.tokens[:offset], parent.tokens[:offset]):
        refuse(f"its first {offset} tokens are not those of its parent")
    if segment.sampled[:offset].any():
        refuse("tokens shared with the parent are sampled twice; each sampled token belongs to one segment")


def _check_policies(segment: Segment, refuse: Callable[[str], NoReturn]) -> None:
    sampled = segment.sampled
    logprobs = segment.logprobs[sampled]
    if not np.isnan(segment.logprobs[~sampled]).all():
        refuse("a token that was not sampled has a log-prob")
    if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
        refuse("a sampled token has a log-prob that is not finite or is above zero")
    if (segment.policy[~sampled] != -1).any():
        refuse("a token that was not sampled has a policy")
    policy = segment.policy[sampled]
    if policy.size and not 0 <= int(policy.min()) <= int(policy.max()) < len(segment.policies):
        refuse(f"a policy index is out of range of the {len(segment.policies)} policies")
    if any(not 0 <= reference.number < 1 << 31 or not reference.line for reference in segment.policies):
        refuse("a policy without a line, or with a number that is negative or too large")


def _check_spans(segment: Segment, refuse: Callable[[str], NoReturn]) -> None:
    """Spans are in order, do not overlap, and cover the sampled tokens exactly."""
    covered = np.zeros(len(segment.tokens), np.bool_)
    end = 0
    for span in segment.spans:
        if not end <= span.start <= span.end <= len(segment.tokens):
            refuse(f"span [{span.start}, {span.end}) overlaps, is out of order or leaves the segment")
        # an answer that ended before its first token attended to nothing
        lowest = 0 if span.end > span.start else -1
        if not lowest <= span.oldest_kv_policy < len(segment.policies):
            refuse(f"span [{span.start}, {span.end}): oldest_kv_policy {span.oldest_kv_policy} is out of range")
        sampling = span.sampling
        numbers = [value for value in vars(sampling).values() if isinstance(value, float)]
        numbers += [span.started_at, span.ended_at, *(bias for _, bias in sampling.logit_bias)]
        if not all(map(math.isfinite, numbers)):
            refuse(f"span [{span.start}, {span.end}) has a time or a sampling parameter that is not finite")
        if not 0 <= span.answered <= span.start:
            refuse(f"span [{span.start}, {span.end}): answered {span.answered} is out of range")
        covered[span.start : span.end] = True
        end = span.end
    if not np.array_equal(covered, segment.sampled):
        refuse("its spans do not cover exactly the sampled tokens")


def refuse_record(where: str, why: str) -> NoReturn:
    raise TrajectoryError(
        f"{where}: {why}", hint="the payload is not used; `rollmill trajectories show` shows where it came from"
    )
