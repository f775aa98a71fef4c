"""Facts about a CUDA device, read from the driver through cuda-python: no torch.cuda, no context."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from te_dynamo.errors import NoDeviceError

_CHECK_DEVICE = "check that one is installed and that CUDA_VISIBLE_DEVICES does not hide it"


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """One CUDA device.

    index:                          its number under CUDA_VISIBLE_DEVICES, as torch counts.
    compute_capability:             (major, minor); (9, 0) is Hopper.
    multiprocessor_count:           programs of a persistent kernel.
    shared_memory_per_block_optin:  bytes one block may ask for.
    l2_cache_bytes, total_memory_bytes: bytes.
    driver_version:                 the newest CUDA the driver supports, "13.0".
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessor_count: int
    shared_memory_per_block_optin: int
    l2_cache_bytes: int
    total_memory_bytes: int
    driver_version: str
    index: int

    @property
    def arch(self) -> str:
        """The compute capability as compilers write it: "sm_90"."""
        return "sm_{}{}".format(*self.compute_capability)


@functools.cache
def read_device(index: int = 0) -> DeviceInfo:
    """Describes device `index`; read once a process. A failure is not remembered.

    Raises NoDeviceError when cuda-python is missing, when there is no driver library, when the driver is too
    old or fails to start, when there is no device, and for an index out of range (naming the valid ones).
    """
    driver = _started_driver()
    count = _count(driver)
    if not 0 <= index < count:
        valid = "0" if count == 1 else f"0 to {count - 1}"
        raise NoDeviceError(f"te_dynamo: there is no CUDA device {index}; valid: {valid}")
    device = _call(driver, "cuDeviceGet", index)

    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", kind, device))

    name = _call(driver, "cuDeviceGetName", 256, device)
    return DeviceInfo(
        name=name.split(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        multiprocessor_count=attribute("MULTIPROCESSOR_COUNT"),
        shared_memory_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_cache_bytes=attribute("L2_CACHE_SIZE"),
        total_memory_bytes=int(_call(driver, "cuDeviceTotalMem", device)),
        driver_version=_version(_call(driver, "cuDriverGetVersion")),
        index=index,
    )


def device_count() -> int:
    """The number of CUDA devices, at least 1. Raises NoDeviceError like `read_device`."""
    return _count(_started_driver())


def _count(driver: Any) -> int:
    count = int(_call(driver, "cuDeviceGetCount"))
    if count == 0:
        raise NoDeviceError(f"te_dynamo: the driver reports no CUDA device; {_CHECK_DEVICE}")
    return count


def _import_driver() -> Any:
    from cuda.bindings import driver

    return driver


def _started_driver() -> Any:
    try:
        driver = _import_driver()
    except ImportError as error:
        raise NoDeviceError(
            f"te_dynamo: cuda-python cannot be imported ({error}); install it with `pip install cuda-python`"
        ) from error
    _call(driver, "cuInit", 0)
    return driver


def _call(driver: Any, name: str, *args: Any) -> Any:
    """The value of a driver call; cuda-bindings returns (status, value) and raises for a missing library."""
    try:
        status, *values = getattr(driver, name)(*args)
    except (RuntimeError, ImportError, OSError) as error:  # the library is loaded at the first call
        raise NoDeviceError(_unloadable(name, error)) from error
    if int(status) != 0:
        raise NoDeviceError(_failed(driver, name, status))
    return values[0] if values else None


def _unloadable(name: str, error: Exception) -> str:
    if "not found" in str(error).lower() and f'"{name}"' in str(error):
        problem = f"the installed NVIDIA driver is too old for cuda-python: it lacks {name}; update the driver"
    else:
        problem = "there is no NVIDIA driver library (libcuda) here; install the driver, or run on the CPU"
    return f"te_dynamo: {problem} ({error})"


def _failed(driver: Any, name: str, status: Any) -> str:
    code = int(status)
    label = getattr(status, "name", str(code))
    meaning = ""
    try:
        problem, text = driver.cuGetErrorString(status)
        meaning = text.decode() if int(problem) == 0 and text else ""
    except RuntimeError:
        pass  # the code's name has to do
    text = f"te_dynamo: {name} failed with {label} ({code}){': ' + meaning if meaning else ''}"
    if label == "CUDA_ERROR_NO_DEVICE":
        return f"{text}; {_CHECK_DEVICE}"
    if label in (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "CUDA_ERROR_STUB_LIBRARY",
    ):
        return f"{text}; the library is too old, a stub or not the kernel driver's: update the driver"
    return text


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
