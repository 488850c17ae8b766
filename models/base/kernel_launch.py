"""Which compiled code runs where, and what runs in its place if it cannot be compiled."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Kernel = tuple[str, torch.dtype]
"""A kernel's name and the dtype that it computes in; each dtype is compiled by itself."""

HAS_NUMBA = importlib.util.find_spec("numba") is not None  # a slim runtime decodes without it

_failed_kernels: set[Kernel] = set()  # kernels that could not be compiled in this process


def kernels_available(device: torch.device) -> bool:
    """Can Triton kernels run on `device`? PyTorch for CUDA installs Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def launch(
    kernel: str, grid: tuple[int, ...], first: Tensor, *others: Tensor | float, **settings: float
) -> None:
    """Launch a Triton kernel, named with its module, on the device of its first argument.

    Only a machine with Triton can import such a module.
    """
    module, _, name = kernel.rpartition(".")
    kernels = importlib.import_module(f"sequoia_plan.{module}")
    with torch.cuda.device_of(first):  # Triton launches on the current device
        getattr(kernels, name)[grid](first, *others, **settings)


def has_failed(kernel: Kernel) -> bool:
    """Has `kernel_or_tensors` tried this kernel in vain?"""
    return kernel in _failed_kernels


def kernel_or_tensors(
    kernel: Kernel, run_kernel: Callable[[], T], run_tensor_operations: Callable[[], T]
) -> T:
    """What a kernel computes; if it cannot be compiled, what tensor operations compute.

    Triton compiles a kernel when it is first launched, which needs a C compiler and a Triton that
    accepts the kernel. If that fails, there is one warning, and the kernel is not tried again in
    this process.
    """
    if kernel in _failed_kernels:
        return run_tensor_operations()
    try:
        return run_kernel()
    except torch.OutOfMemoryError:
        raise
    # compilers raise many types; a device that has failed raises again in the tensor operations
    except Exception as error:
        _failed_kernels.add(kernel)
        warnings.warn(
            f"{kernel[0]}: its Triton kernel cannot be compiled, and slower tensor operations "
            f"replace it: {_reason(error)}",
            stacklevel=3,
        )
        return run_tensor_operations()


def _reason(error: BaseException) -> str:
    """The type and the last line of the error that caused this one; Triton quotes code before."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip() if lines else '':.300}"
