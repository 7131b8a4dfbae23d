"""The trainer on many ranks. Every rank runs the same loop on the same batch and holds a part of everything:

    rows of every parameter     FSDP2 over all ranks; experts first by expert, then over the ranks that share them
    tokens of every micro-batch whole sequences over the data mesh, slices of sequences over the context mesh

Log-probs, losses and counts of a micro-batch are gathered, so an objective sees all of it on every rank.
Files: sharded (the Placement), world (ranks), mesh, shard (parameters), experts, context (attention), split and spread
(micro-batches), rows, load, publish, state (bytes in and out), exchange (collectives with gradients).
"""
