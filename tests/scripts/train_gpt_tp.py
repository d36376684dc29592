"""GPT with tensor parallelism: the library's transformer, or layers of the script that are replaced by its."""

import argparse
import os

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
from smdistributed.modelparallel.torch.nn import DistributedTransformerLayer, DistributedTransformerLMHead
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)


class Block(nn.Module):
    """What the script had before it was made tensor parallel."""

    def __init__(self, width, heads, dropout=0.0):
        super(Block, self).__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attention_mask=None):
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


def init_hook(width, heads, dropout=0.0):
    kwargs = {
        "num_attention_heads": heads,
        "attention_head_size": width // heads,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "attention_dropout_prob": dropout,
        "hidden_dropout_prob": dropout,
        "pre_layernorm": False,
        "post_layernorm": True,
    }
    return (), kwargs


def forward_hook(x, attention_mask=None):
    return ((x, attention_mask),), {}


def return_hook(output):
    return output[0]


smp.tp_register_with_module(Block, DistributedTransformerLayer, init_hook, forward_hook, return_hook)


class Classifier(nn.Module):
    def __init__(self, vocab, width, layers, heads):
        super(Classifier, self).__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocab)

    def forward(self, inputs):
        ids, _, _, _, labels = inputs
        logits = self.head(self.blocks(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    loss, logits = model((input_ids, attention_mask, None, None, input_ids))
    model.backward(loss)
    return loss


def gradient_norm(model):
    """Ranks that split tensors have the same gradients, but for parameters that they hold parts of."""
    counted = [p for p in model.local_parameters() if smp.tp_rank() == 0 or model.is_distributed_parameter(p)]
    total = sum((p.grad.float().square().sum() for p in counted if p.grad is not None), torch.zeros(()))
    torch.distributed.all_reduce(total, group=smp.get_mp_process_group())
    return total.sqrt().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--prescaled_batch", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--own_layers", type=int, default=0)
    parser.add_argument("--model_dir", type=str, default=os.environ.get("SM_MODEL_DIR", ""))
    parser.add_argument("--load", type=str, default="")
    parser.add_argument("--seed", type=int, default=12345)
    args = parser.parse_args()

    smp.init(
        {
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": 2,
            "ddp": True,
            "prescaled_batch": args.prescaled_batch > 0,
        }
    )
    torch.manual_seed(args.seed + smp.tp_rank())  # else slices of weights would be equal
    np.random.seed(args.seed)

    vocab, width, layers, heads, length = 64, 32, 2, 4, 16
    with smp.tensor_parallelism(
        enabled=smp.tp_size() > 1, fused_softmax=True, fused_bias_gelu=True, attention_in_fp32=False
    ):
        if args.own_layers:
            model = Classifier(vocab, width, layers, heads)
        else:
            model = DistributedTransformerLMHead(
                num_layers=layers,
                num_attention_heads=heads,
                attention_head_size=width // heads,
                hidden_size=width,
                intermediate_size=4 * width,
                vocab_size=vocab,
                num_positions=length,
                attention_dropout_prob=0.0,
                hidden_dropout_prob=0.0,
                activation="gelu_new",
                causal_mask_size=length,
                use_normal_initialization=True,
                pre_layernorm=True,
                post_layernorm=False,
            )
    model = smp.DistributedModel(model, trace_device="gpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    optimizer = smp.DistributedOptimizer(optimizer)
    if args.load:
        model.load_state_dict(translate_hf_state_dict_to_smdistributed_gpt2(torch.load(args.load)))

    rank, size = (smp.rdp_rank(), smp.rdp_size()) if args.prescaled_batch else (smp.dp_rank(), smp.dp_size())
    torch.manual_seed(args.seed)
    batches = [torch.randint(vocab, (args.train_batch_size * size, length)) for _ in range(args.max_steps)]
    model.train()
    for step, batch in enumerate(batches):
        input_ids = batch[rank * args.train_batch_size : (rank + 1) * args.train_batch_size]
        attention_mask = torch.zeros_like(input_ids)
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, optimizer, input_ids, attention_mask, args).reduce_mean()
        norm = gradient_norm(model)
        optimizer.step()
        if smp.rank() == 0:
            print(f"({step}) norm: {norm:.6f}")
            print(f"({step}) loss: {loss.item():.6f}")

    kinds = {type(m).__name__ for m in model.modules()}
    if smp.rank() == 0:
        print("layers:", "replaced" if "DistributedTransformerLayer" in kinds else "own")
    if args.model_dir and not args.own_layers:
        if smp.rdp_rank() == 0:
            state = model.state_dict()
            if smp.rank() == 0:
                state = translate_state_dict_to_hf_gpt2(state, max_seq_len=length)
                torch.save(state, os.path.join(args.model_dir, "hf.pt"))
    smp.barrier()


if __name__ == "__main__":
    main()
