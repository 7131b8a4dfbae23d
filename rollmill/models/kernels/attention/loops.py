"""Causal attention on the CPU in compiled loops, one query row and head at a time. This imports numba.

The bits of a row depend on its query, keys and values only: not on other rows, nor on where its keys are stored. The
compiler chooses the order of a sum, but all callers run the same machine code, because the types of the arguments are
fixed. So the engine, over pages, and the trainer, over packed rows, get the same bits.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import float32, int64, njit, void

_FLAGS = {"reassoc", "contract", "nsz"}  # sums may use vectors; infinities and NaN keep their meaning
compiled = functools.partial(njit, fastmath=_FLAGS, error_model="numpy", nogil=True, cache=True)
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)  # e to this power is still a normal number
_ROW, _ROWS, _HEADS, _INDICES = float32[::1], float32[:, ::1], float32[:, :, ::1], int64[::1]


@compiled(float32(float32))
def exp(x):
    """e^x for x ≤ 0, to 1e-7: a power of two times a polynomial. 0 below −87."""
    power = np.floor(max(x, _LOWEST) * _LOG2_E + np.float32(0.5))
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    value = np.float32(1.9875691500e-4)
    value = value * rest + np.float32(1.3981999507e-3)
    value = value * rest + np.float32(8.3334519073e-3)
    value = value * rest + np.float32(4.1665795894e-2)
    value = value * rest + np.float32(1.6666665459e-1)
    value = value * rest + np.float32(5.0000001201e-1)
    value = value * rest * rest + rest + np.float32(1.0)
    factor = np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if x < _LOWEST else value * factor


@compiled(void(_ROW, _ROWS, _INDICES, int64, int64, float32, _ROW))
def score(query, keys, rows, shift, count, scale, scores):
    """Writes scale · q · k for `count` keys. Four at a time, so that each number of the query is loaded once for four
    keys."""
    whole = count // 4 * 4
    for t in range(0, whole, 4):
        a, b, c, d = rows[t] + shift, rows[t + 1] + shift, rows[t + 2] + shift, rows[t + 3] + shift
        first, second, third, fourth = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(query.size):
            first += query[i] * keys[a, i]
            second += query[i] * keys[b, i]
            third += query[i] * keys[c, i]
            fourth += query[i] * keys[d, i]
        scores[t], scores[t + 1] = first * scale, second * scale
        scores[t + 2], scores[t + 3] = third * scale, fourth * scale
    for t in range(whole, count):
        total = np.float32(0.0)
        for i in range(query.size):
            total += query[i] * keys[rows[t] + shift, i]
        scores[t] = total * scale


@compiled(float32(_ROW, int64))
def exponentiate(scores, count):
    """Turns scores into e^(score − largest), and returns their sum."""
    largest = scores[0]
    for t in range(1, count):
        largest = max(largest, scores[t])
    total = np.float32(0.0)
    for t in range(count):
        scores[t] = exp(scores[t] - largest)
        total += scores[t]
    return total


@compiled(void(_ROW, float32, _ROWS, _INDICES, int64, int64, _ROW))
def average(weights, total, values, rows, shift, count, out):
    """Writes Σ weight · value / total, in order of the keys, four at a time."""
    whole = count // 4 * 4
    for i in range(out.size):
        out[i] = np.float32(0.0)
    for t in range(0, whole, 4):
        a, b, c, d = rows[t] + shift, rows[t + 1] + shift, rows[t + 2] + shift, rows[t + 3] + shift
        first, second, third, fourth = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for i in range(out.size):
            out[i] += first * values[a, i] + second * values[b, i] + (third * values[c, i] + fourth * values[d, i])
    for t in range(whole, count):
        for i in range(out.size):
            out[i] += weights[t] * values[rows[t] + shift, i]
    factor = np.float32(1.0) / total
    for i in range(out.size):
        out[i] *= factor


@compiled(void(_HEADS, _ROWS, _ROWS, _HEADS, _INDICES, _INDICES, int64[:, ::1], _INDICES, float32, int64, int64))
def attend(queries, keys, values, out, sequences, counts, firsts, layout, scale, start, stop):
    """Rows `start` to `stop` of models.exact_attention.attend, which explains the arguments."""
    heads, (size, head_step, key_step, group) = queries.shape[1], (layout[0], layout[1], layout[2], layout[3])
    scores = np.empty(firsts.shape[1] * size, np.float32)
    rows = np.empty(firsts.shape[1] * size, np.int64)
    for n in range(start, stop):
        count = counts[n]
        for t in range(count):
            rows[t] = firsts[sequences[n], t // size] + t % size * key_step
        for h in range(heads):
            shift = h // group * head_step
            score(queries[n, h], keys, rows, shift, count, scale, scores)
            total = exponentiate(scores, count)
            average(scores, total, values, rows, shift, count, out[n, h])
