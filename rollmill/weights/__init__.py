"""Weights: lines of versions as snapshots and lossless deltas in an object store. FORMAT.md specifies the format."""

from rollmill.weights.format.manifest import Anchor, Manifest
from rollmill.weights.format.tensors import HostTensor, Tensors
from rollmill.weights.reading.channels import ChannelEntry, Channels
from rollmill.weights.reading.leases import Lease, Leases
from rollmill.weights.reading.line_follower import LineFollower, Update
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.anchors import AnchorBuilder
from rollmill.weights.regions.mirror import Mirror
from rollmill.weights.writing.publisher import OwnChunks, Publisher

__all__ = [
    "Anchor",
    "AnchorBuilder",
    "ChannelEntry",
    "Channels",
    "HostTensor",
    "Lease",
    "Leases",
    "LineFollower",
    "Manifest",
    "Mirror",
    "OwnChunks",
    "Publisher",
    "Tensors",
    "Update",
    "WeightStore",
]
