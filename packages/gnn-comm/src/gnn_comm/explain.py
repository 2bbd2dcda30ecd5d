"""Say in words what a plan does, what it costs and what limits it."""

from __future__ import annotations

from core_kernels.console import format_bytes, format_seconds
from gnn_comm.plan import Plan

__all__ = ["explain_plan"]


def explain_plan(plan: Plan) -> str:
    """Describe a plan for people.

    Args:
        plan: The plan; with its partition attached the lower bound is shown too.

    Returns:
        Several lines.
    """
    estimate, transfers = plan.estimate(), plan.transfers
    lines = [
        f"{plan.planner} plan for {plan.num_devices} devices of {plan.topology.name}: {transfers.num_stages} stages, "
        f"{len(transfers)} messages, planned in {format_seconds(plan.planning_seconds)}"
    ]
    if plan.resident_rows:
        copies = sum(len(rows) for rows in plan.resident_rows)
        lines.append(f"nothing is sent: devices hold {copies} copies of rows, enough for {plan.num_layers} layers")
        return "\n".join(lines)
    sent, needed = int(transfers.num_rows.sum()), len(plan.need_rows)
    lines.append(
        f"{needed} rows are needed by devices that do not own them; {sent} transfers, {sent - needed} of them to relays"
    )
    lines.append(
        f"estimate for rows of {format_bytes(plan.row_bytes)}: {format_seconds(estimate.seconds)}, of which "
        f"{format_seconds(estimate.latency_seconds)} latency; the busiest device sends "
        f"{format_bytes(estimate.max_device_sent_bytes)}"
    )
    if plan.partition is not None:
        bound = plan.lower_bound()
        if bound > 0:
            names = ", ".join(plan.topology.nodes[d].name for d in bound.sources)
            lines.append(
                f"no plan can take less than {format_seconds(bound)}: what {names} must send to the others; "
                f"the links of this plan are busy {plan.bound_ratio():.3f} times that"
            )
    for name, seconds in sorted(plan.considered.items(), key=lambda item: item[1]):
        lines.append(f"  {name:<13} {format_seconds(seconds)}{'  (chosen)' if name == plan.planner else ''}")
    stages = zip(plan.stages, estimate.stage_seconds, estimate.bottlenecks, strict=True)
    for number, (stage, seconds, bottleneck) in enumerate(stages):
        lines.append(
            f"  stage {number}: {format_seconds(seconds)}, {len(stage.messages)} messages, {stage.num_rows} rows; "
            f"limited by {bottleneck}"
        )
    return "\n".join(lines)
