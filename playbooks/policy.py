"""Every threshold that a metric or rule compares with, in one frozen object.

In: nothing. Out: `Policy()`, or one with fields replaced for a site or a test. No rule holds a
number of its own; each field says what moves when it changes. Shares are of step time, 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Policy:
    """Thresholds of metrics, rules and engine."""

    warmup_steps: int = 1
    """Steps left out of step statistics at the begin. More hides compile and allocator warm-up,
    and takes away evidence of short runs."""

    together_ns: int = 2 * SECOND
    """Two ends of processes closer than this have no order: process ends are seen by polling.
    Larger merges separate deaths into one finding; smaller trusts the polling too much."""

    minority_share: float = 0.5
    """A signature is a culprit's when fewer than this share of the members have it. Lower calls
    more mismatches undecided; 0.5 is plain majority."""

    insertion_most: int = 8
    """Longest run of surplus collectives that is tried before a mismatch is called one. Larger
    finds longer insertions and makes accidental alignments likelier."""

    insertion_overlap: int = 2
    """Later operations that must agree again after an insertion is taken out (and not without).
    Smaller calls more mismatches an extra collective."""

    straggler_share: float = 0.15
    """A rank is a straggler from this share of the step upwards that it is busy longer than its
    peers. Lower finds milder ones and calls noise of shared machines one."""

    straggler_ratio: float = 2.0
    """From this multiple of its peers' busy time on, `straggler_least` replaces `straggler_share`.
    Lower accuses ranks that a crowded host disturbs a little more than others."""

    straggler_least: float = 0.05
    """Least share of the step for such a rank. Lower names ranks that delay nobody noticeably."""

    straggler_steps: int = 8
    """Steps that a straggler must last. Fewer answers earlier and mistakes hiccups for one."""

    straggler_consistency: float = 0.7
    """Share of those steps in which it must be beyond half of `straggler_share`. Lower accepts a
    slow rank that changes, which is work imbalance instead."""

    straggler_rise: float = 0.4
    """A rank that became slow must have made the step longer by this share of its excess. Lower
    lets noise of a shared machine pass for a straggler."""

    straggler_lead: float = 0.5
    """A straggler leads the busiest rank that is not accused by this share of its excess over the
    typical one. Lower accuses one of several ranks that a crowded host slows in turn."""

    straggler_tie: float = 0.8
    """A second rank is named beside the slowest when its excess is this share of the slowest's.
    Lower names more ranks; the others cannot wait for any but the slowest."""

    straggler_cause_share: float = 0.6
    """Share of the excess that data (or compute) phases must explain to name the reason. Higher
    names fewer reasons."""

    data_bound_share: float = 0.3
    """Median share of the step that a rank waits for its batch, from which input sets the pace.
    Lower calls ordinary loading a fault."""

    data_bound_ranks: float = 0.5
    """Share of ranks that must be beyond `data_bound_share`; below it is a straggler's matter."""

    data_bound_steps: int = 5
    """Steps seen before input is blamed. Fewer blames the first, cold reads."""

    absurd_request: int = 1 << 42
    """An allocation of this many bytes (4 TiB) is beyond any device, whatever its size. Lower
    blames requests that a large host could serve."""

    outlier_request: float = 1.0
    """A request beyond this multiple of the device's or host's whole memory cannot be served.
    Lower turns ordinary out-of-memory errors into shape bugs."""

    refused_free: int = 1 << 30
    """Free memory beyond the request (and at least as much again) from which a refusal is a limit's
    work. Lower blames limits for what segments and rounding of the allocator need."""

    host_full_share: float = 0.97
    """Host memory use just before a SIGKILL from which memory is the likely reason. Lower blames
    memory for kills that came from elsewhere."""

    host_full_before_ns: int = 30 * SECOND
    """How long before a SIGKILL a host sample still counts as "just before"."""

    foreign_share: float = 0.2
    """Share of a device that other processes must hold to be the reason. Lower blames contexts."""

    outside_bytes: int = 8 << 30
    """Memory of a process beside torch's allocator that context, workspaces and a few communicators
    (1 to 4 GiB) do not explain. Lower blames many-communicator jobs that are as they must be."""

    outside_share: float = 0.1
    """The same as a share of the device."""

    stage_excess: float = 1.25
    """How many times as many parameters as any other rank the ranks of a heavy stage hold."""

    stage_alike: float = 0.02
    """Relative difference up to which peaks of neighbouring ranks are those of one stage."""

    stage_even: float = 0.35
    """Spread of the falls from stage to stage, as a share of their mean, that is still even."""

    stage_fall: float = 0.03
    """Least fall from stage to stage, as a share of the first one's peak."""

    growth_points: int = 8
    """Fewest measured steps in which memory must rise to be called growing; fewer takes the first
    steps' warm-up for it."""

    growth_share: float = 0.2
    """Growth over those steps, of the first value. Lower blames noise."""

    logits_rounding: float = 0.005
    """How far a printed request may be from the logits' size: messages round to two decimals."""

    states_share: float = 0.5
    """Share of the device that the process's tensors must hold to blame model states."""

    caught_before_ns: int = 120 * SECOND
    """How long before the others began to wait a caught error can be the reason. Larger takes an
    old, harmless one for it."""

    working_cpu: float = 0.02
    """Share of a core from which a process worked between two looks. Lower takes the threads of a
    sleeping one for work, higher calls a rank that waits for its disk now and then stuck."""

    count_silence: float = 4.0
    """A counter is at work while its last line is younger than this many of its usual intervals.
    Larger calls a rank slow that had stopped."""

    skew_samples: int = 5
    """Most examples of late arrivals that the metrics list."""

    evidence_most: int = 8
    """Most evidence items of one finding; more makes reports longer, not surer."""

    equal_gpus: int = 3
    """Fewest GPUs that count as equals when one has fewer NVLinks than they. Lower takes a bridged
    pair for the norm of a node, and every other GPU for a fault."""

    shm_small: int = 1 << 30
    """A /dev/shm smaller than this is what containers give by default. Larger calls more file
    systems too small, where NCCL or workers were refused."""

    shm_full: float = 0.9
    """Share of /dev/shm in use from which it counts as full."""

    memlock_small: int = 1 << 30
    """A limit of locked memory below this refuses verbs buffers of NCCL."""

    gpu_busy: float = 50.0
    """Utilisation in percent from which a reading of a GPU was taken under load."""

    modelled_edge: float = 0.25
    """Share of a device's own link below which an edge that NCCL models above it is a fault of the
    model. Larger takes a switch that several devices share for one."""

    cured_rate: float = 2.0
    """Times that one run of a test has to be faster than another to show that a setting cures."""

    congested_packets: int = 1000
    """Growth from which a counter of marks, pauses or retransmits is more than the usual few."""

    congested_spread: float = 1.25
    """90th over 10th percentile of rates from which a fabric's load is seen in the job."""

    axis_cost: float = 0.05
    """Share of the step from which an axis on the wrong links is a finding (the taxonomy's 5 %)."""

    rate_reached: float = 0.7
    """Share of a port's rate from which collectives use all of it; the rest is protocol."""

    rate_beyond: float = 1.1
    """Share of a port's rate beyond which a rate is of another path."""

    network_share: float = 0.3
    """Exposed share of the step from which the network, at its rate, is too slow for the job."""

    gpu_loaded: float = 0.5
    """Share of its power limit from which a GPU was under load. Lower reads idle states as
    faults."""

    throttled_clock: float = 0.9
    """Share of the usual clock below which a GPU with a throttle reason is slower than its peers.
    Higher blames GPUs for the spread that all have."""

    held_clock: float = 0.75
    """Share of its highest clock below which a hot or braked GPU is slow even where all are."""

    power_at_limit: float = 0.9
    """Share of its power limit from which a software power cap is normal under load."""

    pause_share: float = 0.1
    """Share of the time that regular pauses have to take to be a finding."""

    recompiles: int = 3
    """Fewest recompiles that can be a finding. Lower counts warm-up."""

    recompile_peak: float = 3.0
    """A step of this multiple of the usual one is a peak."""

    diverged_share: float = 0.15
    """Rise of the loss over its lowest level, as a share of it, from which it left its trend."""

    diverged_points: int = 5
    """Reports that the rise must last. Fewer calls spikes that recover a divergence."""

    overflows: int = 6
    """Overflows in a row, down to the floor, that are a collapse. Fewer calls the search for the
    first scale one."""

    scale_floor: float = 1.0
    """Loss scale at or below which no lower one helps."""

    collapsed_share: float = 0.8
    """Largest expert's share of the tokens from which a router has collapsed."""

    balance_weight: float = 1e-3
    """Weight of a balancing loss from which it counts as configured."""

    told_share: float = 0.1
    """Share of the step by which the same unit leads its peers in at least three reports to be a
    straggler. Lower takes the uneven work of one rank, such as logging, for slowness."""

    work_follows: float = 0.85
    """Correlation of compute with work from which unequal work is the reason. Lower blames work for
    what a device does."""

    stage_uneven: float = 1.15
    """Work of a stage over the median of the others from which stages are uneven. Lower blames the
    embedding and the head that every pipeline has."""

    bubble_share: float = 0.2
    """Share of the step that the schedule leaves idle from which it is a finding. Lower blames
    every pipeline."""

    offload_share: float = 0.35
    """Share of the step in the CPU's optimizer and copies from which offload sets the pace."""

    shard_share: float = 0.2
    """Share of the step that a memory feature takes from which its need is questioned."""

    shard_room: float = 0.8
    """Share of the device that the less sharded layout may need. Higher risks running out."""

    short_sequence: int = 8192
    """Tokens up to which a sequence is short for context parallelism."""

    exposed_share: float = 0.15
    """Share of the step in exposed communication from which it is a finding."""

    host_share: float = 0.3
    """Share of the step that the device waits for launches from which the host sets the pace."""

    expert_uneven: float = 1.4
    """Tokens of the hottest rank over the mean from which experts are uneven. Lower blames the
    fluctuation that every router has."""

    expert_uneven_one: float = 2.0
    """The same for single experts, which vary more than ranks."""

    few_cores: float = 2.0
    """Cores for each process that shares a mask, below which the mask is too small."""

    looks_least: int = 4
    """Looks at main threads from which their places say something. Fewer takes chance for habit."""

    looks_share: float = 0.6
    """Share of the looks that must find the same kind of place."""

    gc_share: float = 0.05
    """Share of the time in collections of garbage from which they are a finding."""

    long_kernel: float = 50.0
    """Microseconds of a kernel beyond which launching is no limit by itself, and gaps come from
    synchronisation."""

    comm_row: float = 3.0
    """Collectives in a row, without compute between them, from which they could have begun earlier.
    Lower blames those of tensor parallelism, whose result the next kernel needs."""

    hidden_share: float = 0.5
    """Share of communication that runs behind compute above which overlap works."""

    short_kernel: float = 0.5
    """A rank came last when its communication kernel takes at most this share of the median one.
    Higher blames the ordinary spread of arrivals."""

    gpu_idle: float = 10.0
    """Utilisation in percent below which a reading of a GPU says nothing of its clock."""

    compare_least: float = 0.02
    """Least change between two runs that matters, as a share. Lower calls more of it a change,
    and noise that repeats within a run (another clock, a warmer room) with it."""

    compare_least_memory: float = 0.05
    """The same for peak memory."""

    compare_loss: float = 1e-3
    """Relative difference from which the losses of one step count as apart."""

    replay_steps: int = 16
    """Most steps that are replayed to ask what they would take without stragglers."""

    replay_events: int = 60_000
    """Most events of all replayed steps together: more is surer, and slower by a second for about
    a million events times parts asked for."""

    replay_ranks: int = 64
    """More ranks than this are not asked for one by one."""

    replay_error: float = 0.1
    """Largest relative difference between replayed and measured step time; beyond it the model
    lacks something that the job does, and nothing is said."""

    equal_loss: float = 0.005
    """Relative difference of losses at equal weights and data that the order of sums alone makes.
    Larger hides a normalisation that is off by little; smaller takes rounding for a fault."""

    factor_close: float = 0.02
    """How near a ratio of gradients must be to a ratio of sizes to be called that factor. Larger
    finds factors by chance."""

    parity_agree: float = 0.01
    """Relative distance from the reference up to which a parameter's gradient agrees. Larger lets
    a parameter with a small fault pass for one of the sound ones."""

    parity_apart: float = 0.05
    """Distance from which a parameter's gradient differs. Smaller takes low precision for a
    missing reduction."""

    shared_samples: float = 0.02
    """Share of distinct samples that replicas may have in common: the last batch is padded.
    Smaller calls padding of small data sets an overlap."""

    resume_jump: float = 1.3
    """Factor by which a rate or scale must change at a restart to count as lost. Smaller takes the
    schedule's own steps for a loss."""

    read_from_prose: tuple[str, ...] = (
        "numeric.replicas-diverged",
        "numeric.shards-overlap",
        "numeric.resume-data",
        "numeric.tp-rng",
    )
    """Causes that are at most possible when only what a program printed tells them: on piles that
    the rules had not been written with, readings of such lines were right about every second time.
    Leaving one out says it with the rule's own confidence, and outvotes surer findings."""
