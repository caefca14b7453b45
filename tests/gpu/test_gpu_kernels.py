"""Every CUDA kernel against torch's own arithmetic."""

import pytest
import torch
from gpu_helpers import SCALE, kernels, offsets, run_of
from rank_helpers import ranks

import fusewire as fw

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


def batch(dtype):
    """Tensors of all sizes around vectors and tiles, of several layouts."""
    torch.manual_seed(3)
    sizes = [1, 3, 8, 0, 255, 4096, 4097, 20_011, 3_000_001 // SCALE]
    tensors = [(torch.randn(n, device="cuda") * 50).to(dtype) for n in sizes]
    block = (torch.randn(37, 65, device="cuda") * 50).to(dtype)
    image = (torch.randn(2, 5, 6, 7, device="cuda") * 50).to(dtype)
    unaligned = (torch.randn(1001, device="cuda") * 50).to(dtype)[1:]
    return tensors + [block.t(), block[:, 3:40], image.to(memory_format=torch.channels_last), unaligned]


@ranks(1, cuda=True)
@pytest.mark.parametrize("dtype", FLOATING + INTEGERS, ids=str)
def test_pack_and_unpack_are_copies(dtype):
    tensors = batch(dtype)
    places, count = offsets(tensors, dtype)
    buffer = torch.empty(count, dtype=dtype, device="cuda")
    kernels().pack(tensors, buffer, places)
    for tensor, place in zip(tensors, places, strict=True):
        assert run_of(buffer, place, tensor).equal(tensor), tensor.shape
    back = [torch.empty_strided(t.size(), t.stride(), dtype=dtype, device="cuda").zero_() for t in tensors]
    kernels().unpack(back, buffer, places)
    for tensor, copy in zip(tensors, back, strict=True):
        assert copy.equal(tensor), tensor.shape


@ranks(1, cuda=True)
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)],
    ids=str,
)
def test_pack_scales_and_casts(dtype, wire):
    tensors = batch(dtype)
    places, count = offsets(tensors, wire)
    buffer = torch.empty(count, dtype=wire, device="cuda")
    kernels().pack(tensors, buffer, places, factor=0.25)
    for tensor, place in zip(tensors, places, strict=True):
        assert run_of(buffer, place, tensor).equal((tensor.double() * 0.25).to(dtype).to(wire)), tensor.shape
    back = [torch.empty_strided(t.size(), t.stride(), dtype=dtype, device="cuda").zero_() for t in tensors]
    kernels().unpack(back, buffer, places, factor=4.0)
    for place, copy in zip(places, back, strict=True):
        assert copy.equal((run_of(buffer, place, copy).double() * 4).to(dtype)), copy.shape


@ranks(1, cuda=True)
def test_unaligned_offsets():
    tensors = batch(torch.float32)
    places, count = offsets(tensors, torch.float32, align=4)
    buffer = torch.zeros(count, device="cuda")
    kernels().pack(tensors, buffer, places)
    assert buffer.equal(torch.cat([t.reshape(-1) for t in tensors]))


@ranks(1, cuda=True)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("count", [1, 7, 4096, 1_000_003])
def test_reduce(dtype, count):
    torch.manual_seed(4)
    sources = [torch.randn(max(count // SCALE, 1), device="cuda").to(dtype) for _ in range(5)]
    wide = torch.stack(sources).double()
    result = torch.empty_like(sources[0])
    kernels().reduce(sources, result, fw.Average, 1.0, 5)
    torch.testing.assert_close(result, (wide.sum(0) / 5).to(dtype))
    kernels().reduce(sources, result, fw.Max)
    assert result.equal(wide.amax(0).to(dtype))
    kernels().reduce(sources, sources[0], fw.Min)  # in place
    assert sources[0].equal(wide.amin(0).to(dtype))


@ranks(1, cuda=True)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_dot_products_and_combinations(dtype, count):
    torch.manual_seed(5)
    spans = [1, 31, 4096, 5003, 2_000_000 // SCALE, 64]
    sources = [torch.randn(sum(spans), device="cuda").to(dtype) for _ in range(count)]
    dots = kernels().dot(sources, spans)
    assert dots.equal(kernels().dot(sources, spans, times=3)), "the same bits each time"
    pairs = [(i, j) for i in range(count) for j in range(i, count)]
    wide = [source.double().split(spans) for source in sources]
    expected = torch.stack([torch.stack([wide[i][s].dot(wide[j][s]) for i, j in pairs]) for s in range(len(spans))])
    torch.testing.assert_close(dots, expected, rtol=1e-12, atol=1e-9)
    coefficients = torch.randn(len(spans), count, dtype=torch.float64, device="cuda")
    result = torch.empty_like(sources[0])
    kernels().combine(sources, spans, coefficients, result)
    for s, part in enumerate(result.split(spans)):
        sum_ = sum(coefficients[s, i] * wide[i][s] for i in range(count))
        torch.testing.assert_close(part, sum_.to(dtype))


@ranks(1, cuda=True)
def test_adasum_of_two():
    torch.manual_seed(6)
    spans = [100, 5000]
    a, b = (torch.randn(sum(spans), device="cuda") for _ in range(2))
    result = torch.empty_like(a)
    kernels().combine([a, b], spans, kernels().dot([a, b], spans), result)
    for x, y, part in zip(a.double().split(spans), b.double().split(spans), result.split(spans), strict=True):
        both = x.dot(y)
        torch.testing.assert_close(part, ((1 - both / (2 * x.dot(x))) * x + (1 - both / (2 * y.dot(y))) * y).float())


@ranks(1, cuda=True)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("count", [1, 256, 1000, 100_003])
def test_int8(dtype, count):
    torch.manual_seed(7)
    values = torch.randn(max(count // SCALE, 1), device="cuda").to(dtype)
    quantised, scales = kernels().quantise(values, block=256)
    wide = torch.nn.functional.pad(values.double(), (0, -values.numel() % 256)).view(-1, 256)
    assert quantised.view(-1, 256).abs().amax(1).eq(127).all()
    torch.testing.assert_close(scales.double(), wide.abs().amax(1) / 127, rtol=1e-6, atol=0)
    total = torch.empty(values.numel(), dtype=torch.promote_types(dtype, torch.float32), device="cuda")
    kernels().dequantise(quantised, scales, total)
    assert ((total.double() - values.double()).abs() <= scales.max().double() * 0.5001).all()
    kernels().dequantise(quantised.repeat(3), scales.repeat(3), total, payloads=3, factor=1 / 3)
    assert ((total.double() - values.double()).abs() <= scales.max().double() * 0.5001).all()


@ranks(1, cuda=True)
def test_what_cannot_be_is_refused():
    tensor = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="CUDA tensor"):
        kernels().pack([tensor], torch.ones(4), [0])
    with pytest.raises(ValueError, match="contiguous"):
        kernels().reduce([tensor], torch.ones(8, device="cuda")[::2], fw.Sum)
    with pytest.raises(ValueError, match="longer than the buffer"):
        kernels().dot([tensor, tensor], [5])
