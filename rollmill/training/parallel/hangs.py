"""Notices a rank that hangs, names it, and ends the processes, so that all ranks can start again.

A time-out of torch is of no use here: gloo's does not say who is missing, and NCCL ends the process from a thread of
its own. So a thread of each rank writes to the store how many collectives its rank has begun. If that has not changed
on any rank for `patience` seconds and some ranks have begun fewer than others, these hang.

    group of all ranks   0: 7   1: 6   2: 7     ranks 0 and 2 wait for rank 1
    group of 0 and 2     0: 4          2: 3     2 is late too, but it waits for 1: only 1 is named
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

BEATS = 10  # in `patience`


@contextlib.contextmanager
def watching(
    store: dist.Store, rank: int, size: int, patience: float, groups: Sequence[dist.ProcessGroup]
) -> Iterator[None]:
    """`groups`: those that this rank is in, in the order in which all ranks made them."""
    ended = threading.Event()
    own: Any = store  # torch's stubs do not know `clone`: a connection of its own
    arguments = (own.clone(), rank, size, patience, groups, ended)
    threading.Thread(target=_watch, args=arguments, name="hangs", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def late_ranks(begun: Sequence[Mapping[str, int]]) -> list[int]:
    """Who the others wait for. `begun`: for each rank, how many collectives it has begun in each of its groups."""
    late, waiting = set[int](), set[int]()
    for group in set[str]().union(*begun):
        counts = {rank: counted[group] for rank, counted in enumerate(begun) if group in counted}
        if min(counts.values()) < max(counts.values()):
            late |= {rank for rank, count in counts.items() if count < max(counts.values())}
            waiting |= {rank for rank, count in counts.items() if count == max(counts.values())}
    return sorted(late - waiting or late)


def _watch(
    store: dist.Store,
    rank: int,
    size: int,
    patience: float,
    groups: Sequence[dist.ProcessGroup],
    ended: threading.Event,
) -> None:
    keys = [f"begun/{each}" for each in range(size)]
    seen: list[bytes] = []
    since = time.monotonic()
    while not ended.wait(patience / BEATS):
        try:
            store.set(keys[rank], json.dumps(_begun(groups)))
            found = store.multi_get(keys)
        except RuntimeError:  # the rank that has the store is gone: its connections tell
            continue
        if found != seen:
            seen, since = found, time.monotonic()
        elif time.monotonic() - since >= patience and (late := late_ranks([json.loads(each) for each in found])):
            _end(rank, late, patience)


def _begun(groups: Sequence[Any]) -> dict[str, int]:
    """torch has no public names for the devices of a group and for its number of collectives."""
    counts = {}
    for number, group in enumerate(groups):
        for device in group._device_types:
            key = f"{number} of {dist.get_process_group_ranks(group)} on {device.type}"
            counts[key] = group._get_backend(device)._get_sequence_number_for_group()
    return counts


def _end(rank: int, late: Sequence[int], patience: float) -> None:
    """From another thread, because the main one cannot leave a collective of NCCL."""
    if rank in late:
        faulthandler.dump_traceback(sys.stderr)
    else:
        time.sleep(patience / BEATS)  # the late ones write where they hang
    who = f"rank {', '.join(map(str, late))} did not come"
    print(f"error: training: rank {rank} waited {patience / 60:g} minutes for the other ranks: {who}", file=sys.stderr)
    print("hint: the log of that rank shows where it was; if it was only slow, raise hang_minutes", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # not a final error: all ranks start again
