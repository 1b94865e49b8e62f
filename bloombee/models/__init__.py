"""Family specs, loading a span's tensors, and packed execution of its blocks."""
