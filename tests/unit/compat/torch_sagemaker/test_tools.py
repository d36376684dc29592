"""Small functions of the second version, without a job."""

from __future__ import annotations

import logging

import pytest
import torch

from weft.compat.torch_sagemaker import tools
from weft.errors import ConfigError


def test_the_oldest_checkpoints_go(tmp_path):
    for name in ("m-9steps", "m-10steps", "m-100steps", "other-1steps"):
        (tmp_path / name).mkdir()
    (tmp_path / "m-1file").touch()
    (tmp_path / "m-2link").symlink_to(tmp_path / "m-9steps")
    tools.limit_num_subdirs(tmp_path, 2, sort_fn=tools.SORT_BY_LAST_INT, regex="^m-.+$")
    left = {"m-10steps", "m-100steps", "other-1steps", "m-1file", "m-2link"}
    assert {path.name for path in tmp_path.iterdir()} == left
    with pytest.raises(ConfigError, match="got 0 folders to keep: give a number from 1 on"):
        tools.limit_num_subdirs(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 5


def test_the_norm_of_a_model_without_fsdp():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert tools.clip_grad_norm_(model, 1.0).item() == 5
    assert model.weight.grad.norm().item() == pytest.approx(1)


def test_the_logger_tells_times(capsys):
    logger = tools.get_logger()
    assert logger is tools.get_logger() and logger.level == logging.INFO and len(logger.handlers) == 1
    logger.handlers[0].setStream(__import__("sys").stdout)
    with tools.timeit(True, "work", 3):
        pass
    with tools.timeit(False, "rest"):
        pass
    told = capsys.readouterr().out
    assert "[rank 3] work: " in told and "rest" not in told
