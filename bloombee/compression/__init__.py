"""Tensor to frame codecs and the choice between them."""
