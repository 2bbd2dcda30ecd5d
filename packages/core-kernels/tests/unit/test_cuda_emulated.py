"""The CUDA C++ sources, run on the CPU: every operator against the float64 reference, in two thread orders."""

import pytest
import torch

import core_kernels
from core_kernels import Graph, ops
from core_kernels.errors import ArgumentError
from core_kernels.kernels.cuda import _launch, gather, sketch, spmm
from core_kernels.kernels.cuda._source import registered_instances
from core_kernels.ops._library import OPERATORS
from core_kernels.testing import emulator
from core_kernels.testing.operator_cases import compare, operator_cases, run_case

pytestmark = pytest.mark.skipif(
    emulator.compiler_skip_reason() is not None, reason=str(emulator.compiler_skip_reason())
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)


@pytest.fixture(scope="module", autouse=True)
def _built_kernels():
    emulator.build_all()


def same_bits(first, second):
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def check(case):
    """Run in two thread orders: the bits agree, and the values are right."""
    with emulator.shuffle_seed(1):
        results = run_case(case, "emulate")
    with emulator.shuffle_seed(2):
        again = run_case(case, "emulate")
    assert all(same_bits(a, b) for a, b in zip(results, again, strict=True)), f"{case}: the thread order shows"
    compare(case, results)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_emulated_operators_match_the_reference(dtype, index):
    for width, heads in ((7, 1), (12, 3), (1, 1), (64, 4)):
        for case in operator_cases(dtype, index, width, heads):
            check(case)


def test_every_operator_has_a_case():
    covered = {case.op for case in operator_cases(torch.float32, torch.int64)}
    assert covered == {op for op in OPERATORS if not op.endswith("_out")}


@pytest.mark.parametrize("first_width", range(1, 66, 13))
def test_emulated_kernels_cover_every_width(first_width):
    by_width = {"spmm_sum", "spmm_extremum", "sddmm", "segment_sum", "segment_softmax", "segment_softmax_backward"}
    by_width |= {"gather", "unpack_rows_", "embedding_update_", "quantize_rows", "dequantize_rows", "embedding_bag"}
    for width in range(first_width, first_width + 13):
        for heads in {1, width}:
            for case in operator_cases(torch.float32, torch.int64, width, heads, seed=width):
                if case.op in by_width:
                    compare(case, run_case(case, "emulate"))


@pytest.mark.parametrize("width", [128, 130, 260])
def test_emulated_kernels_cover_several_tiles_of_columns(width):
    for case in operator_cases(torch.float32, torch.int32, width, 2):
        check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_emulated_hubs_are_cut_into_chunks(dtype):
    for case in operator_cases(dtype, torch.int32, 3, 3, hub=9000):
        check(case)


def test_a_wrong_value_is_noticed():
    case = next(iter(operator_cases(torch.float32, torch.int64)))
    results = run_case(case, "emulate")
    results[0][-1, -1] += 0.01
    with pytest.raises(AssertionError, match="spmm_sum"):
        compare(case, results)


def test_emulate_backend_runs_public_operators_with_gradients():
    graph = Graph.from_edge_index(torch.randint(0, 40, (2, 300), generator=torch.Generator().manual_seed(1)), 40)
    x = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(300, dtype=torch.float64, requires_grad=True)
    gradients = {}
    for name in ("torch", "emulate"):
        with core_kernels.backend(name):
            out = ops.spmm(graph, x, weight) + ops.spmm(graph, x, weight, reduce="max")
            gradients[name] = torch.autograd.grad(out.square().sum(), (x, weight))
    for wanted, found in zip(gradients["torch"], gradients["emulate"], strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("num_edges", [0, 1])
def test_emulated_operators_take_empty_graphs(num_edges):
    indptr = torch.zeros(5, dtype=torch.int64)
    indptr[4] = num_edges
    indices = torch.zeros(num_edges, dtype=torch.int64)
    with core_kernels.backend("emulate"):
        out = torch.ops.core_kernels.spmm_sum(indptr, indices, torch.ones(1, 3), *[None] * 7)
        soft = torch.ops.core_kernels.segment_softmax(torch.zeros(num_edges, 2), indptr, None)
        drawn = torch.ops.core_kernels.sample_neighbors(indptr, indices, None, torch.arange(4), None, 2, False, 0, 0, 0)
    assert out.sum() == 3 * num_edges
    assert soft.sum() == 2 * num_edges
    assert [part.numel() for part in drawn] == [5, num_edges, num_edges]


def test_atomic_sums_agree_up_to_rounding():
    generator = torch.Generator().manual_seed(3)
    indptr = torch.tensor([0, 9000, 9005])
    indices = torch.randint(0, 50, (9005,), generator=generator)
    x = torch.randn(50, 6, generator=generator)
    plain, atomic = torch.empty(2, 6), torch.empty(2, 6)
    spmm.spmm_sum(indptr, indices, x, None, None, None, None, plain)
    spmm.spmm_sum(indptr, indices, x, None, None, None, None, atomic, atomic=True)
    torch.testing.assert_close(atomic, plain, rtol=1e-4, atol=1e-3)
    half = x.half()
    with pytest.raises(ArgumentError, match="atomic"):
        spmm.spmm_sum(indptr, indices, half, None, None, None, None, plain.half(), atomic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_tiered_gather_takes_rows_from_both_tiers(dtype, width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randint(-9, 9, (50, width), generator=generator).to(dtype)
    in_device = torch.rand(50, generator=generator) < 0.4
    place = torch.where(in_device, in_device.cumsum(0) - 1, -(~in_device).cumsum(0))
    for index in INDICES:
        ids = torch.randint(0, 50, (200,), generator=generator).to(index)
        out = torch.full((200, width), 77, dtype=dtype)
        gather.tiered_gather(place, ids, rows[in_device], rows[~in_device], out)
        assert torch.equal(out, rows[ids.long()])


def test_atomic_sketch_agrees_up_to_rounding():
    generator = torch.Generator().manual_seed(4)
    keys, values = torch.randint(0, 300, (900,), generator=generator), torch.randn(900, generator=generator)
    plain, atomic = torch.zeros(3, 41), torch.zeros(3, 41)
    sketch.sketch_insert_(plain, keys, values, 5)
    sketch.sketch_insert_(atomic, keys, values, 5, atomic=True)
    torch.testing.assert_close(atomic, plain, rtol=1e-5, atol=1e-4)


def test_too_many_blocks_are_refused():
    with pytest.raises(ArgumentError, match="blocks along x"):
        _launch.launch(registered_instances()[0], (2**31, 1), 128, (), torch.device("cpu"))


def test_fp32_sum_of_a_hub_stays_accurate():
    # One row of 64,000 edges: a sequential fp32 sum of these values is off by far more.
    values = torch.rand(64_000, 1, generator=torch.Generator().manual_seed(0))
    out = torch.empty(1, 1)
    spmm.spmm_sum(torch.tensor([0, 64_000]), torch.arange(64_000), values, None, None, None, None, out)
    assert (out.double() - values.double().sum()).abs().item() < 2e-6 * values.sum().item()
