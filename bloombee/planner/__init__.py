"""Pure policies of placement; no torch, no clock, no I/O."""
