"""All rules of weft, with their default parameters."""

from __future__ import annotations

from weft.rules.data.data_wait import DataWait
from weft.rules.data.dataloader import Dataloader
from weft.rules.data.io_bottleneck import IOBottleneck
from weft.rules.data.preprocessing_competes import PreprocessingCompetes
from weft.rules.data.storage_throughput import StorageThroughput
from weft.rules.machine.batch_size import BatchSize
from weft.rules.machine.cpu_bottleneck import CPUBottleneck
from weft.rules.machine.gpu_memory_increase import GPUMemoryIncrease
from weft.rules.machine.low_gpu_utilization import LowGPUUtilization
from weft.rules.machine.memory_headroom import MemoryHeadroom
from weft.rules.machine.memory_leak import MemoryLeak
from weft.rules.machine.other_processes import OtherProcesses
from weft.rules.machine.overall_system_usage import OverallSystemUsage
from weft.rules.pipeline.last_partition_heavy import LastPartitionHeavy
from weft.rules.pipeline.microbatches_too_few import MicrobatchesTooFew
from weft.rules.pipeline.microbatches_too_many import MicrobatchesTooMany
from weft.rules.pipeline.partition_imbalance import PartitionImbalance
from weft.rules.pipeline.pipeline_bubble import PipelineBubble
from weft.rules.pipeline.tensor_parallel_exposed import TensorParallelExposed
from weft.rules.pipeline.transfer_exposed import TransferExposed
from weft.rules.replicas.all_reduce_exposed import AllReduceExposed
from weft.rules.replicas.load_balancing import LoadBalancing
from weft.rules.replicas.small_batch_norm import SmallBatchNorm
from weft.rules.replicas.straggler_rank import StragglerRank
from weft.rules.rule import Rule
from weft.rules.training.checkpoint_stall import CheckpointStall
from weft.rules.training.collector_pauses import CollectorPauses
from weft.rules.training.evaluation_share import EvaluationShare
from weft.rules.training.exploding_gradient import ExplodingGradient
from weft.rules.training.job_failed import JobFailed
from weft.rules.training.loss_not_decreasing import LossNotDecreasing
from weft.rules.training.loss_not_finite import LossNotFinite
from weft.rules.training.max_initialization_time import MaxInitializationTime
from weft.rules.training.overall_framework_metrics import OverallFrameworkMetrics
from weft.rules.training.recording_incomplete import RecordingIncomplete
from weft.rules.training.script_between_steps import ScriptBetweenSteps
from weft.rules.training.step_outlier import StepOutlier
from weft.rules.training.vanishing_gradient import VanishingGradient

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
"""In the order in which findings of equal weight are told: causes before what they cause."""
