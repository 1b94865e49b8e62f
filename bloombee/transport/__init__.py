"""Streams of byte frames between peers: gRPC with TLS, libp2p, and in memory for tests."""
