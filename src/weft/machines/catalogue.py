"""Accelerators by name, with the host that each usually comes in, and instance types of three clouds.

Peak rates are dense, without sparsity; links are one direction of one accelerator. Where figures come from:

    peak rates            the makers' data sheets, as PyTorch (torch/_inductor/analysis/device_info.py) and Lightning
                          (fabric/utilities/throughput.py) cite them. B200, and those from RTX3090 on: from no source
                          that was read; MI250 is one of the two dies of a card, as programs see it
    memory, bandwidth     A100-80, H100: the same. Others: from no source that was read
    links inside          rings of NCCL that were measured: vTrain's tables for V100 and A100 (79 us for 14 steps of 8
                          ranks; 136 and 227 GB/s), NVIDIA's dgxc-benchmarking for H100 (45 us, 480 GB/s). H200: as
                          H100. All others: assumed
    network               80 % of a line of 200 Gbit/s (A100) or 400 Gbit/s (H100, H200, B200) for each accelerator.
                          Others: assumed
    instance types        lines of p4d and p3dn: NVIDIA/nccl, issues 527 and 235. The rest, and the hosts' memory, from
                          no source that was read
    disks inside          Amazon: the instance types' pages; what they give is published for p4d (16 GB/s from 8) and
                          assumed to be as much for each disk of others. Google: 375 GB each, 2.65 GB/s from 8 and 6.24
                          GB/s from 16 ("Local SSD performance"); 32 are assumed to give twice that. Azure, and types
                          whose disks are optional: not here
    shares, conduct       fitted to published steps for A100, H100 and the H100 of 96 GB at 500 W, on five rows each
                          (`benchmarks/plan`); the others borrow them, as their `assumed` says

Prices are not here: they change, and depend on the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from weft.errors import ConfigError
from weft.machines.accelerator import Accelerator
from weft.machines.host import Conduct, Host
from weft.topology.cluster import Link
from weft.untrusted import shown_text, whole

GB, TFLOPS = 10**9, 1e12

_AMPERE = Accelerator(
    "A100-80", 80 * GB, 2.039e12,
    {"fp32": 19.5 * TFLOPS, "tf32": 156 * TFLOPS, "fp16": 312 * TFLOPS, "bf16": 312 * TFLOPS},
    {"fp32": 0.8, "tf32": 0.83, "fp16": 0.83, "bf16": 0.83}, 1.9e9, 0.615, 0.173,
)  # fmt: skip
_HOPPER = Accelerator(
    "H100", 80 * GB, 3.35e12,
    {"fp32": 67 * TFLOPS, "tf32": 494 * TFLOPS, "fp16": 989 * TFLOPS, "bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS},
    {"fp32": 0.7, "tf32": 0.68, "fp16": 0.68, "bf16": 0.68, "fp8": 0.59}, 3.85e9, 0.65, 0.39,
)  # fmt: skip
_VOLTA = Accelerator(
    "V100-32", 32 * GB, 0.9e12,
    {"fp32": 15.7 * TFLOPS, "fp16": 125 * TFLOPS}, {"fp32": 0.8, "fp16": 0.7}, 1.5e9, 0.62, 0.17,
    "shares near those of A100",
)  # fmt: skip
_ADA_PEAK = {
    "fp32": 30.3 * TFLOPS, "tf32": 60 * TFLOPS, "fp16": 121 * TFLOPS, "bf16": 121 * TFLOPS, "fp8": 242 * TFLOPS,
}  # fmt: skip
_BLACKWELL_PEAK = {
    "fp32": 75 * TFLOPS, "tf32": 1125 * TFLOPS, "fp16": 2250 * TFLOPS, "bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS,
}  # fmt: skip

ACCELERATORS: Mapping[str, Accelerator] = {
    device.name: device
    for device in (
        replace(_VOLTA, name="V100-16", memory_bytes=16 * GB),
        _VOLTA,
        replace(_AMPERE, name="A100-40", memory_bytes=40 * GB, bytes_per_s=1.555e12),
        _AMPERE,
        _HOPPER,
        replace(
            _HOPPER, name="H100-96-500W", memory_bytes=96 * GB,
            share={"fp32": 0.5, "tf32": 0.5, "fp16": 0.5, "bf16": 0.5, "fp8": 0.41},
            memory_share=0.33, attention_share=0.24,
        ),
        replace(_HOPPER, name="H200", memory_bytes=141 * GB, bytes_per_s=4.8e12, assumed="shares of H100"),
        replace(
            _HOPPER, name="B200", memory_bytes=180 * GB, bytes_per_s=8.0e12, peak=_BLACKWELL_PEAK, half_flops=8.7e9,
            assumed="shares of H100",
        ),
        Accelerator(
            "L4", 24 * GB, 0.3e12, _ADA_PEAK,
            {"fp32": 0.6, "tf32": 0.6, "fp16": 0.6, "bf16": 0.6, "fp8": 0.5}, 0.7e9, 0.62, 0.17, "all shares",
        ),
        Accelerator(
            "T4", 16 * GB, 0.32e12,
            {"fp32": 8.1 * TFLOPS, "fp16": 65 * TFLOPS}, {"fp32": 0.6, "fp16": 0.5}, 0.4e9, 0.62, 0.17, "all shares",
        ),
        *(
            Accelerator(name, size * GB, rate, {dtype: flops * TFLOPS for dtype, flops in peak.items()},
                        {dtype: 0.5 if dtype == "fp8" else 0.6 for dtype in peak}, half, 0.62, 0.17,
                        "peak rates and all shares")
            for name, size, rate, half, peak in (
                ("RTX3090", 24, 0.936e12, 0.7e9, {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71}),
                ("RTX4090", 24, 1.008e12, 1e9, {"fp32": 82.6, "tf32": 82.6, "fp16": 165, "bf16": 165, "fp8": 330}),
                ("RTX5090", 32, 1.792e12, 1.2e9, {"fp32": 105, "tf32": 105, "fp16": 210, "bf16": 210, "fp8": 419}),
                ("A6000", 48, 0.768e12, 1e9, {"fp32": 38.7, "tf32": 77.4, "fp16": 155, "bf16": 155}),
                ("A10G", 24, 0.6e12, 0.7e9, {"fp32": 35, "tf32": 35, "fp16": 70, "bf16": 70}),
                ("L40S", 48, 0.864e12, 1.5e9, {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733}),
                ("MI250", 64, 1.6e12, 1.5e9, {"fp32": 45, "fp16": 181, "bf16": 181}),
                ("MI300X", 192, 5.3e12, 4e9, {"fp32": 163, "tf32": 654, "fp16": 1307, "bf16": 1307, "fp8": 2615}),
                ("GB200", 186, 8.0e12, 8.7e9, {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000}),
            )
        ),
    )
}  # fmt: skip
"""By name; `cpu:CORES` is another one, see `cpu`."""
_ON_AMPERE = Conduct(tensor=0.0, data=0.0, parameters=0.5, ring=0.32, crossing_s=1.1e-4)
_ON_HOPPER = Conduct(tensor=0.46, data=0.8, parameters=0.7, ring=0.6, crossing_s=4.6e-5, spread=0.0031)
_PLAIN = Conduct(tensor=0.0, data=0.5, parameters=0.5, ring=0.32, crossing_s=1.1e-4)

_HOSTS: Mapping[str, tuple[Link, Link, Conduct]] = {
    "V100-16": (Link(5.6e-6, 136e9), Link(2e-5, 2.5e9), _PLAIN),
    "V100-32": (Link(5.6e-6, 136e9), Link(2e-5, 10e9), _PLAIN),
    "A100-40": (Link(5.6e-6, 230e9), Link(1e-5, 20e9), _ON_AMPERE),
    "A100-80": (Link(5.6e-6, 230e9), Link(1e-5, 20e9), _ON_AMPERE),
    "H100": (Link(3.2e-6, 480e9), Link(1e-5, 40e9), _ON_HOPPER),
    "H100-96-500W": (Link(3.2e-6, 480e9), Link(1e-5, 40e9), replace(_ON_HOPPER, tensor=0.0)),
    "H200": (Link(3.2e-6, 480e9), Link(1e-5, 40e9), _ON_HOPPER),
    "B200": (Link(3.2e-6, 900e9), Link(1e-5, 40e9), _ON_HOPPER),
    "L4": (Link(2e-5, 12e9), Link(2e-5, 1.25e9), _PLAIN),
    "T4": (Link(2e-5, 6e9), Link(2e-5, 1.25e9), _PLAIN),
    "RTX3090": (Link(2e-5, 12e9), Link(2e-5, 1.25e9), _PLAIN),
    "RTX4090": (Link(2e-5, 12e9), Link(2e-5, 1.25e9), _PLAIN),
    "RTX5090": (Link(2e-5, 24e9), Link(2e-5, 1.25e9), _PLAIN),
    "A6000": (Link(2e-5, 12e9), Link(2e-5, 2.5e9), _PLAIN),
    "A10G": (Link(2e-5, 12e9), Link(2e-5, 1.5e9), _PLAIN),
    "L40S": (Link(2e-5, 12e9), Link(2e-5, 12.5e9), _PLAIN),
    "MI250": (Link(1e-5, 100e9), Link(1e-5, 12.5e9), _PLAIN),
    "MI300X": (Link(1e-5, 300e9), Link(1e-5, 40e9), _PLAIN),
    "GB200": (Link(3.2e-6, 900e9), Link(1e-5, 40e9), _ON_HOPPER),
}
"""Inside and network, both for one accelerator, and conduct. Where each link comes from is said above."""


def cpu(cores: int) -> Host:
    """A host whose accelerator are the cores of its processors.

    A core is taken to have two units of 8 numbers for multiply-and-add at 3 GHz (96 GFLOP/s in 32 bits), half of it
    reached, and 8 GB/s of memory; what a real one does is measured.

    >>> cpu(4).accelerator.name, cpu(4).accelerator.rate("fp32")
    ('cpu:4', 192000000000.0)
    """
    device = Accelerator(
        f"cpu:{cores}", 4 * GB * cores, 8e9 * cores, {"fp32": 96e9 * cores}, {"fp32": 0.5}, 1e6, 0.7, 0.25,
        "all shares",
    )  # fmt: skip
    return Host(device.name, device, 1, Link(5e-6, 8e9), Link(5e-5, 1.25e9), conduct=_PLAIN)


def host_of(name: str, accelerators: int = 8) -> Host:
    """The usual host of an accelerator.

    Raises:
        ConfigError: There is no accelerator of that name.

    >>> host_of("H100").network.bytes_per_s, host_of("cpu:16", 2).accelerators
    (40000000000.0, 2)
    """
    kind, colon, cores = name.partition(":")
    if colon and kind.lower() == "cpu" and (count := whole(cores, 4096)):
        return replace(cpu(count), accelerators=accelerators)
    known = {key.lower(): key for key in ACCELERATORS}
    known |= {"a100": "A100-80", "v100": "V100-32", "h100-80": "H100", "rtxa6000": "A6000", "mi300": "MI300X"}
    key = known.get(name.lower().replace(" ", "").removesuffix("gb"))
    if key is None:
        raise ConfigError(
            f'there is no accelerator "{shown_text(name)}": write one of {", ".join(ACCELERATORS)}, cpu:CORES, an '
            "instance type, or the path of a machine file (.json)"
        )
    inside, network, conduct = _HOSTS[key]
    return Host(key, ACCELERATORS[key], accelerators, inside, network, conduct=conduct)


def not_fitted(device: Accelerator, dtype: str) -> str:
    """The parts of an accelerator that are assumed, not fitted to published steps and not measured; empty if none is.

    >>> not_fitted(ACCELERATORS["H200"], "bf16"), not_fitted(ACCELERATORS["H100"], "bf16")
    ('shares of H100', '')
    >>> not_fitted(ACCELERATORS["H100"], "tf32")
    'the share of products in tf32'
    """
    wide = f"the share of products in {dtype}" if dtype in ("fp32", "tf32") else ""
    return device.assumed or (wide if device.name in ACCELERATORS else "")


class Disks(NamedTuple):
    """Disks inside of a host: how many, what each holds, what all give, and whether that is assumed."""

    number: int = 0
    each_bytes: int = 0
    bytes_per_s: float = 0.0
    assumed: bool = False


_NO_DISKS = Disks()


def _nvme(count: int, gigabytes: int) -> Disks:
    """Amazon's, each as quick as those of p4d."""
    return Disks(count, gigabytes * GB, count * 2e9, assumed=True)


def _local_ssd(count: int, rate: float, assumed: bool = False) -> Disks:
    """Google's."""
    return Disks(count, 375 * GB, rate * 1e9, assumed)


def _instance(
    gib: int, gbit: float, accelerators: int, device: str, disks: Disks = _NO_DISKS
) -> Callable[[str], Host]:
    """An instance type: the network's line rate, of which 80 % are taken to be reached, shared by its accelerators."""

    def made(name: str) -> Host:
        usual = host_of(device, accelerators)
        network = replace(usual.network, bytes_per_s=0.8 * gbit * 1e9 / 8 / accelerators)
        return replace(
            usual, name=name, network=network, memory_bytes=gib * 2**30, storage_bytes_per_s=disks.bytes_per_s,
            storage_bytes=disks.number * disks.each_bytes, storage_assumed="rate of its disks" if disks.assumed else "",
        )  # fmt: skip

    return made


INSTANCES: Mapping[str, Callable[[str], Host]] = {
    # Amazon EC2
    "p3.16xlarge": _instance(488, 25, 8, "V100-16"),
    "p3dn.24xlarge": _instance(768, 100, 8, "V100-32", _nvme(2, 900)),
    "p4d.24xlarge": _instance(1152, 400, 8, "A100-40", Disks(8, 1000 * GB, 16e9)),
    "p4de.24xlarge": _instance(1152, 400, 8, "A100-80", _nvme(8, 1000)),
    "p5.48xlarge": _instance(2048, 3200, 8, "H100", _nvme(8, 3840)),
    "p5en.48xlarge": _instance(2048, 3200, 8, "H200", _nvme(8, 3840)),
    "p6-b200.48xlarge": _instance(2048, 3200, 8, "B200", _nvme(8, 3840)),
    "g4dn.12xlarge": _instance(192, 50, 4, "T4", _nvme(1, 900)),
    "g6.12xlarge": _instance(192, 40, 4, "L4", _nvme(4, 940)),
    "g6.48xlarge": _instance(768, 100, 8, "L4", _nvme(8, 940)),
    # Google Cloud
    "a2-highgpu-8g": _instance(680, 100, 8, "A100-40"),
    "a2-ultragpu-8g": _instance(1360, 100, 8, "A100-80", _local_ssd(8, 2.65)),
    "a3-highgpu-8g": _instance(1872, 800, 8, "H100", _local_ssd(16, 6.24)),
    "a3-megagpu-8g": _instance(1872, 1600, 8, "H100", _local_ssd(16, 6.24)),
    "a3-ultragpu-8g": _instance(2952, 3200, 8, "H200", _local_ssd(32, 12.48, assumed=True)),
    "a4-highgpu-8g": _instance(3968, 3200, 8, "B200", _local_ssd(32, 12.48, assumed=True)),
    "g2-standard-48": _instance(192, 50, 4, "L4"),
    "g2-standard-96": _instance(384, 100, 8, "L4"),
    # Microsoft Azure
    "nd40rs_v2": _instance(672, 100, 8, "V100-32"),
    "nd96asr_v4": _instance(900, 1600, 8, "A100-40"),
    "nd96amsr_a100_v4": _instance(1900, 1600, 8, "A100-80"),
    "nd96isr_h100_v5": _instance(1900, 3200, 8, "H100"),
    "nd96isr_h200_v5": _instance(1850, 3200, 8, "H200"),
}
"""By name, in small letters; Azure's without `Standard_`."""
