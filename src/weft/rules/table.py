"""All rules of weft, with their default parameters."""

from __future__ import annotations

from weft.rules.data import Dataloader, DataWait, IOBottleneck, PreprocessingCompetes, StorageThroughput
from weft.rules.learning import ExplodingGradient, LossNotDecreasing, LossNotFinite, VanishingGradient
from weft.rules.machine import BatchSize, CPUBottleneck, LowGPUUtilization, OtherProcesses, OverallSystemUsage
from weft.rules.memory import GPUMemoryIncrease, MemoryHeadroom, MemoryLeak
from weft.rules.pipeline import (
    LastPartitionHeavy,
    MicrobatchesTooFew,
    MicrobatchesTooMany,
    PartitionImbalance,
    PipelineBubble,
    TensorParallelExposed,
    TransferExposed,
)
from weft.rules.replicas import AllReduceExposed, LoadBalancing, SmallBatchNorm, StragglerRank
from weft.rules.rule import Rule
from weft.rules.training import (
    CheckpointStall,
    CollectorPauses,
    EvaluationShare,
    JobFailed,
    MaxInitializationTime,
    OverallFrameworkMetrics,
    RecordingIncomplete,
    ScriptBetweenSteps,
    StepOutlier,
)

RULES: tuple[Rule, ...] = (
    JobFailed(),
    LossNotFinite(),
    MemoryLeak(),
    MemoryHeadroom(),
    RecordingIncomplete(),
    PreprocessingCompetes(),
    StorageThroughput(),
    DataWait(),
    StragglerRank(),
    LastPartitionHeavy(),
    PartitionImbalance(),
    MicrobatchesTooFew(),
    MicrobatchesTooMany(),
    TransferExposed(),
    TensorParallelExposed(),
    AllReduceExposed(),
    CollectorPauses(),
    CheckpointStall(),
    EvaluationShare(),
    ScriptBetweenSteps(),
    OtherProcesses(),
    StepOutlier(),
    CPUBottleneck(),
    IOBottleneck(),
    Dataloader(),
    LoadBalancing(),
    BatchSize(),
    PipelineBubble(),
    LowGPUUtilization(),
    GPUMemoryIncrease(),
    SmallBatchNorm(),
    ExplodingGradient(),
    VanishingGradient(),
    LossNotDecreasing(),
    MaxInitializationTime(),
    OverallFrameworkMetrics(),
    OverallSystemUsage(),
)
"""In the order in which findings of equal weight are shown: causes before what they cause."""
