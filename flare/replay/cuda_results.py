"""What calls of the CUDA driver give: results by name, and which of them say what."""

from __future__ import annotations

from types import ModuleType
from typing import Any

# Results after which the context, or the whole process's CUDA, runs nothing any more: those of which the driver's header says
# that the process must be relaunched, and those that tell that the context, the device or the driver is gone.
FATAL = frozenset(
    """
    CUDA_ERROR_DEINITIALIZED CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_ECC_UNCORRECTABLE
    CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_CONTAINED CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_LAUNCH_TIMEOUT
    CUDA_ERROR_CONTEXT_IS_DESTROYED CUDA_ERROR_ASSERT CUDA_ERROR_HARDWARE_STACK_ERROR CUDA_ERROR_ILLEGAL_INSTRUCTION
    CUDA_ERROR_MISALIGNED_ADDRESS CUDA_ERROR_INVALID_ADDRESS_SPACE CUDA_ERROR_INVALID_PC CUDA_ERROR_LAUNCH_FAILED
    CUDA_ERROR_TENSOR_MEMORY_LEAK CUDA_ERROR_MPS_CLIENT_TERMINATED CUDA_ERROR_EXTERNAL_DEVICE CUDA_ERROR_UNKNOWN
    """.split()
)

# Results of loading a cubin that say something about the cubin, or about a driver too old for it.
REFUSED_IMAGE = frozenset(
    """
    CUDA_ERROR_INVALID_IMAGE CUDA_ERROR_NO_BINARY_FOR_GPU CUDA_ERROR_INVALID_SOURCE CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION CUDA_ERROR_NOT_FOUND CUDA_ERROR_INVALID_VALUE
    """.split()
)


class UnknownResult(Exception):
    """A call of the driver gave a result that the bindings have no name for: a newer driver's. The text is a line about it."""


def given(api: ModuleType, function: str, *arguments: Any) -> Any:
    """Calls a function of the driver and returns what it gives, its result first. Raises UnknownResult for one without a name.

    For that bindings raise KeyError of the number, or ValueError with the name of the results' enum. They raise ValueError for
    bad arguments too, which are a fault of the caller's and say nothing about the device: such an error goes through.
    """
    try:
        return getattr(api, function)(*arguments)
    except (KeyError, ValueError) as error:
        of_number = isinstance(error, KeyError) and isinstance(error.args[0], int)
        if not of_number and not str(error).endswith(" is not a valid CUresult"):
            raise
        raise UnknownResult(f"{function}: a result that this cuda-bindings does not know ({error})") from None


def described(api: ModuleType, function: str, result: Any) -> tuple[str, str]:
    """The driver's name of a result, and a line about it. Results newer than the bindings have a number for a name."""
    name = getattr(result, "name", f"result {result}")
    text = (api.cuGetErrorString(result)[1] or b"no text").decode(errors="replace")
    return name, f"{function}: {name}: {text}"
