"""Every dtype: values against float64 and complex128 references, rounding, integers, bool."""

import pytest
import torch
from rank_helpers import ranks

import fusewire as fw

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]


def input_of(rank, dtype, count=1000):
    generator = torch.Generator().manual_seed(rank)
    if dtype in COMPLEX:
        return torch.randn(count, generator=generator, dtype=torch.complex128).to(dtype)
    if dtype in FLOATS:
        return (torch.randn(count, generator=generator, dtype=torch.float64) * 10).to(dtype)
    low = 0 if dtype in UNSIGNED else -30
    return torch.randint(low, 30, (count,), generator=generator).to(dtype)


def ulp(values, dtype):
    """The distance to the next number of `dtype`, around each value (float64)."""
    bits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    smallest = torch.finfo(dtype).smallest_normal
    exponent = torch.frexp(values.abs().clamp(min=smallest))[1]
    return torch.ldexp(torch.ones_like(values), exponent - bits)


@ranks(2, 4)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_floating_types_are_within_one_rounding_of_the_exact_result(dtype, op):
    n = fw.size()
    inputs = [input_of(r, dtype).double() for r in range(n)]
    exact = {
        "Sum": lambda: sum(inputs),
        "Average": lambda: sum(inputs) / n,
        "Min": lambda: torch.stack(inputs).amin(0),
        "Max": lambda: torch.stack(inputs).amax(0),
        "Product": lambda: torch.stack(inputs).prod(0),
    }[op]()
    result = fw.allreduce(input_of(fw.rank(), dtype), op=getattr(fw, op), name=f"float.{dtype}.{op}")
    assert result.dtype == dtype
    finite = exact.abs() <= torch.finfo(dtype).max
    error = (result.double() - exact).abs()[finite] / ulp(exact, dtype)[finite]
    # Half a unit is a single rounding; a float64 reference is itself rounded once or more.
    allowed = 2.0 if dtype == torch.float64 else 0.51
    assert error.max() <= allowed, f"{error.max()} units in the last place"
    assert torch.isinf(result[~finite]).all()
    return result


@ranks(2, 4)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_mean_is_finite_wherever_it_is_representable(dtype):
    """The sum alone would overflow."""
    large = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(fw.allreduce(large, name=f"large.{dtype}"), large)
    assert torch.equal(fw.allreduce(-large, name=f"large.{dtype}"), -large)
    mixed = large if fw.rank() % 2 == 0 else -large
    assert torch.equal(fw.allreduce(mixed, name=f"large.{dtype}"), torch.zeros_like(large))
    scaled = fw.allreduce(large, op=fw.Sum, prescale_factor=1 / fw.size(), name=f"large.{dtype}.scaled")
    assert torch.equal(scaled, large)


@ranks(2, 4)
def test_sixteen_bit_floats_do_not_lose_small_values_beside_large_ones():
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        # In 16 bits large + 1 rounds back to large, so a running sum would never see the ones.
        mine = torch.full((64,), large if fw.rank() == 0 else 1.0).to(dtype)
        right = torch.tensor(large + (fw.size() - 1)).to(dtype)
        result = fw.allreduce(mine, op=fw.Sum, name=f"small.{dtype}")
        assert torch.equal(result, right.expand(64)), (result[0], right)


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_integers_are_exact_modulo_their_width(dtype):
    inputs = [input_of(r, dtype).to(torch.int64) for r in range(fw.size())]
    mine = input_of(fw.rank(), dtype)

    def check(op, exact):
        result = fw.allreduce(mine, op=op, name=f"int.{dtype}.{op}")
        assert result.dtype == dtype
        assert torch.equal(result.to(torch.int64), exact.to(dtype).to(torch.int64)), op

    total = sum(inputs)
    check(fw.Sum, total)
    check(fw.Min, torch.stack(inputs).amin(0))
    check(fw.Max, torch.stack(inputs).amax(0))
    check(fw.Product, torch.stack(inputs).prod(0))
    if dtype not in (torch.int8, torch.uint8):  # whose sums wrap around here
        check(fw.Average, total.div(fw.size(), rounding_mode="trunc"))


@ranks(2, 3)
def test_integer_sums_wrap_around():
    highest = torch.iinfo(torch.int64).max
    wide = fw.allreduce(torch.full((5,), highest), op=fw.Sum, name="wrap.int64")
    modulus = 1 << 64
    value = (highest * fw.size()) % modulus
    assert wide.tolist() == [value - modulus if value >= modulus // 2 else value] * 5
    narrow = fw.allreduce(torch.full((5,), 200, dtype=torch.uint8), op=fw.Sum, name="wrap.uint8")
    assert narrow.tolist() == [200 * fw.size() % 256] * 5


@ranks(2, 3)
def test_the_average_of_integers_truncates_toward_zero():
    """Also for negative sums that the number of ranks does not divide."""
    n = fw.size()
    for dtype in SIGNED:
        mine = torch.tensor([-7, -1, 0, 1, 7, -5, 5, -n, n], dtype=dtype)
        mine[0] += fw.rank()
        sums = [-7 * n + n * (n - 1) // 2, -n, 0, n, 7 * n, -5 * n, 5 * n, -n * n, n * n]
        result = fw.allreduce(mine, name=f"truncate.{dtype}")
        assert result.tolist() == [int(s / n) for s in sums], dtype
    odd = torch.tensor([-1 if fw.rank() == 0 else 0, -(n + 1) if fw.rank() == 0 else 0])
    assert fw.allreduce(odd, name="truncate.odd").tolist() == [0, -1]


@ranks(2, 3)
def test_scale_factors_of_integers_are_applied_to_the_sum_and_truncated_once():
    n = fw.size()
    base = torch.tensor([2, 4, 6, 16])
    result = fw.allreduce(base, op=fw.Sum, prescale_factor=0.25, postscale_factor=4.0, name="scales")
    assert result.tolist() == [n * v for v in base.tolist()]
    result = fw.allreduce(base, prescale_factor=0.25, postscale_factor=4.0, name="scales of a mean")
    assert result.tolist() == base.tolist()
    result = fw.allreduce(torch.tensor([1, -1, 3, -3]), op=fw.Sum, prescale_factor=0.5, name="half")
    assert result.tolist() == [int(v * n * 0.5) for v in (1, -1, 3, -3)]
    result = fw.allreduce_(torch.tensor([7, -7], dtype=torch.int8), op=fw.Sum, postscale_factor=0.1, name="tenth")
    assert result.tolist() == [int(7 * n * 0.1), int(-7 * n * 0.1)]
    (result,) = fw.grouped_allreduce([base], op=fw.Sum, prescale_factor=0.25, postscale_factor=4.0, name="group scales")
    assert result.tolist() == [n * v for v in base.tolist()]


@ranks(2, 3)
def test_bool_operations():
    """Min and Product are `and`, Max and Sum are `or`, Average has no meaning."""
    mine = torch.tensor([False, fw.rank() == 0, fw.rank() == fw.size() - 1, True])
    for op, right in (
        (fw.Min, [False, False, False, True]),
        (fw.Product, [False, False, False, True]),
        (fw.Max, [False, True, True, True]),
        (fw.Sum, [False, True, True, True]),
    ):
        result = fw.allreduce(mine, op=op, name=f"bool.{op}")
        assert result.dtype == torch.bool
        assert result.tolist() == right, op
    with pytest.raises(TypeError, match="Min"):
        fw.allreduce(mine, op=fw.Average, name="bool mean")
    with pytest.raises(TypeError, match="Min"):
        fw.allreduce(mine, name="bool default")


@ranks(2, 4)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_sum_and_average_also_of_conjugate_views(dtype):
    n = fw.size()
    inputs = [input_of(r, dtype).to(torch.complex128) for r in range(n)]
    mine = input_of(fw.rank(), dtype)
    tolerance = 1e-6 if dtype == torch.complex64 else 1e-14

    def check(result, exact):
        assert result.dtype == dtype
        torch.testing.assert_close(result.to(torch.complex128), exact, rtol=tolerance, atol=tolerance)

    check(fw.allreduce(mine, op=fw.Sum, name="complex"), sum(inputs))
    check(fw.allreduce(mine, name="complex"), sum(inputs) / n)
    check(fw.allreduce(mine.conj(), name="complex"), (sum(inputs) / n).conj())
    if fw.rank() == 0:  # a conjugate view on one rank only
        check(fw.allreduce(mine.conj().resolve_conj().conj(), name="complex"), sum(inputs) / n)
    else:
        check(fw.allreduce(mine, name="complex"), sum(inputs) / n)
    owner = mine.clone()
    view = owner.conj()
    fw.allreduce_(view, name="complex in place")
    check(view.resolve_conj(), (sum(inputs) / n).conj())
    check(owner, sum(inputs) / n)
    imaginary = [x.conj().imag.clone() for x in inputs]
    negative = mine.conj().imag  # a lazily negated view
    torch.testing.assert_close(
        fw.allreduce(negative, op=fw.Sum, name="negative").double(), sum(imaginary), rtol=tolerance, atol=tolerance
    )
    for op in (fw.Min, fw.Max, fw.Product):
        with pytest.raises(TypeError, match=r"Sum.*Average"):
            fw.allreduce(mine, op=op, name="complex order")


@ranks(2, 3)
def test_nan_and_infinity():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    if fw.rank() == 1:
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 4.0])
    for dtype in FLOATS:
        for op in (fw.Min, fw.Max, fw.Sum, fw.Average):
            result = fw.allreduce(values.to(dtype), op=op, name=f"nan.{dtype}.{op}").double()
            assert torch.isnan(result[0]), (dtype, op)
            assert not torch.isnan(result[1:]).any()
        assert fw.allreduce(values.to(dtype), op=fw.Max, name="inf")[1] == float("inf")
        assert fw.allreduce(values.to(dtype), op=fw.Min, name="inf")[2] == -float("inf")


@ranks(2)
def test_a_dtype_without_a_meaning_is_a_type_error_that_lists_what_is_allowed():
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for tensor in (torch.ones(3).to(torch.float8_e4m3fn), quantized):
        with pytest.raises(TypeError):
            fw.allreduce(tensor, name="odd dtype")
    with pytest.raises(TypeError, match=r"float16.*bfloat16.*float32"):
        fw.allreduce(torch.ones(3).to(torch.float8_e4m3fn), name="odd dtype")
    return fw.allreduce(torch.ones(3), name="odd dtype")


@ranks(2, 3)
def test_compression_narrows_on_the_wire_only():
    x = torch.arange(64, dtype=torch.float32) + fw.rank()
    right = torch.arange(64, dtype=torch.float32) + (fw.size() - 1) / 2
    for compression in (fw.Compression.none, fw.Compression.fp16, fw.Compression.bf16):
        result = fw.allreduce(x, compression=compression, name="wire")
        assert result.dtype == torch.float32
        assert torch.equal(result, right), "values that fit into 16 bits must come back exactly"
    fine = fw.allreduce(torch.full((3,), 1 + 2.0**-20), compression=fw.Compression.fp16, name="narrow")
    assert fine.tolist() == [1.0] * 3
    counts = fw.allreduce(torch.tensor([100_000]), op=fw.Sum, compression=fw.Compression.fp16, name="integers")
    assert counts.item() == 100_000 * fw.size()
