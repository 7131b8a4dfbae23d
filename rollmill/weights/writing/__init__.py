"""Committing versions: encoding, publishing by one process or by many ranks, who may write."""
