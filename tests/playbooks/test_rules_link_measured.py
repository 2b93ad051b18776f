"""Links by numbers of tools: each kind sick, nearly sick, and without the deciding number."""

from __future__ import annotations

import json
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


def test_groups_are_read_in_the_ways_in_which_programs_print_them(tmp_path: Path) -> None:
    launch = "torchrun --nnodes 2 --nproc-per-node 4 long.py\n"
    nested = launch + "cp groups: [[0, 2, 4, 6], [1, 3, 5, 7]]\n"
    ring = launch + "cp ring 0: 0 -> 2 -> 4 -> 6\n"
    ranks = launch + "".join(
        f"rank {r} host gx-{r // 4} dp={r % 2} cp={r // 2}\n" for r in range(8)
    )
    for text in (nested, ring, ranks):
        report = _report(tmp_path, job__log=text)
        assert report.verdict is not None, text
        assert (report.verdict.cause, report.verdict.axis) == ("link.axis-placement", "cp")


# --- link.internode-too-slow ------------------------------------------------------------------


def _scaling(exposed: float, rate: float) -> str:
    return "".join(
        f"2024-06-03 10:0{n}:00 step {n} time {0.65 + exposed:.2f} s  fwd 0.20 bwd 0.43 "
        f"exposed-comm {exposed:.2f} opt 0.02\n"
        f"    all-reduce of step {n}: transfer from last arrival to end, busbw {rate} GB/s\n"
        for n in range(8)
    )


_PORT = "$ ethtool ens4\n\tSpeed: 25000Mb/s\n\tLink detected: yes\n"


def test_a_network_at_its_rate_that_cannot_hide_is_too_slow(tmp_path: Path) -> None:
    report = _report(tmp_path, net__txt=_PORT, train__log=_scaling(1.5, 2.95))
    assert report.verdict is not None
    assert report.verdict.cause == "link.internode-too-slow"
    assert "2.95 / 3.12 GB/s = 94%" in (report.verdict.formula or "")


def test_a_network_at_its_rate_that_hides_is_fine(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, net__txt=_PORT, train__log=_scaling(0.01, 2.95))) is None


def test_below_the_ports_rate_the_network_is_not_too_slow(tmp_path: Path) -> None:
    report = _report(tmp_path, net__txt=_PORT, train__log=_scaling(1.5, 0.9))
    assert _cause(report) != "link.internode-too-slow"


def test_without_the_ports_rate_nobody_knows(tmp_path: Path) -> None:
    report = _report(tmp_path, train__log=_scaling(1.5, 2.95))
    assert _cause(report) != "link.internode-too-slow"


# --- a plan from the job's own words ----------------------------------------------------------


def _pairs(kind: str) -> str:
    rows = "".join(
        f"GPU{a}\t"
        + "\t".join(
            " X " if a == b else "NV4" if a // 2 == b // 2 and kind == "SYS" else kind
            for b in range(4)
        )
        + "\t0-31\t0\n"
        for a in range(4)
    )
    return "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n" + rows


_TOML = "[parallelism]\ntensor_parallel_degree = 4\ncontext_parallel_degree = 1\n"


def _profiled(share: int) -> str:
    return "WORLD_SIZE=4\n" + "".join(
        f"2025-01-14 16:0{n}:00 step: {n}0 loss: 8.{n} (tp all_gather exposed {share} % of step)\n"
        for n in range(8)
    )


def test_tp_of_a_config_over_pairs_without_nvlink_is_missing_it(tmp_path: Path) -> None:
    report = _report(
        tmp_path, topo__txt=_pairs("SYS"), job__toml=_TOML, t__log="world_size 4\n" + _profiled(61)
    )
    assert _cause(report) == "link.nvlink-missing"


def test_the_same_without_a_cost_or_with_nvlink_is_none(tmp_path: Path) -> None:
    files = {"job__toml": _TOML, "t__log": "world_size 4\n" + _STEPS}
    assert _cause(_report(tmp_path, topo__txt=_pairs("SYS"), **files)) is None
    files["t__log"] = "world_size 4\n" + _profiled(61)
    assert _cause(_report(tmp_path, topo__txt=_pairs("NV4"), **files)) != "link.nvlink-missing"


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


def _deepspeed(batch: int) -> dict[str, str]:
    return {
        "ds__json": (
            f'{{\n "train_batch_size": {batch},\n "train_micro_batch_size_per_gpu": 4,\n'
            ' "gradient_accumulation_steps": 2\n}\n'
        ),
        "run__log": (
            "world_size: 8\n[rank0]: Traceback (most recent call last):\n"
            '[rank0]:   File "/ws/config.py", line 9, in check\n'
            "[rank0]:     assert train_batch == micro_batch * grad_acc * self.world_size\n"
            "[rank0]: AssertionError: Check batch related parameters. train_batch_size is not "
            f"equal to micro_batch_per_gpu * gradient_acc_step * world_size {batch} != 4 * 2 * 8\n"
        ),
    }


def test_a_batch_that_is_not_its_product_is_the_layout(tmp_path: Path) -> None:
    report = _report(tmp_path, **_deepspeed(48))
    assert report.verdict is not None
    assert report.verdict.cause == "config.layout-invalid"


# --- NVLinks and ports ------------------------------------------------------------------------


def _links(up: int) -> str:
    return "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n" + "".join(
        f"\t Link {n}: {'25 GB/s' if n < up else '<inactive>'}\n" for n in range(12)
    )


def test_a_lone_gpu_is_held_against_its_model(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, nvlink__txt=_links(9))) == "link.nvlink-degraded"
    assert _cause(_report(tmp_path, nvlink__txt=_links(12))) is None


def test_ports_of_ibv_devinfo_have_the_rate_of_all_their_lanes(tmp_path: Path) -> None:
    text = (
        "n1: hca_id:\tmlx5_0\n\tvendor_part_id:\t\t\t4129\n\t\tport:\t1\n"
        "\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tactive_width:\t\t4X (2)\n"
        "\t\t\tactive_speed:\t\t100.0 Gbps (128)\n\t\t\tlink_layer:\t\tInfiniBand\n"
        "Infiniband device 'mlx5_1' port 1 status:\n\tstate:\t\t 4: ACTIVE\n"
        "\tphys state:\t 5: LinkUp\n\trate:\t\t 200 Gb/sec (4X HDR)\n"
        "\tlink_layer:\t InfiniBand\n"
    )
    (tmp_path / "ports.txt").write_text(text)
    rows = read_paths([str(tmp_path)]).rows("log_events")
    ports = [json.loads(r["fields"]) for r in rows if r["kind"] == "ib.port"]
    assert [(p["device"], p["state"], p["rate"]) for p in ports] == [
        ("mlx5_0", "Active", 400.0),
        ("mlx5_1", "Active", 200.0),
    ]
    assert ports[0]["host"] == "n1"
