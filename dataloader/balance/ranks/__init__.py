"""The control plane: messages between ranks about a step, on the CPU, before any sample moves."""
