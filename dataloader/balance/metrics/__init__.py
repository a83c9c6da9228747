"""Metrics of balancing, and where they are written."""
