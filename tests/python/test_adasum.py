"""Adasum (arXiv 2006.02924) against a NumPy reference of the pairwise tree."""

import numpy as np
import pytest
import torch
from rank_helpers import error_of, ranks

import fusewire as fw

SIZES = (1, 2, 3, 4, 5)


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Each vector loses half of what it has in common with the other one."""
    dot, aa, bb = float(np.vdot(a, b)), float(np.vdot(a, a)), float(np.vdot(b, b))
    ca = 1.0 if aa == 0 else 1.0 - dot / (2 * aa)
    cb = 1.0 if bb == 0 else 1.0 - dot / (2 * bb)
    return ca * a + cb * b


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Ranks beyond a power of two fold into the first ones; then neighbours combine, and neighbours of those."""
    vectors = [vector.astype(np.float64) for vector in vectors]
    power = 1 << (len(vectors).bit_length() - 1)
    for extra in range(power, len(vectors)):
        vectors[extra - power] = pair(vectors[extra - power], vectors[extra])
    vectors = vectors[:power]
    while len(vectors) > 1:
        vectors = [pair(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return vectors[0]


def vectors(kind: str, count: int = 1000) -> list[torch.Tensor]:
    """The vector of every rank, float64."""
    random = np.random.default_rng(7)
    n = fw.size()
    if kind == "zeros on one":
        rows = random.standard_normal((n, count))
        rows[n // 2] = 0
    elif kind == "zeros on all":
        rows = np.zeros((n, count))
    elif kind == "equal":
        rows = np.tile(random.standard_normal(count), (n, 1))
    elif kind == "orthogonal":
        rows = np.zeros((n, count))
        for r in range(n):
            rows[r, r::n] = random.standard_normal(len(range(r, count, n)))
    elif kind == "tiny":
        rows = random.standard_normal((n, count)) * 1e-30
    elif kind == "opposite":
        rows = np.tile(random.standard_normal(count), (n, 1)) * np.where(np.arange(n) % 2, -1, 1)[:, None]
    else:
        rows = random.standard_normal((n, count))
    return [torch.from_numpy(np.ascontiguousarray(row)) for row in rows]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(result: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    expected = adasum([tensor.double().flatten().numpy() for tensor in inputs]).reshape(result.shape)
    tolerance = TOLERANCE[result.dtype]
    scale = float(np.abs(expected).max()) or 1.0
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=tolerance, atol=tolerance * scale)


@ranks(*SIZES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", ["random", "zeros on one", "zeros on all", "equal", "orthogonal", "opposite"])
def test_against_the_reference(dtype, kind):
    inputs = [vector.to(dtype) for vector in vectors(kind)]
    result = fw.allreduce(inputs[fw.rank()], op=fw.Adasum, name="adasum")
    assert result.dtype == dtype
    check(result, inputs)
    if kind == "zeros on all":
        assert torch.equal(result, torch.zeros_like(result))
    if kind == "equal":
        torch.testing.assert_close(result, inputs[0], rtol=TOLERANCE[dtype], atol=0)
    if kind == "orthogonal":
        torch.testing.assert_close(result, sum(inputs), rtol=TOLERANCE[dtype], atol=0)
    return result


@ranks(*SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tiny_values_do_not_underflow(dtype):
    inputs = [vector.to(dtype) for vector in vectors("tiny")]
    result = fw.allreduce(inputs[fw.rank()], op=fw.Adasum)
    check(result * 1e30, [vector * 1e30 for vector in inputs])
    return result


@ranks(*SIZES)
def test_half_precision_values_whose_squares_overflow():
    generator = torch.Generator().manual_seed(3)
    inputs = [(300 + torch.rand(10_000, generator=generator)).half() for _ in range(fw.size())]
    result = fw.allreduce(inputs[fw.rank()], op=fw.Adasum)
    assert torch.isfinite(result).all()
    check(result, inputs)
    return result


@ranks(2, 3, 4, 5)
def test_inf_and_nan_stay_in_their_tensor():
    """In one bucket, and in one group: coefficients belong to a tensor."""
    clean = [vector.float() for vector in vectors("random")]
    bad = clean[fw.rank()].clone()
    if fw.rank() == 1:
        bad[3], bad[5] = float("inf"), float("nan")
    given = [clean[fw.rank()], bad, clean[fw.rank()] * 2]
    handles = [fw.allreduce_async(tensor, op=fw.Adasum, name=f"bucket.{i}") for i, tensor in enumerate(given)]
    for results in ([handle.wait() for handle in handles], fw.grouped_allreduce(given, op=fw.Adasum)):
        check(results[0], clean)
        check(results[2], [vector * 2 for vector in clean])
        assert not torch.isfinite(results[1]).all()


@ranks(*SIZES)
def test_every_form_gives_the_same_bits():
    inputs = [vectors("random", 5000)[fw.rank()].float(), vectors("random", 7)[fw.rank()].float()]
    single = [fw.allreduce(tensor, op=fw.Adasum) for tensor in inputs]
    forms = {
        "in place": [fw.allreduce_(tensor.clone(), op=fw.Adasum) for tensor in inputs],
        "async": [fw.allreduce_async(tensor, op=fw.Adasum).wait() for tensor in inputs],
        "async in place": [fw.allreduce_async_(tensor.clone(), op=fw.Adasum).wait() for tensor in inputs],
        "grouped": fw.grouped_allreduce(inputs, op=fw.Adasum),
        "grouped async": fw.grouped_allreduce_async(inputs, op=fw.Adasum).wait(),
        "grouped in place": fw.grouped_allreduce_([tensor.clone() for tensor in inputs], op=fw.Adasum),
        "transposed": [
            fw.allreduce(inputs[0].reshape(50, 100).t().contiguous().t(), op=fw.Adasum).flatten(),
            single[1],
        ],
    }
    for form, results in forms.items():
        for result, expected in zip(results, single, strict=True):
            assert torch.equal(result, expected), form
    return single


@ranks(2, 3)
def test_scales():
    inputs = [vector.float() for vector in vectors("random")]
    result = fw.allreduce(inputs[fw.rank()], op=fw.Adasum, prescale_factor=0.5, postscale_factor=4.0)
    check(result / 4, [vector * 0.5 for vector in inputs])


@ranks(4)
def test_in_a_process_set():
    trio = fw.add_process_set([0, 2, 3])
    if trio.included():
        inputs = [vector.float() for vector in vectors("random")]
        result = fw.allreduce(inputs[fw.rank()], op=fw.Adasum, process_set=trio)
        check(result, [inputs[r] for r in trio.ranks])
    fw.remove_process_set(trio)


@ranks(1, 2)
def test_types_without_a_meaning():
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=r"Adasum has no meaning for \w+; allowed: "):
            fw.allreduce(torch.ones(3, dtype=dtype), op=fw.Adasum)
    if fw.size() == 2:
        error = error_of(fw.allreduce, torch.ones(3), op=[fw.Adasum, fw.Sum][fw.rank()], name="ops")
        assert isinstance(error, fw.TensorMismatchError), error


@ranks(1)
def test_no_gradient():
    with pytest.raises(NotImplementedError, match="ADASUM"):
        fw.allreduce(torch.ones(3, requires_grad=True), op=fw.Adasum).sum().backward()
