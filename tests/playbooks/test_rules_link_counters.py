"""Counters tell by their growth alone, and by how many ports grow."""

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


def _steps(*times: float) -> str:
    return "".join(
        f"2025-04-02 10:{n:02d}:00 step {n} loss 2.{n:02d} step_time {t:.2f}\n"
        for n, t in enumerate(times)
    )


_STEADY = _steps(*[1.0, 1.02] * 8)
_WAVY = _steps(*[1.0, 1.9, 1.1, 2.2] * 4)


def _sysfs(host: str, **counters: int) -> str:
    return "".join(
        f"{host}:/sys/class/infiniband/mlx5_{n}/ports/1/counters/{name}:{value if n == 1 else 0}\n"
        for n in range(4)
        for name, value in counters.items()
    )


def test_line_errors_that_grow_on_one_port_are_that_ports(tmp_path: Path) -> None:
    text = _sysfs("n07", symbol_error=4, link_downed=1)
    text += _sysfs("n07", symbol_error=918, link_downed=3)
    report = _report(tmp_path, counters__txt=text, train__log=_WAVY)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.where) == ("link.nic-degraded", "flapping")
    assert "mlx5_1 of n07" in report.verdict.summary
    assert "symbol_error by 914" in (report.verdict.formula or "")


def test_old_errors_that_do_not_grow_are_history(tmp_path: Path) -> None:
    text = _sysfs("n07", symbol_error=918, link_downed=3) * 2
    assert _cause(_report(tmp_path, counters__txt=text, train__log=_WAVY)) is None


def test_a_single_reading_tells_nothing(tmp_path: Path) -> None:
    text = _sysfs("n07", symbol_error=918, link_downed=3)
    assert _cause(_report(tmp_path, counters__txt=text, train__log=_WAVY)) is None


def _table(*rows: tuple[str, int, int]) -> str:
    head = (
        "counters, increase over 10 minutes\nhost  dev  np_cnp_sent  rx_prio3_pause  symbol_error\n"
    )
    return head + "".join(f"{h}  mlx5_0  {a}  {b}  0\n" for h, a, b in rows)


def test_pauses_on_many_hosts_and_a_rate_that_varies_are_congestion(tmp_path: Path) -> None:
    text = _table(("n01", 812345, 50321), ("n02", 790211, 48777), ("n03", 12, 0))
    report = _report(tmp_path, counters__txt=text, train__log=_WAVY)
    assert _cause(report) == "link.fabric-congestion"


def test_marks_in_a_job_of_steady_steps_are_how_roce_works(tmp_path: Path) -> None:
    text = _table(("n01", 812345, 50321), ("n02", 790211, 48777))
    assert _cause(_report(tmp_path, counters__txt=text, train__log=_STEADY)) is None


def test_pauses_on_one_host_are_not_the_fabric(tmp_path: Path) -> None:
    text = _table(("n01", 812345, 50321), ("n02", 9, 0))
    assert _cause(_report(tmp_path, counters__txt=text, train__log=_WAVY)) is None


def _nvlink(errors: int) -> str:
    return "".join(
        f"GPU {g}: NVIDIA A100-SXM4-80GB (UUID: GPU-{g:08x})\n"
        + "".join(
            f"\t Link {n}: Replay Errors: {errors if (g, n) == (3, 5) else 2}\n" for n in range(6)
        )
        for g in range(4)
    )


def test_replays_that_grow_on_one_gpu_are_its_links(tmp_path: Path) -> None:
    report = _report(tmp_path, nvlink__txt=_nvlink(7) + _nvlink(40211))
    assert report.verdict is not None
    assert report.verdict.cause == "link.nvlink-degraded"
    assert "GPU 3 link 5 replay errors: grew by 40204" in (report.verdict.formula or "")


def test_replays_that_stay_are_none(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, nvlink__txt=_nvlink(7) * 2)) is None


def test_links_of_amd_gpus_are_no_table_of_ranks(tmp_path: Path) -> None:
    head = "       GPU0         GPU1         \n"
    text = (
        "=============== Weight between two GPUs ===============\n"
        + head
        + "GPU0   0            15           \nGPU1   15           0            \n"
        "=============== Link Type between two GPUs ===============\n"
        + head
        + "GPU0   0            XGMI         \nGPU1   XGMI         0            \n"
    )
    (tmp_path / "topo.txt").write_text(text)
    read = read_paths([str(tmp_path)])
    assert [x.kind for x in read.topologies[0].links] == ["xgmi"]
    assert diagnose(read).verdict is None
