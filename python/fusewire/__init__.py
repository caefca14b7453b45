"""Fusewire averages gradients and models across the processes of a PyTorch job.

    import fusewire

    fusewire.init()
    optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fusewire.broadcast_parameters(model.state_dict())

It keeps Horovod's public names: `import fusewire as hvd` runs a Horovod script.
"""

from . import _build

_build.check()  # imports torch, whose libraries the extension needs; says what to do if it was built for another one

from ._run import run
from ._state import cross_rank, cross_size, init, is_initialized, local_rank, local_size, rank, shutdown, size
from ._stats import Histogram, OperationCounts, Stats, stats
from ._timeline import start_timeline, stop_timeline
from ._version import __version__
from .averaging import (
    HierarchicalModelAverager,
    LocalSGD,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)
from .compression import Compression, Compressor
from .compressors import StatefulCompressor
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
from .features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .gather import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
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
    join,
    poll,
    synchronize,
)
from .optimizer import DistributedOptimizer
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from .sparse import sparse_allreduce_async
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "CollectiveError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "DuplicateNameError",
    "FusewireError",
    "Handle",
    "HierarchicalModelAverager",
    "Histogram",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "ModelAverager",
    "NotInitializedError",
    "OperationCounts",
    "PeerLostError",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "ShutdownError",
    "StalledError",
    "StatefulCompressor",
    "Stats",
    "Sum",
    "SyncBatchNorm",
    "TensorMismatchError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]
