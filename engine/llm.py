"""`LLM`: the engine in this process, for offline work. Token ids in, token ids out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import maxsize
from typing import Any

from tqdm import tqdm

from engine.build import build_core, new_scheduler
from engine.config import EngineConfig
from engine.core import Turn
from engine.hub import resolve_model
from engine.logprobs import TokenLogprob, read_logprobs
from engine.request import FinishReason, Request, RequestRejected, SamplingParams


@dataclass(slots=True)
class Completion:
    """One continuation of a prompt; `logprobs` are one to one with its tokens, where they were asked for."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Generation:
    """A prompt and its n continuations; `prompt_logprobs`, where asked for, begin with the prompt's second token."""

    prompt: tuple[int, ...]
    completions: list[Completion]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class LLM:
    """An engine core in this process.

    Args:
        model: a folder in Hugging Face layout, a GGUF file or a hub id; None is the default model.
        progress: show progress bars on standard error.
        settings: further fields of EngineConfig. However many prompts may wait: there is nobody to refuse.

    Raises:
        ModelError: the model cannot be served as asked.
        ValueError: a setting is out of range.
    """

    def __init__(self, model: str | Path | None = None, *, progress: bool = True, **settings: Any) -> None:
        path = resolve_model(None if model is None else str(model), progress=progress)
        self._progress = progress
        config = EngineConfig(model=path, **settings)
        self._config = replace(config, max_queue_requests=maxsize, max_queue_tokens=maxsize)
        self.core, self.info = build_core(self._config, progress=progress)
        self._count = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Generation]:
        """Generates for all prompts together, as many in a step as fit.

        Args:
            prompts: token ids of each prompt.
            params: for all prompts, or one for each.

        Returns:
            one Generation for each prompt, in order.

        Raises:
            RequestRejected: a prompt cannot be taken; then none is computed.
            ValueError: there are not as many params as prompts.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts")
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        results = {
            request.request_id: Generation(request.prompt, [Completion(i) for i in range(request.params.n)])
            for request in requests
        }
        params_of = {request.request_id: request.params for request in requests}
        tokens = 0
        with tqdm(total=sum(one.n for one in each), desc="generating", unit="seq", disable=not self._progress) as bar:
            for turn in self._turns(requests):
                for start in turn.started:
                    results[start.request_id].cached_tokens = start.cached_tokens
                for update in turn.updates:
                    result, own = results[update.request_id], params_of[update.request_id]
                    completion = result.completions[update.index]
                    completion.token_ids += update.tokens
                    completion.logprobs += read_logprobs(update.logprobs, own.top_logprobs or 0)
                    completion.finish = update.finish
                    result.prompt_logprobs += read_logprobs(update.prompt_logprobs, own.prompt_logprobs or 0)
                    tokens += len(update.tokens)
                    if update.finish is not None:
                        bar.update()
                        bar.set_postfix(tokens_per_s=round(tokens / max(bar.format_dict["elapsed"], 1e-9)))
        return list(results.values())

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Completion]:
        """Generates for one prompt; yields the new tokens of an index as they come, `finish` set on its last piece.

        The prompt's logprobs are not among them.

        Raises: RequestRejected.
        """
        for turn in self._turns([self._request(prompt, params)]):
            for update in turn.updates:
                if not update.prompt_logprobs:
                    logprobs = read_logprobs(update.logprobs, params.top_logprobs or 0)
                    yield Completion(update.index, list(update.tokens), update.finish, list(logprobs))

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        self._count += 1
        return Request(f"llm-{self._count}", tuple(prompt), params)

    def _turns(self, requests: Sequence[Request]) -> Iterator[Turn]:
        """Adds the requests and turns the core until they have ended; whatever ends it early leaves none of them."""
        if self.core.has_work:
            raise RuntimeError("this LLM is busy: one generate or stream at a time")
        try:
            for request in requests:
                self.core.scheduler.add(request)
            while self.core.has_work:
                yield self.core.turn()
        except (RequestRejected, GeneratorExit):
            for request in requests:
                self.core.scheduler.abort(request.request_id)
            while self.core.has_work:
                self.core.turn()
            raise
        except BaseException:  # Ctrl-C above all: books may have been left in the midst of a change
            self.core.restart(new_scheduler(self._config, self.info))
            raise
