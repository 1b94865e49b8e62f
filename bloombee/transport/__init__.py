"""Streams of byte frames between peers: gRPC with TLS, and in memory for tests."""
