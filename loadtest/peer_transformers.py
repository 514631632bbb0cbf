"""transformers' `generate`, for `loadtest.peers_cpu`. A program of its own.

The first line of standard output is JSON {"version"}. Then, for each line "INPUT_LEN OUTPUT_LEN STREAMS SEED" on
standard input, it generates for one batch of random prompts and answers with JSON {"output_throughput"} (tokens/s,
prefill included). It ends when standard input does.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def main(model: str, threads: str, dtype: str) -> None:
    """Loads MODEL: a folder in Hugging Face layout or a GGUF file, whose weights are turned into `dtype`."""
    torch.set_num_threads(int(threads))
    path = Path(model)
    where: dict[str, Any] = {}
    if path.is_file():  # packed weights are computed in float32
        where = {"gguf_file": path.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    folder = path.parent if path.is_file() else path
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where)
    _say({"version": transformers.__version__})
    for line in sys.stdin:
        input_len, output_len, streams, seed = map(int, line.split())
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, loaded.config.vocab_size, (streams, input_len), generator=generator)
        began = time.perf_counter()
        with torch.inference_mode():
            made = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        tokens = streams * (made.shape[1] - input_len)
        _say({"output_throughput": tokens / (time.perf_counter() - began)})


def _say(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
