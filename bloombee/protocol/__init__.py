"""Typed messages, framing, and the session state machine; no I/O, no clock."""
