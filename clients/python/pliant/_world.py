"""The world that this process was started for, out of its environment."""

import os
from typing import Mapping, NamedTuple, Optional


class World(NamedTuple):
    """Ranks that train together. A process belongs to one world only: a change of the world starts new processes."""

    #: Number of this process among all, from 0.
    rank: int
    #: Processes in all.
    size: int
    #: Number of this process among those of its step, which is the ordinal of its GPU there.
    local_rank: int
    #: Processes of this step.
    local_size: int
    #: Number of the world, from 1; 0 outside Pliant.
    generation: int
    #: Address of the host of rank 0.
    master_addr: str
    #: Port for the rendezvous there; 0 when the environment names none.
    master_port: int


def read_world(env: Optional[Mapping[str, str]] = None) -> World:
    """Reads RANK, WORLD_SIZE, ...; what is missing or no number counts as a world of one process."""
    env = os.environ if env is None else env

    def number(name: str, default: int, least: int = 0) -> int:
        try:
            return max(int(env[name]), least)
        except (KeyError, ValueError):
            return default

    return World(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1, 1),
        local_rank=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1, 1),
        generation=number("PLIANT_JOB_GENERATION", 0),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT", 0),
    )
