"""The base of every other folder: exceptions, safe files, compiled loops, hashing, registries, optional packages."""
