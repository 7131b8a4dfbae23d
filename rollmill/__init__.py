"""Rollmill: train your own agent model inside your own product."""

__version__ = "0.1.0"
