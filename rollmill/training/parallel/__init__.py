"""The trainer on many ranks. Every rank runs the same loop on the same batch and holds a part of everything:

    rows of every parameter     FSDP2 over all ranks; experts first by expert, then over the ranks that share them
    tokens of every micro-batch whole sequences over the data mesh, pieces of sequences over the context mesh

What belongs to whole micro-batches (log-probs, losses, counts) is brought together, so objectives do not know of ranks.
Files: world (who we are), mesh, shard (parameters), experts, context (attention), split and spread (micro-batches),
rows, load, publish, checkpoint (bytes in and out), exchange (collectives with gradients).
"""
