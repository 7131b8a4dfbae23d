"""Upkeep of stores in several regions: copying between them, anchors, collection."""
