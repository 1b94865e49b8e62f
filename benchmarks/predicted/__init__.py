"""The parts of `benchmarks/predict.py` and `benchmarks/placements.py`."""
