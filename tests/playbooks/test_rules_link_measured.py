"""Links by numbers of tools: each kind sick, nearly sick, and without the deciding number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.readers import read_paths
from playbooks.engine import diagnose

if TYPE_CHECKING:
    from pathlib import Path

    from playbooks.report.model import Report


def _report(folder: Path, **files: str) -> Report:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return diagnose(read_paths([str(folder)]))


def _cause(report: Report) -> str | None:
    return None if report.verdict is None else report.verdict.cause


# --- link.pcie-degraded -----------------------------------------------------------------------


def _block(index: int, *, gen: int = 4, width: int = 16, used: int = 97, idle: bool = False) -> str:
    return (
        f"GPU 00000000:{index + 16:02X}:00.0\n"
        "    Product Name                          : NVIDIA L40S\n"
        "    PCI\n"
        "        GPU Link Info\n"
        "            PCIe Generation\n"
        "                Max                       : 4\n"
        f"                Current                   : {gen}\n"
        "            Link Width\n"
        "                Max                       : 16x\n"
        f"                Current                   : {width}x\n"
        "    Clocks Event Reasons\n"
        f"        Idle                              : {'Active' if idle else 'Not Active'}\n"
        "    Utilization\n"
        f"        Gpu                               : {used} %\n"
    )


_STEPS = "".join(
    f"2025-02-18 22:0{n // 6}:{n % 6 * 10:02d} step {n} loss 3.{n:03d}\n" for n in range(12)
)


def test_one_gpu_at_a_lower_generation_under_load_is_named_with_its_rank(tmp_path: Path) -> None:
    text = "==============NVSMI LOG==============\n" + _block(0) + _block(1) + _block(2, gen=1)
    report = _report(tmp_path, smi__txt=text + _block(3), train__log=_STEPS)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("link.pcie-degraded", (2,))
    assert report.verdict.formula == "Gen1 x16 = 4 GB/s of Gen4 x16 = 31.5 GB/s"
    assert any("Current" in i.quote for i in report.verdict.evidence)


def test_a_lower_generation_at_idle_is_power_management(tmp_path: Path) -> None:
    text = "".join(_block(i, gen=1 if i else 4, used=0, idle=True) for i in range(4))
    assert _cause(_report(tmp_path, smi__txt=text)) is None


def test_half_of_the_lanes_on_all_gpus_is_how_the_host_was_built(tmp_path: Path) -> None:
    text = "".join(_block(i, width=8) for i in range(4))
    assert _cause(_report(tmp_path, smi__txt=text)) is None
    text = "".join(_block(i, width=8 if i == 3 else 16) for i in range(4))
    assert _cause(_report(tmp_path, smi__txt=text)) == "link.pcie-degraded"


_XML = """<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="{speed}" link_width="{width}">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"/>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1"/></nic>
      </pci>
    </pci>
  </cpu>
</system>
"""


def _bench(busbw: float, hosts: str = "ab") -> str:
    ranks = "".join(
        f"#  Rank {r:2d} Group  0 Pid  {900 + r} on node-{hosts[r % len(hosts)]} device  {r // 2} "
        f"[0x1b] NVIDIA H100 80GB HBM3\n"
        for r in range(4)
    )
    rows = "".join(
        f"  {size}  {size // 4}  float  sum  -1  100.0  {busbw / 1.9:.2f}  {busbw:.2f}  0  101.0  "
        f"{busbw / 1.9:.2f}  {busbw:.2f}  0\n"
        for size in (8388608, 536870912, 8589934592)
    )
    return (
        f"# nThread 1 nGpus 1\n{ranks}#       size    count      type   redop    root     time\n"
        f"{rows}# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {busbw}\n"
    )


def test_a_modelled_bridge_counts_with_the_rate_that_it_costs(tmp_path: Path) -> None:
    xml = _XML.format(speed="2.5 GT/s PCIe", width=1)
    report = _report(tmp_path, topo__xml=xml, bench__txt=_bench(6.1))
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.where) == (
        "link.pcie-degraded",
        "virtual-topology",
    )
    assert "0.25" in (report.verdict.formula or "")


def test_a_modelled_bridge_without_a_rate_or_as_wide_as_its_switch_is_none(tmp_path: Path) -> None:
    xml = _XML.format(speed="2.5 GT/s PCIe", width=1)
    assert _cause(_report(tmp_path, topo__xml=xml)) is None
    xml = _XML.format(speed="32.0 GT/s PCIe", width=16)
    assert _cause(_report(tmp_path, topo__xml=xml, bench__txt=_bench(6.1))) is None


# --- groups that a job prints -----------------------------------------------------------------


def _groups(strided: bool) -> str:
    out = "launch: torchrun --nnodes 2 --nproc-per-node 4 moe.py\n"
    for n in range(2):
        ranks = list(range(n, 8, 2)) if strided else list(range(4 * n, 4 * n + 4))
        hosts = " ".join("gx-0" if r < 4 else "gx-1" for r in ranks)
        out += f"ep group {n}: {ranks} hosts {hosts}\n"
    return out


def test_expert_groups_over_hosts_that_have_room_are_misplaced(tmp_path: Path) -> None:
    report = _report(tmp_path, job__log=_groups(strided=True))
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.axis) == ("link.axis-placement", "ep")
    assert "2 on gx-0, 2 on gx-1" in report.verdict.summary


def test_expert_groups_inside_their_hosts_are_not(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, job__log=_groups(strided=False))) is None


def test_crossing_groups_whose_cost_nobody_printed_are_no_fault_of_a_job(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, job__log=_groups(strided=True) + _STEPS)) is None


# --- health by a benchmark --------------------------------------------------------------------


def test_nccl_tests_at_the_nvlinks_rate_are_sound(tmp_path: Path) -> None:
    report = _report(tmp_path, bench__txt=_bench(478.0, hosts="a"))
    assert report.health is not None
    assert "450 GB/s" in report.health.summary


def test_nccl_tests_far_below_it_are_no_health(tmp_path: Path) -> None:
    assert _report(tmp_path, bench__txt=_bench(120.0, hosts="a")).health is None


def test_nccl_tests_over_nics_of_unknown_rate_say_nothing(tmp_path: Path) -> None:
    assert _report(tmp_path, bench__txt=_bench(92.0)).health is None


# --- config -----------------------------------------------------------------------------------

_BIND = """\
[E1103 22:01:17.118339 socket.cpp:500] [c10d] The server socket has failed to listen on any address.
Traceback (most recent call last):
  File "/v/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/v/lib/python3.10/site-packages/torch/distributed/run.py", line 883, in main
    run(args)
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network \
address. port: 29511, useIpv6: true, code: -98, name: EADDRINUSE, message: address already in use
"""


def test_a_launcher_that_cannot_bind_met_a_taken_port(tmp_path: Path) -> None:
    report = _report(tmp_path, run__log=_BIND)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.where) == ("config.rendezvous", "port-in-use")


def test_a_taken_port_of_a_job_that_trains_is_none(tmp_path: Path) -> None:
    warned = _BIND.split("Traceback", maxsplit=1)[0]
    assert _cause(_report(tmp_path, run__log=warned + _STEPS)) is None


def _assertion(experts: int) -> dict[str, str]:
    trace = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/ws/moe/layer.py", line 44, in __init__\n'
        "[rank1]:     assert config.experts % self.expert_parallel_size == 0\n"
        "[rank1]: AssertionError\n"
    )
    return {
        "run__log": trace,
        "config__json": f'{{\n  "num_experts": {experts},\n  "hidden_size": 2048\n}}\n',
        "launch__sh": "torchrun pretrain.py --expert-model-parallel-size 8\n",
    }


def test_a_bare_assertion_on_experts_that_do_not_divide_is_the_layout(tmp_path: Path) -> None:
    report = _report(tmp_path, **_assertion(60))
    assert report.verdict is not None
    assert report.verdict.cause == "config.layout-invalid"
    assert "60 experts over ep 8" in (report.verdict.formula or "")


def test_a_bare_assertion_on_something_else_is_the_programs(tmp_path: Path) -> None:
    files = _assertion(60)
    files["run__log"] = files["run__log"].replace(
        "config.experts % self.expert_parallel_size == 0", "config.path.is_dir()"
    )
    assert _cause(_report(tmp_path, **files)) == "crash.user-exception"
