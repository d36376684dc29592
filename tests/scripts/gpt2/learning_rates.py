"""A schedule of the older kind: it writes the learning rate into the optimizer by itself."""

import math


class AnnealingLR(object):
    """Warm-up, then a decay by name; state and resuming by hand."""

    def __init__(
        self, optimizer, start_lr, warmup_iter, plateau_iter, total_iters, decay_style, last_iter,
        min_lr=0.0, use_checkpoint_lr_scheduler=True, override_lr_scheduler=False,
    ):  # fmt: skip
        self.optimizer = optimizer
        self.start_lr, self.min_lr = start_lr, min_lr
        self.warmup_iter, self.plateau_iter = warmup_iter, plateau_iter
        self.num_iters = last_iter
        self.end_iter = total_iters
        assert self.end_iter > 0
        self.decay_style = decay_style
        self.override_lr_scheduler = override_lr_scheduler
        self.use_checkpoint_lr_scheduler = use_checkpoint_lr_scheduler
        self.step(self.num_iters)

    def get_lr(self):
        num_iters_ = min(self.num_iters, self.end_iter - self.warmup_iter)
        if self.warmup_iter > 0 and self.num_iters <= self.warmup_iter:
            return float(self.start_lr) * num_iters_ / self.warmup_iter
        num_iters_ = num_iters_ - self.warmup_iter
        if self.decay_style == "linear":
            lr = self.start_lr * (self.end_iter - num_iters_) / self.end_iter
        elif self.decay_style == "cosine":
            lr = self.start_lr / 2.0 * (math.cos(math.pi * num_iters_ / self.end_iter) + 1)
        else:
            lr = self.start_lr
        return max(lr, self.min_lr)

    def step(self, step_num=None):
        if step_num is None:
            step_num = self.num_iters + 1
        self.num_iters = step_num
        new_lr = self.get_lr()
        for group in self.optimizer.param_groups:
            group["lr"] = new_lr

    def state_dict(self):
        return {
            "start_lr": self.start_lr,
            "warmup_iter": self.warmup_iter,
            "num_iters": self.num_iters,
            "decay_style": self.decay_style,
            "end_iter": self.end_iter,
            "min_lr": self.min_lr,
        }

    def load_state_dict(self, sd):
        self.start_lr = sd["start_lr"]
        self.warmup_iter = sd["warmup_iter"]
        self.end_iter = sd["end_iter"]
        self.decay_style = sd["decay_style"]
        self.num_iters = sd["num_iters"]
        self.step(self.num_iters)
