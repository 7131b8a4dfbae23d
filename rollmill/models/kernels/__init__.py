"""The layers' products and element-wise passes with a hand-written backward, shared by trainer and engine.

Every one of them is deterministic: gathers and ordered sums, never a scatter whose order depends on timing. A step that
is run again after a crash must give the same bits.
"""
