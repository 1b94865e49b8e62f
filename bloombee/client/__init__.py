"""HF-compatible model classes, sessions and routing."""
