"""The control plane: what ranks tell each other about a step, on the CPU, before any sample moves."""
