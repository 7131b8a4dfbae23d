"""The trainer on many ranks. Every rank runs the same loop on the same batch and holds a part of everything:

    rows of every parameter     FSDP2 over all ranks; experts first by expert, then over the ranks that share them
    tokens of every micro-batch whole sequences over the data mesh, slices of sequences over the context mesh

Log-probs, losses and counts of a micro-batch are gathered, so an objective sees all of it on every rank.

    many_ranks        the interfaces of training/parallelism.py, for one rank of several
    world, hangs      which rank this is, how ranks agree, which one does not come
    mesh, sharding    the groups of ranks; which rank has which rows
    fsdp, expert_parallel, context_parallel, collectives     how a model computes with its rows
    token_split, split_passes        which rank computes which tokens, and the passes over them
    row_loading, row_state, chunk_exchange     weights in, checkpoints in and out, versions out
"""
