"""What a user would lose if a rule over logs broke: the kind named, look-alikes left alone, silence
where nothing was given. All lines are made up from the grammar of the tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import read_paths
from playbooks.engine import diagnose
from playbooks.evidence import Evidence
from playbooks.policy import Policy
from playbooks.rules import named

if TYPE_CHECKING:
    from pathlib import Path

FAILED = "[rank{r}]: torch.distributed.DistBackendError: NCCL error in: x/NCCLUtils.cpp:77, {w}\n"
TRACE = 'Traceback (most recent call last):\n  File "/app/run.py", line 9, in <module>\n    go()\n'


def ask(tmp_path: Path, **files: str) -> dict[str, Any]:
    """The answer on files of these names; "_" in a name becomes ".": node_log -> node.log."""
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    return diagnose(read_paths([str(tmp_path)])).as_json()


def cause(answer: dict[str, Any]) -> str | None:
    return answer["verdict"]["cause"] if answer["verdict"] else None


def fail(rank: int = 0, words: str = "unhandled system error") -> str:
    return f"{TRACE}{FAILED.format(r=rank, w=words)}"


def line(host: str, rank: int, text: str, level: str = "INFO", dev: int | None = None) -> str:
    place = "misc/x.cc:7 " if level == "WARN" else ""
    own = rank if dev is None else dev
    return f"{host}:{700 + rank}:{900 + rank} [{own}] {place}NCCL {level} {text}\n"


def start(host: str, rank: int, size: int, dev: int, bus: str, state: str = "START") -> str:
    text = (
        f"ncclCommInitRank comm 0x5 rank {rank} nranks {size} cudaDev {dev} nvmlDev {dev} busId "
        f"{bus} commId 0xab - Init {state}"
    )
    return line(host, rank, text, dev=dev)


DUPLICATE = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 4b000"
TWO = (
    start("n1", 0, 2, 0, "4b000") + start("n1", 1, 2, 0, "4b000") + line("n1", 1, DUPLICATE, "WARN")
)
SMI = "index, name, pci.bus_id, memory.used [MiB]\n"
GPU = "{i}, NVIDIA L4, 00000000:{i}B:00.0, 9 MiB\n"
STEPS = "".join(
    f"2025-01-02 10:{m:02d}:00 step {m} | loss {4 - m / 40:.3f} | 1.50 s\n" for m in range(20)
)
IB = "NET/IB : Using [0]mlx5_2:1/{layer} [RO]; OOB eth0:10.1.1.{n}<0>"
PAIR = "".join(line(f"n{n}", n, IB.format(layer="{layer}", n=n)) for n in (1, 2))
RETRY = (
    "NET/IB : Got completion from peer 10.1.1.2<41> with status=IBV_WC_RETRY_EXC_ERR(12) "
    "opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=129 req_type=Send localGid {gid} hca mlx5_2"
)
BOOT = "Bootstrap: Using {i}:{a}<0>"
BOOTS = line("n1", 0, BOOT.format(i="eth1", a="10.8.0.1")) + start("n1", 0, 2, 0, "1a000")
NET = "Channel 00/0 : {a}[0] -> {b}[0] [send] via NET/{via}"
OVER = line("n1", 0, NET.format(a=0, b=1, via="IB/0/GDRDMA"), dev=0)
HOST_IB = "CA 'mlx5_2'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 200\n\t\tLink layer: InfiniBand\n"
TOPO = (
    "        GPU0    GPU1    CPU Affinity\nGPU0     X      {k}     0-7\n"
    "GPU1    {k}     X      0-7\n"
)
SHM = "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"

POSITIVE: list[tuple[str, dict[str, str]]] = [
    (
        "config.duplicate-gpu",
        {"a_log": TWO + fail(1), "g_csv": SMI + GPU.format(i=0) + GPU.format(i=1)},
    ),
    ("config.too-many-ranks", {"a_log": TWO + fail(1), "g_csv": SMI + GPU.format(i=0)}),
    ("config.mig", {"a_log": TWO + fail(1), "g_txt": "  MIG 2g.20gb Device 0: (UUID: MIG-1f)\n"}),
    (
        "config.shm-too-small",
        {
            "a_log": line(
                "c",
                3,
                "Error while creating shared memory segment /dev/shm/nccl-q (size 9)",
                "WARN",
            )
            + fail(3)
        },
    ),
    (
        "config.os-limits",
        {
            "a_log": "max locked memory (kbytes, -l) 64\n"
            + line("c", 0, "Call to ibv_create_qp failed with error Cannot allocate memory", "WARN")
            + fail(0)
        },
    ),
    (
        "config.nccl-mismatch",
        {
            "n1_log": line("n1", 0, "NCCL version 2.27.3+cuda12.9")
            + fail(0, "NCCL version 2.27.3"),
            "n2_log": line("n2", 1, BOOT.format(i="eth1", a="10.8.0.2"))
            + fail(1, "internal error, NCCL version 2.26.2"),
        },
    ),
    (
        "config.socket-interface",
        {
            "a_log": line("n1", 0, BOOT.format(i="virbr0", a="192.168.122.1"))
            + line("n2", 1, BOOT.format(i="virbr0", a="192.168.122.1"))
            + line(
                "n2",
                1,
                "connect to 192.168.122.1<40111> returned Connection refused, exceeded "
                "error retry count (35)",
                "WARN",
            )
            + fail(1)
        },
    ),
    (
        "config.port-blocked",
        {
            "a_log": BOOTS
            + line("n2", 1, BOOT.format(i="eth1", a="10.8.0.2"))
            + line(
                "n2",
                1,
                "socketPollConnect: Connect to 10.8.0.1<43111> returned Connection timed out",
                "WARN",
            )
            + fail(1)
        },
    ),
    (
        "config.rendezvous",
        {
            "n1_log": "export MASTER_ADDR=n1\n"
            + TRACE
            + "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. "
            "1/2 clients joined.\n",
            "n2_log": "export MASTER_ADDR=n2\n"
            + TRACE
            + "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms "
            "while trying to connect to (n2, 29500).\n",
        },
    ),
    (
        "config.unsupported-arch",
        {
            "a_log": line(
                "c", 0, "ncclMaxSharedMem 82240 exceeds device/fn maxSharedMem 79856", "WARN"
            )
            + fail(0)
        },
    ),
    (
        "config.fabric-manager",
        {"a_log": TRACE + "RuntimeError: CUDA error: system not yet initialized\n"},
    ),
    (
        "config.imex",
        {
            "a_log": line(
                "g",
                0,
                "MNNVL (cliqueSize 8) is available but not working on "
                "this system. Check the IMEX channel configuration",
                "WARN",
            )
            + fail(0)
        },
    ),
    ("config.efa-provider", {"a_log": line("p", 0, "NET/OFI Selected Provider is tcp") + fail(0)}),
    (
        "config.roce-gid",
        {
            "a_log": PAIR.format(layer="RoCE")
            + line("n1", 1, RETRY.format(gid="fe80::11"), "WARN")
            + fail(0)
        },
    ),
    (
        "link.fabric-unreachable",
        {
            "a_log": PAIR.format(layer="IB")
            + line("n1", 1, "Call to ibv_modify_qp failed with 110 Connection timed out", "WARN")
            + fail(0)
        },
    ),
    (
        "config.layout-invalid",
        {
            "c_toml": "[model]\nn_heads = 20\n[parallelism]\ntensor_parallel_degree = 8\n",
            "a_log": TRACE
            + "RuntimeError: shape '[1, 64, 2, 64]' is invalid for input of size 9\n",
        },
    ),
    (
        "config.layout-invalid",
        {
            "a_log": TRACE + "AssertionError: num_attention_heads (20) must be "
            "divisible by tensor_model_parallel_size (8)\n"
        },
    ),
    (
        "config.launcher-mismatch",
        {
            "j_sh": "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=3\n",
            "a_log": "".join(f"rank {r}/8 on gpu\n" for r in range(6))
            + TRACE
            + "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. "
            "6/8 clients joined.\n",
        },
    ),
    (
        "link.nic-degraded",
        {
            "a_log": STEPS
            + "2025-01-02 10:30:09 "
            + line("n1", 1, RETRY.format(gid="fe80::1"), "WARN"),
            "n2_dmesg": "[Thu Jan  2 10:29:40 2025] mlx5_core 0000:1a:00.0 ibp3: Link down\n",
        },
    ),
    (
        "link.socket-fallback",
        {
            "h_txt": HOST_IB,
            "a_log": line("n1", 0, "NET/IB : No device found.")
            + line("n1", 0, "Using network Socket")
            + line("n1", 0, NET.format(a=0, b=1, via="Socket/0"))
            + STEPS,
        },
    ),
    ("link.gdr-off", {"a_log": OVER + line("n2", 1, NET.format(a=1, b=0, via="IB/0"), dev=0)}),
    (
        "link.nvlink-unused",
        {
            "t_txt": TOPO.format(k="NV4"),
            "a_log": "NCCL_P2P_DISABLE=1\n"
            + start("t", 0, 2, 0, "1a000")
            + start("t", 1, 2, 1, "1b000")
            + line("t", 0, SHM),
        },
    ),
    (
        "link.p2p-broken",
        {
            "n_md": "with NCCL_P2P_DISABLE=1 it works\nACSCtl: SrcValid+ ReqRedir+\n",
            "a_log": line("w", 0, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
            + "[rank0]:[E ProcessGroupNCCL.cpp:6] [Rank 0] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut"
            "=1, Timeout(ms)=600000) ran for 600009 milliseconds before timing out.\n",
        },
    ),
    (
        "link.pcie-degraded",
        {"g_csv": "index, pcie.link.width.current, pcie.link.width.max\n0, 16, 16\n1, 4, 16\n"},
    ),
]


@pytest.mark.parametrize(
    ("wanted", "files"), POSITIVE, ids=[f"{i}-{p[0]}" for i, p in enumerate(POSITIVE)]
)
def test_the_kind_is_named(tmp_path: Path, wanted: str, files: dict[str, str]) -> None:
    answer = ask(tmp_path, **files)
    assert cause(answer) == wanted, answer["abstained"]
    assert answer["verdict"]["evidence"]
    assert answer["verdict"]["advice"]


NEAR: list[tuple[str, dict[str, str]]] = [
    (
        "config.duplicate-gpu",
        {"a_log": start("n1", 0, 2, 0, "1a000") + start("n1", 1, 2, 1, "1b000") + fail(1)},
    ),
    (
        "config.shm-too-small",
        {
            "d_txt": "tmpfs 512G 1G 511G 1% /dev/shm\n",
            "a_log": line(
                "c",
                3,
                "Error while creating shared memory segment /dev/shm/nccl-q (size 9)",
                "WARN",
            )
            + fail(3),
        },
    ),
    ("config.os-limits", {"a_log": "max locked memory (kbytes, -l) 64\n" + fail(0)}),
    (
        "config.nccl-mismatch",
        {
            "n1_log": line("n1", 0, "NCCL version 2.27.3") + fail(0),
            "n2_log": line("n2", 1, BOOT.format(i="eth1", a="10.8.0.2")) + fail(1),
        },
    ),
    (
        "config.socket-interface",
        {"a_log": line("n1", 0, BOOT.format(i="lo", a="127.0.0.1")) + fail(0)},
    ),
    (
        "config.port-blocked",
        {
            "a_log": BOOTS
            + line("n2", 1, "Connect to 10.8.0.1<43111> returned Connection refused", "WARN")
            + fail(1)
        },
    ),
    (
        "config.rendezvous",
        {
            "n1_log": TRACE + "torch.distributed.DistStoreError: Timed out after 601 "
            "seconds waiting for clients. 1/2 clients joined.\n"
        },
    ),
    (
        "config.fabric-manager",
        {
            "k_txt": "[ 9.1] NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.\n",
            "a_log": TRACE + "RuntimeError: CUDA error: system not yet initialized\n",
        },
    ),
    ("config.efa-provider", {"a_log": line("p", 0, "NET/OFI Selected Provider is efa") + fail(0)}),
    (
        "config.roce-gid",
        {
            "a_log": PAIR.format(layer="RoCE")
            + STEPS
            + line("n1", 1, RETRY.format(gid="fe80::11"), "WARN")
            + fail(0)
        },
    ),
    (
        "config.layout-invalid",
        {
            "c_toml": "n_heads = 24\ntensor_parallel_degree = 8\n",
            "a_log": TRACE + "RuntimeError: shape '[1, 2]' is invalid for input of size 9\n",
        },
    ),
    (
        "config.launcher-mismatch",
        {
            "a_log": "".join(f"rank {r}/16 on gpu\n" for r in range(8))
            + TRACE
            + "torch.distributed.DistStoreError: Timed out after 61 seconds "
            "waiting for clients. 8/16 clients joined.\n"
        },
    ),
    (
        "link.nic-degraded",
        {"a_log": STEPS + line("n1", 1, RETRY.format(gid="fe80::1"), "WARN") + fail(0)},
    ),
    (
        "link.socket-fallback",
        {
            "a_log": line("n1", 0, "Using network Socket")
            + line("n1", 0, NET.format(a=0, b=1, via="Socket/0"))
            + STEPS
        },
    ),
    ("link.gdr-off", {"a_log": line("n1", 0, NET.format(a=0, b=1, via="IB/0"), dev=0)}),
    (
        "link.nvlink-unused",
        {
            "t_txt": TOPO.format(k="SYS"),
            "a_log": start("t", 0, 2, 0, "1a000")
            + start("t", 1, 2, 1, "1b000")
            + line("t", 0, SHM),
        },
    ),
    (
        "link.p2p-broken",
        {
            "n_md": "with NCCL_P2P_DISABLE=1 it still hangs\n",
            "a_log": line("w", 0, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"),
        },
    ),
    (
        "link.pcie-degraded",
        {
            "g_csv": "index, pcie.link.gen.current, pcie.link.gen.max, "
            "utilization.gpu [%]\n0, 1, 4, 0 %\n1, 1, 4, 0 %\n"
        },
    ),
]


@pytest.mark.parametrize(("other", "files"), NEAR, ids=[f"{i}-{p[0]}" for i, p in enumerate(NEAR)])
def test_a_look_alike_is_not_that_kind(tmp_path: Path, other: str, files: dict[str, str]) -> None:
    answer = ask(tmp_path, **files)
    assert cause(answer) != other
    assert all(f["cause"] != other or f["role"] != "root" for f in answer["findings"])


USED = line("n1", 0, "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.1.1.1<0>")
PORT = "CA '{d}'\n\tPort 1:\n\t\tState: Active\n\t\tRate: {r}\n\t\tLink layer: InfiniBand\n"
RAILS = (
    "        GPU0    GPU1    mlx5_0  mlx5_1  CPU Affinity\n"
    "GPU0     X      NV18    PIX     SYS     0-7\nGPU1    NV18     X      SYS     PIX     8-15\n"
)


@pytest.mark.parametrize(("nic", "wanted"), [(1, "link.nic-affinity"), (0, None), ("1(1)", None)])
def test_a_far_nic_is_one_only_when_the_rank_itself_sends_through_it(
    tmp_path: Path, nic: object, wanted: str | None
) -> None:
    sent = line("n1", 0, NET.format(a=0, b=2, via=f"IB/{nic}/GDRDMA"))
    text = USED + start("n1", 0, 4, 0, "1a000", "COMPLETE") + sent
    assert cause(ask(tmp_path, t_txt=RAILS, a_log=text)) == wanted


@pytest.mark.parametrize(("rate", "wanted"), [(400, "link.nics-unused"), (100, None)])
def test_idle_nics_count_only_when_they_are_of_the_same_kind(
    tmp_path: Path, rate: int, wanted: str | None
) -> None:
    rates = {"mlx5_0": 400, "mlx5_1": 400, "mlx5_2": rate, "mlx5_3": rate}
    ports = "".join(PORT.format(d=d, r=r) for d, r in rates.items())
    text = USED + start("n1", 0, 4, 0, "1a000", "COMPLETE")
    assert cause(ask(tmp_path, i_txt=ports, a_log=text)) == wanted


@pytest.mark.parametrize(("down", "wanted"), [((3,), "link.nvlink-degraded"), ((0, 1, 2, 3), None)])
def test_inactive_nvlinks_count_against_the_gpus_that_have_them(
    tmp_path: Path, down: tuple[int, ...], wanted: str | None
) -> None:
    text = "".join(
        f"GPU {g}: NVIDIA X (UUID: GPU-{g})\n\t Link 0: 26.562 GB/s\n\t Link 1: "
        f"{'<inactive>' if g in down else '26.562 GB/s'}\n"
        for g in range(4)
    )
    assert cause(ask(tmp_path, n_txt=text)) == wanted


@pytest.mark.parametrize(
    "noise",
    [
        "NVIDIA X with sm_130 is not compatible with the current PyTorch installation.\n",
        line("p", 0, "NET/OFI Selected Provider is tcp"),
        "CA 'mlx5_9'\n\tPort 1:\n\t\tState: Down\n\t\tRate: 40\n\t\tLink layer: Ethernet\n",
    ],
)
def test_the_programs_own_error_is_not_explained_by_what_stands_beside_it(
    tmp_path: Path, noise: str
) -> None:
    text = noise + TRACE + "KeyError: 'tokens'\n"
    assert cause(ask(tmp_path, a_log=text)) == "crash.user-exception"


def test_an_error_about_something_else_is_no_layout_although_sizes_do_not_divide(
    tmp_path: Path,
) -> None:
    text = "n_heads=20 tp=8\n" + TRACE + "KeyError: 'vocab_size'\n"
    assert cause(ask(tmp_path, a_log=text)) == "crash.user-exception"


def test_slower_nics_of_another_model_are_no_fault(tmp_path: Path) -> None:
    port = (
        "CA '{d}'\n\tCA type: {t}\n\tPort 1:\n\t\tState: Active\n\t\tRate: {r}\n"
        "\t\tLink layer: Ethernet\n"
    )
    fast = "".join(port.format(d=f"m{i}", t="MT1", r=400) for i in range(4))
    assert cause(ask(tmp_path, i_txt=fast + port.format(d="m9", t="MT2", r=100))) is None
    slow = fast + port.format(d="m9", t="MT1", r=100)
    assert cause(ask(tmp_path, i_txt=slow)) == "link.nic-degraded"


@pytest.mark.parametrize("rule", named.RULES, ids=lambda r: r.__module__.rsplit(".", 1)[-1])
def test_without_data_no_rule_says_anything(rule: Any) -> None:
    assert rule(Evidence(read_paths(["-"], b"nothing that anybody knows\n")), Policy()) == []


def test_a_job_that_finished_is_healthy_whatever_it_warned_of(tmp_path: Path) -> None:
    text = line("n1", 0, "NET/IB : No device found.") + STEPS + "Training completed\n"
    assert ask(tmp_path, a_log=text)["health"] is not None


def test_glued_messages_of_several_ranks_are_all_read() -> None:
    glued = (start("n1", 0, 2, 0, "1a000").strip() + start("n1", 1, 2, 1, "1b000")).encode()
    assert sorted(Evidence(read_paths(["-"], glued)).nccl.of_rank) == [0, 1]
