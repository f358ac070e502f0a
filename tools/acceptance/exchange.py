"""One request over HTTP and its answer, by a deadline that no server can move."""

import contextlib
import dataclasses
import http.client
import queue
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable

# Log-probabilities of a quarter of a million tokens are a tenth of it.
MOST_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
_MOST_LETTERS = 500


class ServerError(Exception):
    """The server cannot be reached, or its answer is not what the interface says."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server is reached: directly, whatever proxies the environment names."""

    scheme: str
    host: str
    port: int | None
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """The address that ``url`` is; raises ServerError where it is none."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname or "", parts.port
            # Name servers take no label that is empty or too long.
            host.encode("idna")
        except ValueError as error:
            raise ServerError(f"{url!r} is no address of a server: {error}") from error
        is_plain = parts.path.isascii() and parts.path.isprintable() and " " not in parts.path
        has_more = parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in ("http", "https") or not host or not is_plain or has_more:
            raise ServerError(
                f"{url!r} is no address of a server: expected http(s)://host:port, and a path at "
                "the most"
            )
        return cls(parts.scheme, host, port, parts.path.rstrip("/"))

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is yet to be made."""
        if self.scheme == "https":
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back, and the time from before the connection to the last byte."""

    status: int
    data: bytes
    elapsed_s: float
    location: str | None = None


def exchange(address: Address, path: str, *, body: bytes | None = None, timeout_s: float) -> Answer:
    """Sends a request, POST with a ``body`` of JSON and else GET, and returns the answer to it.

    ``timeout_s`` is for all of it, from the look-up of the name to the last byte: then the
    connection is closed, so that the server may give the request up too. Raises ServerError.
    """
    connection = address.connection(timeout_s)
    sockets: list[socket.socket] = []
    given_up = threading.Event()
    ended: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def connected() -> None:
        # The connection itself forgets its socket once the answer begins.
        sockets.append(connection.sock)
        if given_up.is_set():
            raise TimeoutError

    def talk() -> None:
        try:
            ended.put(_talk(connection, address.path + path, body, connected))
        except Exception as error:
            ended.put(error)
        finally:
            connection.close()

    # The time limit of a socket is for each read: a byte now and then would keep it waiting.
    threading.Thread(target=talk, daemon=True).start()
    try:
        found = ended.get(timeout=timeout_s)
    except queue.Empty:
        found = TimeoutError()
    finally:
        given_up.set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
    if isinstance(found, Answer):
        return found
    if isinstance(found, TimeoutError):
        raise ServerError(f"no whole answer in {timeout_s:g} s")
    if isinstance(found, (OSError, ValueError, http.client.HTTPException)):
        raise ServerError(words(str(found)) or type(found).__name__) from found
    raise found


def words(data: bytes | str) -> str:
    """What a server wrote, on one line that a terminal can show, and not much of it."""
    text = data[: 4 * _MOST_LETTERS]
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    line = " ".join(text.split())
    return "".join(x if x.isprintable() else "�" for x in line)[:_MOST_LETTERS]


def _talk(
    connection: http.client.HTTPConnection,
    path: str,
    body: bytes | None,
    connected: Callable[[], None],
) -> Answer:
    start = time.perf_counter()
    connection.connect()
    connected()
    headers = {"Connection": "close"}
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        connection.request(
            "POST", path, body=body, headers={**headers, "Content-Type": "application/json"}
        )
    with connection.getresponse() as response:
        chunks, size = [], 0
        while chunk := response.read(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > MOST_BYTES:
                raise http.client.HTTPException(f"more than {MOST_BYTES} bytes of answer")
        # Reading in parts, http.client does not say so itself.
        if response.length:
            raise http.client.IncompleteRead(b"".join(chunks), response.length)
        return Answer(
            response.status,
            b"".join(chunks),
            time.perf_counter() - start,
            response.getheader("Location"),
        )
