"""A message that does not get through must name the other end and the stage, whatever the transport says."""

from __future__ import annotations

import pytest

from core_kernels.comm import CollectiveError, Group
from gnn_comm.exchange import _finish


class LateHandle:
    def wait(self):
        raise CollectiveError(
            "a peer did not answer; look at the other ranks",
            rank=0,
            world_size=4,
            collective="send_recv",
            tag="gnn_comm.forward",
            seconds=8.0,
        )


def test_late_message_names_peer_and_stage():
    with pytest.raises(CollectiveError) as caught:
        _finish(LateHandle(), Group.single(), 2, 3)
    text = str(caught.value)
    assert "stage 3 with rank 2 did not get through: a peer did not answer" in text
    assert "begin with rank 2" in text
    assert (caught.value.tag, caught.value.seconds) == ("gnn_comm.forward", 8.0)
