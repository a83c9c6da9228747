"""Costs -> who trains on what: pure functions on integer arrays.

A step has W * B slots in rank order: slot r * B + j is row j of rank r, a sample or padding. An algorithm assigns a
rank to each slot, and exactly B slots to each rank. The loops are compiled, run without the GIL, and break every tie by
the lower rank or the lower slot, so they return the same result on every machine. They share their arguments:

    costs        int64 [W * B]   cost of each slot, 0 for padding
    tokens       int64 [W * B]   tokens of each slot, 0 for padding
    order        int64 [W * B]   the slots by descending cost
    world_size   W
    target       the load that is good enough
    rank_of      int32 [W * B]   the rank of each slot: what an algorithm returns, each rank B times
"""
