"""Swarms under seeded faults, in virtual time."""
