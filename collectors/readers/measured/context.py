"""Which labels say where a value belongs (rank, step, epoch, tp size ...) instead of what it is.

In: the words before a value. Out: the key of the row's context, or None for a measurement.
"""

from __future__ import annotations

import re

_WORDS = {
    "rank": "rank proc process proc_id global_rank global-rank rank_id world_rank",
    "local_rank": "local_rank local-rank",
    "step": "step global_step iter iteration it num_updates update upd optimizer_step train_step",
    "epoch": "epoch",
    "microbatch": "microbatch micro_batch_id mb mbs_id microstep micro_step",
    "batch": "batch batch_idx batch_id batch_index i idx index",
    "layer": "layer layer_idx layer_id",
    "stage": "stage pp_stage pipeline_stage",
    "expert": "expert expert_id",
    "tp": "tp tp_rank tp-rank tensor_rank t",
    "dp": "dp dp_rank dp-rank data_rank replica replica_id d",
    "pp": "pp pp_rank pp-rank pipeline_rank",
    "cp": "cp cp_rank cp-rank context_rank",
    "ep": "ep ep_rank ep-rank expert_rank",
    "world": "world world_size world-size gpus gpu num_gpus n_gpus ngpu ngpus nproc "
    "num_processes processes ranks n_ranks num_ranks world_sz w ws",
    "tp_size": "tp_size tp_degree tensor_model_parallel_size tensor_parallel_size "
    "tensor-model-parallel-size tensor-parallel-size tensor_parallel_degree",
    "dp_size": "dp_size dp_degree data_parallel_size data-parallel-size dp_world_size "
    "num_replicas data_parallel_degree replicas",
    "pp_size": "pp_size pipeline_model_parallel_size pipeline_parallel_size "
    "pipeline-model-parallel-size pp_degree",
    "cp_size": "cp_size context_parallel_size context-parallel-size",
    "ep_size": "ep_size expert_model_parallel_size expert_parallel_size expert-parallel-size",
    "accumulation": "accumulation accum ga grad_accum grad_accumulation gas acc accum_steps "
    "gradient_accumulation_steps gradient_accumulation accumulate accumulate_grad_batches "
    "grad_acc grad_acc_steps accumulation_steps microbatches num_microbatches micro_batches "
    "n_micro n_microbatches k m microsteps ga_steps grad_accum_steps update_freq",
    "global_batch": "global_batch global_batch_size global gbs train_batch_size total_batch_size",
    "micro_batch": "micro_batch per-device per_device per_gpu per-gpu "
    "micro_batch_size mbs per_device_train_batch_size "
    "train_micro_batch_size_per_gpu batch_size samples_per_rank",
    "coefficient": "coef coeff coefficient aux_coef aux_coeff aux_weight aux_loss_coef "
    "aux_loss_coeff moe_aux_loss_coeff router_aux_loss_coef aux_loss_weight balance_coef "
    "load_balance_coeff aux_loss_alpha",
    "seed": "seed",
    "attempt": "attempt restart_count restarts",
}
_KEYS = {word: key for key, words in _WORDS.items() for word in words.split()}
_PHRASES = {
    ("tp", "rank"): "tp",
    ("dp", "rank"): "dp",
    ("pp", "rank"): "pp",
    ("cp", "rank"): "cp",
    ("ep", "rank"): "ep",
    ("global", "rank"): "rank",
    ("local", "rank"): "local_rank",
    ("pipeline", "stage"): "stage",
    ("world", "size"): "world",
    ("tp", "size"): "tp_size",
    ("dp", "size"): "dp_size",
    ("pp", "size"): "pp_size",
    ("cp", "size"): "cp_size",
    ("ep", "size"): "ep_size",
    ("data-parallel", "size"): "dp_size",
    ("tensor-model-parallel", "size"): "tp_size",
    ("pipeline-model-parallel", "size"): "pp_size",
    ("context-parallel", "size"): "cp_size",
    ("global", "batch"): "global_batch",
    ("batch", "size"): "micro_batch",
    ("micro", "batch"): "micro_batch",
    ("micro", "batches"): "accumulation",
    ("accumulation", "steps"): "accumulation",
    ("grad", "accum"): "accumulation",
    ("gradient", "accumulation"): "accumulation",
    ("aux", "coef"): "coefficient",
    ("aux", "coefficient"): "coefficient",
    ("aux", "coeff"): "coefficient",
    ("aux", "weight"): "coefficient",
    ("loss", "coefficient"): "coefficient",
    ("loss", "coeff"): "coefficient",
    ("loss", "coef"): "coefficient",
    ("global", "step"): "step",
}
_AXES = {"tensor": "tp_size", "data": "dp_size", "pipeline": "pp_size", "context": "cp_size"}
_AXES |= {"expert": "ep_size", "tp": "tp_size", "dp": "dp_size", "sequence": "cp_size"}
_NOT_AFTER = {"per", "each", "every", "by", "seconds", "ms", "s", "time", "all", "over"}
_LOOSE = {"i", "k", "m", "w", "ws", "process", "t", "d", "it", "idx", "index", "gpu"}
"""Words that are a key only where they stand alone before their value."""
AXES = {"tp", "dp", "pp", "cp", "ep"}
FRACTIONS = {"coefficient"}
"""Keys whose value need not be whole."""
JOINED = re.compile(
    r"^(rank|r|gpu|tp|dp|pp|cp|ep|stage|s|step|epoch|e|layer|mb|microbatch|batch|d|t|replica)"
    r"[-_#]?(\d{1,9})$",
    re.IGNORECASE,
)
"""Key and number in one word: "rank3", "tp0", "e1"."""
_SHORT = {"r": "rank", "gpu": "rank", "s": "stage", "e": "epoch", "d": "dp", "t": "tp"}
_SHORT |= {"mb": "microbatch", "replica": "dp"}


def joined(word: str) -> tuple[str, str] | None:
    """(key, number) of a word such as "rank3"; None for any other word."""
    found = JOINED.match(word)
    if not found:
        return None
    name = found.group(1).lower()
    return _SHORT.get(name, name), found.group(2)


def key(label: list[str]) -> tuple[str, int] | None:
    """The context key at the end of a label and how many words it takes; None for none."""
    low = [w.lower().strip("_-.#*'") for w in label[-3:]]
    if low[-2:] == ["batch", "size"] and {"total", "global", "train"} & {*map(str.lower, label)}:
        return "global_batch", 2
    if low[-2:] == ["per", "step"] and "batches" in low[0] and "micro" in low[0]:
        return "accumulation", 3
    if "parallel" in low and low[-1] in ("parallel", "size", "degree"):
        before = low[low.index("parallel") - 1] if low.index("parallel") else ""
        if before in _AXES:
            return _AXES[before], len(low) - low.index("parallel") + 1
    if len(low) >= 2 and tuple(low[-2:]) in _PHRASES:
        return _PHRASES[low[-2], low[-1]], 2
    found = _KEYS.get(low[-1]) if low else None
    if found is None or (low[-1] in _LOOSE and len(label) > 1):
        return None
    if len(low) >= 2 and low[-2] in _NOT_AFTER:
        return None
    return found, 1
