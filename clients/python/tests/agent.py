"""A socket server that speaks the agent's side of the protocol to one training process at a time."""

import json
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
import time
from typing import Any, Dict, List, Optional


class Agent:
    """Listens on its own path; keeps what clients say; sends what the test says."""

    def __init__(self, directory: Optional[str] = None, answer: Optional[Dict[str, Any]] = None) -> None:
        self.directory = directory or tempfile.mkdtemp(prefix="pliant-client-")
        os.makedirs(self.directory, exist_ok=True)
        self.path = os.path.join(self.directory, "agent.sock")
        self.answer = answer or {"type": "welcome", "version": 1, "job": 7, "node": "n0"}
        self.heard: "queue.Queue[Dict[str, Any]]" = queue.Queue()
        self.hellos: List[Dict[str, Any]] = []
        self.mute = False
        self._connections: List[socket.socket] = []
        self._welcomed = threading.Event()
        if os.path.exists(self.path):
            os.unlink(self.path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        try:
            while head := stream.read(4):
                message = json.loads(stream.read(struct.unpack(">I", head)[0]))
                if message["type"] == "hello":
                    self.hellos.append(message)
                    if not self.mute:
                        self.raw(self.answer, connection)
                        self._welcomed.set()
                else:
                    self.heard.put(message)
        except (OSError, ValueError, struct.error):
            pass

    def raw(self, message: Any, connection: Optional[socket.socket] = None) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        (connection or self._connections[-1]).sendall(struct.pack(">I", len(data)) + data)

    def tell(self, word: str, **fields: Any) -> None:
        """Sends one message to the client that came last."""
        assert self._welcomed.wait(10)
        self.raw({"type": "client", "say": word, **fields})

    def wait_hellos(self, number: int, seconds: float = 15) -> None:
        until = time.monotonic() + seconds
        while len(self.hellos) < number:
            assert time.monotonic() < until, f"{len(self.hellos)} of {number} hellos"
            time.sleep(0.01)

    def next(self, word: str, seconds: float = 10) -> Dict[str, Any]:
        """The next message of that kind; others before it are dropped."""
        until = time.monotonic() + seconds
        while True:
            message = self.heard.get(timeout=max(until - time.monotonic(), 0.001))
            if message["say"] == word:
                return message

    def hang_up(self) -> None:
        """Closes the connections, not the listener."""
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self.hang_up()
        shutil.rmtree(self.directory, ignore_errors=True)
