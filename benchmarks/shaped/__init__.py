"""The parts of `benchmarks/bandwidth.py` and `benchmarks/link_drop.py`: swarms on shaped links."""
