# SPDX-License-Identifier: MIT
"""Detection on a host without accelerators and with a driver library that is made up."""

import sys
from types import SimpleNamespace

import psutil
import pytest

from tilescale.errors import UnknownMachineError
from tilescale.hda import Machine, nvml

GIB = 2**30


class NVMLError(Exception):
    pass


def fake_nvml(name, count, *, memory=143771 * 2**20, capability=(9, 0), cores=16896, links=None):
    """A driver library with `count` GPUs; `links(gpu, link)` is "switch", a peer's number or None for a dead link."""

    def link_of(gpu, link):
        peer = links(gpu, link) if links else "switch"
        if peer is None:
            raise NVMLError
        return peer

    def core_count(gpu):
        if cores is None:
            raise NVMLError
        return cores

    def bus(gpu):
        return SimpleNamespace(busId=f"0000:{gpu:02X}:00.0".encode())

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_FEATURE_ENABLED=1,
        NVML_NVLINK_DEVICE_TYPE_GPU=0,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.65.06",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetPciInfo=bus,
        nvmlDeviceGetName=lambda gpu: name,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=memory),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: capability,
        nvmlDeviceGetNumGpuCores=core_count,
        nvmlDeviceGetNvLinkState=lambda gpu, link: 1 if link_of(gpu, link) != "down" else 0,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda gpu, link: 2 if link_of(gpu, link) == "switch" else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda gpu, link: bus(link_of(gpu, link)),
    )


@pytest.fixture
def driver(monkeypatch):
    def install(*args, **kwargs):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*args, **kwargs))

    return install


def test_the_very_machine_keeps_its_name(driver):
    driver("NVIDIA H200", 8)
    assert Machine.detect() is Machine.load("h200-sxm-8")


def test_fewer_devices_and_links(driver):
    driver(b"NVIDIA H200", 4, links=lambda gpu, link: "switch" if link < 9 else "down")
    machine = Machine.detect()
    assert machine.name == "h200-sxm-8 (detected)" and machine.title == "4 x NVIDIA H200"
    assert machine.count("device") == 4 and machine.network("device").bandwidth == pytest.approx(225e9)
    assert machine.network("device").mechanism("tma").put == pytest.approx(180e9)


def test_no_links(driver):
    driver("NVIDIA H100 80GB HBM3", 2, memory=81559 * 2**20, links=lambda gpu, link: None)
    machine = Machine.detect()
    assert machine.network("device").name == "pcie" and machine.layer("l2").title == "HBM3"


def test_links_from_device_to_device(driver):
    # Four GPUs without a switch: four links to each peer.
    driver("NVIDIA A100-SXM4-80GB", 4, memory=80 * GIB, capability=(8, 0), cores=6912,
           links=lambda gpu, link: (gpu + 1 + link // 4) % 4 if link < 12 else None)  # fmt: skip
    machine = Machine.detect()
    assert machine.network("device").topology == "graph"
    assert machine.path("device", 0, 3).bandwidth == pytest.approx(100e9)
    assert machine.path("device", 2, 0).hops[0].target == ("device", 0)
    assert machine.count("block", "device") == 108


def test_the_longest_product_name_wins(driver):
    driver("NVIDIA GB200", 4, memory=189471 * 2**20, capability=(10, 0), cores=152 * 128)
    machine = Machine.detect()
    # Other trays are not seen from this one.
    assert machine.name == "gb200-nvl72 (detected)" and machine.count("device") == 4


def test_an_unknown_product_of_a_known_architecture(driver):
    driver("NVIDIA H800 Mini", 1, memory=40 * GIB, cores=100 * 128, links=lambda gpu, link: None)
    machine = Machine.detect()
    assert machine.count("block", "device") == 100 and machine.layer("l2").capacity == 40 * GIB
    driver("NVIDIA H800 Mini", 1, memory=40 * GIB, cores=None)
    assert Machine.detect().count("block", "device") == 132


def test_an_unknown_architecture(driver):
    driver("Tesla K80", 1, capability=(3, 7))
    with pytest.raises(UnknownMachineError, match=r"Tesla K80 \(compute capability 3.7\)"):
        Machine.detect()


@pytest.mark.parametrize("case", ["no library", "no driver", "no device"])
def test_a_host_without_accelerators(monkeypatch, driver, case):
    driver("none", 0)
    if case == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    if case == "no driver":
        monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", lambda: (_ for _ in ()).throw(NVMLError()))
    assert nvml.accelerators() == () and nvml.driver() == (None if case != "no device" else ("580.65.06", "13.1"))
    machine = Machine.detect()
    assert machine.tensor_level.name == "socket" and machine.count("core") >= 1
    assert machine.layer_for("global").capacity * machine.count("socket") == pytest.approx(
        psutil.virtual_memory().total, rel=1e-6
    )


def test_processors_are_counted(monkeypatch, driver, tmp_path):
    driver("none", 0)
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr("tilescale.hda.detect.PACKAGES", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(max=3000.0))
    machine = Machine.detect()
    assert machine.count("socket") == 2 and machine.count("core", "socket") == 32
    assert machine.rate("core", "vector", "float32") == pytest.approx(64 * 3e9)
