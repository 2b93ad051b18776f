"""XML of NCCL and nvidia-smi: what is in it is read, and hostile XML is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collectors.readers import read_paths

DATA = Path(__file__).parents[2].parent / "shared" / "data"

_TREE = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <gpu id="00000000:01:00.0">
    <product_name>NVIDIA A100-SXM4-80GB</product_name>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>4</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width>
      <current_link_width>8x</current_link_width></link_widths>
    </pci_gpu_link_info><replay_counter>7</replay_counter></pci>
    <utilization><gpu_util>98 %</gpu_util></utilization>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
    </clocks_event_reasons>
  </gpu>
</nvidia_smi_log>
"""


def test_a_gpu_of_nvidia_smi_keeps_its_link_and_load() -> None:
    (row, _) = read_paths(["-"], _TREE.encode()).rows("log_events")
    fields = json.loads(row["fields"])
    assert row["kind"] == "gpu.bus"
    assert (fields["width"], fields["width_max"], fields["gen"]) == (8, 16, 4)
    assert (fields["utilization"], fields["replays"], fields["throttle"]) == (98, 7, 4)
    assert fields["idle"] is False


@pytest.mark.parametrize(
    "inside",
    [
        '<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">',
        '<!ENTITY x SYSTEM "file:///etc/hostname">',
        "<!ELEMENT gpu ANY>",
    ],
)
def test_declarations_inside_a_document_type_are_refused(inside: str) -> None:
    text = f"<!DOCTYPE nvidia_smi_log [{inside}]><nvidia_smi_log><gpu>&b;</gpu></nvidia_smi_log>"
    read = read_paths(["-"], text.encode())
    assert not read.rows("log_events")
    assert [s.read for s in read.sources] == ["none"]
    assert "refused" in read.sources[0].problems[0]


def test_deep_and_broken_xml_is_a_line_not_a_traceback() -> None:
    deep = "<system><cpu>" + "<pci>" * 5000
    for text in (deep, "<system><cpu></system>", "<nvidia_smi_log"):
        read = read_paths(["-"], text.encode())
        assert not read.topologies
        assert read.sources[0].problems


def test_a_bridge_narrower_than_its_device_is_a_path() -> None:
    text = (
        '<system version="1"><cpu numaid="0">'
        '<pci busid="0000:10:00.0" link_speed="8.0 GT/s" link_width="4">'
        '<pci busid="0000:11:00.0" link_speed="16.0 GT/s" link_width="16"><gpu dev="0">'
        '<nvlink target="0000:12:00.0" count="4"/></gpu></pci>'
        '<pci busid="0000:12:00.0" link_speed="16.0 GT/s" link_width="16"><gpu dev="1">'
        '<nvlink target="0000:11:00.0" count="4"/></gpu></pci>'
        "</pci></cpu></system>"
    )
    read = read_paths(["-"], text.encode())
    fields = json.loads(read.rows("log_events")[0]["fields"])
    assert (fields["own"], fields["path"]) == (31.504, 3.94)
    (topology,) = read.topologies
    link = topology.link("GPU0", "GPU1")
    assert link is not None
    assert (link.kind, link.count) == ("nvlink", 4)


@pytest.mark.skipif(not DATA.is_dir(), reason="the samples are not there")
def test_samples_of_both_kinds_are_read() -> None:
    found = sorted((DATA / "nccl_topology").rglob("*.xml"))
    found += sorted((DATA / "inventory").glob("*.xml"))
    for path in found:
        read = read_paths([str(path)])
        assert [s.read for s in read.sources] == ["all"], path
    dumped = read_paths([str(DATA / "nccl_topology" / "dump_4x4090")]).topologies[0]
    assert len(dumped.gpus) == 4
    assert {x.kind for x in dumped.links} <= {"host-bridge", "socket"}
