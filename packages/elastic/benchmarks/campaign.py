"""Kill, pause or cut off workers over and over, and check each job against one that nothing happens to.

Every trial is a job of its own: three workers, one of which is struck. ``kill`` strikes inside an all-reduce: a worker
arms a helper process at the start of one, which kills it with SIGKILL after a random part of an all-reduce's time, half
of the time the leader. ``leader`` does so with leaders only. ``pause`` stops a worker (SIGSTOP), of which the lease
must run out. ``partition`` puts workers into network namespaces of their own, with the store in another, and takes
one's link down (needs root and ``ip``). Afterwards survivors must hold the same weights, those of a run of one worker;
every sample must have counted once; and generations must form one line.

    python benchmarks/campaign.py kill 200         # about two minutes on two quiet cores, a leader's hundred one
    python benchmarks/campaign.py leader 100
    python benchmarks/campaign.py pause 20
    python benchmarks/campaign.py partition 10
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import forked

import elastic_train
from elastic_train.events import read_events
from elastic_train.launchers.signals import ending_on_sigterm
from elastic_train.stores import StoreServer

LEASE_SECONDS = 1.0
_serial = itertools.count()


class Assassin:
    """A helper process that kills its parent a moment after it is told to."""

    def __init__(self) -> None:
        target, (reader, self._writer) = os.getpid(), os.pipe()
        if os.fork() == 0:
            os.close(self._writer)  # so that the read ends when the parent does
            order = os.read(reader, 64)
            if order:
                end = time.perf_counter() + float(order)
                while time.perf_counter() < end:
                    pass
                os.kill(target, signal.SIGKILL)
            os._exit(0)

    def strike_after(self, seconds: float) -> None:
        """Kill this process so many seconds from now."""
        os.write(self._writer, repr(seconds).encode())


def die_in_all_reduce(folder: Path, worker: str, step: int, share: float, only: str) -> Any:
    """Return a function that makes a worker die inside the all-reduce of a step, if the role is its own."""

    def prepare(job: elastic_train.Job) -> None:
        assassin, gradients, durations = Assassin(), job.gradients, []
        assert gradients is not None
        start, finish = gradients._start, gradients.finish
        begun = [0.0]

        def timed_start(bucket: Any) -> None:
            is_mine = only == worker or (only == "leader" and job.agent.is_leader)
            if job.step >= step and is_mine and not (folder / "struck").exists():
                (folder / "struck").write_text(json.dumps({"worker": worker, "at": time.time()}))
                assassin.strike_after(share * forked.quantile(durations, 0.5))
            begun[0] = time.perf_counter()
            start(bucket)

        def timed_finish() -> None:
            finish()
            durations.append(time.perf_counter() - begun[0])

        gradients._start, gradients.finish = timed_start, timed_finish

    return prepare


def try_kill(rng: random.Random, folder: Path, kind: str, trial: int, stack: contextlib.ExitStack) -> list[int]:
    """Start a job one of whose workers kills itself; returns process ids."""
    only = "leader" if kind == "leader" or trial % 2 else rng.choice(["w0", "w1", "w2"])
    step, share, pids = rng.randint(4, 40), rng.uniform(0, 1), []
    for worker in ("w0", "w1", "w2"):
        prepare = die_in_all_reduce(folder, worker, step, share, only)
        settings = forked.Settings(3, width=4096, prepare=prepare, lease_seconds=5 * LEASE_SECONDS)
        pids.append(forked.fork(folder, worker, settings))
        stack.callback(end, pids[-1])
    return pids


def try_pause(rng: random.Random, folder: Path, kind: str, trial: int, stack: contextlib.ExitStack) -> list[int]:
    """Start a job and stop one of its workers."""
    settings = forked.Settings(3, 0.004, lease_seconds=LEASE_SECONDS)
    pids = {f"w{i}": forked.fork(folder, f"w{i}", settings) for i in range(3)}
    for pid in pids.values():
        stack.callback(end, pid)
    forked.wait_for_event(folder, "commit")
    time.sleep(rng.uniform(0, 0.15))
    leader = next(e["worker"] for e in read_events(folder / "events.jsonl") if e["event"] == "leader")
    victim = leader if trial % 2 else rng.choice([w for w in pids if w != leader])
    (folder / "struck").write_text(json.dumps({"worker": victim, "at": time.time()}))
    os.kill(pids[victim], signal.SIGSTOP)
    return list(pids.values())


def try_partition(rng: random.Random, folder: Path, kind: str, trial: int, stack: contextlib.ExitStack) -> list[int]:
    """Start a job over network namespaces and take one worker's link down."""
    network = Namespaces(3)
    stack.callback(network.close)
    server = StoreServer("secret", network.gateway)
    stack.callback(server.close)
    pids = {}
    for index in range(3):
        settings = forked.Settings(
            3,
            0.004,
            store=server.address,
            interface=network.addresses[index],
            token="secret",
            lease_seconds=LEASE_SECONDS,
        )
        pid = os.fork()
        if pid == 0:
            network.enter(index)
            pid = forked.fork(folder, f"w{index}", settings)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        pids[f"w{index}"] = pid
        stack.callback(end, pid)
    forked.wait_for_event(folder, "commit")
    time.sleep(rng.uniform(0, 0.15))
    leader = next(e["worker"] for e in read_events(folder / "events.jsonl") if e["event"] == "leader")
    victim = leader if trial % 2 else rng.choice([w for w in pids if w != leader])
    (folder / "struck").write_text(json.dumps({"worker": victim, "at": time.time()}))
    network.cut(int(victim[1:]))
    return list(pids.values())


def end(pid: int) -> None:
    """Kill a worker that still runs, because the trial was cut short."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Namespaces:
    """Hosts that are network namespaces, each with a link to this one."""

    def __init__(self, count: int):
        serial = f"{os.getpid() % 10000}n{next(_serial)}"
        self._names = [f"elastic{serial}x{i}" for i in range(count)]
        bridge = f"e{serial}"
        self._bridge, self.gateway = bridge, "10.231.0.1"
        self.addresses = [f"10.231.0.{i + 2}" for i in range(count)]
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {self.gateway}/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for index, name in enumerate(self._names):
            _ip(f"netns add {name}")
            _ip(f"link add v{index}{bridge} type veth peer name eth0 netns {name}")
            _ip(f"link set v{index}{bridge} master {bridge}")
            _ip(f"link set v{index}{bridge} up")
            _ip(f"-n {name} addr add {self.addresses[index]}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")

    def enter(self, index: int) -> None:
        """Move this process into a namespace; its host name becomes the namespace's."""
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self._names[index]}") as file:
            if libc.setns(file.fileno(), 0x40000000) or libc.unshare(0x04000000):
                raise OSError(ctypes.get_errno(), "cannot enter the namespace")
        name = self._names[index].encode()
        libc.sethostname(name, len(name))

    def cut(self, index: int) -> None:
        """Take the link of a host down."""
        _ip(f"link set v{index}{self._bridge} down")

    def close(self) -> None:
        """Remove the namespaces and the bridge."""
        for name in self._names:
            _ip(f"netns del {name}")
        _ip(f"link del {self._bridge}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def recovery_seconds(folder: Path, struck: dict[str, Any]) -> float | None:
    """Return the time from the strike to the first step that the survivors committed after they noticed."""
    failed = [
        e["t"]
        for e in read_events(folder / "events.jsonl")
        if e["event"] == "failed" and e["worker"] != struck["worker"]
    ]
    commits = [line["at"] for w, lines in forked.read(folder)[0].items() if w != struck["worker"] for line in lines]
    after = [at for at in commits if failed and at > max(failed)]
    return min(after) - struck["at"] if after else None


def run(kind: str, num_trials: int, seed: int, limit_seconds: float) -> dict[str, Any]:
    """Run the trials; returns what went wrong and how long recovery took."""
    rng, begun = random.Random(seed), time.monotonic()
    start = {"pause": try_pause, "partition": try_partition}.get(kind, try_kill)
    width = 4096 if start is try_kill else 64
    with tempfile.TemporaryDirectory() as name:
        os.waitpid(forked.fork(Path(name), "w0", forked.Settings(width=width)), 0)
        reference = forked.read(Path(name))[1]["w0"]
    wrong, seconds, leaders, num_done, num_missed = [], [], 0, 0, 0
    for trial in range(num_trials):
        if time.monotonic() - begun > limit_seconds:
            break
        num_done += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with contextlib.ExitStack() as stack:
                for pid in start(rng, folder, kind, trial, stack):
                    os.waitpid(pid, 0)
            if not (folder / "struck").exists() or len(forked.read(folder)[1]) == 3:
                num_missed += 1  # it had just ended
                continue
            struck = json.loads((folder / "struck").read_text())
            events = read_events(folder / "events.jsonl")
            leaders += struck["worker"] == next(e["worker"] for e in events if e["event"] == "leader")
            wrong += [
                f"trial {trial} ({struck['worker']}): {text}" for text in forked.check(folder, reference, 2, True)
            ]
            found = recovery_seconds(folder, struck)
            seconds += [] if found is None else [found]
    return {
        "kind": kind, "trials": num_done, "leaders_struck": leaders, "ended_before": num_missed, "wrong": wrong,
        "recoveries": len(seconds), "median_seconds": forked.quantile(seconds, 0.5),
        "p95_seconds": forked.quantile(seconds, 0.95), "max_seconds": forked.quantile(seconds, 1.0),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["kill", "leader", "pause", "partition"])
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=3600, help="start no trial after this long")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    forked.warm_up()
    with ending_on_sigterm():
        result = run(args.kind, args.trials, args.seed, args.limit_seconds)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
