"""Frames."""

import json
import struct
import unittest

from pliant._wire import MAX_FRAME, Decoder, WireError, count, encode, hello, say


class Frames(unittest.TestCase):
    def test_the_messages_are_those_of_the_protocol(self):
        self.assertEqual(
            {k: v for k, v in hello(3, 2).items() if k != "software"},
            {"type": "hello", "version": 1, "role": "client", "rank": 3, "generation": 2},
        )
        frame = encode(say("vote", boundary=12, accept=True, passed=9))
        self.assertEqual(frame[4:], b'{"type":"client","say":"vote","boundary":12,"accept":true,"passed":9}')
        self.assertEqual(struct.unpack(">I", frame[:4])[0], len(frame) - 4)

    def test_cutting_does_not_matter(self):
        messages = [{"a": 1}, {}, {"text": "é" * 100}]
        data = b"".join(encode(message) for message in messages)
        for cut in (1, 2, 3, 5, 1000):
            decoder, out = Decoder(), []
            for start in range(0, len(data), cut):
                out += decoder.feed(data[start : start + cut])
            self.assertEqual(out, messages)

    def test_what_is_no_frame_is_an_error(self):
        for head in (0, MAX_FRAME + 1, 0xFFFFFFFF):
            with self.assertRaises(WireError):
                Decoder().feed(struct.pack(">I", head))
        for payload in (b"[1]", b"nonsense", b"\xff", b"[" * 100_000, json.dumps(5).encode()):
            with self.assertRaises(WireError):
                Decoder().feed(struct.pack(">I", len(payload)) + payload)

    def test_counts(self):
        self.assertEqual([count(v) for v in (0, 7, -1, True, "7", 1.0, None)], [0, 7, None, None, None, None, None])


if __name__ == "__main__":
    unittest.main()
