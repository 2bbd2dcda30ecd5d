"""What changes of a running job cost: stop-free, by stop and restart, and with torchft and torchrun, side by side.

Workers emulate an accelerator: a step sleeps, then sums the gradients of a model of the size asked for and steps AdamW.
All systems run this same step, over gloo on loopback; times are those between the ends of steps, as workers log them.
"""

from elastic_train.bench.changes import measure_change, measure_restart, measure_scale_in, measure_vote
from elastic_train.bench.peers import measure_torchft, measure_torchrun
from elastic_train.bench.survival import measure_kill

__all__ = [
    "measure_change",
    "measure_kill",
    "measure_restart",
    "measure_scale_in",
    "measure_torchft",
    "measure_torchrun",
    "measure_vote",
]
