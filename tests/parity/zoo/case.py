"""One entry of the zoo: how to build a network, what to feed it, how to read its loss.

A case is a real class of `transformers`, never edited, from a small random configuration. Everything that
makes one run differ from the next (dropout, masking by chance, dropped layers) is set to zero here, in one
general way, so that one process and several can be compared to the last digits. Chance is tested elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.compare import Record, train_alone
from tests.parity.worker import BeforeSplit

Batch = dict[str, Tensor]

BATCH_SIZE = 8
MICROBATCHES = 4
STEPS = 3
VOCABULARY = 96
WIDTH = 32
LAYERS = 4

# Parts of configuration names that stand for a probability or a strength of noise.
_NOISE = ("dropout", "drop_path", "layerdrop", "drop_rate", "pdrop", "dropout_prob", "jitter", "drop_prob")
_NOISE += ("mask_time_prob", "mask_feature_prob", "label_noise", "stochastic_depth")


def loss_attribute(outputs: Any) -> Tensor:
    """The `loss` that a model computed from its labels."""
    return outputs.loss


@dataclass(frozen=True)
class Case:
    """A model class with its input.

    `batch(step)` gives tensors whose dim 0 is the batch; `options` are the other arguments of the model's
    forward, the same for each microbatch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Tensor] = loss_attribute
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    learning_rate: float = 0.02

    def optimizer_for(self, parameters: Any) -> torch.optim.Optimizer:
        """A new optimizer. AdamW's epsilon is large: it would turn rounding noise into full-size updates."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.learning_rate, eps=1e-3)
        return torch.optim.SGD(parameters, lr=self.learning_rate)

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        """The loss of one microbatch."""
        return self.loss(model(**batch, **self.options))

    def batches(self) -> list[Batch]:
        """The batches of all steps."""
        return [self.batch(step) for step in range(STEPS)]

    def trained_alone(self, microbatches: int = MICROBATCHES) -> tuple[nn.Module, Record]:
        """A model that is not trained, and what one process makes of it."""
        try:
            net = self.build()
            alone = copy.deepcopy(net)
            optimizer = self.optimizer_for(alone.parameters())
            return net, train_alone(alone, self.batches(), self.loss_of, optimizer, microbatches)
        except Exception as broken:
            raise BeforeSplit(f"not trained in one process: {broken!r}") from broken


CASES: dict[str, Case] = {}


def add(name: str, build: Callable[[], nn.Module], batch: Callable[[int], Batch], **more: Any) -> None:
    """Registers a case under the name of its class (a suffix after a colon tells variants apart)."""
    if name in CASES:
        raise ValueError(f"two cases named {name}")
    CASES[name] = Case(name, build, batch, **more)


def silence(config: Any) -> Any:
    """Sets every source of chance in a configuration, and in the ones nested in it, to zero."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            silence(value)
        elif isinstance(value, bool):
            if key == "apply_spec_augment":
                setattr(config, key, False)
        elif isinstance(value, (int, float)) and any(part in key for part in _NOISE):
            setattr(config, key, type(value)(0))
    return config


def silence_modules(net: nn.Module) -> nn.Module:
    """The same for modules whose probability does not come from the configuration."""
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net


def awaken(net: nn.Module) -> nn.Module:
    """Gives all layers weights that matter.

    Initial values of 0.02 and zero biases suit wide networks. In these narrow ones the signal of a layer
    would drown in the residual, and with it the gradients that the comparison is about.
    """
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=numbers)
            if not parameter.requires_grad or parameter.ndim == 0:
                continue
            if parameter.ndim == 1 or parameter.std() == 0:
                parameter.add_(noise, alpha=0.1)
            elif parameter.std() < (std := 0.7 * parameter[0].numel() ** -0.5):
                parameter.mul_(std / parameter.std())
    return net


def network(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A builder for `transformers.<model>(transformers.<config>(**settings))`, the same at each call."""

    def build() -> nn.Module:
        import transformers

        return from_config(model, getattr(transformers, config)(**settings))

    return build


def from_config(model: str, config: Any) -> nn.Module:
    """A silent network in training mode with weights from a fixed seed."""
    import transformers

    torch.manual_seed(0)
    return awaken(silence_modules(getattr(transformers, model)(silence(config)))).train()


def generator(step: int) -> torch.Generator:
    """The source of the inputs of one step."""
    return torch.Generator().manual_seed(1000 + step)
