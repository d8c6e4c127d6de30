"""Causal language models of transformers over a static key-value cache with one slot for each conversation.

`SlotModel` makes one `forward(input_ids, positions, slots)` of a model: the prefill of a prompt (one row, its tokens)
and a step of decoding (one token for each of several conversations) are calls of the same function.  Rows of a call may
be of any slots, at any positions, so conversations begin and end independently of each other.

The cache is buffers of a fixed size, written in place.  Two rules keep what is padded out of it: a row that pads the
batch goes to the last slot, which no conversation has, and tokens that pad a prompt stand behind it, where they are
written over before anything may see them.

Weights are random: nothing is downloaded, and what the models write has no meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 256


class SlotModel(nn.Module):
    """See the module's text; `slots` conversations of up to `length` tokens."""

    def __init__(self, model: Any, slots: int, length: int) -> None:
        super().__init__()
        self.model, self.slots, self.length = model, slots, length
        config = model.config
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            for name in ("keys", "values"):
                buffer = torch.zeros(slots + 1, length, heads, width, dtype=model.dtype, device=model.device)
                self.register_buffer(f"{name}{layer}", buffer, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Logits for every token; all rows of a call have as many."""
        places = torch.arange(self.length, device=input_ids.device)
        visible = (places <= positions[:, :, None])[:, None]  # a token sees what stands at or before its own place
        cache = CacheOfRows(self, positions, slots)
        logits: Tensor = self.model(
            input_ids=input_ids, attention_mask=visible, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
        return logits


class CacheOfRows:
    """What a call sees of the cache: its rows' slots.  `update` is what transformers' attention calls."""

    is_compileable = True

    def __init__(self, owner: SlotModel, positions: Tensor, slots: Tensor) -> None:
        self.owner, self.positions, self.slots = owner, positions, slots

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        found = []
        for name, new in (("keys", keys), ("values", values)):
            buffer: Tensor = getattr(self.owner, f"{name}{layer}")
            buffer.index_put_((self.slots[:, None], self.positions), new.transpose(1, 2))
            found.append(buffer[self.slots].transpose(1, 2))
        return found[0], found[1]

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.owner.length, 0


def language_models(device: str, quick: bool) -> dict[str, Any]:
    """Three models by name, with random weights that are the same in every process."""
    small = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "tie_word_embeddings": False}
    scale = 1 if quick else 4

    def sized(width: int, layers: int, heads: int, shared: int) -> dict[str, Any]:
        return small | {
            "hidden_size": width * scale,
            "intermediate_size": 2 * width * scale,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": shared,
        }

    torch.manual_seed(0)
    models = {
        "chat": LlamaForCausalLM(LlamaConfig(**sized(64, 3, 4, 2))),
        "draft": LlamaForCausalLM(LlamaConfig(**sized(32, 1, 2, 2))),
        "code": Qwen2ForCausalLM(Qwen2Config(**sized(48, 2, 4, 4))),
    }
    return {name: model.to(device).eval() for name, model in models.items()}
