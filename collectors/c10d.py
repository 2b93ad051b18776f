"""Words of torch.distributed as dumps, logs and hooks spell them, brought to one spelling.

In: names of operations, dtypes and process groups. Out: the words of the tables. Unknown words come
back as they are, in lower case; an axis that a name does not state is "unknown", never a guess.
"""

from __future__ import annotations

import re

_OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_coalesced": "all_gather_coalesced",
    "reducescatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_base": "all_to_all_single",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_reduce_barrier": "barrier",
}

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}
_SIZES = {"bool": 1, "complex64": 8, "complex128": 16}

_AXES = (
    ("world", r"default_pg|world"),
    ("dp", r"expert_data_parallel_group"),
    ("ep", r"(?:expert_model_parallel_group|expert_parallel_group|mesh_ep|ep)"),
    ("tp", r"(?:(?:expert_)?tensor_model_parallel_group|tensor_parallel_group|mesh_tp|tp|etp)"),
    ("pp", r"(?:pipeline_model_parallel_group|pipeline_parallel_group|mesh_pp|pp)"),
    ("cp", r"(?:context_parallel_group|mesh_cp|cp)"),
    (
        "dp",
        (
            r"(?:(?:intra_partial_|inter_partial_)?data_parallel_group(?:_with_cp)?(?:_gloo)?"
            r"|mesh_dp\w*|dp|dp_shard|dp_replicate|dp_cp|dp_shard_cp|mesh_fsdp|fsdp|ddp)"
        ),
    ),
)
_AXIS = tuple((axis, re.compile(pattern)) for axis, pattern in _AXES)


def op_word(name: str) -> str:
    """`nccl:_all_gather_base`, `ALLREDUCE`, `nccl:send 0->1` as the tables' word."""
    bare = name.rpartition(":")[2].strip().split(" ", 1)[0].lower()
    return _OPS.get(bare, bare.lstrip("_"))


def dtype_word(name: str) -> str:
    """`Float`, `BFloat16`, `torch.int64` as torch's lower-case word."""
    bare = name.rpartition(".")[2].lower()
    return _DTYPES.get(bare, bare)


def dtype_size(word: str) -> int | None:
    """Bytes of one element of a dtype in torch's words; None when it is not known."""
    if word in _SIZES:
        return _SIZES[word]
    bits = re.match(r"(?:b?float|u?int|q?u?int)(\d+)", word)
    return int(bits.group(1)) // 8 if bits else None


def axis_word(description: str) -> str:
    """The axis that a process group's description states (DeviceMesh, Megatron, plain words)."""
    bare = description.strip().lower()
    for axis, pattern in _AXIS:
        if pattern.fullmatch(bare):
            return axis
    return "unknown"


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """[0, 1, 2, 3, 8] as "0..3,8": short, and equal for equal lists."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            run = ranks[start:i]
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}")
            start = i
    return ",".join(parts)
