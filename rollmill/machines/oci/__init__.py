"""OCI images as machines: the whole root file system of an image, at its real paths, with its own programs.

reference.py says what `oci:…` names: an image of a registry, a layout, an archive. registry.py gets manifests and blobs
from a registry, every one verified; layout.py reads layouts and archives. unpack.py makes trees of layers that an
overlay can join, with links, modes, owners and whiteouts. oci_image.py is an unpacked image, kept by digest on this
host.
"""
