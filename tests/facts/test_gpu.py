"""GPUs: the table of known ones, planning, and what drivers say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerogap.errors import UsageError
from zerogap.facts import gpu
from zerogap.facts.fact import EachOf

NAMES = {
    "A100": "8.0",
    "NVIDIA A100-SXM4-80GB": "8.0",
    "A10": "8.6",
    "NVIDIA A10G": "8.6",
    "L4": "8.9",
    "NVIDIA L40S": "8.9",
    "L40": "8.9",
    "RTX 3060": "8.6",
    "GeForce RTX 3090": "8.6",
    "RTX 4080 SUPER": "8.9",
    "rtx4090": "8.9",
    "RTX 5070 Ti": "12.0",
    "5090": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "12.0",
    "NVIDIA RTX 6000 Ada Generation": "8.9",
    "NVIDIA RTX A6000": "8.6",
    "H20": "9.0",
    "NVIDIA H20-3e": "9.0",
    "H100": "9.0",
    "NVIDIA H100 80GB HBM3": "9.0",
    "H100 NVL": "9.0",
    "H800": "9.0",
    "H200": "9.0",
    "NVIDIA GH200 480GB": "9.0",
    "B200": "10.0",
    "NVIDIA B300 SXM6 AC": "10.3",
    "GB200": "10.0",
    "GB300": "10.3",
    "NVIDIA GB10": "12.1",
    "DGX Spark": "12.1",
    "NVIDIA Thor": "11.0",
}
GFX = {"MI250X": "gfx90a", "AMD Instinct MI300X": "gfx942", "MI325X": "gfx942", "MI355X": "gfx950"}


@pytest.mark.parametrize(("name", "capability"), NAMES.items())
def test_known_nvidia_names(name: str, capability: str) -> None:
    found = gpu.find(name)
    assert found is not None
    assert (found.vendor, found.capability) == ("nvidia", capability)


@pytest.mark.parametrize(("name", "gfx"), GFX.items())
def test_known_amd_names(name: str, gfx: str) -> None:
    found = gpu.find(name)
    assert found is not None
    assert (found.vendor, found.gfx) == ("amd", gfx)


def test_every_row_finds_itself() -> None:
    for row in gpu.known_gpus():
        found = gpu.find(row.name)
        assert found is not None
        assert (found.capability, found.gfx) == (row.capability, row.gfx), row.name


@pytest.mark.parametrize(
    "name", ["H1000", "A1000", "RTX A1000", "H10", "GB100", "RTX 60900", "", "8x", "0xH100", "engine=", "x" * 200]
)
def test_an_unknown_name_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="--gpu"):
        gpu.plan(name)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'H100'"):
        gpu.plan("H10")


def test_planning() -> None:
    assert gpu.plan("8xH100")[2] == 8
    assert gpu.plan("engine=H20")[0] == ("engine",)
    assert (
        gpu.plan("sm_121")[1].capability
        == gpu.plan("12.1")[1].capability
        == gpu.plan("sm_121a")[1].capability
        == "12.1"
    )
    assert gpu.plan("gfx942")[1].gfx == "gfx942"
    facts = gpu.planned_facts(["engine=H20", "trainer=8xH100"])
    assert facts["gpu.engine.name"].value == "H20"
    assert facts["gpu.trainer.count"].value == 8
    assert all(fact.assumed for fact in facts.values())


def test_unequal_gpus_stand_side_by_side() -> None:
    facts = gpu.planned_facts(["H100", "RTX 4090"])
    assert facts["gpu.engine.capability"].value == EachOf(("9.0", "8.9"))


class _Nvml(SimpleNamespace):
    """NVML as a driver with these devices answers."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N818
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N818
        pass

    def __init__(self, devices: list[tuple[str, tuple[int, int], int | None, bool]]) -> None:
        super().__init__()
        self.devices = devices

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.devices[handle][0]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.devices[handle][1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self.devices[handle][2] is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=self.devices[handle][2] * 2**30)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return (int(self.devices[handle][3]), 0)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"


def test_nvml_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        _Nvml([("NVIDIA GB10", (12, 1), None, False), ("NVIDIA H100 80GB HBM3", (9, 0), 80, True)]),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = gpu.detected_facts()
    assert facts["gpu.engine.capability"].value == EachOf(("12.1", "9.0"))
    assert facts["gpu.engine.count"].value == 2
    assert facts["gpu.cuda_driver"].value == "13.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    facts = gpu.detected_facts()
    assert facts["gpu.engine.capability"].value == "12.1"
    assert facts["gpu.engine.unified_memory"].value is True
    assert facts["gpu.engine.memory_gib"].value == 128, "a GPU with unified memory reports none of its own"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11")
    facts = gpu.detected_facts()
    assert (facts["gpu.engine.capability"].value, facts["gpu.engine.mig"].value) == ("9.0", True)
    assert not any(fact.assumed for fact in facts.values())


def test_a_driver_that_cannot_be_read_is_unknown_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _Nvml([])
    error = _Nvml.NVMLError("Driver/library version mismatch")
    monkeypatch.setattr(broken, "nvmlInit", lambda: (_ for _ in ()).throw(error))
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    facts = gpu.detected_facts()
    assert "gpu.engine.capability" not in facts
    assert "nvidia-smi" in facts.unknown["gpu.engine.capability"]


def test_no_gpu_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    none = _Nvml([])
    monkeypatch.setattr(none, "nvmlInit", lambda: (_ for _ in ()).throw(_Nvml.NVMLError_LibraryNotFound()))
    monkeypatch.setitem(sys.modules, "pynvml", none)
    monkeypatch.setattr(gpu, "_amd", lambda: ([], ""))
    monkeypatch.setattr(gpu, "_apple", lambda: ([], ""))
    facts = gpu.detected_facts()
    assert facts["gpu.engine.vendor"].value == "none"
    assert facts["gpu.engine.count"].value == 0
    assert facts["gpu.engine.capability"].value == "absent"


def test_amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        AmdSmiException=RuntimeError,
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: [0],
        amdsmi_get_gpu_asic_info=lambda _: {
            "market_name": "AMD Instinct MI300X",
            "target_graphics_version": "gfx942",
        },
        amdsmi_get_gpu_vram_info=lambda _: {"vram_size": 196608},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    found, source = gpu._amd()
    assert (source, found) == ("amdsmi", [gpu.Gpu("AMD Instinct MI300X", "amd", gfx="gfx942", memory_gib=192.0)])


def test_amd_topology(tmp_path: Path) -> None:
    for index, version in enumerate((0, 90402, 90010)):
        node = tmp_path / str(index)
        (node / "mem_banks" / "0").mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
        (node / "mem_banks" / "0" / "properties").write_text(f"heap_type 1\nsize_in_bytes {192 * 2**30}\n")
    found, _ = gpu._amd(tmp_path)
    assert [item.gfx for item in found] == ["gfx942", "gfx90a"]
    assert found[0].memory_gib == 192
    (tmp_path / "1" / "properties").write_text("gfx_target_version many\n")
    assert [item.gfx for item in gpu._amd(tmp_path)[0]] == ["gfx90a"]
    assert gpu._amd(tmp_path / "nowhere") == ([], "")
