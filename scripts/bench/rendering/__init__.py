"""What the reports of several benchmarks are made of."""
