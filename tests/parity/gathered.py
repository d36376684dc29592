"""Replicas of a pipeline share parameters, which are gathered for each microbatch; started by `test_gathered.py`.

    gathered.py --folder FOLDER --partitions 2 check...       with the settings in WEFT_SET

Every rank asserts for itself; a job that ends well has passed. The model and the job are those of `shared_parts.py`.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests import models
from tests.parity import shared_parts
from tests.parity.registry import Checks
from tests.parity.shared_parts import WIDTH, WORDS, Job, Net, a_model_trains_as_in_one_process

CHECKS = Checks()
CHECKS.given = shared_parts.given
CHECKS |= {
    check.__name__: check
    for check in (
        shared_parts.steps_give_the_weights_and_states_of_one_process,
        shared_parts.a_rank_holds_its_share,
        shared_parts.norms_are_those_of_the_whole_model,
        shared_parts.gradients_add_up_over_steps,
        shared_parts.an_evaluation_leaves_shares,
        shared_parts.a_whole_state_is_loaded_into_shares,
        shared_parts.saves_go_to_other_layouts,
    )
}


# Tied words, layers of one module, experts, checkpoints, code that reads other modules' weights, convolutions.
CHECKS.of_each(
    "GPT2LMHeadModel", "LlamaForCausalLM", "AlbertForMaskedLM", "MixtralForCausalLM", "BertForMaskedLM",
    "GPT2LMHeadModel:checkpointed", "T5ForConditionalGeneration:checkpointed", "MambaForCausalLM", "Wav2Vec2ForCTC",
    "BartForConditionalGeneration",
)(a_model_trains_as_in_one_process)  # fmt: skip


class Deep(models.Words):
    """Layers that are checkpointed: as a whole, a piece of each, or not at all."""

    def __init__(
        self, layers: int = 4, whole: bool = False, piece: bool = False, reentrant: bool = False
    ) -> None:
        torch.manual_seed(0)
        super().__init__(WORDS, WIDTH, [Piece(piece, reentrant) for _ in range(layers)], tied=False)
        self.whole = whole

    def body(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.whole else block(x)
        return x


class Piece(models.Block):
    def __init__(self, piece: bool, reentrant: bool) -> None:
        super().__init__(WIDTH, 13, torch.tanh)
        self.piece, self.reentrant = piece, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not self.piece:
            return super().forward(x)
        return x + checkpoint(self.inside, self.norm(x), use_reentrant=self.reentrant)

    def inside(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@CHECKS.check
def checkpointed_layers_are_gathered_again() -> None:
    for kind in ({"whole": True}, {"piece": True}, {"piece": True, "reentrant": True}):
        job = Job(net=Deep(**kind), pipeline="zb_h1")
        job.trains_as_one_process(2)


@CHECKS.check
def replicas_meet_new_shapes_at_other_times() -> None:
    """One waits for what is known of the shapes of a module's result where another one knows them."""
    job, lengths = Job(net=Deep()), [3, 5, 3, 7, 5, 5, 2, 7]
    for number, length in enumerate(lengths):
        own = length if weft.rdp_rank() % 2 else lengths[number - 1]
        words = torch.randint(0, WORDS, (8, own), generator=torch.Generator().manual_seed(number))
        job.step(job.model, words, words.roll(1, 1))


@CHECKS.check
def few_layers_are_whole_at_once() -> None:
    """Of a partition of six layers: bytes of weights, whoever holds them, and of gradients that are not yet shares."""
    for pipeline in ("1f1b", "zb_h1"):
        job = Job(net=Deep(layers=12), pipeline=pipeline)
        job.train(1)
        units = job.model.shared.units
        alive: dict[int, int] = {}
        most = [0, 0]
        gathered, summed = units.gather, units.take_gradients

        def gather(layer: Any, alive: Any = alive, most: Any = most, gathered: Any = gathered) -> Any:
            found = gathered(layer)
            for (whole,) in found:
                storage = whole.untyped_storage()
                key = storage._cdata
                alive[key] = storage.nbytes()
                weakref.finalize(storage, alive.pop, key, None)
            most[0] = max(most[0], sum(alive.values()))
            return found

        def reduce_scatter(layer: Any, units: Any = units, most: Any = most, summed: Any = summed) -> None:
            parameters = [weight.parameter for weight in units.by_layer.weights]
            most[1] = max(most[1], sum(p.grad.nbytes for p in parameters if p.grad is not None))
            summed(layer)

        units.gather, units.take_gradients = gather, reduce_scatter
        job.train(1)
        sizes = [sum(4 * math.prod(w.how.shape) for w in layer.weights) for layer in units.by_layer.layers]
        assert 0 < most[0] <= 2 * max(sizes) < 0.5 * sum(sizes), (most, sizes)
        assert 0 < most[1] <= 3 * max(sizes), (most, sizes)


class Peeping(Net):
    """From the second step on a block reads a weight of the one before, which the first step cannot have shown."""

    def __init__(self) -> None:
        super().__init__()
        for block, before in zip(self.blocks[1:], self.blocks, strict=False):
            block.__dict__["before"] = before
            block.__class__ = PeepingBlock


class PeepingBlock(models.Block):
    peeps = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0 * self.before.norm.weight if PeepingBlock.peeps else y


@CHECKS.check
def a_weight_that_is_given_back_is_read() -> None:
    job = Job(net=Peeping())
    job.train(1)
    PeepingBlock.peeps = True
    job.train(1)


class Skipping(Net):
    """From the second step on the second replica leaves a layer out."""

    skips = False

    def body(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for number, block in enumerate(self.blocks):
            if not (Skipping.skips and number == 2 and weft.rdp_rank() == 1):
                x = block(x)
        return x


@CHECKS.check
def replicas_run_other_layers() -> None:
    job = Job(net=Skipping())
    job.train(1)
    Skipping.skips = True
    job.train(1)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
