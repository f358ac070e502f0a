"""A server that sends whatever bytes it is told, as fast or as slowly as it is told."""

import contextlib
import itertools
import socket
import threading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


class RawServer:
    """Answers a request with the bytes of ``chunks(request)``, ``pause_s`` after each.

    ``hung_up`` is set once a client went away before the last of them; ``received`` is
    the last request.
    """

    def __init__(self, chunks, pause_s=0.0):
        self.hung_up = threading.Event()
        self.received = None
        self._chunks = chunks
        self._pause_s = pause_s
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        # Closing alone does not wake who accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self):
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                self.received = client.recv(1 << 16)
                try:
                    for chunk in self._chunks(self.received):
                        client.sendall(chunk)
                        if self._ended.wait(self._pause_s):
                            return
                        if _is_gone(client):
                            self.hung_up.set()
                            break
                except OSError:
                    self.hung_up.set()


def _is_gone(client):
    try:
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def once(*chunks):
    """For any request, these."""
    return lambda _request: iter(chunks)


def then_forever(start, drip):
    """For any request, ``start`` and then ``drip`` without end."""
    return lambda _request: itertools.chain([start], itertools.repeat(drip))
