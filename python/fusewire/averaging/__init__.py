"""Model averagers: ranks train on their own and average parameters now and then.

The names of torch.distributed.algorithms.model_averaging, and `LocalSGD`, which averages gradients first and models
later. See docs/averaging.md.
"""

from . import utils
from .averagers import ModelAverager, PeriodicModelAverager
from .hierarchical_model_averager import HierarchicalModelAverager
from .local_sgd import LocalSGD
from .post_local_sgd import PostLocalSGDOptimizer
from .utils import average_parameters, average_parameters_or_parameter_groups, get_params_to_average

__all__ = [
    "HierarchicalModelAverager",
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
    "utils",
]
