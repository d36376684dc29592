"""Those of the other comparisons, and one that predicts and runs nothing."""

from __future__ import annotations

from benchmarks import contenders
from benchmarks.contenders import Weft


class Task(contenders.Task):
    """The same GPT."""


class Predictor(Weft):
    """Two ranks that trace, halves of the backward pass too, and simulate. Their model is never split: it is traced
    again and again."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, pipeline="auto")

    def predictions(self, schedules: list[str]) -> dict[str, float]:
        from benchmarks.simulator.predict import predictions

        return predictions(self.model, self.train_step, self.task.mini_batch(), schedules)


CONTENDERS = {**contenders.CONTENDERS, "predictor": Predictor}
