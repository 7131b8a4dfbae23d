"""What the bytes mean: tensors and chunks, codings, manifests, keys. FORMAT.md specifies it."""
