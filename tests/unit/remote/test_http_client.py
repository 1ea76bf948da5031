"""The HTTP client against servers that write bytes as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from outrider.remote.guard import Guard
from outrider.remote.http_client import MAX_UNREAD, Address, Connection, HttpClient
from outrider.server.http.disconnect import ClientDisconnected

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Work = Callable[[str, HttpClient], Awaitable[None]]


class Scripted:
    """Answers each request with the next script: its pieces one write each, None for closing the connection."""

    def __init__(self, *scripts: list[bytes | None]) -> None:
        self.scripts = list(scripts)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.scripts.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def against(server: Scripted, work: Work, key: str = "") -> None:
    async def run() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            client = HttpClient(key)
            port = listening.sockets[0].getsockname()[1]
            async with asyncio.timeout(20):
                await work(f"http://127.0.0.1:{port}/base", client)
            client.close()

    asyncio.run(run())


async def idle(connection: Connection) -> None:
    while connection not in connection.address.idle:
        await asyncio.sleep(0)


def test_requests_share_a_connection_and_are_sent_whole():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    server = Scripted([answer[:7], answer[7:]], [CHUNKED, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"])

    async def work(url: str, client: HttpClient) -> None:
        first = await client.post(url, "/v1/x", b"{}", [("X-Request-Id", "r1")])
        assert (first.status, await first.read_all()) == (200, b"hello")
        first.release(ended=False)
        second = await client.get(url, "/health")
        assert second is first
        assert await second.read_all() == b"abcde"

    against(server, work, "secret")
    assert server.connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], body) == (b"POST /base/v1/x HTTP/1.1", b"{}")
    assert {b"X-Request-Id: r1", b"Authorization: Bearer secret", b"Content-Length: 2"} <= set(lines)


def test_a_stream_whose_end_is_still_to_come_gives_its_connection_back():
    server = Scripted([CHUNKED, b"3\r\nabc\r\n", b"0\r\n\r\n"], [b"HTTP/1.1 204 No Content\r\n\r\n"])

    async def work(url: str, client: HttpClient) -> None:
        connection = await client.get(url, "/")
        assert await connection.read() == b"abc"
        connection.release(ended=True)
        await idle(connection)
        assert (await client.get(url, "/")).status == 204

    against(server, work)
    assert server.connections == 1


def test_a_response_that_is_left_closes_its_connection():
    server = Scripted([CHUNKED, b"3\r\nabc\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])

    async def work(url: str, client: HttpClient) -> None:
        connection = await client.get(url, "/")
        assert await connection.read() == b"abc"
        connection.release(ended=False)
        assert await client.get(url, "/") is not connection

    against(server, work)
    assert server.connections == 2


def test_one_that_says_close_is_not_used_again():
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    server = Scripted([answer], [answer])

    async def work(url: str, client: HttpClient) -> None:
        for _ in range(2):
            connection = await client.get(url, "/")
            assert await connection.read_all() == b""
            connection.release(ended=False)

    against(server, work)
    assert server.connections == 2


def test_a_response_without_a_length_ends_with_its_connection():
    server = Scripted([b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", None])

    async def work(url: str, client: HttpClient) -> None:
        assert await (await client.get(url, "/")).read_all() == b"hello"

    against(server, work)


@pytest.mark.parametrize(
    "script",
    [[None], [b"HTTP/1.1 200 OK\r\nConte", None], [b"220 mail ready\r\n"]],
    ids=["nothing", "half a head", "no HTTP"],
)
def test_no_response(script: list[bytes | None]):
    async def work(url: str, client: HttpClient) -> None:
        with pytest.raises(ConnectionError):
            await client.get(url, "/")

    against(Scripted(script), work)


@pytest.mark.parametrize("rest", [[None], [b"zz\r\n"]], ids=["cut", "no chunk"])
def test_a_response_that_breaks_off(rest: list[bytes | None]):
    async def work(url: str, client: HttpClient) -> None:
        connection = await client.get(url, "/")
        assert await connection.read() == b"abc"
        with pytest.raises(ConnectionError):
            await connection.read()

    against(Scripted([CHUNKED + b"3\r\nabc\r\n", *rest]), work)


def test_what_nobody_reads_is_bounded():
    size = 64 << 20

    async def work(url: str, client: HttpClient) -> None:
        connection = await client.get(url, "/")
        while connection.transport.is_reading():
            await asyncio.sleep(0)
        total = len(first := await connection.read())
        assert MAX_UNREAD < len(first) < 2 * MAX_UNREAD
        while data := await connection.read():
            total += len(data)
        assert total == size

    against(Scripted([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size]), work)


def test_addresses():
    found = Address.of("https://[::1]/a/path")
    assert (found.host, found.port, found.tls, found.name, found.path) == ("::1", 443, True, b"[::1]", b"/a/path")
    assert Address.of("http://host:8001").name == b"host:8001"


def test_a_guard_ends_its_work_and_nothing_else():
    async def run() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def leave(guard: Guard) -> None:
            async with guard:
                left.set()
                await asyncio.Event().wait()

        guard = Guard(receive)
        with pytest.raises(ClientDisconnected):
            await leave(guard)
        await asyncio.sleep(0)  # nothing is left of the cancellation
        with pytest.raises(ClientDisconnected):
            await guard.__aenter__()
        other = Guard(receive)
        with pytest.raises(KeyError):
            async with other:
                other.end(KeyError("mine"))  # work that ends at the same moment
        await asyncio.sleep(0)
        other.close()

    asyncio.run(run())
