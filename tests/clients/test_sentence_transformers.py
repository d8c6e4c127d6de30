"""sentence-transformers: a model put together from its modules, compiled by the backend's name, encodes sentences."""

from __future__ import annotations

from pathlib import Path

import sentence_transformers
import torch
from sentence_transformers.sentence_transformer import modules as models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.support.on_device import DEVICE, nothing_fell_back, same, settings

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "trace", "many", "variants", "a", "call"]


def test_sentences_are_encoded_as_eager_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=32,
    ).save_pretrained(tmp_path)  # fmt: skip
    transformer = models.Transformer(str(tmp_path))
    pooling = models.Pooling(16)
    model = sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device=str(DEVICE))
    batches = [["one trace", "many variants"], ["a call", "one trace many variants", "many"]]
    wanted = [model.encode(batch) for batch in batches]
    model.compile(**settings())
    for batch, expected in zip(batches, wanted, strict=True):
        same(torch.from_numpy(model.encode(batch)), torch.from_numpy(expected))
    assert nothing_fell_back()["generic_calls"] >= 2
