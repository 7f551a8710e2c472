"""Client of Pliant in a training script: ``job = pliant.connect()``.

Outside Pliant ``connect()`` gives an object whose methods do nothing, so that a script needs no special case. Inside,
a daemon thread keeps a connection to the agent of the node; see ``docs/user/client.md`` for the contract.
"""

from ._job import Job, connect
from ._version import __version__
from ._world import World

__all__ = ["Job", "World", "connect", "__version__"]
