"""Weights changed where they lie: deltas made and applied on the device, and the audit of what is there."""
