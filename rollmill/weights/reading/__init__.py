"""Reads versions from a store into verified weights in memory, and follows a line or a channel."""
