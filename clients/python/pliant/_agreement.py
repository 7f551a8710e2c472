"""On which call of ``should_leave()`` the world ends: this process's side of the two-phase agreement.

The launcher proposes a boundary (a count of ``should_leave()`` calls) to all ranks. The connection's thread answers at
once, also while the training thread is inside a collective operation: *accept* promises to stop at that call and to
wait there for the decision. When all have accepted, the launcher commits; otherwise it aborts and proposes a later one.

Two threads meet here. The training thread writes ``calls`` and then reads ``attention``; the connection's thread writes
``attention`` (under the lock) and then reads ``calls``. Whatever the order, a call that overlaps with a proposal either
sees ``attention`` or is counted in the vote, so the fast path needs no lock.
"""

import threading
import time
from typing import Optional, Tuple

#: How long a promised call waits for the decision before training goes on.
PROMISE_SECONDS = 10.0


class Agreement:
    """State of the agreement in one process."""

    __slots__ = ("calls", "attention", "left", "stepped", "timed_out", "_lock", "_changed", "_boundary", "_committed", "_waiting")

    def __init__(self) -> None:
        #: Calls of ``should_leave()`` so far, with the one that is under way.
        self.calls = 0
        #: The next call has more to do than to count.
        self.attention = True
        #: The boundary at which ``should_leave()`` has returned true.
        self.left: Optional[int] = None
        #: The first call or report has been made.
        self.stepped = False
        #: The boundary whose decision did not come in time, for the warning.
        self.timed_out: Optional[int] = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._boundary: Optional[int] = None
        self._committed = False
        self._waiting = False

    def propose(self, boundary: int) -> Tuple[bool, int]:
        """Connection's thread: a proposal. Gives the vote: accepted, boundaries passed.

        A proposal takes the place of an older one that has not been decided (its abort was lost with a connection).
        """
        with self._lock:
            if self.left is not None or self._committed:
                return boundary in (self.left, self._boundary), self._passed()
            before = self._boundary
            self._boundary = boundary
            self.attention = True
            passed = self._passed()
            accept = passed < boundary
            if not accept:
                self._boundary = None
            if before != self._boundary:
                self._changed.notify_all()
            return accept, passed

    def commit(self, boundary: int) -> None:
        """Connection's thread: all ranks leave at ``boundary``.

        A process that is past it (its wait ran out) leaves at its next call: the others are gone.
        """
        with self._lock:
            if self.left is None and not self._committed:
                self._boundary, self._committed = boundary, True
                self.attention = True
                self._changed.notify_all()

    def abort(self, boundary: int) -> None:
        """Connection's thread: the proposal is void."""
        with self._lock:
            if self._boundary == boundary and not self._committed:
                self._boundary = None
                self._changed.notify_all()

    def attend(self, call: int) -> bool:
        """Training thread: the slow path of call number ``call``; true: leave now."""
        with self._lock:
            self.stepped = True
            if self.left is not None:
                return True
            boundary = self._boundary
            if boundary is not None and not self._committed and call >= boundary:
                self._wait(boundary)
            if self._committed and self._boundary is not None and call >= self._boundary:
                self.left = call
                return True
            self.attention = self._boundary is not None
            return False

    def _wait(self, boundary: int) -> None:
        self._waiting = True
        try:
            until = time.monotonic() + PROMISE_SECONDS
            while self._boundary == boundary and not self._committed:
                rest = until - time.monotonic()
                if rest <= 0:
                    self._boundary, self.timed_out = None, boundary
                    return
                self._changed.wait(rest)
        finally:
            self._waiting = False

    def _passed(self) -> int:
        return self.calls - 1 if self._waiting else self.calls
