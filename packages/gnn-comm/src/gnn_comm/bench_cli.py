"""The sub-command ``gnn-comm bench``: exchanges or training epochs on shaped hosts."""

from __future__ import annotations

import argparse
from math import inf
from typing import Any

from core_kernels.console import CommandLine, format_bytes, format_seconds, say, table
from gnn_comm.bench import PAPER_SAVING, bench_hosts
from gnn_comm.errors import GnnCommArgumentError
from gnn_comm.layers import MODELS
from gnn_comm.partitioning import METHODS
from gnn_comm.planner import PLANNERS

__all__ = ["add_bench", "read_hosts", "read_numbers"]

_BENCH_PAYLOADS = "1,4"


def add_bench(cli: CommandLine) -> None:
    """Add the sub-command to a command line."""
    parser = cli.command(
        "bench",
        _bench,
        "measure plans on shaped hosts (Linux, root)",
        "gnn-comm bench --hosts 2x2 --rates 2000,200 --json\n"
        "gnn-comm bench --hosts 2x2,2x4,4x1 --rates 800,80 --payloads 1,2\n"
        "gnn-comm bench --hosts 2x2 --rates 1000,100 --epoch gcn --dataset rmat:13 --method random",
    )
    parser.add_argument(
        "--hosts", default="2x2", help="hosts x ranks, or ranks per host as 2+4; several by comma (default %(default)s)"
    )
    parser.add_argument("--rates", default="2000,200", help="Mbit/s inside a host, between hosts (default %(default)s)")
    parser.add_argument("--payloads", default=_BENCH_PAYLOADS, help="MiB of own rows per rank (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="float32 values per row (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed exchanges per scheme (default %(default)s)")
    parser.add_argument("--planner", choices=PLANNERS[:-1], default="auto", help="planner (default %(default)s)")
    parser.add_argument("--epoch", choices=MODELS, help="time epochs of this model instead of exchanges")
    parser.add_argument("--dataset", default="rmat:11", help="graph of --epoch (default %(default)s)")
    parser.add_argument(
        "--method", choices=METHODS[:-1], default="hierarchical", help="partition of --epoch (default %(default)s)"
    )


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    local, link = read_numbers("rates", args.rates, 2)
    machines = [read_hosts(text) for text in args.hosts.split(",")]
    for name in ("width", "repeats"):
        if getattr(args, name) < 1:
            raise GnnCommArgumentError(f"--{name} {getattr(args, name)}: expected at least 1; raise it")
    if args.epoch and len(machines) > 1:
        raise GnnCommArgumentError(f"--hosts {args.hosts}: --epoch expects one machine, not {len(machines)}; name one")
    if args.epoch:
        return _bench_epoch(args, machines[0], local, link)
    payloads = [int(size * 2**20) for size in read_numbers("payloads", args.payloads)]
    runs = []
    for hosts in machines:
        runs.append(bench_hosts(hosts, local, link, payloads, args.width, args.repeats, args.planner))
        _show_bench(runs[-1])
    savings = {
        key: sum(run[key] for run in runs) / len(runs)
        for key in ("average_saving", "average_saving_model", "average_saving_limit")
    }
    say(
        f"average saving {savings['average_saving']:.1%} of the time of straight messages (model "
        f"{savings['average_saving_model']:.1%}; no plan can save more than {savings['average_saving_limit']:.1%}; "
        f"the paper's average over its machines is {PAPER_SAVING:.1%})"
    )
    savings["paper_saving"] = PAPER_SAVING
    return runs[0] | savings if len(runs) == 1 else {"machines": runs, **savings}


def _show_bench(found: dict[str, Any]) -> None:
    rows = []
    for result in found["results"]:
        for direction in ("forward", "backward"):
            entry = result[direction]
            ratio = f"{entry['ratio_measured']:.2f} ({entry['ratio_model']:.2f})"
            spent = entry["slow_link_bytes"] / max(entry["slow_link_bytes_minimum"], 1)
            pairs = [(entry[f"{name}_seconds"], entry[f"{name}_predicted_seconds"]) for name in ("p2p", "planned")]
            seconds = [f"{format_seconds(got)} ({format_seconds(model)})" for got, model in pairs]
            seconds.append(format_seconds(entry["all_to_all_seconds"]))
            rows.append((f"{format_bytes(result['payload_bytes'])} {direction}", *seconds, ratio, f"{spent:.3f}"))
    columns = (
        "payload per rank",
        "p2p (model)",
        "planned (model)",
        "all_to_all",
        "p2p / planned (model)",
        "slow bytes / minimum",
    )
    measured, hosts = found["measured"], "+".join(map(str, found["hosts"]))
    table(f"hosts {hosts}, {found['local_rate_mbit']:g} and {found['link_rate_mbit']:g} Mbit/s", columns, rows)
    rates = [f"{8e-6 * measured[f'{kind}_bytes_per_second']:.0f}" for kind in ("local", "link")]
    latencies = [format_seconds(measured[f"{kind}_latency_seconds"]) for kind in ("local", "link")]
    say(
        f"measured with every rank at work: {' and '.join(rates)} Mbit/s of payload, {' and '.join(latencies)} "
        f"per stage; planner {found['results'][0]['planner']}"
    )


def _bench_epoch(args: argparse.Namespace, hosts: list[int], local: float, link: float) -> dict[str, Any]:
    from gnn_comm.epoch_bench import bench_epochs

    found = bench_epochs(hosts, local, link, args.dataset, args.epoch, turns=args.repeats, method=args.method)
    names = ("p2p_epoch_seconds", "planned_epoch_seconds", "speedup", "communication_share")
    rows = [(name, f"{found[name]:.3f}") for name in names]
    table(f"{args.epoch} on {args.dataset}, hosts {args.hosts}, {local:g} and {link:g} Mbit/s", ("", "value"), rows)
    return found


def read_hosts(text: str) -> list[int]:
    """Read ``2x4`` (hosts x ranks) or ``2+4`` (ranks of each host).

    >>> read_hosts("2x4"), read_hosts("2+4")
    ([4, 4], [2, 4])
    """
    try:
        if "x" in text:
            count, ranks = (int(part) for part in text.split("x"))
            hosts = [ranks] * count
        else:
            hosts = [int(part) for part in text.split("+")]
    except ValueError:
        hosts = []
    if not hosts or min(hosts) < 1:
        raise GnnCommArgumentError(
            f"hosts={text!r}: expected such as 2x4 or 2+4, at least 1 rank on each; pass hosts and ranks"
        )
    return hosts


def read_numbers(option: str, text: str, count: int | None = None) -> list[float]:
    """Read positive numbers separated by commas.

    >>> read_numbers("rates", "2000,200", 2)
    [2000.0, 200.0]
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < inf for number in numbers) or len(numbers) != (count or len(numbers)):
        wanted = "positive numbers" if count is None else f"{count} positive numbers"
        raise GnnCommArgumentError(f"{option}={text!r}: expected {wanted} separated by commas; pass such as 200,20")
    return numbers
