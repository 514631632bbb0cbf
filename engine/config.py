"""The engine's settings, checked where they enter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple


class StepLimits(NamedTuple):
    """The most that one step takes: sequences, tokens, and tokens drawn (one for each sequence, and its guesses')."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_samples: int


# 1,152 tokens are where cuBLAS is fastest on an H200 (16.5 us a token with Qwen2.5-7B; 18.8 at 2,048 and at 8,192).
# Such a step takes 29 ms: what a running sequence waits for its next token while prompts are computed. CPUs compute 128
# tokens of a step as fast as 2,048 (SmolLM2, two cores: 1 ms a token), so there the wait decides: half a second.
_STEP_LIMITS = {"cpu": (256, 512), "cuda": (1024, 1152)}
# With so many rows or more, guesses get what the rows leave.
_MOST_GUESSED = 128

_LEAST = {
    **dict.fromkeys(("page_size", "max_num_seqs", "max_num_batched_tokens", "speculative_length", "threads"), 1),
    **dict.fromkeys(("max_queue_requests", "max_queue_tokens"), 1),
    **dict.fromkeys(("look_ahead", "trace_requests", "step_timeout"), 0),
    "max_model_len": 2,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine core.

    Args:
        model: a folder in Hugging Face layout or a GGUF file (hub ids are resolved before, by `engine.hub`).
        dtype: "auto" is bfloat16 where the device computes it natively and float32 elsewhere.
        device: "auto" is cuda where torch finds one, else cpu.
        load_format: "dummy" fills the weights with seeded N(0, 0.02) instead of reading them.
        memory_budget: bytes (an int) or a fraction of the device's or the container's memory (a float in (0, 1]).
            On CUDA it covers weights, activations and the KV pool; on the CPU the KV pool alone (None: 2 GiB).
        max_model_len: longest prompt + completion, tokens (None: the model's own window).
        page_size: tokens in a page of the KV pool.
        max_num_seqs: most sequences in one step (None: see `step_limits`).
        max_num_batched_tokens: token budget of one step (None: see `step_limits`).
        scheduler: "static" is the naive baseline, kept to measure against.
        prefix_cache: share the pages of equal prefixes.
        chunked_prefill: let a prompt be computed over several steps beside decodes.
        admission: which of a tenant's waiting sequences comes first: the first come, or ("prefix") the one with the
            longest cached prefix, until too many others have overtaken one.
        max_queue_requests, max_queue_tokens: requests, and tokens of prompts, that may wait before further ones are
            refused.
        reserve_full_length: admit a sequence only with pages for its prompt and max_tokens; kept to measure against.
        look_ahead: how many waiting sequences that do not fit may be passed by (0: strictly first come).
        overlap: on CUDA, launch a step before the one before it has been collected.
        cuda_graphs: on CUDA, replay recorded steps instead of launching kernel by kernel.
        attention: "reference" runs the plain-torch kernels on CUDA too, without graphs; kept to measure against.
        speculative: "ngram" guesses tokens from what stood before, and verifies several in one step; the output stays.
        speculative_length: most tokens guessed for a sequence in a step.
        speculative_window: shortest and longest run of tokens that is looked for.
        logits_processors: "package.module:Class" of user logits processors, applied in order.
        step_timeout: seconds that a step may take before the process gives up and says where it hangs; 0: any time.
        trace_requests: the last so many requests, and 8 times as many steps, are kept as timelines; 0: none.
        threads: torch threads on the CPU (None: the cores this process may use).
        seed: of dummy weights (None: 0), and of the seeds minted for requests without one (None: new at every start).
    """

    model: Path
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    memory_budget: int | float | None = None
    max_model_len: int | None = None
    page_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduler: Literal["continuous", "static"] = "continuous"
    prefix_cache: bool = True
    chunked_prefill: bool = True
    admission: Literal["fcfs", "prefix"] = "fcfs"
    max_queue_requests: int = 16_384
    max_queue_tokens: int = 16_777_216
    reserve_full_length: bool = False
    look_ahead: int = 4
    overlap: bool = True
    cuda_graphs: bool = True
    attention: Literal["auto", "reference"] = "auto"
    speculative: Literal["off", "ngram"] = "off"
    speculative_length: int = 8
    speculative_window: tuple[int, int] = (2, 4)
    logits_processors: tuple[str, ...] = ()
    step_timeout: float = 300.0
    trace_requests: int = 0
    threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError naming the field that is out of range."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, not {self.page_size}")
        few_tokens = self.max_num_batched_tokens is not None and self.max_num_batched_tokens < (self.max_num_seqs or 0)
        if few_tokens and self.scheduler == "continuous":
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}): every running sequence decodes one token a step"
            )
        shortest, longest = self.speculative_window
        if not 1 <= shortest <= longest:
            raise ValueError(f"speculative_window must be of 1 <= min <= max, not {shortest},{longest}")
        if self.speculative != "off" and self.scheduler == "static":
            raise ValueError("speculative: the static scheduler takes one token of a sequence at a time")
        if self.memory_budget is not None:
            if isinstance(self.memory_budget, float) and not 0 < self.memory_budget <= 1:
                raise ValueError(f"memory_budget as a fraction must be in (0, 1], not {self.memory_budget}")
            if isinstance(self.memory_budget, int) and self.memory_budget < 1:
                raise ValueError(f"memory_budget must be at least 1 byte, not {self.memory_budget}")

    def step_limits(self, device_type: str) -> StepLimits:
        """As set; what is not set suits the device ("cpu", "cuda") and what is."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        usual_seqs, usual_tokens = _STEP_LIMITS[device_type]
        if seqs is None:
            seqs = usual_seqs if tokens is None else min(usual_seqs, tokens)
        if tokens is None:
            tokens = max(usual_tokens, seqs)
        guessed = 0 if self.speculative == "off" else min(seqs * (1 + self.speculative_length), _MOST_GUESSED)
        # There are fewer tokens than sequences in static batching alone, whose batches are then no larger.
        return StepLimits(seqs, tokens, min(max(seqs, guessed), tokens))
