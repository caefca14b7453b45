"""Model averagers: ranks train on their own and average parameters now and then."""

from .averagers import ModelAverager, PeriodicModelAverager

__all__ = ["ModelAverager", "PeriodicModelAverager"]
