"""Ranks in lockstep over TCP: rank 0 listens on MASTER_ADDR:MASTER_PORT, the others connect. Every wait is bounded."""

import json
import socket
import time


class Gone(Exception):
    """A peer has closed its connection, or has been silent for too long."""


class Star:
    """One barrier with a small value per step: the ranks send theirs, rank 0 sends its own back."""

    def __init__(self, rank, size, address, port, timeout):
        self.rank, self.size, self.timeout = rank, size, timeout
        self._peers = []
        if size == 1:
            return
        if rank == 0:
            self._listen(port)
        else:
            self._join(address, port)

    def _listen(self, port):
        until = time.monotonic() + self.timeout
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                listener.bind(("", port))
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        listener.listen(self.size)
        found = {}
        while len(found) < self.size - 1:
            listener.settimeout(max(until - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                raise Gone(f"{len(found) + 1} of {self.size} ranks came in {self.timeout} s") from None
            peer = Peer(connection, self.timeout)
            found[peer.receive()["rank"]] = peer
        listener.close()
        self._peers = [found[rank] for rank in sorted(found)]

    def _join(self, address, port):
        until = time.monotonic() + self.timeout
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=1)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise Gone(f"rank 0 at {address}:{port}: {error}") from None
                time.sleep(0.02)
        peer = Peer(connection, self.timeout)
        peer.send({"rank": self.rank})
        self._peers = [peer]

    def exchange(self, value):
        """Sends `value`; rank 0 gives the list of all values by rank, the others give rank 0's value."""
        if self.size == 1:
            return [value]
        if self.rank == 0:
            values = [value] + [peer.receive() for peer in self._peers]
            for peer in self._peers:
                peer.send(value)
            return values
        self._peers[0].send(value)
        return self._peers[0].receive()


class Peer:
    """One connection; a JSON value per line."""

    def __init__(self, connection, timeout):
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._buffer = connection, b""

    def send(self, value):
        try:
            self._connection.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self):
        while b"\n" not in self._buffer:
            try:
                data = self._connection.recv(65536)
            except OSError as error:
                raise Gone(str(error) or "timeout") from None
            if not data:
                raise Gone("closed")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)
