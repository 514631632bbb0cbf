"""What the service knows of the served model: names, tokenizer, template, defaults. No weights, no torch."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from engine.model.config import GenerationDefaults
from engine.model.gguf_header import read_gguf_metadata
from service.chat_template import ChatTemplate
from service.config import ServiceConfig
from service.detokenizer import Detokenizer, StopChecker, TextStream
from service.errors import ApiError
from service.parsers.registry import Formats
from service.prompts import Prompts
from service.tokenizer import Tokenizer
from service.validate import Plan


@dataclass(frozen=True)
class ServedModel:
    """The text side of one model.

    Args:
        names: what it may be called; the first is the principal one.
        prompts: renders and tokenizes.
        defaults: sampling parameters where a request is silent.
        created: Unix seconds at which it was loaded.
    """

    names: tuple[str, ...]
    prompts: Prompts
    defaults: GenerationDefaults
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, config: ServiceConfig) -> "ServedModel":
        """Reads tokenizer, template and generation defaults from the model's files. Raises what their readers raise."""
        model, tokenizer = config.model, Tokenizer.load(config.tokenizer or config.model)
        special_tokens = tokenizer.special_tokens
        if config.chat_template is not None:
            template = ChatTemplate.from_file(config.chat_template, special_tokens)
        elif model.is_dir():  # it may have none: chats are refused then
            template = ChatTemplate.from_folder(model, special_tokens)
        else:
            template = ChatTemplate.from_gguf(read_gguf_metadata(model), special_tokens, model)
        formats = Formats.choose(config.tool_parser, config.reasoning_parser, template.source)
        prompts = Prompts(tokenizer, template, config.tokenizer_threads, formats)
        return cls(config.served_model_names, prompts, GenerationDefaults.load(model))

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return "default" in self.prompts.template.content_form

    def resolve(self, name: str) -> str:
        """The name that an answer carries. Raises ApiError NOT_FOUND for a model that is not served."""
        if not name:
            return self.names[0]
        if name not in self.names:
            text = f"the model {name[:200]!r} is not served here; there is {', '.join(self.names)}"
            raise ApiError(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", text, field="model")
        return name

    def text_stream(self, plan: Plan, *, after_prompt: bool, shown: Iterable[str] = ()) -> TextStream:
        """The text of one sequence, which goes on where the prompt ended or begins anew (a chat's next message).

        `shown`: special tokens that are text all the same.
        """
        skip = plan.skip_special_tokens
        detokenizer = Detokenizer(
            self.prompts.tokenizer, skip_special_tokens=skip, after_prompt=after_prompt, shown=shown
        )
        stops = StopChecker(plan.stop, include_stop=plan.include_stop)
        return TextStream(detokenizer, stops, min_tokens=plan.job.params.min_tokens)
