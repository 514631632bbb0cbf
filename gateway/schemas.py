"""What the HTTP endpoints take, and what each field must be. Knows nothing of bodies and nothing of gRPC."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from fulcrum import limits
from gateway.constraints import VLLM, Choices, Given, ResponseFormat, Schema, StructuredOutputs, in_vllms_fields
from gateway.errors import invalid
from gateway.strict import Strict

T = TypeVar("T")

UINT32_MAX = 2**32 - 1
COMPLETION_MAX_TOKENS = 16

UInt32 = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Top = Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Fields that change nothing here: accepted with any value and ignored.
IGNORED = frozenset({"user", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"})

# Fields that are not served yet, and the values beside null that ask for nothing.
UNSERVED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({"mode": "implicit"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class Body(Strict):
    """What an endpoint takes, or an object in it."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = UNSERVED


def or_text(form: Any, one: Callable[[str], object] = str) -> BeforeValidator:
    """A plain string means a list of one: of what `one` makes of it. `form` is what may be written, for OpenAPI."""
    return BeforeValidator(lambda value: [one(value)] if isinstance(value, str) else value, json_schema_input_type=form)


def only_with(field: str) -> AfterValidator:
    """Something is asked for only where this field, which comes before, is true."""

    def check(value: T, info: ValidationInfo) -> T:
        if value and not info.data.get(field):
            raise ValueError(f"is only allowed when {field} is true")
        return value

    return AfterValidator(check)


def not_streamed(value: int | None, info: ValidationInfo) -> int | None:
    """No chunk has a place for it."""
    if value is not None and info.data.get("stream"):
        raise ValueError("is not available in streams")
    return value


PromptTop = Annotated[Top, AfterValidator(not_streamed)]


def bias_keys(value: object) -> object:
    """JSON keys are strings: turns decimal ones into token ids."""
    if not isinstance(value, Mapping):
        return value
    if len(value) > limits.LISTED_IDS:
        raise ValueError(f"at most {limits.LISTED_IDS} token ids, not {len(value)}")
    keys = [key for key in value if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32_MAX)]
    if keys:
        raise ValueError(f"keys must be token ids, not {keys[0][:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def prompts(value: object) -> list[str] | list[list[int]]:
    """The prompt's four forms, as a list of texts or a list of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if are_token_ids(value):
            return [value]
        if all(isinstance(item, list) and are_token_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists; none empty")


def are_token_ids(values: list[Any]) -> bool:
    """Whether there are some, all of them integers that a token id can be (True and False are not)."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= UINT32_MAX


def quick_ids(value: object, thorough: ValidatorFunctionWrapHandler) -> Any:
    """Pydantic looks at each of them, five times as slow, where one is none."""
    return value if isinstance(value, list) and are_token_ids(value) else thorough(value)


PromptForms = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[UInt32], Field(min_length=1)]
    | Annotated[list[Annotated[list[UInt32], Field(min_length=1)]], Field(min_length=1)]
)


# Only the first fault is told: a list of millions of them would keep every other request waiting.
UInt32s = Annotated[list[UInt32], Field(fail_fast=True), WrapValidator(quick_ids)]


class StreamOptions(Body):
    """What else a stream brings."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, only_with("include_usage")] = None
    # Padding against side channels, which OpenAI's own servers add: there is none here.
    include_obfuscation: bool | None = None


class Sampling(Body):
    """Fields that chat and text completions share."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(bias_keys)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: UInt32 | None = None
    n: Annotated[int, Field(ge=1, le=limits.N)] | None = None
    presence_penalty: Penalty | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.SALT_BYTES)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    skip_special_tokens: bool | None = None
    speculative: bool | None = None
    stop: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=limits.STOPS), or_text(str | list[str])]
        | None
    ) = None
    stop_token_ids: Annotated[list[UInt32], Field(max_length=limits.LISTED_IDS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, only_with("stream")] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=UINT32_MAX)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def asked_format(self) -> list[Given]:
        """What OpenAI's own field asks for."""
        return self.response_format.given if self.response_format is not None else []

    @property
    def constraint(self) -> Given | None:
        """What the answer must follow. Raises: ApiError 400 where there are several."""
        structured = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        guided = {name: getattr(self, f"guided_{name}", None) for name in VLLM}
        given = (
            self.asked_format + in_vllms_fields("structured_outputs.", structured) + in_vllms_fields("guided_", guided)
        )
        if len(given) > 1:
            why = f"there is a '{given[0].param}' already, and one answer follows one of them"
            raise invalid(given[1].param, why)
        return given[0] if given else None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether its other chunks tell the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ContentPart(BaseModel):
    """A part of a message. Kinds other than text keep whatever fields they have: the engine refuses them by name.

    Ignored: `cache_control` (of messages and tools too) and `prompt_cache_breakpoint`, hints to other servers' caches,
    and LangChain's `id`.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    id: Any = None

    @model_validator(mode="after")
    def text_part_is_text(self) -> "ContentPart":
        """A text part has its text and nothing else."""
        if self.type == "text":
            if self.text is None:
                raise ValueError("a part of type text needs its text")
            if unknown := next((name for name, each in (self.model_extra or {}).items() if each is not None), None):
                raise ValueError(f"unknown field {unknown!r:.200} in a part of type text")
        return self


class CalledFunction(Body):
    """The function that an assistant called."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # what OpenAI's clients made of them


class ToolCall(Body):
    """A tool call in an assistant's earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Function(Body):
    """What a tool is: `parameters` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None


class FunctionName(Body):
    """A function, by its name."""

    name: str


class NamedTool(Body):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionName


# Of a choice that is an object, its own fault is told. Tags are in brackets: they are no fields of the caller's.
Mode = Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
MODE_OR_NAMED = Discriminator(lambda value: "[mode]" if isinstance(value, str) else "[named]")


def said(value: T, info: ValidationInfo) -> T:
    """Content: the assistant's alone may be missing, as where it has called or thought."""
    if value is None and info.data.get("role", "assistant") != "assistant":
        raise ValueError("is missing")
    return value


class Message(Body):
    """One message of a chat. The last five fields come back when a client sends an earlier answer unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[
            list[ContentPart],
            Field(max_length=limits.PARTS, fail_fast=True),
            or_text(str | list[ContentPart], lambda text: {"type": "text", "text": text}),
        ]
        | None,
        Field(validate_default=True),
        AfterValidator(said),
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    cache_control: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed: Any = None  # what OpenAI's clients made of the content
    provider_specific_fields: Any = None  # LiteLLM's copy of what it does not know


class ChatPrompt(Body):
    """Fields that make a chat's prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[Mode | Annotated[NamedTool, Tag("[named]")], MODE_OR_NAMED] | None = None
    parallel_tool_calls: bool | None = None
    # For templates that know it; others ignore it.
    reasoning_effort: Effort | None = None


class ChatRequest(Sampling, ChatPrompt):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Top, only_with("logprobs")] | None = None
    prompt_logprobs: PromptTop | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(prompts, json_schema_input_type=PromptForms)]
    max_tokens: UInt32 | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    prompt_logprobs: PromptTop | None = None

    @property
    def top_of_prompt(self) -> int | None:
        """The logprobs of the prompt that are to be computed. Raises: ApiError 400 where nothing is to be answered."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        if self.max_tokens == 0:
            asked.append(0)  # the engine reads no prompt for nothing
            if not self.echo and self.prompt_logprobs is None:
                raise invalid("max_tokens", "must be at least 1, but with echo or prompt_logprobs")
        return max((top for top in asked if top is not None), default=None)


class TokenizeTextRequest(Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatPrompt):
    """POST /tokenize with messages."""

    unserved: ClassVar = {**UNSERVED, "add_special_tokens": (False,)}  # a chat's come from its template

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: UInt32s
    skip_special_tokens: bool | None = None
