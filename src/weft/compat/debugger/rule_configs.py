"""Names of rules with the parameters that are given, as `rule_configs` has them.

A parameter that is not given keeps weft's own default, not the original's: those waited for 1000 measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RuleConfig:
    """A rule that is asked for: its name, and parameters by name."""

    rule: str
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """The action of a rule that finds something: a name and its target."""

    name: str
    target: str = ""


def ActionList(*actions: Action) -> tuple[Action, ...]:
    """Several actions."""
    return actions


def StopTraining(training_job_prefix: str = "") -> Action:
    """End the job."""
    return Action("StopTraining", training_job_prefix)


def Email(email_address: str) -> Action:
    """Write a message."""
    return Action("Email", email_address)


def SMS(phone_number: str) -> Action:
    """Write a short message."""
    return Action("SMS", phone_number)


def _of_profiler(rule: str) -> Callable[..., RuleConfig]:
    """A rule of the profiler: its parameters are arguments."""
    return lambda **parameters: RuleConfig(rule, parameters)


def _of_tensors(rule: str) -> Callable[[], RuleConfig]:
    """A rule about tensors: its parameters are given to `Rule.sagemaker`."""
    return lambda: RuleConfig(rule)


ProfilerReport = _of_profiler("ProfilerReport")
CPUBottleneck = _of_profiler("CPUBottleneck")
IOBottleneck = _of_profiler("IOBottleneck")
LowGPUUtilization = _of_profiler("LowGPUUtilization")
GPUMemoryIncrease = _of_profiler("GPUMemoryIncrease")
BatchSize = _of_profiler("BatchSize")
LoadBalancing = _of_profiler("LoadBalancing")
Dataloader = _of_profiler("Dataloader")
StepOutlier = _of_profiler("StepOutlier")
MaxInitializationTime = _of_profiler("MaxInitializationTime")
OverallSystemUsage = _of_profiler("OverallSystemUsage")
OverallFrameworkMetrics = _of_profiler("OverallFrameworkMetrics")

vanishing_gradient = _of_tensors("VanishingGradient")
exploding_tensor = _of_tensors("ExplodingTensor")
loss_not_decreasing = _of_tensors("LossNotDecreasing")
overfit = _of_tensors("Overfit")
overtraining = _of_tensors("Overtraining")
poor_weight_initialization = _of_tensors("PoorWeightInitialization")
weight_update_ratio = _of_tensors("WeightUpdateRatio")
unchanged_tensor = _of_tensors("UnchangedTensor")
all_zero = _of_tensors("AllZero")
tensor_variance = _of_tensors("TensorVariance")
saturated_activation = _of_tensors("SaturatedActivation")
dead_relu = _of_tensors("DeadRelu")
class_imbalance = _of_tensors("ClassImbalance")
confusion = _of_tensors("Confusion")
stalled_training_rule = _of_tensors("StalledTrainingRule")
check_input_images = _of_tensors("CheckInputImages")
nlp_sequence_ratio = _of_tensors("NLPSequenceRatio")
similar_across_runs = _of_tensors("SimilarAcrossRuns")
tree_depth = _of_tensors("TreeDepth")
feature_importance_overweight = _of_tensors("FeatureImportanceOverweight")
create_xgboost_report = _of_tensors("CreateXgboostReport")
