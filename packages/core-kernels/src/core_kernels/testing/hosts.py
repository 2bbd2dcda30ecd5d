"""Several hosts joined by slow links, on one machine: ranks in network namespaces behind rate-limited interfaces.

Every host is a network namespace whose uplink to a switch (one more namespace) is shaped in both directions, so all
ranks of a host share that uplink as they would share a network card. With ``local_rate_mbit`` each rank gets a
namespace of its own behind a bridge in its host, with a shaped link too; without it the ranks of a host talk over its
loopback interface at full speed. Gloo then really sends over these links, and the kernel counts the bytes.

Needs Linux, root, and the ``ip`` and ``tc`` commands (Debian and Ubuntu: ``apt-get install iproute2``); ask
:func:`skip_reason` first. Namespaces are removed on exit; those of a crashed process are removed by the next use.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from core_kernels._ranks import RankSet, RankSettings
from core_kernels.errors import CoreKernelsError, argument_error

__all__ = ["HostsError", "ShapedHosts", "skip_reason"]

_NAMESPACES = Path("/var/run/netns")
_serial = itertools.count()


class HostsError(CoreKernelsError, RuntimeError):
    """The kernel refused a namespace or a link, or shaped hosts cannot run here."""


class ShapedHosts:
    """Hosts with some ranks each, joined by links of a chosen rate.

    Args:
        hosts: Number of ranks on each host, for example ``[2, 4]``.
        link_rate_mbit: Rate of each host's uplink, megabit per second, each direction.
        local_rate_mbit: Rate of each rank's own link inside its host; ``None`` leaves local traffic unshaped.
        threads: Threads of each rank.
        timeout_seconds: Longest wait for one collective.
        faults: Faults to inject, see :class:`~core_kernels.testing.FaultPlan`.

    Attributes:
        host_of_rank: Host of each rank; ranks are numbered host by host.

    A TCP payload reaches about 0.95 of a link's rate (headers). Keep the sum of local rates below what the machine's
    cores can move, some 2,000 Mbit/s for two of them, or the cores become the link.

    Raises:
        HostsError: Shaped hosts cannot run here; the message is :func:`skip_reason`.

    ::

        with ShapedHosts([2, 2], link_rate_mbit=100) as hosts:
            results = hosts.run(exchange)          # exchange(group), defined at the top of a module
            print(hosts.link_bytes())              # per host: sent and received over its uplink
    """

    def __init__(
        self,
        hosts: Sequence[int],
        link_rate_mbit: float,
        local_rate_mbit: float | None = None,
        threads: int = 1,
        timeout_seconds: float = 60.0,
        faults: Any = None,
    ):
        hosts = [int(num_ranks) for num_ranks in hosts]
        if not hosts or min(hosts) < 1 or sum(hosts) > 250:
            raise argument_error("hosts", hosts, "1 to 250 ranks, at least 1 on each host", "list ranks per host")
        for name, rate in (("link_rate_mbit", link_rate_mbit), ("local_rate_mbit", local_rate_mbit)):
            if rate is not None and not rate > 0:
                raise argument_error(name, rate, "a positive rate", "pass megabit per second, such as 100")
        reason = skip_reason()
        if reason:
            raise HostsError(reason)
        sweep_stale_namespaces()
        self.host_of_rank = [host for host, num_ranks in enumerate(hosts) for _ in range(num_ranks)]
        self.link_rate_mbit, self.local_rate_mbit = link_rate_mbit, local_rate_mbit
        self._prefix = f"{_process_prefix(os.getpid())}{next(_serial)}-"
        self._cleanup = weakref.finalize(self, _delete_namespaces, self._prefix)
        self._ranks: RankSet | None = None
        try:
            namespaces = self._build(len(hosts))
        except BaseException:
            self.close()
            raise
        self._settings = RankSettings(
            sum(hosts),
            threads,
            timeout_seconds,
            env={"GLOO_SOCKET_IFNAME": "eth0"},
            faults=faults,
            namespaces=namespaces,
            hosts=[f"{self._prefix}host{host}" for host in self.host_of_rank],
        )

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return len(self.host_of_rank)

    def run(self, fn: Callable[..., Any], *args: Any, deadline_seconds: float | None = None) -> list[Any]:
        """Run ``fn(group, *args)`` on every rank; see :func:`core_kernels.launch.run_ranks`.

        The ranks stay up for the next run.
        """
        if self._ranks is None or not self._ranks.is_usable:
            self._ranks = RankSet(self._settings)
        return self._ranks.run(fn, args, deadline_seconds)

    def link_bytes(self) -> list[dict[str, int]]:
        """Return what the kernel counted on each host's uplink since it was made, frame headers included.

        Returns:
            Per host ``{"sent_bytes": ..., "received_bytes": ...}``.
        """
        uplink = "eth0" if self.local_rate_mbit is None else "uplink"
        counts = []
        for host in range(max(self.host_of_rank) + 1):
            answer = _command(f"ip -n {self._prefix}host{host} -s -j link show dev {uplink}")
            stats = json.loads(answer)[0]["stats64"]
            counts.append({"sent_bytes": stats["tx"]["bytes"], "received_bytes": stats["rx"]["bytes"]})
        return counts

    def close(self) -> None:
        """End the ranks and remove all namespaces."""
        if self._ranks is not None and self._ranks.is_usable:
            self._ranks.kill()
        self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _build(self, num_hosts: int) -> list[str]:
        """Make namespaces and links; return the namespace of every rank."""
        switch = self._add_namespace("switch")
        _add_bridge(switch)
        hosts = [self._add_namespace(f"host{host}") for host in range(num_hosts)]
        local_rate_mbit = self.local_rate_mbit
        per_rank = local_rate_mbit is not None
        for number, host in enumerate(hosts):
            inside = "uplink" if per_rank else "eth0"
            _add_link(host, inside, switch, f"host{number}", self.link_rate_mbit)
            _command(f"ip -n {switch} link set host{number} master bridge")
            if per_rank:
                _add_bridge(host)
                _command(f"ip -n {host} link set uplink master bridge")
            else:
                _set_address(host, number)
        if local_rate_mbit is None:
            return [hosts[host] for host in self.host_of_rank]
        namespaces = []
        for rank, host in enumerate(self.host_of_rank):
            namespaces.append(self._add_namespace(f"rank{rank}"))
            _add_link(namespaces[rank], "eth0", hosts[host], f"rank{rank}", local_rate_mbit)
            _command(f"ip -n {hosts[host]} link set rank{rank} master bridge")
            _set_address(namespaces[rank], rank)
        return namespaces

    def _add_namespace(self, part: str) -> str:
        name = self._prefix + part
        _command(f"ip netns add {name}")
        _command(f"ip -n {name} link set lo up")
        return name


@functools.cache
def skip_reason() -> str | None:
    """Say why shaped hosts cannot run here, ``None`` when they can.

    Tries one shaped link the first time, for kernels and containers that refuse.
    """
    if sys.platform != "linux":
        return f"shaped hosts need Linux network namespaces; this is {sys.platform}"
    if os.geteuid() != 0:
        return "shaped hosts need root to make network namespaces; run as root"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"shaped hosts need the command {' and '.join(missing)}; install iproute2"
    prefix = f"{_process_prefix(os.getpid())}probe-"
    try:
        for end in "ab":
            _command(f"ip netns add {prefix}{end}")
        _add_link(f"{prefix}a", "eth0", f"{prefix}b", "eth0", 100.0)
        _add_bridge(f"{prefix}a")
    except HostsError as error:
        return f"this kernel or container refuses network namespaces with shaped links: {error}"
    finally:
        _delete_namespaces(prefix)
    return None


def sweep_stale_namespaces() -> list[str]:
    """Remove namespaces left by processes that are gone, and return their names."""
    stale = []
    for path in _NAMESPACES.glob("sextet-*-*-*") if _NAMESPACES.is_dir() else ():
        pid = path.name.split("-")[1]
        if pid.isdigit() and not path.name.startswith(_process_prefix(int(pid)) or "\0"):
            stale.append(path.name)
            _delete_namespaces(path.name)
    return stale


def burst_bytes(rate_mbit: float) -> int:
    """Return the bucket of a token-bucket filter for a rate.

    It holds what the link carries between two ticks of a 250 Hz kernel, and at least one 64 KiB offloaded packet;
    anything larger would let small payloads pass unshaped.

    >>> burst_bytes(100), burst_bytes(1000)
    (68608, 500000)
    """
    return max(int(rate_mbit * 1e6 / 8 / 250), 67 * 1024)


def queue_bytes(rate_mbit: float) -> int:
    """Return the room for packets that wait for a link: 50 ms of it, and at least 8 MiB.

    Shorter queues overflow when many ranks send at once over a slow link, and what is sent again would be counted as
    traffic; the networks of clusters hold senders back instead of losing packets.

    >>> queue_bytes(100), queue_bytes(10000)
    (8388608, 62500000)
    """
    return max(int(rate_mbit * 1e6 / 8 / 20), 8 << 20)


def _process_prefix(pid: int) -> str:
    """Return how names of a live process begin, or nothing; the start time tells reuse of a pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"sextet-{pid}-{fields[19]}-"


def _add_bridge(namespace: str) -> None:
    _command(f"ip -n {namespace} link add bridge type bridge")
    _command(f"ip -n {namespace} link set bridge up")


def _add_link(namespace: str, name: str, peer_namespace: str, peer_name: str, rate_mbit: float) -> None:
    _command(f"ip -n {namespace} link add {name} type veth peer name {peer_name} netns {peer_namespace}")
    for where, interface in ((namespace, name), (peer_namespace, peer_name)):
        shape = f"rate {round(rate_mbit * 1e6)}bit burst {burst_bytes(rate_mbit)} limit {queue_bytes(rate_mbit)}"
        _command(f"tc -n {where} qdisc add dev {interface} root tbf {shape}")
        _command(f"ip -n {where} link set {interface} up")


def _set_address(namespace: str, number: int) -> None:
    _command(f"ip -n {namespace} addr add 10.86.0.{number + 1}/24 dev eth0")


def _delete_namespaces(prefix: str) -> None:
    if _NAMESPACES.is_dir():
        for path in list(_NAMESPACES.glob(f"{prefix}*")):
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def _command(line: str) -> str:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsError(f"`{line}` failed: {done.stderr.strip()}; see whether the kernel has veth, bridge and sch_tbf")
    return done.stdout
