"""From objects to verified weights in memory: the cheapest legs, one after the other, around those that are damaged."""

from __future__ import annotations

from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.reading.image import Image
from rollmill.weights.reading.patches import Patches
from rollmill.weights.reading.plan import Have, Leg, LegFailed, LegId, Source, plan_legs

__all__ = ["Image", "Leg", "LegFailed", "Source", "plan_legs", "restore"]

_MEMORY_FAULTS = 3  # that could not be repaired chunk by chunk: more is no accident


def restore(source: Source, target: Version, image: Image | None = None, patches: Patches | None = None) -> Image:
    """An image of `target`, every chunk verified: the given one, brought there, or a new one.

    `patches` collects what changed, if given. An error leaves the image wherever the last good leg led, or in the
    middle of one; restoring it again, to whatever version, goes on from there.
    """
    avoid: frozenset[LegId] = frozenset()
    failure: LegFailed | None = None
    patches, faults = patches or Patches(0), 0
    while True:
        try:
            legs = plan_legs(source.manifest, source.anchor, target, _recognise(image), avoid)
        except WeightsError as error:
            raise failure or error from None
        try:
            for leg in legs:
                image = _fitting(image, leg)
                image.take(leg, source, patches)
            assert image is not None, "a plan from nothing starts with a snapshot"
            _name(image, source.manifest(target), source, patches)
            return image
        except LegFailed as error:
            failure = failure if failure and failure.memory else error  # where bad memory leads is not worth telling
            faults += error.memory
            if faults == _MEMORY_FAULTS:
                raise
            if not error.memory:
                avoid |= {error.leg.id}


def _recognise(image: Image | None) -> Have:
    """By the root digest alone: the same bytes may have another version's name."""
    return lambda _, digest: image is not None and image.holds(digest)


def _fitting(image: Image | None, leg: Leg) -> Image:
    if image is None:
        return Image(leg.manifest.tensors)
    if leg.encoding.base is None and not image.fits(leg.manifest):
        image.allocate(leg.manifest.tensors)
    return image


def _name(image: Image, manifest: Manifest, source: Source, patches: Patches) -> None:
    """No leg was needed: the image has these bytes under another name, or was half on its way from here."""
    if image.manifest is None:
        image.heal(manifest, source, patches)
    elif image.manifest.version != manifest.version:
        image.rename(manifest)
