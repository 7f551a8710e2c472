"""The connection to the node's agent: one daemon thread that connects, serves, and connects again for ever.

All socket work happens in this thread; the training thread only sets attributes and, for what must not wait for the
next beat, writes one byte to a pipe.
"""

import os
import random
import select
import socket
import threading
import time
from typing import Callable, List, Optional

from ._agreement import PROMISE_SECONDS, Agreement
from ._version import PROTOCOL
from ._wire import Decoder, Message, WireError, count, encode, hello, say
from ._world import World

#: The agent must have answered the Hello by then, in seconds.
HELLO_SECONDS = 5.0
#: Reports go out at most once per beat.
BEAT_SECONDS = 0.2
#: Pauses between attempts to connect.
FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 2.0
REFUSED_PAUSE_SECONDS = 5.0
#: A connection that has lived so long makes the next pause short again.
STEADY_SECONDS = 5.0
#: More unsent bytes than this mean that the agent reads no more.
MAX_UNSENT = 1 << 20


def warn(text: str) -> None:
    """One line on stderr; not through ``sys.stderr``, which a daemon thread must not touch while Python ends."""
    try:
        os.write(2, f"pliant: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


class Refused(Exception):
    """The agent does not take this process."""


class Link:
    """The connection; see the module."""

    def __init__(self, path: str, world: World, agreement: Agreement, report: Callable[[], Optional[Message]]) -> None:
        self.connected = False
        #: An attempt to connect has ended, well or not.
        self.tried = threading.Event()
        #: The agent says that the old world has ended.
        self.started = threading.Event()
        #: Left is on its way (written to the socket).
        self.left_sent = threading.Event()
        #: Why there is no connection, for the warning.
        self.problem = ""
        self.path, self._world, self._agreement, self._report = path, world, agreement, report
        self._stop = False
        self._socket: Optional[socket.socket] = None
        self._out = bytearray()
        self._said_stepped = self._said_left = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="pliant", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Any thread: do not wait for the next beat."""
        try:
            os.write(self._wake_write, b"w")
        except OSError:
            pass

    def close(self, seconds: float) -> None:
        """Sends what is left to say and ends the thread, in at most ``seconds``."""
        self._stop = True
        self.wake()
        self._thread.join(seconds)

    def drop_after_fork(self) -> None:
        """In a forked child: gives up the descriptors, so that the agent sees the parent's end when it comes."""
        self._stop, self.connected = True, False
        for fd in (self._wake_read, self._wake_write):
            try:
                os.close(fd)
            except OSError:
                pass
        if self._socket is not None:
            try:
                self._socket.close()
            except OSError:
                pass

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stop:
            least, began = 0.0, time.monotonic()
            try:
                self._serve(self._connect())
                self.problem = "the agent has closed the connection"
            except Refused as error:
                self.problem, least = str(error), REFUSED_PAUSE_SECONDS
            except (OSError, WireError) as error:
                self.problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
            except Exception as error:  # pylint: disable=broad-except  # a fault here must never reach the training
                self.problem = f"{type(error).__name__}: {error}"
            if self.connected and time.monotonic() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            self.connected = False
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self.tried.set()
            if not self._stop:
                self._sleep(max(pause, least) * random.uniform(0.5, 1.0))
                pause = min(pause * 2, LAST_PAUSE_SECONDS)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop and (rest := until - time.monotonic()) > 0:
            self._poll(None, rest)

    def _poll(self, sock: Optional[socket.socket], seconds: float) -> bool:
        """Waits for the socket (to write as well while there is something to), a wake or the time; true: can be read."""
        poller = select.poll()  # not select.select(): a training may have more than 1024 files open
        poller.register(self._wake_read, select.POLLIN)
        if sock is not None:
            poller.register(sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        readable = False
        for fd, events in poller.poll(int(seconds * 1000) + 1):
            if fd == self._wake_read:
                self._drain()
            elif events & ~select.POLLOUT:
                readable = True
        return readable

    def _drain(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except OSError:
            pass

    def _connect(self) -> Decoder:
        """Connects and says Hello; raises when Welcome does not come in time."""
        self._out.clear()
        self._said_stepped = self._said_left = False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = sock
        until = time.monotonic() + HELLO_SECONDS
        sock.settimeout(HELLO_SECONDS)
        try:
            sock.connect(self.path)
            sock.sendall(encode(hello(self._world.rank, self._world.generation)))
            decoder = Decoder()
            early: List[Message] = []
            while not early:
                sock.settimeout(max(until - time.monotonic(), 0.001))
                data = sock.recv(65536)
                if not data:
                    raise WireError("the agent has closed the connection")
                early = decoder.feed(data)
        except (socket.timeout, BlockingIOError):
            raise WireError(f"the agent did not answer in {HELLO_SECONDS:.0f} s") from None
        self._welcome(early.pop(0))
        sock.setblocking(False)
        self.connected = True
        self.tried.set()
        for message in early:
            self._take(message)
        return decoder

    @staticmethod
    def _welcome(message: Message) -> None:
        kind = message.get("type")
        if kind == "refused":
            raise Refused(f"the agent refused this process: {str(message.get('reason', ''))[:200]}")
        if kind != "welcome":
            raise WireError("the agent's first message is no answer to Hello")
        if message.get("version") != PROTOCOL:
            raise Refused(f"the agent speaks version {message.get('version')!r:.20}, this client version {PROTOCOL}")

    def _serve(self, decoder: Decoder) -> None:
        """Until the connection or the process ends."""
        sock = self._socket
        assert sock is not None
        beat = time.monotonic()
        while True:
            now = time.monotonic()
            if not self._out and (now >= beat or self._stop):
                beat = now + BEAT_SECONDS
                report = self._report()
                if report is not None:
                    self._say(report)
            self._announce()
            self._flush(sock)
            if self._stop and not self._out:
                return
            if self._poll(sock, BEAT_SECONDS):
                data = sock.recv(65536)
                if not data:
                    return
                for message in decoder.feed(data):
                    self._take(message)

    def _announce(self) -> None:
        """What has become true, once per connection: the supervisor may have missed it."""
        if self._agreement.stepped and not self._said_stepped:
            self._said_stepped = True
            self._say(say("stepped"))
        if self._agreement.left is not None and not self._said_left:
            self._said_left = True
            self._say(say("left", boundary=self._agreement.left))

    def _say(self, message: Message) -> None:
        self._out += encode(message)
        if len(self._out) > MAX_UNSENT:
            raise WireError("the agent reads no more")

    def _flush(self, sock: socket.socket) -> None:
        while self._out:
            try:
                del self._out[: sock.send(self._out)]
            except (BlockingIOError, InterruptedError):
                return
        if self._said_left:
            self.left_sent.set()

    def _take(self, message: Message) -> None:
        """One message from the agent. What is not known is for a newer client."""
        if message.get("type") != "client":
            return
        word = message.get("say")
        if word == "start":
            self.started.set()
            return
        boundary = count(message.get("boundary"))
        if boundary is None:
            return
        if word == "propose":
            accept, passed = self._agreement.propose(boundary)
            self._say(say("vote", boundary=boundary, accept=accept, passed=passed))
        elif word == "commit":
            self._agreement.commit(boundary)
        elif word == "abort":
            self._agreement.abort(boundary)


def timed_out_line(boundary: int) -> str:
    """The warning when no decision came."""
    return f"no decision about leaving at call {boundary} came in {PROMISE_SECONDS:.0f} s; training goes on"
