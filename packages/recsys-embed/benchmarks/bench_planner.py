"""Regret of the planner: the step time of its choice against the best of 12 sizes of the hot tier, on shaped links.

    python bench_planner.py --criteo criteo_8192.npz --json planner.json        (root)

A setting is ``rate:data:batch[:width]``: Mbit/s; ``criteo``, or what ``recsys-embed bench`` takes; samples per rank.
Per setting

1. links and processor are measured, the cost model chooses, and :func:`recsys_embed.race_tiers` chooses;
2. *sweep*: 12 sizes from none to all rows take a short turn each; those within twice the fastest, and both choices, go
   on in interleaved rounds. A turn is the median of a few steps, the slowest rank's. Sizes that are slower than the
   leader beyond the simultaneous 95 % intervals of paired ratios drop out;
3. *final*: the fastest of those that remain, both choices and none, five or so, are measured afresh, in interleaved
   rounds that chose nothing, until intervals separate the choices and none from all others or leave less than 1 %, at
   most ``--final-seconds``.

Regret comes from the final alone. It is cross-fitted: the best size is found in the even rounds and compared in the odd
ones and the other way around, because the best of several equals is the luckiest in the rounds that it was found in. In
brackets stands the simultaneous 95 % interval over comparisons with all finalists.

The default settings take about 10 minutes on two cores. Settings that ``--json`` already holds are not measured again,
so that the command can be stopped and repeated; ``--at-most 3`` stops after three.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from core_kernels.interconnect import Interconnect
from core_kernels.testing import ShapedHosts
from recsys_embed import SGD, AccessStats, Plan, TieredEmbeddingBagCollection, WorkCosts, plan_tiers
from recsys_embed.bench import BenchJob, bench_data, endless, measure_dense, own_steps
from recsys_embed.contest import Contest
from recsys_embed.models import make_model
from recsys_embed.race import race_tiers, take_turn

SETTINGS = (
    "1000:criteo:128,1000:criteo:512,1000:criteo:1024,1000:uniform:256,1000:movielens:512:16,100:criteo:128,"
    "100:criteo:256"
)
NUM_SIZES = 12
TURN_SECONDS, NEGLIGIBLE, MOST_FINALISTS = 0.5, 0.01, 4
HOPELESS = (2.0, 1.5, 1.3)  # times the leader, after one, two and three rounds


@dataclass(frozen=True)
class Limits:
    """Seconds that the parts of a setting may take."""

    race: float
    sweep: float
    final: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--criteo", metavar="FILE.npz", help="real samples")
    parser.add_argument("--race-seconds", type=float, default=22.0)
    parser.add_argument("--sweep-seconds", type=float, default=10.0)
    parser.add_argument("--final-seconds", type=float, default=20.0)
    parser.add_argument("--at-most", type=int, default=1000, help="settings to measure now")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    limits = Limits(args.race_seconds, args.sweep_seconds, args.final_seconds)
    rows = json.loads(args.json.read_text())["settings"] if args.json and args.json.exists() else []
    wanted = args.settings.split(",")
    missing = [s for s in wanted if s not in {row["setting"] for row in rows}][: args.at_most]
    for rate, group in itertools.groupby(missing, key=lambda s: float(s.split(":")[0])):
        with ShapedHosts([1] * 4, rate, timeout_seconds=120.0) as hosts:
            machine = hosts.run(measure_machine)[0]
            for setting in group:
                _, data, batch, width = (setting + ":64").split(":")[:4]
                name = f"criteo:{args.criteo}" if data == "criteo" else data
                job = BenchJob("ours", name, int(batch), int(width), zipf_rows=2000)
                found = hosts.run(setting_on_rank, job, *machine, limits, deadline_seconds=280.0)[0]
                rows.append({"setting": setting, **found, "machine": [m.to_dict() for m in machine]})
                print(json.dumps(rows[-1]), flush=True)
                save(args.json, rows, {})
    rows = sorted((r for r in rows if r["setting"] in wanted), key=lambda r: wanted.index(r["setting"]))
    show(rows)
    save(args.json, rows, summary_of(rows))


def save(path: Path | None, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps({"settings": rows, "summary": summary}, indent=1) + "\n")


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"settings": len(rows), "settings_with_no_tier_best": sum(r["none_is_best"] for r in rows)}
    for who in ("model", "race"):
        regrets = [r[who]["regret"][0] - 1 for r in rows]
        against = [r[who]["against_none"][0] - 1 for r in rows]
        found[who] = {
            "worst_regret": max(regrets),
            "median_regret": statistics.median(regrets),
            "worst_against_none": max(against),
            "best_against_none": min(against),
        }
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line per setting, and the summary."""
    for row in rows:
        print(f"{row['setting']}: best {row['best']}, {row['final_rounds']} final rounds of {row['finalists']}")
        for who in ("model", "race"):
            choice = row[who]
            print(
                f"  {who:<6}{choice['hot_rows']:>6} hot rows, regret {percent(choice['regret'])}, "
                f"against none {percent(choice['against_none'])}"
            )
    if rows:
        print(json.dumps(summary_of(rows), indent=1))


def percent(ratio: list[float]) -> str:
    mean, low, high = (100 * (value - 1) for value in ratio[:3])
    return f"{mean:+.1f} % [{low:+.1f}, {high:+.1f}]"


def measure_machine(group: Any) -> tuple[Interconnect, WorkCosts]:
    return Interconnect.measure(group, budget_seconds=10.0), WorkCosts.measure(group, SGD(0.05))


class Trainer:
    """Trains a model on this rank, in turns."""

    def __init__(self, group: Any, job: BenchJob):
        torch.manual_seed(0)
        self.job, self.data = job, bench_data(job)
        self.tables = self.data.tables(job.width)
        self.embeddings = TieredEmbeddingBagCollection(self.tables, None, SGD(0.05), group)
        self.model = make_model("dlrm", self.embeddings, self.data.dense.shape[1], job.hidden)
        self.stream = endless(self.data, job, group.rank, group.size)
        self.steps = 4

    def train(self) -> float:
        """Return the median seconds of a step, without the first (nothing was fetched) and the last (nothing is)."""
        batches = list(itertools.islice(self.stream, self.steps + 2))
        marks = own_steps(self.embeddings, self.model, self.job, batches)
        return statistics.median(stop[0] - start[0] for start, stop in itertools.pairwise(marks[1:-1]))


def setting_on_rank(group: Any, job: BenchJob, net: Interconnect, work: WorkCosts, limits: Limits) -> dict[str, Any]:
    trainer = Trainer(group, job)
    stats = AccessStats.from_batches(
        (b.features for b in trainer.data.batches(job.batch_size, seed=99)), trainer.tables
    )
    seconds, num_bytes = measure_dense(group, job)
    plan = plan_tiers(
        stats, net, trainer.tables, group.size, job.batch_size, SGD(0.05), dense_seconds=seconds,
        dense_bytes=num_bytes, work=work,
    )  # fmt: skip
    plan = group.broadcast_object(plan)
    none = Plan.without_tier(trainer.tables, group.size)
    take_turn(trainer.embeddings, none, trainer.train)  # loads code and opens connections
    step = take_turn(trainer.embeddings, none, trainer.train)[0]
    steps = max(4, min(12, round(TURN_SECONDS / step)))
    trainer.steps = steps
    raced = race_tiers(trainer.embeddings, stats, plan, trainer.train, max_seconds=limits.race)
    choices = {"model": plan, "race": raced.plan}

    plans: dict[int, Plan] = {}

    def turn(size: int) -> tuple[float, float]:
        if size not in plans:
            fixed = plan_tiers(stats, net, trainer.tables, group.size, job.batch_size, SGD(0.05), hot=size, pooled=[])
            plans[size] = group.broadcast_object(fixed)
        return take_turn(trainer.embeddings, plans[size], trainer.train)

    num_rows = sum(t.num_embeddings for t in trainer.tables)
    sizes = {0} | {round(50 * (num_rows / 50) ** (i / (NUM_SIZES - 2))) for i in range(NUM_SIZES - 1)}
    chosen = {p.num_hot_rows for p in choices.values()}
    begin = time.perf_counter()
    trainer.steps = 1
    glance = Contest()
    play(glance, turn, sorted(sizes))
    trainer.steps = steps
    swept = sweep(turn, near(glance, 0) | chosen | {0}, limits.sweep)
    middle = time.perf_counter()
    final = decide(turn, finalists_of(swept, chosen), chosen, limits.final)
    end = time.perf_counter()
    row: dict[str, Any] = {
        "best": final.fastest(final.medians()),
        "none_is_best": final.regret(0).low <= 1 and final.regret(0).mean < 1 + NEGLIGIBLE,
        "none_regret": as_list(final.regret(0)),
        "finalists": sorted(final.medians()),
        "final_rounds": len(final.rounds),
        "sweep_rounds": len(swept.rounds),
        "sweep_seconds": middle - begin,
        "final_seconds": end - middle,
        "dense_seconds": seconds,
        "race_seconds": raced.seconds,
        "race_rounds": raced.num_rounds,
        "race_ratios": {size: as_list(ratio) for size, ratio in raced.against_none.items()},
    }
    for who, choice in choices.items():
        size = choice.num_hot_rows
        ratios = {"regret": as_list(final.regret(size)), "against_none": as_list(final.ratio(size, 0))}
        row[who] = {"hot_rows": size, "reason": choice.reason, **ratios}
    row["turns"] = [{size: round(s, 5) for size, s in r.items()} for r in final.rounds]
    row["final"] = {size: round(s, 5) for size, s in final.medians().items()}
    row["sweep"] = {size: round(s, 5) for size, s in sorted((glance.medians() | swept.medians()).items())}
    row["predicted"] = {c.num_hot_rows: round(c.step_seconds, 5) for c in plan.candidates}
    row["chosen"] = asdict(plan.chosen) if plan.chosen else None
    return row


def as_list(ratio: Any) -> list[float]:
    return [round(value, 4) for value in (ratio.mean, ratio.low, ratio.high)]


def near(contest: Contest, comparisons: int) -> set[int]:
    """Return the ways that may be the fastest: not surely slower than the leader, or by a wide margin at first."""
    leader, number = contest.fastest(contest.rounds[-1]), len(contest.rounds)
    behind = {way: contest.ratio(way, leader, comparisons) for way in contest.rounds[-1]}
    return {w for w, r in behind.items() if (r.low <= 1 if number > len(HOPELESS) else r.mean <= HOPELESS[number - 1])}


def sweep(turn: Callable[[int], tuple[float, float]], sizes: set[int], max_seconds: float) -> Contest:
    """Let all sizes take turns; those surely slower than the leader drop out, none never does."""
    contest, alive, taken = Contest(), sizes, 0.0
    while len(contest.rounds) < 3 or (taken < max_seconds and len(contest.rounds) < 12):
        taken += play(contest, turn, sorted(alive))
        alive = near(contest, len(sizes) - 1) | {0}
    return contest


def finalists_of(swept: Contest, chosen: set[int]) -> list[int]:
    """Return none, the choices, and the fastest of the sizes that were there to the end."""
    last = sorted(swept.rounds[-1], key=lambda size: swept.ratio(size, 0).mean)
    fixed = {0} | chosen
    others = [size for size in last if size not in fixed]
    return sorted(fixed | set(others[: max(2, MOST_FINALISTS - len(fixed))]))


def decide(
    turn: Callable[[int], tuple[float, float]], finalists: list[int], chosen: set[int], max_seconds: float
) -> Contest:
    """Measure afresh until the choices are told apart from all other finalists, or time is up."""
    contest, taken, alive = Contest(), 0.0, set(finalists)
    while len(contest.rounds) < 6 or (taken < max_seconds and len(contest.rounds) < 40):
        taken += play(contest, turn, sorted(alive))
        if len(contest.rounds) < 6:
            continue
        alive = near(contest, len(alive) - 1) | chosen | {0}
        pairs = [contest.ratio(c, f, len(alive) - 1) for c in chosen | {0} for f in alive if c != f]
        if all(p.is_settled or p.high / p.low < 1 + 2 * NEGLIGIBLE for p in pairs):
            break
    return contest


def play(contest: Contest, turn: Callable[[int], tuple[float, float]], sizes: list[int]) -> float:
    """Add a round, every other one backwards; return what it took."""
    order = sizes if len(contest.rounds) % 2 == 0 else sizes[::-1]
    turns = {size: turn(size) for size in order}
    contest.add({size: step for size, (step, _) in turns.items()})
    return math.fsum(whole for _, whole in turns.values())


if __name__ == "__main__":
    begin = time.perf_counter()
    main()
    print(f"{time.perf_counter() - begin:.0f} seconds")
