"""Version of this package, and of the messages that it speaks."""

__version__ = "0.1.0"

#: Must equal ``VERSION`` in ``sidecar/protocol``.
PROTOCOL = 1
