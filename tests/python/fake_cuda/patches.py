"""torch.cuda's Python side, which a CPU-only build refuses to use: the same names over the stand-in."""

from __future__ import annotations

import contextlib

import torch

_ops = torch.ops.fake_cuda


def _index(device=None) -> int:
    if device is None:
        return _ops.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _ops.current_device() if index is None else index


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device=None, priority=0, **keywords):
        if "stream_id" in keywords:
            return super().__new__(cls, **keywords)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    def wait_event(self, event) -> None:
        event.wait(self)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        return _ops.native_handle(self.device_index, self.stream_id)


class Event:
    """torch.cuda.Event. Not a subclass of torch.Event, whose methods do not know subclasses."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._event = torch.Event("cuda", enable_timing=enable_timing)
        self.query, self.synchronize = self._event.query, self._event.synchronize

    def record(self, stream=None) -> None:
        self._event.record(stream or _current_stream())

    def wait(self, stream=None) -> None:
        self._event.wait(stream or _current_stream())

    def elapsed_time(self, end: Event) -> float:
        return self._event.elapsed_time(end._event)


def _stream(index: int, stream_id: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=index, device_type=1)  # DeviceType::CUDA


def _current_stream(device=None) -> Stream:
    index = _index(device)
    return _stream(index, _ops.current_stream(index))


def _set_stream(stream) -> None:
    if stream is not None:
        _ops.set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def _use_stream(stream):
    if stream is None:
        yield
        return
    device = _ops.set_device(stream.device_index)
    before = _current_stream()
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)
        _ops.set_device(device)


class Graph:
    """torch.cuda.CUDAGraph, as far as being captured goes: nothing is recorded."""

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        self._stream = _current_stream()
        _ops.capture(self._stream.device_index, self._stream.stream_id, True)

    def capture_end(self) -> None:
        _ops.capture(self._stream.device_index, self._stream.stream_id, False)


@contextlib.contextmanager
def _graph(graph, pool=None, stream=None, capture_error_mode="global"):
    with _use_stream(stream or Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def _synchronize(device=None) -> None:
    torch.accelerator.synchronize(_index(device))


_storage_to, _storage_clone = torch.storage._to, torch.storage._StorageBase.clone


def _bytes(storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to(storage, device, non_blocking=False):
    if device.type != "cuda":
        return _storage_to(storage, device, non_blocking)
    return _bytes(storage).to(device, copy=True).untyped_storage()


def _clone(storage):
    return _bytes(storage).clone().untyped_storage() if storage.device.type == "cuda" else _storage_clone(storage)


def apply() -> None:
    """Changes torch.cuda for the rest of the process."""
    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.init = cuda._lazy_init
    cuda._initialized = True
    cuda.is_initialized = lambda: True
    cuda.is_available = lambda: True
    cuda.device_count = _ops.device_count
    cuda.current_device = _ops.current_device
    cuda.set_device = lambda device: _ops.set_device(_index(device)) and None
    cuda._exchange_device = _ops.set_device
    cuda._maybe_exchange_device = _ops.set_device
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream = _current_stream
    cuda.default_stream = lambda device=None: _stream(_index(device), 0)
    cuda.set_stream = _set_stream
    cuda.stream = cuda.StreamContext = _use_stream
    cuda.synchronize = _synchronize
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = Graph
    cuda.graph = cuda.graphs.graph = _graph
    cuda.is_current_stream_capturing = lambda: _current_stream().is_capturing()
    cuda.empty_cache = lambda: None
    cuda.get_device_name = lambda device=None: "a stand-in on the CPU"
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    # torch.load() and deepcopy().
    torch.storage._to, torch.storage._StorageBase.clone = _to, _clone
    # Random numbers are the CPU's, which torch.manual_seed() has seeded already.
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
