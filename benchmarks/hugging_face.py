"""Hugging Face's transformers as a process that decodes what it is asked to, one job at a time.

It needs PyTorch, which fly_jax does not, and so it may run in an interpreter of its own. Between
jobs it waits, and leaves the processor to whoever is measured beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GREEDY = "Hugging Face, greedy"
PROMPT_LOOKUP = "Hugging Face, prompt lookup"
ASSISTED = "Hugging Face, assisted by self:int4"
WAYS = (GREEDY, PROMPT_LOOKUP, ASSISTED)
# transformers refuses these for several rows.
ONE_ROW_ONLY = (PROMPT_LOOKUP, ASSISTED)


class HuggingFace:
    """The process, and what it is asked."""

    def __init__(self, python: str, target: str, assistant: str) -> None:
        """Starts it.

        Args:
          python: an interpreter that has PyTorch and transformers.
          target: a folder in Hugging Face's format, as that of the assistant.
          assistant: what drafts in assisted generation.
        """
        command = [python, __file__, target, assistant]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def decode(
        self, way: str, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[list[list[int]], float]:
        """Decodes a batch: every row's new tokens, and the seconds of all but the first of them.

        A call that ends with the first token is timed and taken off: it is what the prompts take.
        """
        job = {"way": way, "prompts": list(map(list, prompts)), "max_new_tokens": max_new_tokens}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("Hugging Face's process has ended; what it wrote above says why.")
        tokens, seconds = json.loads(line)
        return tokens, seconds


def _serve(target: str, assistant: str) -> None:
    """Runs in the other interpreter, until standard input ends."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    model = load(target)
    options = {
        GREEDY: {},
        PROMPT_LOOKUP: {"prompt_lookup_num_tokens": 10},
        ASSISTED: {"assistant_model": load(assistant)},
    }
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for line in sys.stdin:
        job = json.loads(line)
        prompts, limit = job["prompts"], job["max_new_tokens"]
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])

        def timed(limit: int, way: str = job["way"], tokens: Any = tokens, mask: Any = mask) -> Any:
            begin = time.perf_counter()
            whole = model.generate(
                tokens, attention_mask=mask, do_sample=False, max_new_tokens=limit, pad_token_id=0,
                **options[way],
            )  # fmt: skip
            return whole, time.perf_counter() - begin

        timed(1)  # warms these shapes up
        _, first = timed(1)
        whole, seconds = timed(limit)
        rows = [_until_end(row, ends) for row in whole[:, width:].tolist()]
        print(json.dumps([rows, seconds - first]), flush=True)


def _until_end(row: list[int], ends: list[int]) -> list[int]:
    """A row without what fills it up behind its end of text, which stays."""
    places = [index for index, token in enumerate(row) if token in ends]
    return row[: places[0] + 1] if places else row


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # this file has a module's name
    _serve(*sys.argv[1:])
