"""Over really slow links: fewer bytes than plain ways, as many as predicted, and less waiting."""

import pytest

from core_kernels.interconnect import Interconnect
from core_kernels.testing import hosts
from recsys_embed.bench import BenchJob, bench_on_rank, bench_plan

pytestmark = [
    pytest.mark.network,
    pytest.mark.distributed,
    pytest.mark.skipif(hosts.skip_reason() is not None, reason=hosts.skip_reason() or ""),
]


def test_fewer_bytes_and_less_waiting_than_plain_ways():
    with hosts.ShapedHosts([1, 1], 100.0, timeout_seconds=60.0) as network:
        base = {"batch_size": 256, "width": 32, "steps": 5, "zipf_rows": 2000, "hidden": (16, 8)}
        plan = bench_plan(BenchJob("ours", **base), Interconnect.preset("ethernet-100mbit"), 2, (0.02, 0))
        found, sent = {}, {}
        for system in ("ours", "no_prefetch", "all_to_all"):
            before = network.link_bytes()
            job = BenchJob(system, plan=plan, **base)
            found[system] = max(network.run(bench_on_rank, job), key=lambda r: r["step_seconds"])
            total = sum(b["sent_bytes"] - a["sent_bytes"] for a, b in zip(before, network.link_bytes(), strict=True))
            sent[system] = total / 2 / (job.steps + job.warmup)
    assert sent["ours"] < 0.7 * sent["all_to_all"]
    assert found["ours"]["exposed_seconds"] < found["all_to_all"]["exposed_seconds"]
    assert found["ours"]["exposed_seconds"] < found["no_prefetch"]["exposed_seconds"]
