"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional as F

from . import gather, ops
from .process_sets import ProcessSet, global_process_set

# By process set, whose members alone use a module: they must all give it the same number.
_numbers: defaultdict[int, itertools.count] = defaultdict(itertools.count)


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Normalises with the mean and variance of the batches of all ranks together, as if they were one batch.

    Input and output have shape (N, C, ...), two to five dimensions; N may differ between the ranks and may be 0. Any
    floating dtype and memory format; statistics are computed in float32 or wider and combined in float64. In training
    every rank must run it equally often, forward and backward; each is one small operation, and never waits for a GPU.
    In eval mode, or in a job of one rank, it is an ordinary batch norm. The gradients of weight and bias are this
    rank's part: what DistributedOptimizer expects.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: of the running statistics; None keeps their cumulative average.
        affine: whether there are weight and bias.
        track_running_stats: whether running statistics are kept for eval mode.
        process_set: the ranks whose batches belong together.

    Raises ValueError for an input of fewer than two dimensions, and when there are fewer than two values per channel
    on all ranks together; NotInitializedError before init(); in forward and backward the errors of an allreduce.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set
        self._name: str | None = None  # given by the first forward, so that modules which are never used do not count

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, (N, C, ...), got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training or self.process_set.size() == 1:
            return self._local(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got an input of shape {tuple(input.shape)}")
        if self._name is None:
            self._name = f"sync_batch_norm.{next(_numbers[self.process_set.registered_id()])}"
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self._name, self.process_set
        )
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                factor = self._factor()
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (count / (count - 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output

    def _local(self, input: torch.Tensor) -> torch.Tensor:
        batch_statistics = self.training or self.running_mean is None
        tracks = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if tracks else None,
            self.running_var if tracks else None,
            self.weight,
            self.bias,
            batch_statistics,
            self._factor() if self.training else 0.0,
            self.eps,
        )

    def _factor(self) -> float:
        """How much this batch weighs in the running statistics; counts it."""
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """`module` with every batch norm in it (of any dimension) replaced by a SyncBatchNorm, or such a one itself.

        The new modules hold the same parameter and buffer objects, so an optimizer made before stays right.
        """
        return cls._convert(module, process_set, {})

    @classmethod
    def _convert(
        cls, module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        if module in done:  # used in several places
            return done[module]
        result = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            result = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
            )
            for name, parameter in module._parameters.items():
                result._parameters[name] = parameter
            for name, buffer in module._buffers.items():
                result._buffers[name] = buffer
            result.training = module.training
        done[module] = result
        for name, child in module.named_children():
            result.add_module(name, cls._convert(child, process_set, done))
        return result


class _Normalise(torch.autograd.Function):
    """(output, mean, biased variance, values per channel) of the batches of all ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, name, process_set):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels = x.shape[1]
        dims = [d for d in range(x.dim()) if d != 1]
        count = x.numel() // channels
        row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if count:
            variance, mean = torch.var_mean(wide, dims, correction=0)
            row[:channels], row[channels:-1], row[-1] = mean, variance, count
        if x.is_cpu:
            rows = _gather(row, f"{name}.forward", process_set)
            total = float(rows[:, -1].sum())
        else:  # the host needs the counts as well, and reading them from a GPU would make it wait for that
            own = torch.full((1,), count, dtype=torch.float64, device="cpu")
            rows, totals = _gather_both(row, own, f"{name}.forward", process_set)
            total = float(totals.sum())
        means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
        if total < 2:
            raise ValueError(f"expected more than 1 value per channel on all ranks together, got {total:.0f}")
        # Each rank's values lie around its own mean, and the means around the common one (Chan et al., 1979).
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        mean, variance = mean.to(wide.dtype), variance.to(wide.dtype)
        scale, shift = (None if t is None else t.to(wide.dtype) for t in (weight, bias))
        output = F.batch_norm(wide, mean, variance, scale, shift, False, 0.0, eps) if count else wide
        output = output.to(x.dtype) if output is not x else x.clone()
        ctx.save_for_backward(x, weight, bias, mean, (variance + eps).rsqrt())
        ctx.total, ctx.name, ctx.process_set = total, name, process_set
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, *_):
        x, weight, bias, mean, inverse = ctx.saved_tensors
        channels = x.shape[1]
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, channels] + [1] * (x.dim() - 2)
        gradient = gradient.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        own = torch.cat([gradient.sum(dims), (gradient * centred).sum(dims)])
        # Also where this rank needs no gradient of its input: others may.
        sums = ops.allreduce(own.double(), op=ops.Sum, name=f"{ctx.name}.backward", process_set=ctx.process_set)
        sums = (sums / ctx.total).to(mean.dtype)
        slope = inverse if weight is None else inverse * weight.to(inverse.dtype)
        gradient = gradient - sums[:channels].view(shape)
        gradient -= centred * (sums[channels:] * inverse.square()).view(shape)
        result = (gradient * slope.view(shape)).to(x.dtype)
        of_weight = None if weight is None else (own[channels:] * inverse).to(weight.dtype)
        of_bias = None if bias is None else own[:channels].to(bias.dtype)
        return result, of_weight, of_bias, None, None, None


def _gather(row: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """The rows of all ranks, in the order of the ranks."""
    return gather.allgather(row[None], name=name, process_set=process_set)


def _gather_both(row: torch.Tensor, own: torch.Tensor, name: str, process_set: ProcessSet) -> list[torch.Tensor]:
    """The same, as one operation, for a row on a GPU and one number in host memory."""
    return gather.grouped_allgather([row[None], own], name=name, process_set=process_set)
