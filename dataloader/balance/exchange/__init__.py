"""Moves samples between ranks: what to send, one buffer per batch, one collective per step, on the CPU or on a GPU."""
