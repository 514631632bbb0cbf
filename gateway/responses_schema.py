"""What POST /v1/responses takes. Knows nothing of gRPC."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from fulcrum import limits
from gateway.constraints import Given, TextFormat
from gateway.schemas import (
    MODE_OR_NAMED,
    UINT32_MAX,
    Body,
    CalledFunction,
    Effort,
    Function,
    FunctionName,
    Mode,
    Sampling,
    Top,
    or_text,
)

LOGPROBS = "message.output_text.logprobs"
# What `include` may ask for. All others speak of things that are never here.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


def kind(value: object) -> str:
    """The tag of an item: its type, in brackets, as that is no field of the caller's."""
    return f"[{value.get('type') or 'message'}]" if isinstance(value, Mapping) else "[]"


class Text(Body):
    """A part of a message. The last four change nothing; three of them come back with an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Texts = Annotated[
    list[Text],
    Field(max_length=limits.PARTS, fail_fast=True),
    or_text(str | list[Text], lambda text: {"type": "input_text", "text": text}),
]


class Thought(Body):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Thoughts = Annotated[list[Thought], Field(max_length=limits.PARTS, fail_fast=True)]


class Item(Body):
    """What every item may have; neither field changes anything."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(Item):
    """A message; the assistant's too."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Item, CalledFunction):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    role: ClassVar = "assistant"


class FunctionOutput(Item):
    """What came out of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    name: str | None = None
    role: ClassVar = "tool"


class Reasoning(Item):
    """What the assistant thought."""

    type: Literal["reasoning"]
    content: Thoughts | None = None
    summary: Thoughts | None = None
    encrypted_content: None = None
    role: ClassVar = "assistant"


AnyItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[FunctionCall, Tag("[function_call]")]
    | Annotated[FunctionOutput, Tag("[function_call_output]")]
    | Annotated[Reasoning, Tag("[reasoning]")],
    Discriminator(
        kind,
        custom_error_type="item",
        custom_error_message="must be an item of type message, function_call, function_call_output or reasoning "
        "(nothing is stored, so none can be referred to: let your client send store: false)",
    ),
]


class TextConfig(Body):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    """How to reason. Summaries are never made: the reasoning itself is in the answer."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class OfFunctions(Body):
    """Says that it is about a function; there are no other tools. (A mixin, so that this is checked first.)"""

    type: Literal["function"]


class FunctionTool(Function, OfFunctions):
    """A tool that the model may call."""


class NamedFunction(FunctionName, OfFunctions):
    """The one tool to call."""


class ResponsesRequest(Sampling):
    """POST /v1/responses."""

    ignored: ClassVar = frozenset(
        {"max_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
    )
    unserved: ClassVar = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tokens": (),
        "moderation": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": ({"mode": "implicit"},),
        "response_format": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[AnyItem],
        Field(min_length=1, max_length=limits.MESSAGES, fail_fast=True),
        or_text(str | list[AnyItem], lambda text: {"role": "user", "content": text}),
    ]
    instructions: str | None = None
    include: Annotated[list[Includable], Field(max_length=limits.PARTS, fail_fast=True)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tool_choice: Annotated[Mode | Annotated[NamedFunction, Tag("[named]")], MODE_OR_NAMED] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=limits.TOOLS, fail_fast=True)] | None = None
    top_logprobs: Top | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def continuous_usage(self) -> bool:
        """Of its events the last alone has a place for it."""
        return False

    @property
    def logprobs(self) -> bool:
        """Whether those of the text are told. As OpenAI has it, `top_logprobs` alone does not ask for them."""
        return LOGPROBS in (self.include or ())

    @property
    def asked_format(self) -> list[Given]:
        """What text.format asks for."""
        return self.text.format.given if self.text is not None and self.text.format is not None else []
