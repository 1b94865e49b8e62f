"""Settings of gRPC channels and servers: what differs from its defaults, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloombee.transport.interface import TransportLimits

Options = list[tuple[str, int | str]]

# What a stream may have in flight before the other side grants more. The default of
# 64 KB would make the first prefill on a long link crawl until gRPC has measured it.
_LOOKAHEAD_BYTES = 4 << 20
# HTTP/2 frames of 16 KB, the default, would cut a decode step of a batch in dozens.
_HTTP2_FRAME_BYTES = 1 << 20


def _common(limits: TransportLimits) -> Options:
    return [
        ("grpc.max_receive_message_length", limits.max_frame_bytes),
        # Our own check comes first and says more.
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ("grpc.http2.max_frame_size", _HTTP2_FRAME_BYTES),
    ]


def server_options(limits: TransportLimits) -> Options:
    """For a listener."""
    return [
        *_common(limits),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
        # A client whose machine lost power says nothing for ever: notice within a minute.
        # Only servers may ping this often; they would hang up on a client that does.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(limits: TransportLimits, peer: str) -> Options:
    """For a channel to `peer`, whose id is the name in its certificate."""
    return [
        *_common(limits),
        ("grpc.ssl_target_name_override", peer),
        # Proxies of the environment are for the web, not for peers.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        # A channel's sockets are its own, so that closing it closes them.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]
