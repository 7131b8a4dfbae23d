"""The ways to a version as a store stands: how many bytes, and whether all they need is there. Nothing is decoded."""

from __future__ import annotations

from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.format.keys import pack_key
from rollmill.weights.reading.plan import Leg, LegId, plan_legs
from rollmill.weights.reading.store import WeightStore


def cheapest_route(
    store: WeightStore, target: Version, form: str, digest: str | None = None, avoid: frozenset[LegId] = frozenset()
) -> list[Leg]:
    """The legs with the fewest bytes to a version, from weights with the root digest `digest` or from nothing."""
    source = store.source(form)
    return plan_legs(source.manifest, source.anchor, target, lambda _, found: found == digest, avoid)


def check_present(store: WeightStore, target: Version, form: str) -> list[Leg]:
    """A route whose objects are all there, as large as they should be. WeightsError says what is missing.

    A quick look before something points at the version. Only `rollmill weights verify` reads the bytes.
    """
    avoid: frozenset[LegId] = frozenset()
    missing: str | None = None
    while True:
        try:
            legs = cheapest_route(store, target, form, avoid=avoid)
        except WeightsError as error:
            if missing is None:
                raise
            raise WeightsError(
                f"{target} ({form}) cannot be restored from {store.objects.url}: {missing}", hint=error.hint
            ) from None
        broken = next((leg for leg in legs if _missing(store, leg)), None)
        if broken is None:
            return legs
        missing = missing or _missing(store, broken)
        avoid |= {broken.id}


def _missing(store: WeightStore, leg: Leg) -> str | None:
    for pack in leg.encoding.packs:
        key = pack_key(leg.manifest, pack)
        size = store.objects.head(key)
        if size != pack.bytes:
            return f"{key!r} is missing" if size is None else f"{key!r} has {size} bytes, not {pack.bytes}"
    return None
