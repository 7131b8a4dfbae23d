"""From objects to verified weights in memory, and following a line or a channel."""
