"""Argument parsing of the console scripts."""
