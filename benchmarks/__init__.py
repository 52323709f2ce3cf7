"""Benchmarks: this package, its peers and the limit, side by side in one run. ``python -m benchmarks --help``."""
