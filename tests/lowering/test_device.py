"""Device facts, against a driver made of plain functions; every way in which there can be no device."""

import enum
import importlib.util
import types

import pytest
import torch

from te_dynamo.lowering import device


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_UNKNOWN = 999


ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "L2_CACHE_SIZE": 62914560,
}


def fake_driver(**overrides):
    """A driver of two H200s; each override replaces one call's result, or raises when it is an exception."""
    results = {
        "cuInit": (Status.CUDA_SUCCESS,),
        "cuDriverGetVersion": (Status.CUDA_SUCCESS, 13020),
        "cuDeviceGetCount": (Status.CUDA_SUCCESS, 2),
        "cuDeviceGetName": (Status.CUDA_SUCCESS, b"NVIDIA H200\0\0\0"),
        "cuDeviceTotalMem": (Status.CUDA_SUCCESS, 150 * 2**30),
        "cuGetErrorString": (Status.CUDA_SUCCESS, b"what it means"),
        **overrides,
    }

    def call(name):
        def run(*_):
            if isinstance(results[name], Exception):
                raise results[name]
            return results[name]

        return run

    driver = types.SimpleNamespace(**{name: call(name) for name in results})
    driver.cuDeviceGet = lambda index: (Status.CUDA_SUCCESS, index)
    driver.cuDeviceGetAttribute = lambda kind, _: (Status.CUDA_SUCCESS, ATTRIBUTES[kind])
    driver.CUdevice_attribute = types.SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in ATTRIBUTES})
    return driver


@pytest.fixture
def use(monkeypatch):
    def use(driver):
        device.read_device.cache_clear()
        monkeypatch.setattr(device, "_import_driver", lambda: driver)

    yield use
    device.read_device.cache_clear()


def test_reads_every_fact(use):
    use(fake_driver())
    assert device.read_device(1) == device.DeviceInfo(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        multiprocessor_count=132,
        shared_memory_per_block_optin=232448,
        l2_cache_bytes=62914560,
        total_memory_bytes=150 * 2**30,
        driver_version="13.2",
        index=1,
    )
    assert device.read_device(1).arch == "sm_90"
    assert device.device_count() == 2


def test_is_read_once(use):
    use(fake_driver())
    first = device.read_device(0)
    device._import_driver = lambda: pytest.fail("read again")  # the fixture's monkeypatch puts it back
    assert device.read_device(0) is first


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"cuInit": RuntimeError('"cuda" is an NVIDIA driver library')},
            r"no NVIDIA driver library \(libcuda\)",
        ),
        ({"cuInit": ImportError("libcuda.so.1")}, r"no NVIDIA driver library \(libcuda\)"),
        ({"cuInit": RuntimeError('Function "cuInit" not found')}, "too old for cuda-python: it lacks cuInit"),
        (
            {"cuInit": (Status.CUDA_ERROR_NO_DEVICE,)},
            r"CUDA_ERROR_NO_DEVICE \(100\): what it means; .*VISIBLE_DEVICES",
        ),
        (
            {"cuInit": (Status.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)},
            r"SYSTEM_DRIVER_MISMATCH \(803\).*update the driver",
        ),
        ({"cuDeviceGetCount": (Status.CUDA_SUCCESS, 0)}, "no CUDA device; .*CUDA_VISIBLE_DEVICES"),
        (
            {"cuDeviceGetName": (Status.CUDA_ERROR_UNKNOWN, b"")},
            r"cuDeviceGetName failed with CUDA_ERROR_UNKNOWN \(999\)",
        ),
        (
            {"cuDeviceTotalMem": (Status.CUDA_ERROR_UNKNOWN, 0), "cuGetErrorString": RuntimeError("gone")},
            r"cuDeviceTotalMem failed with CUDA_ERROR_UNKNOWN \(999\)$",
        ),
    ],
)
def test_failures_say_what_is_wrong(use, overrides, message):
    use(fake_driver(**overrides))
    with pytest.raises(device.NoDeviceError, match=message):
        device.read_device(0)


@pytest.mark.parametrize("index", [-1, 2])
def test_bad_index_names_the_valid_range(use, index):
    use(fake_driver())
    with pytest.raises(device.NoDeviceError, match=f"no CUDA device {index}; valid: 0 to 1"):
        device.read_device(index)


def test_bad_index_with_one_device(use):
    use(fake_driver(cuDeviceGetCount=(Status.CUDA_SUCCESS, 1)))
    with pytest.raises(device.NoDeviceError, match=r"valid: 0$"):
        device.read_device(1)


def test_missing_cuda_python(monkeypatch):
    def missing():
        raise ImportError("No module named 'cuda'")

    device.read_device.cache_clear()
    monkeypatch.setattr(device, "_import_driver", missing)
    with pytest.raises(device.NoDeviceError, match=r"pip install cuda-python"):
        device.read_device(0)


@pytest.mark.skipif(
    torch.cuda.is_available() or not importlib.util.find_spec("cuda"), reason="needs cuda-python, no GPU"
)
def test_this_machine_without_a_driver():
    device.read_device.cache_clear()
    with pytest.raises(device.NoDeviceError, match=r"te_dynamo: .*(driver|device)"):
        device.read_device(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_agrees_with_torch():
    info, properties = device.read_device(0), torch.cuda.get_device_properties(0)
    assert info.compute_capability == (properties.major, properties.minor)
    assert info.multiprocessor_count == properties.multi_processor_count
    assert info.total_memory_bytes == properties.total_memory
    assert info.name == properties.name
