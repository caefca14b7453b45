"""Fusewire averages gradients and models across the processes of a PyTorch job.

    import fusewire

    fusewire.init()
    optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fusewire.broadcast_parameters(model.state_dict())

It keeps Horovod's public names: `import fusewire as hvd` runs a Horovod script.
"""

from . import _build

_build.check()  # also imports torch, whose libraries the extension needs

from ._run import run
from ._state import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ._version import __version__
from .compression import Compression
from .errors import (
    CollectiveError,
    DuplicateNameError,
    FusewireError,
    HorovodInternalError,
    NotInitializedError,
    PeerLostError,
    ShutdownError,
    StalledError,
    TensorMismatchError,
)
from .ops import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from .process_sets import ProcessSet, add_process_set, global_process_set

__all__ = [name for name in dir() if not name.startswith("_")]
