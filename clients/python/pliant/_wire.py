"""Frames (a length of four bytes, big endian, and a JSON object) and the messages of a training process.

The contract is ``sidecar/protocol/src/{codec,local}.rs``.
"""

import json
import struct
from typing import Any, Dict, List, Optional

from ._version import PROTOCOL, __version__

#: The largest payload, in bytes.
MAX_FRAME = 1 << 20

Message = Dict[str, Any]


class WireError(Exception):
    """The stream is of no use any more."""


def encode(message: Message) -> bytes:
    """One message as a frame."""
    payload = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return struct.pack(">I", len(payload)) + payload


class Decoder:
    """Cuts a stream of bytes into messages; holds at most one frame and what was fed last."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> List[Message]:
        """Takes bytes as they came; gives the messages that are whole now."""
        self._buffer += data
        out: List[Message] = []
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from(">I", self._buffer)
            if not 1 <= size <= MAX_FRAME:
                raise WireError(f"a frame of {size} bytes; 1 to {MAX_FRAME} are allowed")
            if len(self._buffer) < 4 + size:
                break
            payload = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            try:
                message = json.loads(payload)
            except (ValueError, RecursionError) as error:
                raise WireError(f"not a valid message: {error}") from None
            if not isinstance(message, dict):
                raise WireError("not a valid message: no JSON object")
            out.append(message)
        return out


def hello(rank: int, generation: int) -> Message:
    """The first message of a connection."""
    return {
        "type": "hello",
        "version": PROTOCOL,
        "software": f"{__version__} (python)",
        "role": "client",
        "rank": rank,
        "generation": generation,
    }


def say(word: str, **fields: Any) -> Message:
    """A message to the supervisor."""
    return {"type": "client", "say": word, **fields}


def count(value: Any) -> Optional[int]:
    """A boundary as it came; ``None``: it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
