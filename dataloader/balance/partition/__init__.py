"""The compiled loops behind the strategies.

They run without the interpreter's lock, know nothing of ranks as processes, and break every tie by the lower rank or
the lower slot, so that they give the same everywhere. A step has W * B slots, rank after rank; each rank gets B.
"""
