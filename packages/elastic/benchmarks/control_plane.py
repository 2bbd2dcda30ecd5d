"""The control plane of a job of 256 workers, emulated in one process: how long until a change is agreed.

Every worker has a real agent over one store; only the connections are left out. Agents take turns in one thread, the
worst case for the time of a round. A change is agreed when the record of the new generation says that all its members
run it; it counts from the moment the newcomers are ready, or the leaver asks.

    python benchmarks/control_plane.py          # 20 seconds
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from elastic_train.agent import Agent
from elastic_train.coordinator import Limits
from elastic_train.events import EventLog
from elastic_train.group import Links
from elastic_train.stores import MemoryStore, SignedStore, Store


def connect_nothing(generation: Any, worker: str, *_: Any) -> Links:
    """Return links without connections."""
    return Links(generation.number, generation.members, generation.members.index(worker), None)


class Emulation:
    """Agents that take turns; their training threads switch when all are offered the same generation."""

    def __init__(self, store: Store, min_workers: int):
        self._store, self._min_workers = store, min_workers
        self.agents: dict[str, Agent] = {}

    def add(self, count: int) -> None:
        """Make newcomers ready."""
        for _ in range(count):
            name = f"w{len(self.agents):03d}"
            limits = Limits(self._min_workers, 1024)
            agent = Agent(self._store, "job", name, limits, EventLog(None, name), lease_seconds=30.0)
            agent.connect = connect_nothing
            agent.publish_ready()
            self.agents[name] = agent

    def run_until(self, size: int) -> float:
        """Let agents take turns until a generation of this size is agreed; returns the seconds."""
        begin, gone = time.perf_counter(), set()
        while True:
            for agent in self.agents.values():
                agent.turn()
            newest = next(iter(self.agents.values())).newest
            if newest is not None and newest.status == "commit" and len(newest.members) == size:
                break
            if newest is None:
                continue
            offers = {name: agent.offered()[0] for name, agent in self.agents.items()}
            involved = [name for name, agent in self.agents.items() if agent.is_running or name in newest.members]
            if all(offers[name] == newest.number for name in involved):
                for name in involved:  # the vote
                    if self.agents[name].take() is None:
                        self.agents[name].close()
                        gone.add(name)
                    else:
                        self.agents[name].report_running(newest.number)
                self.agents = {name: agent for name, agent in self.agents.items() if name not in gone}
        return time.perf_counter() - begin


def measure(num_workers: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of joins, of leaves and of the first generation."""
    emulation = Emulation(SignedStore(MemoryStore(), "secret"), num_workers - 8)
    emulation.add(num_workers - 8)
    start = emulation.run_until(num_workers - 8)
    joins, leaves, size = [], [], num_workers - 8
    for _ in range(repeats):
        emulation.add(8)
        size += 8
        joins.append(emulation.run_until(size))
        for agent in list(emulation.agents.values())[-8:]:
            agent.ask_to_leave()
        size -= 8
        leaves.append(emulation.run_until(size))
    return {
        "workers": num_workers, "start_seconds": start, "join_seconds": median(joins), "leave_seconds": median(leaves),
        "longest_seconds": max(joins + leaves),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    result = measure(args.workers, args.repeats)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
