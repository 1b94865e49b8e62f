"""Timing spans, counters and logging set-up; the only timing code."""
