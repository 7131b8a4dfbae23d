"""Stores of several regions: copying between them, anchors, collection."""
