"""Translations between names of states: with nothing split they change nothing."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
