"""What could quietly measure the wrong thing in the weights benchmark: baselines, bounds, the drawn updates."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import weights_codec as codec
from benchmarks.weights_codec import Recording, flat, ordered, write_version
from benchmarks.weights_wan import Law, unordered


def step(elements: int = 200_000, share: float = 0.01, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bf16 weights and a step that moves some of them, one by a gap that needs more than 16 bits."""
    random = np.random.default_rng(seed)
    old = (random.standard_normal(elements, dtype=np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    changed = random.random(elements) < share
    changed[elements // 4 : elements // 4 + 70_000] = False
    moves = random.choice([-1, 1, -1, 1, 3, -40], elements)
    return old, np.where(changed, unordered(ordered(old) + moves), old).astype(np.uint16)


def test_xor_into_given_buffers_gives_back_the_new_weights() -> None:
    old, new = step()
    coder, weights = codec.XorZstd(old.size), old.copy()
    payload = coder.encode(old, new)
    coder.decode(payload, weights)
    assert np.array_equal(weights, new)
    assert abs(payload.size / len(codec.encode_xor(old, new)) - 1) < 0.01


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_gaps_and_absolute_values_give_back_the_new_weights(share: float) -> None:
    old, new = step(share=share)
    weights = old.copy()
    codec.decode_gaps_absolute(codec.encode_gaps_absolute(old, new), weights)
    assert np.array_equal(weights, new)


def test_the_bound_is_an_entropy() -> None:
    old, new = np.zeros(1 << 20, np.uint16), np.zeros(1 << 20, np.uint16)
    old[:] = 0x3C00
    new[:] = old
    where = np.arange(0, old.size, 4)
    new[where[::2]] += 1
    new[where[1::2]] -= 1
    # a quarter of the positions, and one bit of sign for each of them
    expected = (old.size * 0.8112781 + where.size) / 8
    assert codec.independent_bound(old, new) == pytest.approx(expected, rel=1e-6)


def test_every_contestant_is_raced_and_checked() -> None:
    old, new = step(elements=100_000)
    race = codec.race([(old, new)], repeats=1)
    assert set(race.encoding) == set(race.decoding) == set(codec.contestants(1))
    assert race.encode("fast").median > 0 and race.scanning


def test_a_recorded_step_is_drawn_again(tmp_path: Path) -> None:
    old, new = step(elements=400_000, share=0.02)
    write_version(tmp_path / "dense" / "start.safetensors", {"b": old[:1000], "a": old[1000:].reshape(-1, 1000)})
    write_version(tmp_path / "dense" / "1e-06.1.safetensors", {"b": new[:1000], "a": new[1000:].reshape(-1, 1000)})
    (tmp_path / "recording.json").write_text(json.dumps({"dense": {"1e-06": 1}}))
    recording = Recording(tmp_path)
    before, after = recording.step("dense", "1e-06")
    assert np.array_equal(flat(before), np.concatenate([old[1000:], old[:1000]]))
    changed = np.count_nonzero(flat(before) != flat(after)) / old.size
    assert changed == np.count_nonzero(old != new) / old.size
    law = Law.of(recording)
    exponent = (old >> 7) & 255
    assert float(law.chances[exponent].mean()) == pytest.approx(changed, rel=1e-3)


def test_ordered_integers_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    assert np.array_equal(unordered(ordered(bits)), bits)
    assert np.unique(ordered(bits)).size == bits.size
