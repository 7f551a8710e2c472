"""The object that a training script holds, and ``connect()``."""

import atexit
import math
import numbers
import os
import sys
import threading
import time
import weakref
from typing import Any, Optional

from ._agreement import Agreement
from ._link import HELLO_SECONDS, Link, timed_out_line, warn
from ._wire import Message, say
from ._world import World, read_world

#: On hold and without an agent, `connect()` ends the process after so many seconds: the old world may still train, and
#: two worlds would write the same checkpoint. The launcher starts it again when it is needed.
HOLD_SECONDS = 60.0
#: With this exit code; the launcher knows it.
HOLD_EXIT = 75
#: `should_leave()` waits so long for Left to be on its way before it returns true.
LEFT_SECONDS = 2.0
#: At the end of the process, for the last report.
EXIT_SECONDS = 0.5

_MAX_COUNT = (1 << 64) - 1


class Job:
    """This training process as a part of an elastic job; outside Pliant its methods do nothing.

    The methods are for one thread, the training's. ``report()`` may be called by any.
    """

    __slots__ = ("_world", "_agreement", "_link", "_dirty", "_step", "_total_steps", "_samples", "_loss", "__weakref__")

    def __init__(self, world: World, path: Optional[str] = None) -> None:
        """For ``connect()``; ``path``: the agent's socket, ``None`` outside Pliant."""
        self._world = world
        self._dirty = False
        self._step: Optional[int] = None
        self._total_steps: Optional[int] = None
        self._samples: Optional[int] = None
        self._loss: Optional[float] = None
        self._agreement = Agreement()
        self._link: Optional[Link] = None
        if path is None:
            self._agreement.attention = False
        else:
            self._link = Link(path, world, self._agreement, self._take_report)

    @property
    def world(self) -> World:
        """The world that this process was started for."""
        return self._world

    @property
    def active(self) -> bool:
        """Whether the agent of the node is connected now."""
        link = self._link
        return link is not None and link.connected

    def report(
        self,
        *,
        step: Any = None,
        total_steps: Any = None,
        samples: Any = None,
        loss: Any = None,
        **metrics: Any,
    ) -> None:
        """Tells how far the training is; never blocks, never raises.

        ``step`` (steps done), ``total_steps`` and ``samples`` are counts, ``loss`` is a finite number. Of each the last value
        counts; they are sent at most five times a second. A value of another type (also a tensor: use ``.item()``) is
        dropped. Other names are accepted, and not sent yet.
        """
        del metrics
        try:
            if step is not None and (number := _count(step)) is not None:
                self._step = number
            if total_steps is not None and (number := _count(total_steps)) is not None:
                self._total_steps = number
            if samples is not None and (number := _count(samples)) is not None:
                self._samples = number
            if loss is not None and isinstance(loss, numbers.Real):
                real = float(loss)
                if math.isfinite(real):
                    self._loss = real
            self._dirty = True
            if self._agreement.attention and not self._agreement.stepped and self._link is not None:
                self._agreement.stepped = True
                self._link.wake()
        except Exception:  # pylint: disable=broad-except  # a strange number type must not end a training
            pass

    def should_leave(self) -> bool:
        """Whether to save and exit with 0 now. Call it once per iteration, at its end, on every rank.

        All ranks get true at the same iteration. Costs well under a microsecond as long as no change is proposed. Near a
        change it may wait, 10 s at most, for the other ranks. Once true, it stays true.
        """
        agreement = self._agreement
        agreement.calls = call = agreement.calls + 1
        if not agreement.attention:
            return False
        return self._attend(call)

    def _attend(self, call: int) -> bool:
        agreement, link = self._agreement, self._link
        if link is None:
            return False
        first, before = not agreement.stepped, agreement.left
        leave = agreement.attend(call)
        if agreement.timed_out is not None:
            warn(timed_out_line(agreement.timed_out))
            agreement.timed_out = None
        if first or (leave and before is None):
            link.wake()
        if leave and before is None:
            link.left_sent.wait(LEFT_SECONDS)
        return leave

    def _take_report(self) -> Optional[Message]:
        """Connection's thread: what is new since the last time."""
        if not self._dirty:
            return None
        self._dirty = False
        fields = {"step": self._step, "total_steps": self._total_steps, "samples": self._samples, "loss": self._loss}
        fields = {name: value for name, value in fields.items() if value is not None}
        return say("report", **fields) if fields else None

    def _open(self, hold: bool) -> None:
        """The blocking part of ``connect()``: the first attempt and, on hold, the wait for Start."""
        link = self._link
        if link is None:
            return
        link.start()
        link.tried.wait(HELLO_SECONDS + 1)
        if not link.connected:
            after = "waiting on" if hold else "training goes on without changes of the world until it answers"
            warn(f"no connection to the agent at {link.path}: {link.problem or 'no answer'}; {after}")
        absent_since = None
        while hold and not link.started.wait(0.2):
            if link.connected:
                absent_since = None
                continue
            absent_since = absent_since or time.monotonic()
            if time.monotonic() - absent_since > HOLD_SECONDS:
                warn(f"no agent for {HOLD_SECONDS:.0f} s, so no word to start: ending with code {HOLD_EXIT}")
                _end(HOLD_EXIT)

    def _close(self) -> None:
        if self._link is not None:
            self._link.close(EXIT_SECONDS)

    def _after_fork(self) -> None:
        """In a forked child, such as a worker of a DataLoader: it is no rank."""
        link, self._link = self._link, None
        self._agreement.attention = False
        if link is not None:
            link.drop_after_fork()


def _end(code: int) -> None:
    """Ends this process for certain: an exception might be caught, and the training begin."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass
    os._exit(code)


def _count(value: Any) -> Optional[int]:
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        return number if 0 <= number <= _MAX_COUNT else None
    return None


#: The process that is the rank; inherited by processes that it starts, which are none.
_OWNER = "PLIANT_JOB_CLIENT_PID"

_lock = threading.Lock()
_job: Optional[Job] = None


def connect() -> Job:
    """The job of this process; the same object at each call. Never raises; ends a process that waits on hold (see below)
    and has heard nothing of the agent for a minute.

    Outside Pliant, and in processes that a rank starts (workers of a DataLoader), it gives an object that does nothing.
    Inside it may wait: a few seconds for the agent, and in a process that was started beside a world that still trains,
    until that world has ended. So import, read data and build the model before, and load the checkpoint after it.
    """
    global _job  # pylint: disable=global-statement
    with _lock:
        if _job is None:
            _job = _new_job()
        return _job


def _new_job() -> Job:
    world = read_world()
    path = os.environ.get("PLIANT_JOB_SOCKET")
    me = str(os.getpid())
    if not path or os.environ.get(_OWNER, me) != me:
        return Job(world)
    try:
        os.environ[_OWNER] = me
        job = Job(world, path)
        reference = weakref.ref(job)
        os.register_at_fork(after_in_child=lambda: _forked(reference))
        atexit.register(job._close)
        job._open(os.environ.get("PLIANT_JOB_HOLD") == "1")
        return job
    except (OSError, RuntimeError, ValueError) as error:  # no descriptors, no threads
        warn(f"no client: {error}; training goes on without changes of the world")
        return Job(world)


def _forked(reference: "weakref.ref[Job]") -> None:
    global _lock  # pylint: disable=global-statement
    _lock = threading.Lock()
    job = reference()
    if job is not None:
        job._after_fork()
