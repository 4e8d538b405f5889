"""Prompts of ours, which the dense model answers to give calibration text; none is one of questions.txt."""

import json
from pathlib import Path

_PROMPTS = Path(__file__).with_name("prompts.txt")
_TEMPLATES = Path(__file__).with_name("templates.json")


def prompts() -> list[str]:
    """The short list, which layerwise carving uses."""
    return _PROMPTS.read_text().splitlines()


def all_prompts() -> list[str]:
    """The short list and every filled template, each once."""
    groups = json.loads(_TEMPLATES.read_text())
    filled = [
        prompt.format(*filling)
        for group in groups
        for filling in group["fillings"]
        for prompt in group["prompts"]
    ]
    return list(dict.fromkeys(prompts() + filled))
