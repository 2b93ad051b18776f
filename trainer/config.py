"""What a run may be told: frozen sections, a docstring under every field, defaults that work.

In: nothing; `settings.py` fills these from a TOML file and `section.key=value` arguments.
Out: `Config`, which every other file reads and none changes.
No torch here: a wrong configuration must be refused before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the mesh that this trainer knows."""
ALWAYS = ("pp", "dp", "tp")
"""Those that a mesh has even where their size is 1."""


class ConfigError(Exception):
    """A configuration that cannot work; `problems` holds one line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer, or a model of your own."""

    file: str = ""
    """A Python file with a model() of yours, or FILE:FACTORY, instead of the transformer that the
    other fields describe; trainer/blueprint.py says what it may give."""
    vocabulary: int = 256
    """Tokens that the model knows (a model.file's too); bytes of text need 256. More than the data
    has do no harm: let it be a multiple of tp."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 128
    """Size of the residual stream."""
    heads: int = 8
    """Query heads; must divide width."""
    kv_heads: int = 4
    """Key and value heads; each serves heads / kv_heads query heads (GQA)."""
    mlp: int = 384
    """Hidden size of the SwiGLU MLP, or of each expert."""
    experts: int = 0
    """MLPs in each layer, of which a router gives every token a few; 0: one dense MLP."""
    top_k: int = 2
    """Experts that each token passes."""
    capacity: float = 0.0
    """Places that an expert has in each sample, as a multiple of its even share (top_k x sequence /
    experts); tokens beyond it are dropped. 0: none is (dropless)."""
    balance: float = 0.01
    """Weight of the loss that balances the load of the experts; 0: none."""
    norm: str = field(default="rmsnorm", metadata={"choices": ("rmsnorm", "layernorm")})
    """Normalisation before attention, before the MLP and before the head."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norm."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies (Su et al. 2021, arXiv:2104.09864)."""
    dropout: float = 0.0
    """Share of elements that fall, behind the embedding and behind what attention and MLP add to
    the stream; which ones is a function of seed, step, sample, position and channel, whatever the
    layout. 0: no dropout, at no cost."""


@dataclass(frozen=True)
class DataConfig:
    """Text, or token files."""

    path: str = ""
    """A file, or a folder whose files are read; empty: the standard library's sources."""
    suffixes: tuple[str, ...] = ()
    """Endings of the files that are read when `path` is a folder; empty: .py, .txt, .md and .rst,
    or .bin for tokens."""
    dtype: str = field(default="uint8", metadata={"choices": ("uint8", "uint16", "uint32")})
    """A token in the files: a byte of text, or a little-endian number of a token file (without a
    header, as numpy's tofile writes)."""
    end: int = -1
    """Token with which a document ends; -1: only files end documents. What follows the end of a
    document is no target of it."""
    documents: bool = False
    """Attention keeps to documents: a token sees only what stands before it in its own."""


@dataclass(frozen=True)
class TrainConfig:
    """The batch, the length and the arithmetic of a run."""

    steps: int = 40
    """Optimizer steps."""
    global_batch: int = 16
    """Samples a step over all ranks; must be a multiple of dp x microbatch."""
    microbatch: int = 2
    """Samples that pass through the model at once on one rank."""
    sequence: int = 128
    """Tokens a sample."""
    seed: int = 0
    """Fixes the initial weights and the order of samples."""
    device: str = field(default="auto", metadata={"choices": ("auto", "cpu", "cuda")})
    """auto: CUDA with NCCL where there is CUDA, else CPU with gloo."""
    dtype: str = field(
        default="float32", metadata={"choices": ("float64", "float32", "bfloat16", "float16")}
    )
    """bfloat16 and float16: matrix products only (autocast); the weights that are updated, and the
    optimizer, stay float32. float16 has a dynamic loss scale (section scale)."""
    reduce_dtype: str = field(
        default="auto", metadata={"choices": ("auto", "float32", "bfloat16", "float16")}
    )
    """In which gradients travel and are summed over replicas; auto: that of the weights (float64
    for float64, else float32). Microbatches add up in the weights' dtype whatever this is."""


@dataclass(frozen=True)
class ScaleConfig:
    """The dynamic loss scale of train.dtype=float16 (Micikevicius et al. 2018, arXiv:1710.03740).

    A step whose gradients overflow on any rank is skipped by all ranks.
    """

    initial: float = 65536.0
    """Factor of the loss at the start."""
    growth: float = 2.0
    """By how much the factor grows after `interval` good steps in a row; more than 1."""
    backoff: float = 0.5
    """By how much it is multiplied after a step that was skipped; below 1."""
    interval: int = 2000
    """Good steps in a row before it grows."""
    least: float = 1.0
    """It never falls below; an overflow there ends the run, since nothing is left to try."""


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks share what."""

    dp: int = 0
    """Replicas of the model; 0: what tp, cp and pp leave of the world."""
    tp: int = 1
    """Ranks that share every layer's matrices."""
    pp: int = 1
    """Stages that the layers are cut into."""
    cp: int = 1
    """Ranks that share every sequence."""
    cp_form: str = field(default="ring", metadata={"choices": ("ring", "all-gather")})
    """How attention reaches the other ranks' keys and values: they go round, or are fetched."""
    schedule: str = field(
        default="1f1b",
        metadata={"choices": ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")},
    )
    """In which order stages do their forwards and backwards; interleaved has virtual stages,
    zero-bubble defers weight gradients into what would be idle (--show-schedule draws it)."""
    virtual: int = 1
    """Stages a rank, for schedule=interleaved."""
    split: tuple[str, ...] = ("even",)
    """Layers of each stage: even, so many each (such as 1,2,1), or measured: balanced by the time
    that layers, embedding and head take here, within memory.limit."""
    ep: int = 1
    """Ranks that share the experts of every layer; they are ranks of dp x cp, not further ones, and
    replicas of an expert are the dp x cp / ep that remain."""
    sp: bool = False
    """Sequence parallelism beside tp: norms and residual stream hold a shard of the sequence."""
    zero: int = field(default=0, metadata={"choices": (0, 1, 2, 3)})
    """What replicas share instead of each holding it whole: 1 optimizer states, 2 also gradients,
    3 also parameters (ZeRO, arXiv:1910.02054); 0 nothing. What only enters matrix products is
    gathered in train.dtype, also where that is bfloat16 or float16."""
    replicate: int = 1
    """Replicas of the shared state under zero (hybrid sharding): the data axis (dp and cp) of D
    ranks is cut into groups of D / replicate neighbours that share, and gradients are summed over
    the groups; 1: all of them share."""
    prefetch: int = 1
    """Units that zero=3 gathers before they are needed, forward and backward, beside what computes;
    each takes its memory. 0: gathered when needed."""
    bucket: int = 25 << 20
    """Bytes of gradients that one dp reduction carries (at least one parameter), by default as
    many as in torch's DDP: smaller ones overlap more of backward, and each costs a call. With
    zero=3 the unit is a layer instead."""
    timeout: float = 600.0
    """Seconds after which the backend gives up on a collective."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is computed twice, or kept on the host, rather than kept on the device."""

    offload: str = field(default="none", metadata={"choices": ("none", "optimizer", "parameters")})
    """What lives in host memory: optimizer (its states, and the weights that it updates: the update
    runs on the host), parameters (with zero=3: the shares too, fetched when they are gathered)."""
    checkpoint: tuple[str, ...] = ("none",)
    """Layers whose activations are recomputed in backward: none, full (all), every-K, such as
    every-2: layers 0, 2, 4 ..., or selective: of all layers everything but what matrix products
    gave; one word, or one a stage, such as full,none."""
    limit: int = 0
    """Bytes of weights, gradients, optimizer and activations that parallel.split=measured may give
    a stage; 0: no limit."""


@dataclass(frozen=True)
class MeshConfig:
    """How ranks are laid out."""

    order: tuple[str, ...] = AXES
    """Axes from outermost to innermost; the last one's ranks are neighbours. cp need not be named
    where it is 1. ep may be: after dp and cp (the default) experts are shared by neighbouring data
    ranks, before them by ranks that lie far apart."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and its learning rate."""

    lr: float = 3e-3
    """Peak learning rate."""
    base_batch: int = 0
    """Global batch for which lr was found: the peak becomes lr x train.global_batch / base_batch;
    0: lr as it is."""
    schedule: str = field(
        default="cosine",
        metadata={"choices": ("constant", "linear", "cosine", "wsd", "inverse-sqrt")},
    )
    """What follows warm-up; wsd keeps the peak and decays at the end."""
    lr_final: float = 0.1
    """Learning rate at the last step of linear, cosine and wsd, as a share of the peak."""
    decay: float = 0.2
    """Share of the steps in which wsd decays."""
    warmup: int = 5
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors (norms) are not decayed."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass(frozen=True)
class EvalConfig:
    """The loss on samples that training never sees."""

    every: int = 0
    """Steps between evaluations; the last step always has one. 0: none."""
    batches: int = 4
    """Batches of train.global_batch samples in an evaluation, always the same ones."""
    held: float = 0.01
    """Share of all samples that is held out, by their number alone; none where every is 0."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run, so that it goes on after whatever ended it, on any layout."""

    folder: str = ""
    """Where checkpoints go, seen by all ranks, of one run at a time; empty: none are written."""
    every: int = 0
    """Steps between checkpoints; 0: only one, after the last step, which always has one."""
    keep: int = 2
    """Checkpoints that stay; older ones of this run are removed."""
    resume: str = "auto"
    """auto: from the newest in `folder`, or from the start where it has none; none: from the start;
    else the path of a checkpoint of your own (it holds a pickle: none from strangers)."""
    background: bool = True
    """Copy and write while training goes on; false: training waits, and no copy takes memory."""


@dataclass(frozen=True)
class LogConfig:
    """What is printed and written."""

    every: int = 5
    """Steps between progress lines; the first and the last step always have one."""
    metrics: str = ""
    """File for one JSON object a step, written by rank 0; empty: none."""


@dataclass(frozen=True)
class FaultConfig:
    """One fault on purpose, so that a diagnosis can be checked against the truth."""

    kind: str = field(
        default="none",
        metadata={
            "choices": (
                *("none", "rank-dies", "rank-stalls", "straggler"),
                *("slow-forward", "slow-backward", "slow-data", "slow-stage"),
                *("collective-mismatch", "collective-dtype", "collective-order"),
                *("collective-extra", "collective-missing"),
                *("rank0-collective", "rank0-work", "uneven-inputs", "exception-swallowed"),
                *("oom", "leak", "nan", "replicas-apart", "sum-not-mean", "no-set-epoch"),
                *("router-collapse", "capacity-overflow"),
            )
        },
    )
    """What goes wrong. rank-dies: SIGKILL in a step; rank-stalls: reading data blocks; straggler:
    slow in forward and backward (slow-forward, slow-backward: in one; slow-data: in reading;
    slow-stage: all ranks of a pp stage). collective-*: a rank joins the world's sum with another
    shape (mismatch) or dtype, too early (order), after one more (extra) or not at all (missing).
    rank0-*: rank 0 alone enters a barrier (collective), or writes while all wait (work).
    uneven-inputs: a dp index has fewer batches and leaves; exception-swallowed: an error is caught
    and the batch skipped. oom: one absurd allocation; leak: memory grows each step. nan: in the
    output of faults.module; replicas-apart: a replica does not take the gradients' sum;
    sum-not-mean: gradients too large by the replicas (dp x cp); no-set-epoch: epochs have one
    order; router-collapse: a few experts get all; capacity-overflow: experts have few places."""
    rank: int = 0
    """Global rank on which it goes wrong; 0 where all ranks do."""
    step: int = 0
    """Step (from 0) at which it goes wrong; what is slow, leaks or is wrong stays so."""
    seconds: float = 0.0
    """Length of a stall or of rank 0's work, or extra time a forward, backward or step; 0: the
    fault's own default."""
    bytes: int = 0
    """What leaks a step; 0: 16 MiB."""
    module: str = ""
    """Path of the module of kind nan, on faults.rank, such as layers.1.mlp; empty: its last."""


@dataclass(frozen=True)
class Config:
    """Everything."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    scale: ScaleConfig = ScaleConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    mesh: MeshConfig = MeshConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    faults: FaultConfig = FaultConfig()
