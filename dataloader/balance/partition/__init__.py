"""Costs -> who trains what: pure functions on integer arrays, one algorithm per file.

A step has W * B slots in rank order: slot r * B + j is row j of rank r. An algorithm assigns a rank to each slot, and
exactly B slots to each rank. The loops are compiled, run without the GIL, and break every tie by the lower rank or the
lower slot, so they return the same result on every machine.
"""
