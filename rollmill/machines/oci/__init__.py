"""OCI images as machines: the whole root file system of an image, at its real paths, with its own programs.

image_reference.py says what `oci:…` names: an image of a registry, a layout, an archive. registry_client.py gets
manifests and blobs from a registry, every one verified; oci_layout.py reads layouts and archives; documents.py is the
JSON in them. unpack_layers.py makes trees of layers that an overlay can join, with links, modes, owners and whiteouts;
tar.py reads their archives. oci_image.py is an unpacked image, and kept_images.py keeps those of this host by digest.
build_image.py builds Dockerfiles, in namespaces (build_sandbox.py); dockerfile.py finds the images that they name.
guest/image_root.py makes a machine's root of an image.
"""
