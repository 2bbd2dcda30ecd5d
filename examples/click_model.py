"""recsys-embed: count how skewed real ratings are, plan a hot tier, train a click model on two ranks, prove it exact.

python examples/click_model.py
python examples/click_model.py --dataset criteo:train.txt --ranks 4
"""

from __future__ import annotations

import numpy as np
from chapter import Chapter, finish, new_figure, parser

from core_kernels import launch
from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from recsys_embed import AccessStats, RowWiseAdagrad, plan_tiers
from recsys_embed.training import TrainJob, load_clicks, train_on_rank
from recsys_embed.verify import Case, compare, reference_tables, run_case

NETWORKS = ("ethernet-100mbit", "h100-8x8-ib")


def run(dataset: str = "movielens", epochs: int = 1, ranks: int = 2) -> Chapter:
    """Count, plan for several networks, train, and compare tiers with one process."""
    data = load_clicks(dataset)
    tables = data.tables(16)
    stats = AccessStats.from_batches((batch.features for batch in data.batches(512, seed=0)), tables)
    plans = {
        name: plan_tiers(stats, Interconnect.preset(name), tables, 4, 512, RowWiseAdagrad(), dense_seconds=0.005)
        for name in NETWORKS
    }
    job = TrainJob(dataset, epochs=epochs)
    trained = launch.run_ranks(train_on_rank, ranks, job, timeout_seconds=120.0)[0]

    batches = [batch.features for _, batch in zip(range(3), data.batches(512, seed=0), strict=False)]
    expected = reference_tables(tables, batches, Case(0, False, "adam"))
    cases = [Case(hot, True, "adam") for hot in (0, 100, 3000)]
    equal = [compare(run_case(Group.single(), tables, batches, case), expected).is_bitwise_equal for case in cases]

    figure, axes = new_figure()
    for table in tables[:3]:
        counts = np.sort(stats.counts(table.name))[::-1]
        axes.loglog(np.arange(1, len(counts) + 1), np.maximum(counts, 0.5), label=table.name)
    axes.set(xlabel="rank of the row", ylabel="accesses")
    axes.legend()
    rows = [
        ("ids of a batch for each distinct row", f"{stats.describe()['dedup_factor']:.2f}"),
        (
            f"hot rows planned for 4 ranks on {', '.join(NETWORKS)}",
            ", ".join(str(p.num_hot_rows) for p in plans.values()),
        ),
        ("hot tiers of 0, 100, 3,000 rows against one process", "bitwise equal" if all(equal) else "DIFFER"),
        (f"area under the curve, {dataset}, {ranks} ranks", f"{trained['auc']:.3f}"),
    ]
    return Chapter("recsys-embed", "embedding tables outgrow one device", rows, plans[NETWORKS[0]].explain(), [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--dataset", default="movielens", help="movielens, criteo:FILE (text or .npz) or folder:DIR")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--ranks", type=int, default=2)
    args = options.parse_args()
    finish([run(args.dataset, args.epochs, args.ranks)], args.report)
