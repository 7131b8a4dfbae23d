"""Weights: lines of versions as snapshots and lossless deltas in an object store. FORMAT.md is the format."""

from rollmill.weights.anchors import AnchorBuilder
from rollmill.weights.channels import ChannelEntry, Channels
from rollmill.weights.follower import Follower, Update
from rollmill.weights.leases import Lease, Leases
from rollmill.weights.manifest import Anchor, Manifest
from rollmill.weights.parts import PartPublisher
from rollmill.weights.publisher import Publisher
from rollmill.weights.store import WeightStore
from rollmill.weights.tensors import HostTensor, Tensors
from rollmill.weights.transfer import Mirror

__all__ = [
    "Anchor",
    "AnchorBuilder",
    "ChannelEntry",
    "Channels",
    "Follower",
    "HostTensor",
    "Lease",
    "Leases",
    "Manifest",
    "Mirror",
    "PartPublisher",
    "Publisher",
    "Tensors",
    "Update",
    "WeightStore",
]
