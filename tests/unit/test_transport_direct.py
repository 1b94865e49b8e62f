"""What only the direct transport has: certificates, sockets, loops in threads, processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from bloombee.errors import AuthError, Refused, SettingsError, TransportError
from bloombee.transport import certificates
from bloombee.transport.direct import DirectDialer, DirectListener
from bloombee.transport.interface import Endpoint, Stream, TransportLimits
from bloombee.transport.pumped import PumpedStream

PEER = "12D3KooWServer"
Run = Callable[[Coroutine[typing.Any, typing.Any, None]], None]


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send([frame])


async def talk(endpoint: Endpoint, count: int = 50) -> None:
    dialer = DirectDialer()
    try:
        stream = await dialer.dial(endpoint, 10.0)
        for number in range(count):
            await stream.send([b"%d" % number, bytes(20_000)])
            assert await stream.receive() == b"%d" % number + bytes(20_000)
        await stream.close()
    finally:
        await dialer.close()


def test_certificates_are_kept_beside_the_identity_and_private(tmp_path: Path) -> None:
    identity = tmp_path / "server.id"
    made = certificates.load_or_create(PEER, identity)
    path = tmp_path / "server.id.tls"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert certificates.load_or_create(PEER, identity) == made
    assert len(made.hash) == 32
    assert "KEY" not in repr(made)
    other = certificates.load_or_create("another-peer", identity)
    assert other.hash != made.hash
    assert certificates.load_or_create("another-peer", identity) == other
    path.write_text("rubbish")
    with pytest.raises(SettingsError, match="server.id.tls"):
        certificates.load_or_create(PEER, identity)
    with pytest.raises(SettingsError, match="missing"):
        certificates.load_or_create(PEER, tmp_path / "missing" / "server.id")
    assert certificates.load_or_create(PEER, None).peer == PEER


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:port", "host:0", "host:70000"]
)
def test_addresses_that_are_none(address: str) -> None:
    async def main() -> None:
        dialer = DirectDialer()
        with pytest.raises(TransportError, match="host:port"):
            await dialer.dial(Endpoint(PEER, address, bytes(32)), 1.0)
        await dialer.close()

    asyncio.run(main())


def test_addresses_are_split() -> None:
    assert certificates.split_address("example.org:80") == ("example.org", 80)
    assert certificates.split_address("[::1]:8080") == ("::1", 8080)


def test_a_record_without_a_certificate_and_a_server_without_tls_are_refused() -> None:
    async def main() -> None:
        listener = DirectListener("127.0.0.1", 0, certificates.create(PEER))
        await listener.start(echo)
        dialer = DirectDialer()
        with pytest.raises(AuthError, match="names no certificate"):
            await dialer.dial(replace(listener.endpoint, certificate_hash=b""), 5.0)

        async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(plain, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransportError, match="can't reach"):
            await dialer.dial(Endpoint(PEER, f"127.0.0.1:{port}", bytes(32)), 5.0)
        server.close()
        await dialer.close()
        await listener.stop(0.0)

    asyncio.run(main())


def test_a_server_that_comes_back_with_another_certificate_is_refused() -> None:
    async def main() -> None:
        listener = DirectListener("127.0.0.1", 0, certificates.create(PEER))
        await listener.start(echo)
        endpoint = listener.endpoint
        dialer = DirectDialer()
        await (await dialer.dial(endpoint, 5.0)).close()
        await listener.stop(0.0)
        port = int(endpoint.address.rpartition(":")[2])
        impostor = DirectListener("127.0.0.1", port, certificates.create(PEER))
        await impostor.start(echo)
        with pytest.raises(AuthError, match="another certificate"):
            await dialer.dial(endpoint, 5.0)
        stream = await dialer.dial(impostor.endpoint, 5.0)
        await stream.send([b"known by its new record"])
        assert await stream.receive() == b"known by its new record"
        await dialer.close()
        await impostor.stop(0.0)

    asyncio.run(main())


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_listener_and_dialers_in_loops_of_several_threads(
    run_loop: Run, caplog: pytest.LogCaptureFixture
) -> None:
    finished: list[bool] = []

    def client(endpoint: Endpoint) -> None:
        run_loop(talk(endpoint))
        finished.append(True)

    async def main() -> None:
        listener = DirectListener("127.0.0.1", 0, certificates.create(PEER))
        await listener.start(echo)
        for _ in range(2):
            threads = [threading.Thread(target=client, args=(listener.endpoint,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            await talk(listener.endpoint)
            for thread in threads:
                await asyncio.to_thread(thread.join)
        await listener.stop(1.0)

    with caplog.at_level(logging.WARNING):
        run_loop(main())
    assert len(finished) == 6
    assert caplog.records == []


def test_a_hung_up_phone_is_noticed_when_a_process_is_killed() -> None:
    program = f"""
import asyncio
from bloombee.transport import certificates
from bloombee.transport.direct import DirectListener
async def echo(stream):
    while (frame := await stream.receive()) is not None:
        await stream.send([frame])
async def main():
    listener = DirectListener("127.0.0.1", 0, certificates.create("{PEER}"))
    await listener.start(echo)
    print(listener.address, listener.certificate.hash.hex(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def main(address: str, certificate_hash: str) -> None:
        endpoint = Endpoint(PEER, address, bytes.fromhex(certificate_hash))
        dialer = DirectDialer()
        stream = await dialer.dial(endpoint, 10.0)
        await stream.send([b"hello"])
        assert await stream.receive() == b"hello"
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(5.0):
            with pytest.raises(TransportError, match=address):
                await stream.receive()
            with pytest.raises(TransportError, match=address):
                await dialer.dial(endpoint, 5.0)
        await dialer.close()

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            address, certificate_hash = process.stdout.readline().decode().split()
            asyncio.run(main(address, certificate_hash))
        finally:
            process.kill()


def congestion_controls(port: int) -> dict[str, bytes]:
    """Algorithm by role of each socket of this process that has to do with `port`."""
    found: dict[str, bytes] = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
            continue
        with socket.socket(fileno=os.dup(int(name))) as held:
            if held.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            local, remote = held.getsockname()[1], None
            with contextlib.suppress(OSError):
                remote = held.getpeername()[1]
            if port in (local, remote):
                role = "dialed" if remote == port else "accepted" if remote else "listening"
                option = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                found[role] = option.rstrip(b"\0")
    return found


def best_congestion_control() -> bytes:
    """Cubic where this process may choose it, else the host's default."""
    with socket.socket() as probe:
        with contextlib.suppress(OSError):
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_all_sockets_of_a_connection_use_cubic() -> None:
    async def main() -> None:
        listener = DirectListener("127.0.0.1", 0, certificates.create(PEER))
        await listener.start(echo)
        dialer = DirectDialer()
        stream = await dialer.dial(listener.endpoint, 5.0)
        port = int(listener.address.rpartition(":")[2])
        controls = congestion_controls(port)
        assert controls == dict.fromkeys(
            ("listening", "accepted", "dialed"), best_congestion_control()
        )
        await stream.close()
        await dialer.close()
        await listener.stop(0.0)

    asyncio.run(main())


def test_keep_alives_really_cross_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    keep_alive = PumpedStream.keep_alive

    def noted(stream: PumpedStream) -> bool:
        sent.append(stream.remote)
        return keep_alive(stream)

    async def main() -> None:
        limits = TransportLimits(keepalive_s=0.02, keepalive_after_s=0.4)
        listener = DirectListener("127.0.0.1", 0, certificates.create(PEER), limits)
        await listener.start(echo)
        dialer = DirectDialer(limits)
        stream = await dialer.dial(listener.endpoint, 5.0)
        monkeypatch.setattr(PumpedStream, "keep_alive", noted)
        await stream.send([bytes(5000)])
        assert await stream.receive() == bytes(5000)
        await asyncio.sleep(1.0)
        # Both sides sent a large frame, so both keep their window, and then rest.
        assert len(set(sent)) == 2
        assert 20 <= len(sent) <= 90
        assert stream.counters.frames_received == 1
        await stream.send([b"and the stream still works"])
        assert await stream.receive() == b"and the stream still works"
        await stream.close()
        await dialer.close()
        await listener.stop(0.0)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_a_settings_error(host: str) -> None:
    async def main() -> None:
        with pytest.raises(SettingsError, match=f"{host}.*--host"):
            await DirectListener(host, 0, certificates.create(PEER)).start(echo)

    asyncio.run(main())


def test_ipv6_works_where_the_host_has_it() -> None:
    async def main() -> None:
        listener = DirectListener("::1", 0, certificates.create(PEER))
        await listener.start(echo)
        assert listener.address.startswith("[::1]:")
        await talk(listener.endpoint, 3)
        await listener.stop(0.0)

    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        asyncio.run(main())


def test_where_nobody_listens_any_more_is_refused(tmp_path: Path) -> None:
    """Known by its certificate, by a connection that broke, or not at all."""

    async def main() -> None:
        listener = DirectListener("127.0.0.1", 0, certificates.load_or_create(PEER, tmp_path / "i"))
        await listener.start(echo)
        dialer, other = DirectDialer(), DirectDialer()
        try:
            stream = await dialer.dial(listener.endpoint, 10.0)
            await listener.stop(0.0)
            with contextlib.suppress(TransportError):
                while await stream.receive() is not None:
                    pass
            for each in (dialer, dialer, other):
                with pytest.raises(Refused, match="connection refused"):
                    await each.dial(listener.endpoint, 10.0)
        finally:
            await dialer.close()
            await other.close()

    asyncio.run(main())
