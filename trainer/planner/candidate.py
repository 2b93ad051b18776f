"""What is asked, and what is tried: a Job and the Candidates for it. No torch.

In: a Shape, a Cluster, sequence, batch and the numbers' sizes. Out: frozen records that memory,
communication and time are computed from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.planner.cluster import Cluster
    from trainer.planner.shape import Shape

CHECKPOINTING = ("none", "selective", "full")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Numbers:
    """Bytes of one element of what is kept, computed with and sent."""

    name: str
    parameter: int
    gradient: int
    optimizer: int
    """Moments, and a master copy where there is one."""
    compute: int
    """What products take and give, and most of what autograd keeps."""
    stream: int
    """The residual stream."""
    wire: int
    """Gradients that travel over replicas."""
    gathered: int
    """Parameters that ZeRO-3 gathers."""
    regather: bool
    """Whether sequence parallelism gathers the inputs of products again in backward (Megatron), or
    keeps them whole."""

    @property
    def states(self) -> int:
        """Bytes a parameter that nobody shares."""
        return self.parameter + self.gradient + self.optimizer


NUMBERS: dict[str, Numbers] = {
    one.name: one
    for one in (
        # ZeRO (arXiv:1910.02054), section 3.1: 2 + 2 + 12 bytes a parameter
        Numbers("bf16", 2, 2, 12, 2, 2, 2, 2, regather=True),
        Numbers("fp16", 2, 2, 12, 2, 2, 2, 2, regather=True),
        # fp8 products keep bf16 weights and activations (arXiv:2209.05433, section 3)
        Numbers("fp8", 2, 2, 12, 2, 2, 2, 2, regather=True),
        Numbers("fp32", 4, 4, 8, 4, 4, 4, 4, regather=True),
        # trainer/: autocast over float32 weights, sequence gathered once and kept
        Numbers("trainer-bf16", 4, 4, 8, 2, 4, 4, 2, regather=False),
        Numbers("trainer-fp32", 4, 4, 8, 4, 4, 4, 4, regather=False),
        Numbers("trainer-fp64", 8, 8, 16, 8, 8, 8, 8, regather=False),
    )
}
DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
    "float8": "fp8",
    "fp32": "fp32",
    "float32": "fp32",
}
"""What people call them."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, on what."""

    shape: Shape
    cluster: Cluster
    sequence: int
    global_batch: int
    """Samples a step."""
    numbers: Numbers = NUMBERS["bf16"]
    flash: bool = True
    """Attention keeps no square of the sequence (arXiv:2205.14135)."""

    @property
    def tokens(self) -> int:
        """A step's."""
        return self.sequence * self.global_batch


@dataclass(frozen=True)
class Candidate:
    """One way to lay a job out."""

    dp: int = 1
    zero: int = 0
    tp: int = 1
    sp: bool = False
    pp: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    cp: int = 1
    cp_form: str = "ring"
    ep: int = 1
    microbatch: int = 1
    checkpointing: str = "none"

    @property
    def world(self) -> int:
        """Ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data(self) -> int:
        """Ranks that hold replicas of dense parameters, or shares of them: dp x cp."""
        return self.dp * self.cp

    def microbatches(self, job: Job) -> int:
        """Of each rank, in a step."""
        return job.global_batch // (self.dp * self.microbatch)

    def as_json(self, job: Job) -> dict[str, Any]:
        """As diag.plan/1 writes it."""
        return {
            "dp": self.dp, "zero": self.zero, "tp": self.tp, "sp": self.sp, "pp": self.pp,
            "virtual": self.virtual, "cp": self.cp, "cp_form": self.cp_form, "ep": self.ep,
            "microbatch": self.microbatch, "microbatches": self.microbatches(job),
            "schedule": self.schedule, "checkpointing": self.checkpointing,
        }  # fmt: skip

    def __str__(self) -> str:
        words = [f"dp={self.dp}"]
        words += [f"zero={self.zero}"] if self.zero else []
        words += [f"tp={self.tp}{'+sp' if self.sp else ''}"] if self.tp > 1 else []
        words += [f"pp={self.pp}"] if self.pp > 1 else []
        words += [f"virtual={self.virtual}"] if self.virtual > 1 else []
        words += [f"cp={self.cp}"] if self.cp > 1 else []
        words += [f"ep={self.ep}"] if self.ep > 1 else []
        words += [f"microbatch={self.microbatch}"]
        words += [f"recompute {self.checkpointing}"] if self.checkpointing != "none" else []
        return " ".join(words)


@dataclass(frozen=True)
class Rejected:
    """A candidate that cannot be, with every reason."""

    candidate: Candidate
    reasons: tuple[str, ...]
    peak: float | None = None
    """Bytes of the fullest rank, where only they are too many."""
