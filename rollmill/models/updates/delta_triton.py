"""Triton kernels that turn two versions of a model in device memory into the streams of coding `sparse`.

A model is cut into tiles of TILE elements. A tile belongs to one payload and is one row of the tables: the addresses of
its old and new elements, their number, the payload, and the index of its first element in the payload. One program
processes one tile. Counts per tile are summed between the launches, so every program knows where its part of a stream
starts. No program waits for another, and the bytes are the same every time. The count of tile t is stored at t + 1, so
the sum at t counts what comes before tile t.

    flag              reads both versions once, eight bytes at a time; writes one bit per element, set if it changed
    gather            lists the changes in order, from the bits: index, new value, kind of change
    write_exceptions  signs, and the changes that are not ±1
    count_skips       the number of 255 bytes that a tile's gaps need
    write_gaps        the last byte of each gap; the buffer is filled with 255 before
    pack_signs        eight per byte
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def popcount(bits):
    """The number of set bits of each uint32."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits + (bits >> 8) + (bits >> 16) + (bits >> 24)) & 63).to(tl.int32)


@triton.jit
def flag(
    which, old_table, new_table, elements, bitmap, counts,
    DTYPE: tl.constexpr, LANE_BITS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sets bit e of a tile's 32-bit words if element e changed. DTYPE is a word of LANES elements of LANE_BITS bits."""
    tile = tl.load(which + tl.program_id(0))
    old = tl.load(old_table + tile).to(tl.pointer_type(DTYPE))
    new = tl.load(new_table + tile).to(tl.pointer_type(DTYPE))
    words = tl.load(elements + tile) // LANES
    column = tl.arange(0, 32 // LANES)
    lane_mask = (1 << LANE_BITS) - 1
    total = tl.zeros([ROWS], dtype=tl.int32)
    for first in range(0, TILE // 32, ROWS):
        row = first + tl.arange(0, ROWS)
        word = row[:, None] * (32 // LANES) + column[None, :]
        inside = word < words
        difference = tl.load(old + word, inside, other=0) ^ tl.load(new + word, inside, other=0)
        if LANES == 1:
            flags = (difference != 0).to(tl.uint32)
        else:
            flags = tl.zeros(difference.shape, dtype=tl.uint32)
            for lane in tl.static_range(LANES):
                changed = ((difference >> (lane * LANE_BITS)) & lane_mask) != 0
                flags |= changed.to(tl.uint32) << lane
        # the flags of a row's words are disjoint, so their sum is their union
        bits = tl.sum(flags << (column * LANES).to(tl.uint32)[None, :], axis=1).to(tl.uint32)
        tl.store(bitmap + tile.to(tl.int64) * (TILE // 32) + row, bits)
        total += popcount(bits)
    tl.store(counts + tile + 1, tl.sum(total, axis=0))


@triton.jit
def gather(
    old_table, new_table, origins, bitmap, starts, index, value, kind, exceptions, literals,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists the changes of a tile in order. kind = (256 if negative) + (magnitude, or 0 if it is over 255)."""
    tile = tl.program_id(0)
    start, end = tl.load(starts + tile), tl.load(starts + tile + 1)
    old = tl.load(old_table + tile).to(tl.pointer_type(DTYPE))
    new = tl.load(new_table + tile).to(tl.pointer_type(DTYPE))
    origin = tl.load(origins + tile)
    row = tl.arange(0, TILE // 32)
    kept = row * 0 + end > start  # False for a payload that is too dense
    bits = tl.load(bitmap + tile.to(tl.int64) * (TILE // 32) + row, kept, other=0).to(tl.uint32)
    count = popcount(bits)
    place = start + tl.cumsum(count, axis=0) - count
    unusual = tl.zeros([TILE // 32], dtype=tl.int32)
    escaped = tl.zeros([TILE // 32], dtype=tl.int32)
    for step in range(0, tl.max(count, axis=0)):  # takes the lowest set bit of every word
        lowest = bits & (0 - bits)
        bits ^= lowest
        there = lowest != 0
        # the exponent of a power of two, as a float, is its logarithm
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        element = row * 32 + bit
        before = tl.load(old + element, there, other=0).to(tl.int32)
        after = tl.load(new + element, there, other=0)
        difference = ordered(after.to(tl.int32), WIDTH) - ordered(before, WIDTH)
        difference = (difference << (32 - 8 * WIDTH)) >> (32 - 8 * WIDTH)
        negative = difference < 0
        magnitude = tl.where(negative, 0 - difference, difference)
        literal = (magnitude > 255) | (magnitude < 0)  # −2^31 has no positive counterpart
        unusual += (there & (magnitude != 1)).to(tl.int32)
        escaped += (there & literal).to(tl.int32)
        code = tl.where(negative, 256, 0) + tl.where(literal, 0, magnitude)
        tl.store(index + place + step, origin + element, there)
        tl.store(value + place + step, after, there)
        tl.store(kind + place + step, code.to(tl.int16), there)
    tl.store(exceptions + tile + 1, tl.sum(unusual, axis=0))
    tl.store(literals + tile + 1, tl.sum(escaped, axis=0))


@triton.jit
def ordered(bits, WIDTH: tl.constexpr):
    """Sign-magnitude bits as integers in numeric order; only the low 8 · WIDTH bits of the result count."""
    top = (bits << (32 - 8 * WIDTH)) >> 31  # all ones where the sign bit is set
    return bits ^ (top | (-1 << (8 * WIDTH - 1)))


@triton.jit
def write_exceptions(
    kind, value, starts, first_tiles, payloads, exception_starts, literal_starts,
    signs, exception, magnitudes, literals, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one byte per sign, each payload from a multiple of eight, and exceptions by their number among the
    changes."""
    tile = tl.program_id(0)
    start, end = tl.load(starts + tile), tl.load(starts + tile + 1)
    first = tl.load(starts + tl.load(first_tiles + tile))
    sign_first = (first + 7) // 8 * 8 + 8 * tl.load(payloads + tile)
    unusual_at, literal_at = tl.load(exception_starts + tile), tl.load(literal_starts + tile)
    for block in range(start, end, BLOCK):
        change = block + tl.arange(0, BLOCK)
        there = change < end
        code = tl.load(kind + change, there, other=1).to(tl.int32)
        tl.store(signs + sign_first + (change - first), (code >> 8).to(tl.uint8), there)
        magnitude = code & 255
        unusual = (there & (magnitude != 1)).to(tl.int32)
        place = unusual_at + tl.cumsum(unusual, axis=0) - unusual
        tl.store(exception + place, change - first, unusual != 0)
        tl.store(magnitudes + place, magnitude.to(tl.uint8), unusual != 0)
        escaped = (there & (magnitude == 0)).to(tl.int32)
        place = literal_at + tl.cumsum(escaped, axis=0) - escaped
        tl.store(literals + place, tl.load(value + change, escaped != 0), escaped != 0)
        unusual_at += tl.sum(unusual, axis=0)
        literal_at += tl.sum(escaped, axis=0)


@triton.jit
def count_skips(index, starts, first_tiles, skips, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    start, end = tl.load(starts + tile), tl.load(starts + tile + 1)
    first = tl.load(starts + tl.load(first_tiles + tile))  # of this payload
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(start, end, BLOCK):
        item = block + tl.arange(0, BLOCK)
        there = item < end
        previous = tl.load(index + item - 1, there & (item > first), other=-1)
        gap = tl.load(index + item, there, other=0) - previous - 1
        total += tl.where(there, gap // 255, 0)
    tl.store(skips + tile + 1, tl.sum(total, axis=0))


@triton.jit
def write_gaps(index, starts, first_tiles, skip_starts, gaps, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    start, end = tl.load(starts + tile), tl.load(starts + tile + 1)
    first = tl.load(starts + tl.load(first_tiles + tile))  # of this payload
    skipped = tl.load(skip_starts + tile)
    for block in range(start, end, BLOCK):
        item = block + tl.arange(0, BLOCK)
        there = item < end
        previous = tl.load(index + item - 1, there & (item > first), other=-1)
        gap = tl.where(there, tl.load(index + item, there, other=0) - previous - 1, 0)
        skips = gap // 255
        place = item + skipped + tl.cumsum(skips, axis=0)
        tl.store(gaps + place, (gap - 255 * skips).to(tl.uint8), there)
        skipped += tl.sum(skips, axis=0)


@triton.jit
def pack_signs(signs, packed, size, BLOCK: tl.constexpr):
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    inside = (byte < size)[:, None]
    flags = tl.load(signs + byte[:, None] * 8 + bit[None, :], inside, other=0).to(tl.int32)
    tl.store(packed + byte, tl.sum(flags << (7 - bit)[None, :], axis=1).to(tl.uint8), byte < size)
