"""The format: tensors and chunks, codings, manifests, keys. FORMAT.md specifies it."""
