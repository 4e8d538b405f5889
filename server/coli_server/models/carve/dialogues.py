"""The dense model's own answers to prompts of ours, many at a time, with torch and transformers.

One greedy answer to each prompt and one sampled answer. Finished batches are kept in a file, a JSON list of
dialogues a line, so an interrupted run goes on.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from transformers import LlamaConfig, LlamaForCausalLM

from coli_server.models.carve.kept import finished_lines
from coli_server.models.dense import DenseModel
from coli_server.models.tokenizer import build_tokenizer

BATCH = 64
ANSWER_TOKENS = 200
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
GREEDY = {"do_sample": False, "temperature": None, "top_p": None}


def dialogues(dense: DenseModel, prompts: Sequence[str], file: Path) -> list[list[int]]:
    """Token ids of prompt and answer, two dialogues a prompt."""
    encoded = sorted(_encoded(dense, prompts), key=len)
    batches = [
        (encoded[first : first + BATCH], options)
        for options in (GREEDY, SAMPLING)
        for first in range(0, len(encoded), BATCH)
    ]
    done = finished_lines(file)
    if len(done) < len(batches):
        model = llama(dense)
        with file.open("a") as kept:
            for number in range(len(done), len(batches)):
                torch.manual_seed(number)
                done.append(list(_answered(model, dense, *batches[number])))
                kept.write(json.dumps(done[-1]) + "\n")
                kept.flush()
                print(f"dialogues: batch {number + 1} of {len(batches)}", file=sys.stderr, flush=True)
    return [row for batch in done for row in batch]


def _encoded(dense: DenseModel, prompts: Sequence[str]) -> list[list[int]]:
    tokenizer = build_tokenizer(dense.vocabulary)
    template = Environment().from_string(dense.vocabulary.chat_template)
    return [
        tokenizer.encode(
            template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        ).ids
        for prompt in prompts
    ]


def llama(dense: DenseModel) -> Any:
    """The dense model as transformers runs it, in bfloat16."""
    config = dense.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
        )
    )
    names = set(model.state_dict()) - {"lm_head.weight"}
    weights = {name: torch.from_numpy(dense.tensor(name).copy()) for name in names}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.bfloat16().eval()


def _answered(
    model: Any, dense: DenseModel, asked: Sequence[list[int]], options: dict[str, Any]
) -> Iterator[list[int]]:
    """Each prompt with its answer, which ends with the end of the turn unless it was cut."""
    pad, eos = dense.vocabulary.pad, dense.vocabulary.eos
    longest = max(map(len, asked))
    # Padded in front, so that all answers begin at the same place.
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in asked])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=ANSWER_TOKENS,
            eos_token_id=eos,
            pad_token_id=pad,
            **options,
        )
    for row, answer in zip(asked, out[:, longest:].tolist(), strict=True):
        yield row + (answer[: answer.index(eos) + 1] if eos in answer else answer)
