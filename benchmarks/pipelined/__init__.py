"""The parts of `benchmarks/pipeline.py`: its client process, and what is made of the diaries."""
