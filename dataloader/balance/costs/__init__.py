"""Lengths -> the cost of training on each sample."""
