"""What a cluster's GPUs can do and how fast they talk, by kind.

In: the name of a GPU, a count, perhaps measured bandwidths. Out: a Cluster. All rates are one
direction, bytes a second and FLOP/s; the peaks are dense, as MFU counts (`trainer/flops.py`).

    inside a node (or NVLink domain)   nvlink: what one GPU sends to its peers together
    between nodes                      nic: a GPU's share of its node's adapters
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20
_GIGA = 1e9
_TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One kind."""

    name: str
    memory: int
    """Bytes that the driver shows."""
    peak: float
    """bf16 products, dense."""
    fp8_peak: float
    """fp8 products, dense; the bf16 peak where it has none."""
    float32_peak: float
    """Without TF32."""
    bandwidth: float
    """Of its memory."""
    nvlink: float
    """To peers of its node, or PCIe where it has no NVLink."""
    nic: float
    """What the usual node has for each GPU."""
    source: str


def _gpu(
    name: str, mib: int, peaks: tuple[float, float, float], rates: tuple[float, float, float],
    source: str,
) -> Gpu:  # fmt: skip
    half, eight, full = (one * _TERA for one in peaks)
    memory, nvlink, nic = (one * _GIGA for one in rates)
    return Gpu(name, mib * _MIB, half, eight, full, memory, nvlink, nic, source)


GPUS: dict[str, Gpu] = {
    one.name: one
    for one in (
        _gpu("v100", 32768, (125, 125, 15.7), (900, 150, 12.5),
             "NVIDIA V100 data sheet (SXM2 32 GB, fp16 products); 4 x 100 Gbit/s for 4 GPUs"),
        _gpu("v100-16", 16384, (125, 125, 15.7), (900, 150, 12.5),
             "NVIDIA V100 data sheet (SXM2 16 GB, fp16 products); 100 Gbit/s a GPU"),
        _gpu("a100", 81920, (312, 312, 19.5), (2039, 300, 25),
             "NVIDIA A100 data sheet (SXM 80 GB); DGX A100: 200 Gbit/s a GPU"),
        _gpu("a100-40", 40960, (312, 312, 19.5), (1555, 300, 25),
             "NVIDIA A100 data sheet (SXM 40 GB); DGX A100: 200 Gbit/s a GPU"),
        _gpu("l40s", 46068, (362, 733, 91.6), (864, 32, 12.5),
             "NVIDIA L40S data sheet; PCIe 4.0 x16, no NVLink; 100 Gbit/s a GPU assumed"),
        _gpu("h100", 81559, (989.5, 1979, 67), (3350, 450, 50),
             "NVIDIA H100 data sheet (SXM 80 GB); DGX H100: 400 Gbit/s a GPU"),
        _gpu("h100-96", 97871, (989.5, 1979, 67), (2400, 450, 50),
             "H100 96 GB HBM2e as in torchtitan's 2024-12 benchmarks; 400 Gbit/s a GPU"),
        _gpu("h200", 143771, (989.5, 1979, 67), (4800, 450, 50),
             "NVIDIA H200 data sheet (SXM); DGX H200: 400 Gbit/s a GPU"),
        _gpu("b200", 183359, (2250, 4500, 75), (8000, 900, 50),
             "NVIDIA B200 data sheet (HGX); DGX B200: 400 Gbit/s a GPU"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """So many GPUs of one kind."""

    gpu: Gpu
    count: int
    per_node: int = 8
    nvlink: float = 0.0
    """Measured or read from a topology; 0: the kind's."""
    nic: float = 0.0
    """The same of the network."""
    source: str = ""
    """Where these two come from."""

    @property
    def nodes(self) -> int:
        """Nodes, the last perhaps partly used."""
        return -(-self.count // self.per_node)

    @property
    def inside(self) -> float:
        """Bytes a second from one GPU to those of its node."""
        return self.nvlink or self.gpu.nvlink

    @property
    def across(self) -> float:
        """Bytes a second from one GPU to other nodes, all GPUs of the node at once."""
        return self.nic or self.gpu.nic


def gpu_named(text: str) -> Gpu | None:
    """The kind that a driver's or a person's words mean: `NVIDIA H100 80GB HBM3`, `h100`."""
    plain = text.lower().strip()
    if plain in GPUS:
        return GPUS[plain]
    for name in ("b200", "h200", "h100", "l40s", "a100", "v100"):
        if name in plain and "g" + name not in plain:
            small = {"a100": ("40gb", "a100-40"), "v100": ("16gb", "v100-16")}.get(name)
            return GPUS[small[1] if small and small[0] in plain else name]
    return None
