"""Compiled loops over the elements of a chunk. This imports numba: only `compiled` imports it, and only when needed.

The loops check nothing: `compiled` passes buffers that are large enough and indices that lie in the chunk. Index
variables are unsigned (a signed index costs a test for wrap-around) and mostly 64 bits wide (numba widens them anyway).
Unpredictable decisions take no branch: a place is always written, and then kept or overwritten.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, uint8, uint32, uint64, uintp
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

TILE_BYTES = 16 << 10  # 16 KiB of the base and 16 KiB of the new elements: both stay in the first-level cache
BLOCK = 64  # bytes compared together
SKIP = 255
MOST_CLASSES = 8

compiled = njit(nogil=True, cache=True, error_model="numpy")


@compiled
def width_of(elements):
    """Bytes per element. Unlike `itemsize` it is a constant for the compiler, so loops over it are unrolled."""
    largest = uint64(elements.dtype.type(-1))
    return uintp(1) if largest == uint64(0xFF) else uintp(2) if largest == uint64(0xFFFF) else uintp(4)


@compiled
def ordered(bits, sign):
    """Sign-magnitude bits as an integer in numeric order. `sign` is the index of the sign bit."""
    top = uint64(1) << sign
    return bits ^ (top | ((uint64(0) - (bits >> sign)) & (top - uint64(1))))


@compiled
def unordered(number, sign):
    top = uint64(1) << sign
    return number ^ (top | (((number >> sign) - uint64(1)) & (top - uint64(1))))


# --- encoding: collect the changes, then write streams


@intrinsic
def changed_mask(context, old, new, index):
    """A mask of the changed elements of the block at `index`, in no more vector instructions than a plain scan."""
    lanes = 8 * BLOCK // old.dtype.bitwidth

    def generate(context, builder, signature, arguments):
        block = ir.VectorType(ir.IntType(old.dtype.bitwidth), lanes)
        loaded = []
        for kind, array in zip(signature.args[:2], arguments[:2], strict=True):
            place = builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[2]])
            loaded.append(builder.load(builder.bitcast(place, block.as_pointer()), align=old.dtype.bitwidth // 8))
        mask = builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(lanes))
        return mask if lanes == 64 else builder.zext(mask, ir.IntType(64))

    return uint64(old, new, uintp), generate


@compiled
def make_scratch(elements):
    """Scratch arrays for `find_changed`: masks and places of blocks, then the found indices with room for one more."""
    blocks = uintp(TILE_BYTES // BLOCK)
    per_tile = uintp(TILE_BYTES) // width_of(elements)
    return np.empty(blocks, np.uint64), np.empty(blocks, np.uint32), np.empty(per_tile + uintp(1), np.uint32)


@compiled
def find_changed(old, new, start, scratch):
    """Writes the indices of the changed elements of the tile at element `start` to the last scratch array. Returns
    their number.

    Computing the masks is as fast as reading. Most blocks have no change, most others one or two: these take no branch.
    """
    masks, blocks, found = scratch
    per_block = uintp(BLOCK) // width_of(old)
    for block in range(uintp(masks.size)):
        masks[block] = changed_mask(old, new, start + block * per_block)  # type: ignore[call-arg]
    kept, count = uintp(0), uintp(0)
    for block in range(uintp(masks.size)):
        blocks[kept] = uint32(block)
        kept += uintp(masks[block] != uint64(0))
    for which in range(kept):
        mask, place = masks[blocks[which]], start + uintp(blocks[which]) * per_block
        found[count] = uint32(place + uintp(trailing_zeros(mask)))  # type: ignore[call-arg]
        mask &= mask - uint64(1)
        found[count + uintp(1)] = uint32(place + uintp(trailing_zeros(mask)))
        second = uint64(mask != uint64(0))
        mask &= mask - second
        count += uintp(1) + uintp(second)
        while mask != uint64(0):
            found[count] = uint32(place + uintp(trailing_zeros(mask)))
            count += uintp(1)
            mask &= mask - uint64(1)
    return count


@compiled
def collect(old, new, offset, changed, indices, differences, values):
    """Appends the changed elements: their indices (plus `offset`), differences and new values. `changed` is the number
    already stored; returns the new number."""
    kind, width = old.dtype.type, width_of(old)
    sign = uint64(8) * width - uint64(1)
    scratch = make_scratch(old)
    found = scratch[2]
    changed = uintp(changed)
    for start in range(uintp(0), uintp(old.size), uintp(TILE_BYTES) // width):
        for which in range(find_changed(old, new, start, scratch)):
            index = uintp(found[which])
            indices[changed] = uint32(uintp(offset) + index)
            differences[changed] = kind(ordered(uint64(new[index]), sign) - ordered(uint64(old[index]), sign))
            values[changed] = new[index]
            changed += uintp(1)
    return changed


@compiled
def write_gap(gaps, place, gap):
    """Writes one gap at `place`. Returns the place after it."""
    while gap >= uint64(SKIP):
        gaps[place] = uint8(SKIP)
        place += uintp(1)
        gap -= uint64(SKIP)
    gaps[place] = uint8(gap)
    return place + uintp(1)


@compiled
def encode_sparse(old, new, offset, state, gaps, signs, exceptions, differences, values):
    """Writes gaps and signs of the changes; and for the exceptions their indices, differences and new elements.

    `state` is carried from part to part of a chunk: the element after the last change, then the numbers of changes, gap
    bytes and exceptions, and the sign bits of the byte in progress.
    """
    kind, width = old.dtype.type, width_of(old)
    sign, full = uint64(8) * width - uint64(1), uint64(old.dtype.type(-1))
    scratch = make_scratch(old)
    found = scratch[2]
    behind, bits = uint64(state[0]), uint64(state[4])
    change, place, odd = uintp(state[1]), uintp(state[2]), uintp(state[3])
    for start in range(uintp(0), uintp(old.size), uintp(TILE_BYTES) // width):
        for which in range(find_changed(old, new, start, scratch)):
            index = uintp(found[which])
            gap = uint64(offset) + uint64(index) - behind
            behind = uint64(offset) + uint64(index) + uint64(1)
            place = write_gap(gaps, place, gap)
            difference = uint64(kind(ordered(uint64(new[index]), sign) - ordered(uint64(old[index]), sign)))
            bits = (bits << uint64(1)) | (difference >> sign)
            signs[change >> uintp(3)] = uint8(bits)
            exceptions[odd] = uint32(change)
            differences[odd] = kind(difference)
            values[odd] = new[index]
            odd += uintp((difference != uint64(1)) & (difference != full))
            change += uintp(1)
    state[0], state[1], state[2], state[3], state[4] = behind, change, place, odd, bits


@compiled
def write_gaps(indices, gaps):
    """Writes ascending indices as gap bytes. Returns the number of bytes."""
    place, behind = uintp(0), uint64(0)
    for which in range(uintp(indices.size)):
        gap = uint64(indices[which]) - behind
        behind = uint64(indices[which]) + uint64(1)
        place = write_gap(gaps, place, gap)
    return place


@compiled
def write_signs(differences, signs, exceptions):
    """Writes the signs, one bit each, and the indices of differences other than ±1. Returns the number of those."""
    sign, full = uint64(8) * width_of(differences) - uint64(1), uint64(differences.dtype.type(-1))
    bits, odd = uint64(0), uintp(0)
    for change in range(uintp(differences.size)):
        difference = uint64(differences[change])
        bits = (bits << uint64(1)) | (difference >> sign)
        signs[change >> uintp(3)] = uint8(bits)
        exceptions[odd] = uint32(change)
        odd += uintp((difference != uint64(1)) & (difference != full))
    rest = uint64(differences.size) & uint64(7)
    if rest:
        signs[uintp(differences.size) >> uintp(3)] = uint8(bits << (uint64(8) - rest))
    return odd


@compiled
def write_exceptions(differences, values, exceptions, magnitudes, literals):
    """Writes one byte per exception, and the elements that do not fit a byte. Returns the number of those."""
    kind, sign = differences.dtype.type, uint64(8) * width_of(differences) - uint64(1)
    escaped = uintp(0)
    for which in range(uintp(exceptions.size)):
        change = uintp(exceptions[which])
        difference = uint64(differences[change])
        negative = difference >> sign
        magnitude = uint64(kind((difference ^ (uint64(0) - negative)) + negative))
        fits = magnitude <= uint64(255)
        magnitudes[which] = uint8(magnitude * uint64(fits))
        literals[escaped] = values[change]
        escaped += uintp(not fits)
    return escaped


# --- classes: `table` has the class of each magnitude byte


@compiled
def magnitude_byte(bits, width):
    """The eight bits below the sign, mostly the exponent."""
    return (bits >> (uint64(8) * width - uint64(9))) & uint64(255) if width > uintp(1) else bits & uint64(127)


@compiled
def collect_classed(old, new, table, totals, members, classes, differences, values):
    """Like `collect` for a whole chunk, plus the class of each change and, in `members`, its place among the members of
    that class. `totals` counts the members of each class. Returns the number of changes."""
    kind, width = old.dtype.type, width_of(old)
    sign = uint64(8) * width - uint64(1)
    changed = uintp(0)
    for index in range(uintp(old.size)):
        before, after = uint64(old[index]), uint64(new[index])
        which = uintp(table[magnitude_byte(before, width)])
        members[changed] = totals[which]
        classes[changed] = uint8(which)
        differences[changed] = kind(ordered(after, sign) - ordered(before, sign))
        values[changed] = new[index]
        changed += uintp(before != after)
        totals[which] += uint32(1)
    return changed


@compiled
def place_members(bits, table, members, next_member, ends, indices, order):
    """Puts the changes of all classes into the order of the chunk. Input: their places among the members of their
    class, class by class; the first and the end of each class in that list. Output: their indices, and their places in
    the list.

    Returns the number placed. Fewer than all means that a class has fewer members than its list says.
    """
    width, totals = width_of(bits), np.zeros(MOST_CLASSES, np.uint32)
    placed = uintp(0)
    for index in range(uintp(bits.size)):
        which = uintp(table[magnitude_byte(uint64(bits[index]), width)])
        at = uintp(next_member[which])
        if at < uintp(ends[which]) and members[at] == totals[which]:
            indices[placed] = uint32(index)
            order[placed] = uint32(at)
            placed += uintp(1)
            next_member[which] += uint32(1)
        totals[which] += uint32(1)
    return placed


# --- decoding


@compiled
def expand_gaps(gaps, indices):
    """Converts gap bytes to indices. `indices` needs room for one more than there are."""
    place, reached = uintp(0), uint32(0)
    for at in range(uintp(gaps.size)):
        byte = gaps[at]
        reached += uint32(byte)
        indices[place] = reached
        ends = uint32(byte != uint8(SKIP))
        place += uintp(ends)
        reached += ends


@compiled
def expand_differences(signs, exceptions, magnitudes, differences):
    """Converts signs and exceptions to one difference per change; 0 marks a literal. `differences` has whole bytes."""
    kind = differences.dtype.type
    for byte in range(uintp(signs.size)):
        bits = uint64(signs[byte])
        for bit in range(uintp(8)):
            negative = bits >> (uint64(7) - uint64(bit)) & uint64(1)
            differences[byte * uintp(8) + bit] = kind(uint64(1) - (negative << uint64(1)))
    for exception in range(uintp(exceptions.size)):
        change = uintp(exceptions[exception])
        # it is 1 or -1 at this point
        differences[change] = kind(uint64(differences[change]) * uint64(magnitudes[exception]))


@compiled
def gather(bits, indices, values):
    """A separate loop: the shorter it is, the more cache misses are in flight at the same time."""
    for change in range(uintp(indices.size)):
        values[change] = bits[uintp(indices[change])]


@compiled
def add_differences(values, differences):
    kind, sign = values.dtype.type, uint64(8) * width_of(values) - uint64(1)
    for change in range(uintp(values.size)):
        number = kind(ordered(uint64(values[change]), sign) + uint64(differences[change]))
        values[change] = kind(unordered(uint64(number), sign))


@compiled
def scatter(bits, indices, values, before):
    for change in range(uintp(indices.size)):
        index = uintp(indices[change])
        before[change] = bits[index]
        bits[index] = values[change]


# --- planes: bytes of elements


@compiled
def raw_plane(elements, plane, data):
    kind, bits, shift = elements.dtype.type, uint64(8) * width_of(elements), uint64(8) * uint64(plane)
    for place in range(uintp(elements.size)):
        element = uint64(elements[place])
        rotated = kind((element << uint64(1)) | (element >> (bits - uint64(1))))
        data[place] = uint8(uint64(rotated) >> shift)


@compiled
def dense_plane(old, new, plane, data):
    kind, shift = old.dtype.type, uint64(8) * uint64(plane)
    sign = uint64(8) * width_of(old) - uint64(1)
    for place in range(uintp(old.size)):
        difference = uint64(kind(ordered(uint64(new[place]), sign) - ordered(uint64(old[place]), sign)))
        zigzagged = kind((difference << uint64(1)) ^ (uint64(0) - (difference >> sign)))
        data[place] = uint8(uint64(zigzagged) >> shift)


@compiled
def count_changed(old, new):
    changed = uint64(0)
    for place in range(uintp(old.size)):
        changed += uint64(old[place] != new[place])
    return changed


@compiled
def add_plane(elements, data, plane):
    kind, shift = elements.dtype.type, uint64(8) * uint64(plane)
    if shift == uint64(0):
        for place in range(uintp(elements.size)):
            elements[place] = kind(data[place])
    else:
        for place in range(uintp(elements.size)):
            elements[place] = kind(uint64(elements[place]) | (uint64(data[place]) << shift))


@compiled
def rotate_right(elements):
    kind, sign = elements.dtype.type, uint64(8) * width_of(elements) - uint64(1)
    for place in range(uintp(elements.size)):
        element = uint64(elements[place])
        elements[place] = kind((element >> uint64(1)) | (element << sign))


@compiled
def undo_dense(base, elements):
    """Converts zigzagged differences to elements."""
    kind, sign = base.dtype.type, uint64(8) * width_of(base) - uint64(1)
    for place in range(uintp(base.size)):
        zigzagged = uint64(elements[place])
        difference = (zigzagged >> uint64(1)) ^ (uint64(0) - (zigzagged & uint64(1)))
        number = uint64(kind(ordered(uint64(base[place]), sign) + difference))
        elements[place] = kind(unordered(number, sign))
