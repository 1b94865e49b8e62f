"""Tests: `unit`, `swarm`, `parity` and `e2e`; the folder of a test is its marker."""
