"""Matrix products and element-wise passes of the layers, with hand-written backward passes. Trainer and engine share
them.

All of them are deterministic: they gather and sum in a fixed order, and never scatter in an order that depends on
timing. A step that is run again after a crash must give the same bits.
"""
