"""Generated CUDA C++ becomes machine code without spilling registers."""

from __future__ import annotations

import pytest

from core_kernels.errors import MissingDependencyError
from core_kernels.kernels.cuda.compiler import compile_kernels, find_compiler
from core_kernels.nn.gat import gatv2
from core_kernels.vertex.compiled import compiled
from core_kernels.vertex.emit_cuda import KERNEL_NAME, emit_cuda
from core_kernels.vertex.passes import Widths
from core_kernels.vertex.run_cuda import group_lanes


def has_compiler():
    try:
        return bool(find_compiler())
    except MissingDependencyError:
        return False


@pytest.mark.skipif(not has_compiler(), reason="neither NVRTC nor nvcc is installed")
def test_attention_compiles_for_a_device():
    shapes = tuple({"att": (4, 32), "h": (4, 32), "query": (4, 32)}[name] for _, _, name in gatv2._inputs)
    code = compiled(gatv2.specialise(shapes, (0, 1, 2))[0])
    texts = emit_cuda(code.forward_plan) + emit_cuda(code.backward_plan)
    assert len(texts) >= 3
    for text in texts:
        usage = compile_kernels(text, (KERNEL_NAME,), "sm_90").usage[KERNEL_NAME]
        assert usage.spill_bytes == 0
        assert usage.registers <= 128


def test_groups_cover_every_width():
    for width in range(1, 200):
        lanes = group_lanes(Widths(1, [width]))
        assert lanes & (lanes - 1) == 0
        covered = {feature for lane in range(lanes) for feature in range(lane, width, lanes)}
        assert covered == set(range(width))


def test_a_stride_of_the_block_would_miss_features():
    def covered(width):
        lanes = 1 << (width.bit_length() - 1)
        return {feature for lane in range(lanes) for feature in range(lane, width, 64)}

    missed = [width for width in range(1, 64) if covered(width) != set(range(width))]
    assert len(missed) == 57
