"""Payloads: exact round trips, and only TrajectoryError for bytes that the encoder did not write."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.errors import TrajectoryError
from rollmill.trajectories import payload
from rollmill.trajectories.invariants import check_trajectory
from rollmill.trajectories.payload import decode_trajectory, encode_trajectory, seal_facts
from rollmill.types import Sampling, Segment, Span, Trajectory, TrajectoryState
from tests.trajectories import build

ARRAYS = ("tokens", "sampled", "logprobs", "policy", "routes", "routes_valid", "kept_sizes", "kept")
VALID = encode_trajectory(build.trajectory())
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for mine, theirs in zip(one.segments, other.segments, strict=True):
        for name in ARRAYS:
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None), name
            if a is not None:
                assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name
        for name in ("id", "policies", "spans", "parent", "cause"):
            assert getattr(mine, name) == getattr(theirs, name)
    for name in ("id", "task_id", "group_id", "traffic", "messages", "provenance"):
        assert getattr(one, name) == getattr(other, name)


def test_round_trip_with_parents_routes_and_no_routes() -> None:
    written = build.trajectory()
    read = decode_trajectory(encode_trajectory(written))
    assert_same(written, read)
    assert read.state == TrajectoryState.finished and read.rewards == []
    read.segments[0].tokens[0] = 5  # the trainer may work in place


def test_strided_arrays_and_numpy_numbers_are_written_correctly() -> None:
    written = build.trajectory()
    first = written.segments[0]
    first.routes = np.asfortranarray(first.routes)
    first.spans[0] = dataclasses.replace(first.spans[0], start=np.int64(4), started_at=np.float64(1.5))  # type: ignore[arg-type]
    assert_same(written, decode_trajectory(encode_trajectory(written)))


def test_tokens_shared_with_a_parent_are_stored_once() -> None:
    parent = build.segment(length=4096, answers=((4000, 4096),), routes=None)
    child = build.segment("s1", 4096, ((4095, 4096),), routes=None, parent=(parent, 4090), cause="edit")
    alone = len(encode_trajectory(Trajectory("t", [parent])))
    assert len(encode_trajectory(Trajectory("t", [parent, child]))) < alone * 1.15


def test_routes_shared_with_a_parent_are_stored_once() -> None:
    parent = build.segment(length=4096, answers=((4000, 4096),), routes="uint8")
    child = build.segment("s1", 4096, ((4095, 4096),), routes="uint8", parent=(parent, 4090), cause="edit")
    assert parent.routes is not None and child.routes is not None
    child.routes[:4089] = parent.routes[:4089]  # the last shared token was no input in the parent
    both = Trajectory("t", [parent, child])
    alone = len(encode_trajectory(Trajectory("t", [parent])))
    assert len(encode_trajectory(both)) < alone * 1.15
    assert_same(both, decode_trajectory(encode_trajectory(both)))


def test_references_cannot_use_any_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = build.segment(length=4096, answers=((4000, 4096),), routes="uint8")
    children = [
        build.segment(f"s{n}", 4096, ((4095, 4096),), routes=None, parent=(parent, 4090), cause="edit")
        for n in range(1, 9)
    ]
    data = encode_trajectory(Trajectory("t", [parent, *children]))
    assert len(decode_trajectory(data).segments) == 9
    monkeypatch.setattr(payload, "MAX_EXPANDED_BYTES", 200_000)
    with pytest.raises(TrajectoryError, match="would take more than"):
        decode_trajectory(data)


@pytest.mark.parametrize("routes", [None, "uint8", "uint16"])
def test_what_is_written_can_be_read_within_the_same_limit(monkeypatch: pytest.MonkeyPatch, routes: str | None) -> None:
    parent = build.segment(length=100, answers=((90, 100),), routes=routes)
    children = [
        build.segment(f"s{n}", 100, ((99, 100),), routes=routes, parent=(parent, 99), cause="edit") for n in range(1, 9)
    ]
    trajectory = Trajectory("t", [parent, *children])
    written = 0
    for limit in range(12_800, 23_000, 700):
        monkeypatch.setattr(payload, "MAX_EXPANDED_BYTES", limit)
        try:
            data = encode_trajectory(trajectory)
        except TrajectoryError as error:
            assert "would take more than" in error.message
            continue
        written += 1
        assert len(decode_trajectory(data).segments) == 9
    assert 0 < written < 15


def test_lone_surrogates_in_messages_do_not_stop_the_seal() -> None:
    written = build.trajectory(messages=[{"role": "user", "content": "half \ud800 a pair"}])
    assert decode_trajectory(encode_trajectory(written)).messages[0]["content"] == "half ? a pair"


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    made: list[Segment] = []
    for index in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(made)) if made and draw(st.booleans()) else None
        shared = draw(st.integers(0, len(parent.tokens))) if parent else 0
        cuts = sorted(draw(st.sets(st.integers(shared, shared + 20), max_size=6)))
        answers = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        segment = build.segment(
            f"s{index}",
            (cuts[-1] if cuts else shared) + draw(st.integers(0, 3)),
            answers,
            routes=draw(st.sampled_from([None, "uint8", "uint16"])),
            parent=(parent, shared) if parent else None,
            cause=draw(st.sampled_from(["summary", "edit", "sub_agent", "retry", "fork"])) if parent else "start",
            seed=draw(st.integers(0, 99)),
        )
        made.append(segment)
    plain = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
        max_leaves=5,
    )
    return Trajectory(
        "t",
        made,
        messages=draw(st.lists(st.dictionaries(st.text("ab"), plain), max_size=3)),
        provenance={"x": draw(plain)},
    )


@quick
@given(trajectories())
def test_any_valid_trajectory_survives(written: Trajectory) -> None:
    assert_same(written, decode_trajectory(encode_trajectory(written)))


def decoded_or_refused(data: bytes) -> None:
    """The only two allowed outcomes."""
    with contextlib.suppress(TrajectoryError):
        check_trajectory(decode_trajectory(data))


@quick
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    good = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(bytes(good))


@quick
@given(st.data())
def test_damaged_contents(data: st.DataObject) -> None:
    """Inside the compression, where no checksum helps: the header, the record and the arrays."""
    plain = bytearray(zstandard.decompress(VALID))
    for _ in range(data.draw(st.integers(1, 4))):
        plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(zstandard.compress(bytes(plain)))


@quick
@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    decoded_or_refused(data)
    decoded_or_refused(zstandard.compress(data))


def forge(change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> bytes:
    """A payload with record and arrays changed by someone who knows the format."""
    arrays = dict(safetensors.numpy.load(zstandard.decompress(VALID)))
    record = json.loads(arrays.pop("record").tobytes())
    change(record, arrays)
    return repack(arrays, json.dumps(record).encode())


def repack(arrays: dict[str, np.ndarray], record: bytes) -> bytes:
    arrays = {**arrays, "record": np.frombuffer(record, np.uint8)}
    return zstandard.compress(safetensors.numpy.save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))


@quick
@given(st.data())
def test_forged_records(data: st.DataObject) -> None:
    junk = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({}) | st.booleans()

    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        node: Any = record
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and data.draw(st.integers(0, 4)):
                node = node[key]
            else:
                node[key] = data.draw(junk)
                return

    decoded_or_refused(forge(change))


def _set(path: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        *parents, leaf = [int(part) if part.isdigit() else part for part in path.split("/")]
        node: Any = record
        for part in parents:
            node = node[part]
        node[leaf] = value

    return change


def _array(name: str, edit: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        copy = arrays[name].copy()
        edited = edit(copy)
        arrays[name] = copy if edited is None else edited

    return change


def _put(index: Any, value: Any) -> Callable[[np.ndarray], None]:
    return lambda array: array.__setitem__(index, value)


def _drop(name: str) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda record, arrays: arrays.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_array("0.sampled", lambda a: a[:-1]), "shape"),
        (_array("0.logprobs", lambda a: a[:-1]), "shape"),
        (_array("1.policy", lambda a: a[:-1]), "shape"),
        (_array("1.policy", lambda a: a.astype(np.uint8)), "policy is uint8"),
        (_array("1.routes", lambda a: a[:-1]), "shape"),
        (_array("1.routes_at", _put(0, 5)), "row of shared positions"),
        (_array("1.routes_at", lambda a: a[:-1]), "does not fit"),
        (_array("1.routes_more", lambda a: a.astype(np.uint8)), "does not fit"),
        (_drop("1.routes_at"), "row of shared positions"),
        (lambda record, arrays: arrays.__setitem__("0.routes_at", arrays["1.routes_at"]), "without shared tokens"),
        (_array("0.tokens", lambda a: a.astype(np.float32)), "row of int32"),
        (_array("0.tokens", lambda a: a.reshape(3, 4)), "row of int32"),
        (_array("1.tokens", lambda a: a.reshape(2, 2)), "row of int32"),
        (_array("0.tokens", _put(0, -1)), "negative"),
        (_array("0.routes", lambda a: a[:, 0]), "shape"),
        (_array("0.routes", lambda a: a.astype(np.int32)), "int32"),
        (_array("0.sampled", lambda a: a.view(np.uint8) * np.uint8(7)), "uint8"),
        (_array("0.kept_sizes", lambda a: a[:-1]), "shape"),
        (_array("1.kept_sizes", lambda a: a[:-1]), "shape"),
        (_array("0.kept_sizes", _put(4, -5)), "from 0 to"),
        (_array("0.kept_sizes", _put(slice(None), 1 << 30)), "from 0 to"),
        (_array("0.kept_sizes", _put(4, 6)), "add up to"),
        (_array("0.kept_sizes", lambda a: np.roll(a, 2)), "was not sampled has a set"),
        (_drop("0.kept"), "come together"),
        (_drop("0.kept_sizes"), "come together"),
        (_set("segments/0/spans/0/answered", 5), "answered"),
        (_array("0.logprobs", _put(5, np.nan)), "not finite"),
        (_array("0.logprobs", _put(5, -np.inf)), "not finite"),
        (_array("0.logprobs", _put(5, 0.5)), "above zero"),
        (_array("0.logprobs", _put(0, -0.5)), "was not sampled"),
        (_array("0.policy", _put(5, 2)), "out of range"),
        (_array("0.policy", _put(5, -1)), "out of range"),
        (_array("0.policy", _put(0, 0)), "was not sampled"),
        (_drop("0.tokens"), "tokens are missing"),
        (_drop("0.policy"), "policy is missing"),
        (_drop("0.routes_valid"), "come together"),
        (lambda record, arrays: arrays.__setitem__("9.tokens", arrays["0.tokens"]), "without a segment"),
        (_set("segments/0/spans/1/start", 6), "overlaps"),
        (_set("segments/0/spans/1/end", 13), "leaves the segment"),
        (_set("segments/0/spans/0/start", -1), "out of order"),
        (_set("segments/0/spans/0/end", 6), "cover exactly"),
        (_set("segments/0/spans/0/oldest_kv_policy", 2), "oldest_kv_policy"),
        (_set("segments/0/spans/0/finish", "bored"), "segments.0.spans.0.finish"),
        (_set("segments/0/spans/0/sampling/seed", "7"), "sampling.seed"),
        (_set("segments/0/spans/0/started_at", float("inf")), "started_at"),
        (_set("segments/0/policies", []), "out of range"),
        (_set("segments/0/policies/0/number", -1), "is negative"),
        (_set("segments/0/policies/0/number", 1 << 31), "too large"),
        (_set("segments/0/id", "s1"), "two segments"),
        (_set("segments/1/parent", ["s2", 5]), "not there"),
        (_set("segments/1/parent", ["s1", 5]), "not there"),
        (_set("segments/2/parent", ["s9", 0]), "does not come before"),
        (_set("segments/1/parent", ["s0", 99]), "not there"),
        (_set("segments/1/parent", ["s0", 4]), "shape|shared positions"),
        (_set("segments/1/cause", "start"), "cause"),
        (_set("version", 4), "version"),
        (_set("surprise", 1), "surprise"),
        (_set("messages", [1]), "messages"),
    ],
)
def test_forgeries_are_named(change: Callable[..., None], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        decode_trajectory(forge(change))


def test_bytes_that_are_neither_true_nor_false() -> None:
    plain = bytearray(zstandard.decompress(encode_trajectory(Trajectory("t", [build.segment(routes=None)]))))
    offset = plain.rindex(bytes(build.segment().sampled.tobytes()))
    plain[offset + 4] = 2
    with pytest.raises(TrajectoryError, match="neither true nor false"):
        decode_trajectory(zstandard.compress(bytes(plain)))


@pytest.mark.parametrize("shape", [[0, 2**40, 2**40], [2**62, 8], [2**63], [0, 2**63]])
def test_absurd_shapes(shape: list[int]) -> None:
    header = json.dumps({"record": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
    with pytest.raises(TrajectoryError):
        decode_trajectory(zstandard.compress(len(header).to_bytes(8, "little") + header))


def test_deeply_nested_record() -> None:
    with pytest.raises(TrajectoryError, match="malformed"):
        decode_trajectory(repack({}, b"[" * 200_000))


def test_decompression_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    lie = zstandard.ZstdCompressor().compressobj(size=1 << 40).compress(bytes(1 << 20))
    with pytest.raises(TrajectoryError, match="over the limit"):
        decode_trajectory(lie)
    silent = zstandard.ZstdCompressor().compressobj()
    with pytest.raises(TrajectoryError, match="unknown size"):
        decode_trajectory(silent.compress(bytes(1 << 20)) + silent.flush())
    with pytest.raises(TrajectoryError, match="damaged"):
        decode_trajectory(encode_trajectory(build.trajectory()) + b"more")
    monkeypatch.setattr(payload, "MAX_PAYLOAD_BYTES", 1000)
    # a payload that could not be read is not written either
    with pytest.raises(TrajectoryError, match="over the limit"):
        encode_trajectory(build.trajectory())


@pytest.mark.parametrize("keep", [0, 1, 10, 100, -1])
def test_truncated(keep: int) -> None:
    with pytest.raises(TrajectoryError, match="damaged"):
        decode_trajectory(encode_trajectory(build.trajectory())[:keep])


def test_the_encoder_refuses_inconsistent_records() -> None:
    broken = build.trajectory()
    broken.segments[0].logprobs[0] = -1.0
    with pytest.raises(TrajectoryError, match=r"t0: segment 's0'.*was not sampled"):
        encode_trajectory(broken)
    with pytest.raises(TrajectoryError, match="not JSON"):
        encode_trajectory(build.trajectory(provenance={"x": object()}))
    with pytest.raises(TrajectoryError, match="not JSON"):
        encode_trajectory(build.trajectory(provenance={"x": float("nan")}))


def test_an_answer_that_ended_before_its_first_token() -> None:
    empty = build.segment(length=4, answers=())
    empty.policies = []
    empty.spans = [Span(4, 4, Sampling(), "abort", "engine-0", "home", "rollout", 1.0, 2.0, -1)]
    assert_same(Trajectory("t", [empty]), decode_trajectory(encode_trajectory(Trajectory("t", [empty]))))


def test_seal_facts() -> None:
    facts = seal_facts(build.trajectory())
    assert facts == {
        "tokens": 12 + 4 + 4,
        "sampled_tokens": 6 + 3 + 2,
        "turns": 2 + 1 + 1,
        "segments": 3,
        "line": "rl",
        "form": "bf16",
        "oldest_version": 3,
        "newest_version": 4,
        "causes": "start,summary,sub_agent",
        "regions": "home",
    }
    assert seal_facts(Trajectory("t", []))["newest_version"] is None
