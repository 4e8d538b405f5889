"""Rebuild a Hugging Face tokenizer from a GGUF vocabulary."""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from coli_server.models.dense import Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer whose ids equal those of the source: digits apart, then byte-level BPE."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in sorted(vocabulary.control)]
    )
    return tokenizer


def tokenizer_config(vocabulary: Vocabulary, context: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, chat template included."""
    tokens = vocabulary.tokens
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {
                "content": tokens[i],
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i in sorted(vocabulary.control)
        },
        "bos_token": tokens[vocabulary.bos],
        "chat_template": vocabulary.chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[vocabulary.eos],
        "model_max_length": context,
        "pad_token": tokens[vocabulary.pad],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[vocabulary.unknown],
    }


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """The content of `tokenizer.json`, indented so that a person can read it."""
    return json.dumps(json.loads(build_tokenizer(vocabulary).to_str()), ensure_ascii=False, indent=1)
