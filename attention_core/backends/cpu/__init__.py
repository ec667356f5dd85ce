"""The CPU backend: vectorised torch. A product backend, not an oracle."""

from attention_core.backends.cpu.device import CpuDevice, CpuEvent, CpuGraph
from attention_core.backends.cpu.kernels import CpuKernels

__all__ = ["CpuDevice", "CpuEvent", "CpuGraph", "CpuKernels"]
