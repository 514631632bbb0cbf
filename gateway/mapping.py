"""Turns validated HTTP requests into messages of the contract, field by field. Knows nothing of the network."""

import json
from typing import Any

from fulcrum.v1 import inference_pb2 as pb
from gateway.constraints import Given
from gateway.errors import invalid
from gateway.responses_schema import FunctionCall, FunctionOutput, InputMessage, Reasoning, ResponsesRequest, Text
from gateway.schemas import (
    COMPLETION_MAX_TOKENS,
    ChatPrompt,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    Function,
    FunctionName,
    Message,
    NamedTool,
    Sampling,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

UINT64 = 1 << 64


def chat_request(body: ChatRequest) -> pb.GenerateRequest:
    """The Generate of a chat."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = shared_fields(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)
    request.chat.CopyFrom(chat(body))
    return request


def responses_request(body: ResponsesRequest) -> tuple[pb.GenerateRequest, dict[str, str]]:
    """The Generate of a response, and what the fields of its chat are called in `body`."""
    request = shared_fields(body, body.max_output_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    effort = body.reasoning.effort if body.reasoning is not None else None
    chat = pb.Chat(
        tools=[tool(function) for function in body.tools or ()],
        tool_choice=tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs_json=template_kwargs(effort, body.chat_template_kwargs),
    )
    names = {f"tools[{number}].function": f"tools[{number}]" for number, _ in enumerate(chat.tools)}
    names |= {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"} | add_items(chat, body)
    request.chat.CopyFrom(chat)
    return request, names


def add_items(chat: pb.Chat, body: ResponsesRequest) -> dict[str, str]:
    """Adds the messages of a response's input to its chat. Returns: where in `body` each of them comes from.

    Reasoning, text and calls of the assistant that follow one another are one message, as templates know it.
    """
    names: dict[str, str] = {}
    if body.instructions is not None:
        chat.messages.add(role="system", content=[pb.ContentPart(text=body.instructions)])
        names["messages[0]"] = "instructions"
    thoughts: list[tuple[pb.ChatMessage, list[str]]] = []
    spoken = False  # by the last message: nothing of the assistant's but calls goes on with it
    for number, item in enumerate(body.input):
        before = chat.messages[-1].role if chat.messages else ""
        begun = not before == item.role == "assistant" or (spoken and not isinstance(item, FunctionCall))
        turn = chat.messages.add(role=item.role) if begun else chat.messages[-1]
        spoken = not isinstance(item, Reasoning)
        field, own = "content", ".content"  # what the item brings, by its name in the message and in the item
        match item:
            case InputMessage():
                turn.content.extend(text_parts(item.content))
            case FunctionOutput():
                turn.MergeFrom(
                    pb.ChatMessage(tool_call_id=item.call_id, name=item.name, content=text_parts(item.output))
                )
                own = ".output"
            case Reasoning():
                if begun:
                    thoughts.append((turn, []))
                thoughts[-1][1].extend(part.text for part in item.content or item.summary or ())
                field, own = "reasoning", ""
            case FunctionCall():
                turn.tool_calls.add(id=item.call_id, name=item.name, arguments_json=item.arguments)
                field, own = f"tool_calls[{len(turn.tool_calls) - 1}].function", ""
        message = f"messages[{len(chat.messages) - 1}]"
        names.setdefault(message, f"input[{number}]")
        names[f"{message}.{field}"] = f"input[{number}]{own}"
    for turn, texts in thoughts:
        turn.reasoning = "".join(texts)
    return names


def text_parts(texts: list[Text]) -> list[pb.ContentPart]:
    """Parts of an item as parts of a message."""
    return [pb.ContentPart(text=text.text) for text in texts]


def completion_requests(body: CompletionRequest, max_prompts: int) -> list[pb.GenerateRequest]:
    """One Generate for each prompt, in their order.

    Raises: ApiError 400 for too many prompts, or where nothing is to be answered.
    """
    if len(body.prompt) > max_prompts:
        raise invalid("prompt", f"at most {max_prompts} prompts")
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    template = shared_fields(body, max_tokens, body.logprobs, body.top_of_prompt)
    requests = []
    for prompt in body.prompt:
        request = pb.GenerateRequest()
        request.CopyFrom(template)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def tokenize_request(body: TokenizeTextRequest | TokenizeChatRequest) -> pb.TokenizeRequest:
    """The Tokenize of a text or of a chat."""
    if isinstance(body, TokenizeChatRequest):
        return pb.TokenizeRequest(model=body.model, chat=chat(body))
    return pb.TokenizeRequest(model=body.model, text=body.prompt, add_special_tokens=body.add_special_tokens)


def detokenize_request(body: DetokenizeRequest) -> pb.DetokenizeRequest:
    """The Detokenize of token ids."""
    return pb.DetokenizeRequest(model=body.model, token_ids=body.tokens, skip_special_tokens=body.skip_special_tokens)


def shared_fields(
    body: Sampling, max_tokens: int | None, top_logprobs: int | None, prompt_logprobs: int | None = None
) -> pb.GenerateRequest:
    """All but the prompt. What the caller left out stays unset. Raises: ApiError 400 for several constraints."""
    request = pb.GenerateRequest(
        model=body.model,
        sampling=pb.SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(body.top_k, 0),  # -1 is another way to say off
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            seed=None if body.seed is None else body.seed % UINT64,  # int64 to uint64, two's complement
            logit_bias=body.logit_bias,
        ),
        stopping=pb.StoppingCriteria(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            include_stop=body.include_stop_str_in_output,
        ),
        output=pb.OutputOptions(
            token_ids=body.continuous_usage or None,  # to be counted
            skip_special_tokens=body.skip_special_tokens,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        n=body.n,
        priority=body.priority,
        cache=None if body.cache_salt is None else pb.CacheOptions(salt=body.cache_salt),
        speculative=body.speculative,
    )
    match body.constraint:
        case Given(field="choices", value=list(choices)):
            request.choices.choices.extend(choices)
        case Given(field=field, value=value):
            setattr(request, field, value)
    return request


def chat(body: ChatPrompt) -> pb.Chat:
    """A chat's messages and template options. Raises: ApiError 400 when the template variables are no JSON."""
    # To continue the last message excludes a generation prompt: who asks for the one need not deny the other.
    continued = bool(body.continue_final_message) and body.add_generation_prompt is None
    choice = body.tool_choice
    return pb.Chat(
        messages=[message(item) for item in body.messages],
        tools=[tool(item.function) for item in body.tools or ()],
        tool_choice=tool_choice(choice.function if isinstance(choice, NamedTool) else choice),
        parallel_tool_calls=body.parallel_tool_calls,
        add_generation_prompt=False if continued else body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs_json=template_kwargs(body.reasoning_effort, body.chat_template_kwargs),
    )


def template_kwargs(effort: str | None, given: dict[str, Any] | None) -> str:
    """The template variables as JSON text; empty when there are none."""
    variables = ({} if effort is None else {"reasoning_effort": effort}) | (given or {})
    if not variables:
        return ""
    try:
        return json.dumps(variables, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise invalid("chat_template_kwargs", str(error)) from error


def tool(function: Function) -> pb.Tool:
    """One tool. What the caller left out stays empty: {} are parameters too."""
    parameters = function.parameters
    schema = None if parameters is None else json.dumps(parameters, ensure_ascii=False)
    return pb.Tool(name=function.name, description=function.description, parameters_json=schema, strict=function.strict)


def tool_choice(choice: str | FunctionName | None) -> pb.ToolChoice | None:
    """Whether tools are to be called, or the one that is."""
    if isinstance(choice, FunctionName):
        return pb.ToolChoice(function=choice.name)
    return None if choice is None else pb.ToolChoice(mode=f"MODE_{choice.upper()}")


def message(item: Message) -> pb.ChatMessage:
    """One message."""
    return pb.ChatMessage(
        role=item.role,
        content=[part(piece) for piece in item.content or ()],
        name=item.name,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
            for call in item.tool_calls or ()
        ],
        tool_call_id=item.tool_call_id,
        reasoning=item.reasoning if item.reasoning_content is None else item.reasoning_content,
    )


def part(piece: ContentPart) -> pb.ContentPart:
    """One part of a message; the engine refuses kinds that it does not take."""
    return pb.ContentPart(text=piece.text) if piece.type == "text" else pb.ContentPart(unsupported=piece.type)
