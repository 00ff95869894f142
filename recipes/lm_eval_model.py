"""lm-eval's model `fly_jax`: whatever its tasks have generated, decoded in this process.

    python recipes/lm_eval_model.py run --model fly_jax --tasks gsm8k --batch_size 16 \
        --apply_chat_template --model_args target=MODEL,draft=ngram,num_speculative_tokens=auto

This is lm-eval's own command with one more model; who imports this module has that model, too.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from fly_jax.decoding.pair import load_pair, open_pair
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState
from fly_jax.errors import FlyJaxError
from fly_jax.models.layouts import Workload


@register_model("fly_jax")
class FlyJaxLM(LM):
    """A pair that answers lm-eval's requests, several at a time. It ranks no given answers."""

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, mesh: str = "1x1",
        dtype: Any = None, batch_size: int | str = 1, max_gen_toks: int = 256,
        max_batch_size: int | None = None, device: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        """Loads the models; FlyJaxError as `load_pair` and `DecodingConfig`.

        Args:
          batch_size: requests that are decoded at a time.
          max_gen_toks: new tokens of a request whose task does not say.
          max_batch_size: not used, as `device`; lm-eval gives both.
          **given: values of a `DecodingConfig`, such as rule and num_speculative_tokens.
        """
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise FlyJaxError(
                f"The batch size is {batch_size}; give a whole number of requests, at least 1."
            )
        self._slots, self._most, self._is_chat = int(batch_size), int(max_gen_toks), False
        self._models = open_pair(target, draft)
        rows = Workload(rows=self._slots)
        self._pair = load_pair(self._models, mesh=mesh, dtype=dtype, workload=rows)
        self._config = self._pair.config(**given)
        self._models.check_drafting(self._config)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The texts behind the requests' contexts, up to a stop, the end of text or the limit.

        A context that leaves no room for the answer loses its beginning.
        """
        asked = [self._request(at, *one.args) for at, one in enumerate(requests)]
        engine = Engine.of(
            self._pair, self._config, prompts=[one.prompt for one in asked],
            max_new_tokens=max(one.max_new_tokens for one in asked), num_slots=self._slots,
        )  # fmt: skip
        draws = engine.spec.sampling
        states = [engine.submit(dataclasses.replace(one, sampling=draws)) for one in asked]
        texts = collections.defaultdict[RequestState, str](str)
        with tqdm(total=len(states), desc="fly_jax") as bar:
            for state, settled in engine.run(()):
                texts[state] += "".join(settled.texts)
                bar.update(settled.finish_reason is not None)
        answers = [texts[state] for state in states]
        for one, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", one.args, answer)
        return answers

    def _request(self, at: int, context: str, wanted: Mapping[str, Any]) -> Request:
        wanted = normalize_gen_kwargs(dict(wanted), self._most)
        most = min(wanted["max_gen_toks"], self._models.max_context - 1)
        prompt = self._models.encode(json.loads(context) if self._is_chat else context)
        given, own = (wanted if wanted.get("temperature") else {}), self._config.to_dict()
        for name in ("temperature", "top_p", "top_k"):
            if given.get(name, own.get(name)) != own.get(name):
                raise FlyJaxError(
                    f"The task asks for {name}={given[name]}, and this model decodes with "
                    f"{own.get(name)}; give {name}={given[name]} in --model_args."
                )
        end = prompt[most - self._models.max_context :]
        return Request(end, most, seed=at, stop=wanted["until"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages as JSON, which `generate_until` turns into the template's tokens."""
        if not add_generation_prompt:
            raise FlyJaxError(
                "This task begins the assistant's answer for it, which no chat template here can "
                "continue; take the task without --apply_chat_template."
            )
        self._is_chat = True
        return json.dumps(chat_history)

    @property
    def tokenizer_name(self) -> str:
        """What tells lm-eval's caches of requests apart."""
        return self._pair.tokenizer.digest

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Refused: no rule has a part in it, and `serve` gives it (`echo` and `logprobs`)."""
        raise FlyJaxError(
            "lm-eval's model fly_jax only generates, and this task ranks given answers; take one "
            "that generates, or lm-eval's local-completions with the command serve."
        )

    loglikelihood_rolling = loglikelihood


if __name__ == "__main__":
    try:
        cli_evaluate()
    except FlyJaxError as wrong:
        print(wrong, file=sys.stderr)
        sys.exit(2)
