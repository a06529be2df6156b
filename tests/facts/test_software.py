"""Installed software is read from files; nothing of it is imported or run."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from zerogap.errors import UsageError
from zerogap.facts import collect, elf
from zerogap.facts.software import software_facts


def _venv(root: Path, version: str = "3.12") -> Path:
    site = root / "lib" / f"python{version}" / "site-packages"
    site.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin" / "python").write_text("#!/bin/sh\ntouch RAN\n")
    (root / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}.3\n")
    return site


def _install(site: Path, name: str, version: str, *requires: str, folder: str | None = None) -> Path:
    info = site / (folder or f"{name.replace('-', '_')}-{version}.dist-info")
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {item}" for item in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n\nlong text\nName: other\n")
    return info


def test_an_environment(tmp_path: Path) -> None:
    site = _venv(tmp_path)
    _install(site, "torch", "2.8.0+cu128")
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(
        "__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    _install(site, "sglang", "0.5.16")
    (site / "sglang" / "srt" / "true_on_policy").mkdir(parents=True)
    _install(site, "sglang-kernel", "0.4.4", "torch==2.11.0 ; python_version > '3.8'")
    (site / "sgl_kernel").mkdir()
    (site / "sgl_kernel" / "flash_ops.abi3.so").write_bytes(b"no ELF file")
    _install(site, "flash_attn_3", "3.0.0")
    _install(site, "flash-attn", "2.8.3")
    _install(site, "triton", "3.4.0")
    tools = site / "triton" / "backends" / "nvidia" / "bin"
    tools.mkdir(parents=True)
    (tools / "ptxas").write_bytes(b"\x7fELF\0sm_80\0sm_90a\0xsm_100\0sm_120\0")
    (site / "deep_gemm").mkdir()
    (site / "deep_gemm" / "__init__.py").write_text("raise SystemExit('imported')")
    facts = software_facts(tmp_path / "bin" / "python")
    got = {
        name: facts[f"software.{name}"].value
        for name in (
            "python",
            "torch",
            "torch_cuda",
            "sglang",
            "sglang_true_on_policy",
            "sgl_kernel",
            "sgl_kernel_fa3",
            "sgl_kernel_needs_torch",
            "flash_attn_3",
            "flash_attn_2",
            "flash_attn_4",
            "vllm",
            "triton_archs",
            "deep_gemm",
            "slime_topp_patch",
        )
    }
    assert got == {
        "python": "3.12.3",
        "torch": "2.8.0+cu128",
        "torch_cuda": "12.8",
        "sglang": "0.5.16",
        "sglang_true_on_policy": True,
        "sgl_kernel": "0.4.4",
        "sgl_kernel_fa3": True,
        "sgl_kernel_needs_torch": "==2.11.0",
        "flash_attn_3": "3.0.0",
        "flash_attn_2": "2.8.3",
        "flash_attn_4": "absent",
        "vllm": "absent",
        "triton_archs": ("sm_80", "sm_90a", "sm_120"),
        "deep_gemm": "0",
        "slime_topp_patch": False,
    }
    assert "sm_120" in facts["software.torch_archs"].value  # type: ignore[operator]
    assert facts["software.sglang"].source.endswith("sglang-0.5.16.dist-info")
    assert not (tmp_path / "RAN").exists()


def test_torch_builds_of_the_table(tmp_path: Path) -> None:
    site = _venv(tmp_path)
    _install(site, "torch", "2.11.0+cu130")
    facts = software_facts(tmp_path / "bin" / "python")
    assert "sm_120" in facts["software.torch_archs"].value  # type: ignore[operator]
    assert "manywheel" in facts["software.torch_archs"].source


def test_a_torch_build_that_is_in_no_table_is_unknown(tmp_path: Path) -> None:
    site = _venv(tmp_path)
    _install(site, "torch", "9.9.0+cu990")
    facts = software_facts(tmp_path / "bin" / "python")
    assert facts["software.torch_cuda"].value == "99.0"
    assert "software.torch_archs" not in facts


def test_an_old_flash_attention_3_egg(tmp_path: Path) -> None:
    site = _venv(tmp_path)
    egg = site / "flash_attn-3.0.0b1-py3.12-linux-x86_64.egg" / "EGG-INFO"
    egg.mkdir(parents=True)
    (egg / "PKG-INFO").write_text("Name: flash-attn\nVersion: 3.0.0b1\n")
    _install(site, "flash-attn", "2.7.0")
    facts = software_facts(tmp_path / "bin" / "python")
    assert facts["software.flash_attn_3"].value == "3.0.0b1"
    assert "flash_attn-3.0.0b1" in facts["software.flash_attn_3"].source
    assert facts["software.flash_attn_2"].value == "2.7.0"
    assert len(facts["software.flash_attn_paths"].value) == 2  # type: ignore[arg-type]


def test_an_editable_install(tmp_path: Path) -> None:
    site = _venv(tmp_path / "venv")
    source = tmp_path / "source" / "python"
    (source / "sglang" / "srt" / "true_on_policy").mkdir(parents=True)
    info = _install(site, "sglang", "0.5.16.dev3")
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{source}", "dir_info": {"editable": True}}))
    assert software_facts(tmp_path / "venv" / "bin" / "python")["software.sglang_true_on_policy"].value is True


def test_damaged_metadata_is_no_reason_to_stop(tmp_path: Path) -> None:
    site = _venv(tmp_path)
    (site / "torch-2.11.0.dist-info").mkdir()
    info = site / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"\xff\xfe\0\0")
    (info / "direct_url.json").write_text("[1, 2")
    facts = software_facts(tmp_path / "bin" / "python")
    assert facts["software.torch"].value == "2.11.0"
    assert facts["software.vllm"].value == "0.32.0"


@pytest.mark.parametrize("what", ["missing", "no environment"])
def test_a_python_that_is_none(tmp_path: Path, what: str) -> None:
    python = tmp_path / "bin" / "python"
    if what == "no environment":
        python.parent.mkdir()
        python.write_text("")
    with pytest.raises(UsageError, match="--python"):
        software_facts(python)


def test_this_environment() -> None:
    facts = software_facts()
    assert facts["software.python"].value == sys.version.split()[0]
    assert facts["software.zerogap"].value != "absent"


def _elf(path: Path, needed: list[str]) -> None:
    """Write the smallest 64-bit ELF file with these needed libraries."""
    strings = b"\0" + b"\0".join(name.encode() for name in needed) + b"\0"
    offsets = [1 + sum(len(name) + 1 for name in needed[:index]) for index in range(len(needed))]
    header, programs = 64, 2 * 56
    at = header + programs
    dynamic = b"".join(struct.pack("<qQ", 1, offset) for offset in offsets)
    dynamic_at = at + len(strings)
    dynamic += struct.pack("<qQ", 5, at) + struct.pack("<qQ", 0, 0)
    total = dynamic_at + len(dynamic)
    head = (
        b"\x7fELF\x02\x01" + b"\0" * 10 + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, header, 0, 0, 64, 56, 2, 0, 0, 0)
    )
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, total, total, 4096)
    dyn = struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, 0, len(dynamic), len(dynamic), 8)
    path.write_bytes(head + load + dyn + strings + dynamic)


def test_needed_libraries(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    _elf(file, ["libnvrtc.so.12", "libc.so.6"])
    assert elf.needed(file) == ("libnvrtc.so.12", "libc.so.6")
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        elf.needed(file)  # a damaged file gives None or fewer names, never an exception
    file.write_bytes(b"\x7fELF\x02\x01" + b"\xff" * 200)
    assert elf.needed(file) in (None, ())


def test_a_missing_cuda_library_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = _venv(tmp_path)
    _install(site, "sgl-kernel", "0.3.0")
    (site / "sgl_kernel").mkdir()
    _elf(site / "sgl_kernel" / "common_ops.abi3.so", ["libnvrtc.so.12", "libc10.so", "libcudart.so.13"])
    (site / "nvidia" / "cuda_runtime" / "lib").mkdir(parents=True)
    (site / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.13").write_text("")
    monkeypatch.setattr(elf, "_system_folders", lambda: ())
    facts = software_facts(tmp_path / "bin" / "python")
    assert facts["software.missing_libraries"].value == ("libnvrtc.so.12<-sgl_kernel/common_ops.abi3.so",)
    assert facts["software.libraries"].value == ("libcudart.so.13",)


def test_kernels_by_cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = _venv(tmp_path)
    _install(site, "sgl-kernel", "0.4.5")
    (site / "sgl_kernel").mkdir()
    (site / "sgl_kernel" / "flash_ops.abi3.so").write_text("")
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "cuobjdump"
    tool.write_text("#!/bin/sh\necho 'ELF file    1: x.1.sm_80.cubin'\necho 'ELF file    2: x.2.sm_90a.cubin'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    facts = collect.kernel_facts(tmp_path / "bin" / "python")
    assert facts["software.sgl_kernel_fa3_cubins"].value == ("sm_80", "sm_90a")
    assert "software.sgl_kernel_cubins" not in facts
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    facts = collect.kernel_facts(tmp_path / "bin" / "python")
    assert "CUDA toolkit" in facts.unknown["software.sgl_kernel_fa3_cubins"]
