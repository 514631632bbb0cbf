"""Computes smollm2_many.json: the lone greedy run of 64 prompts, by transformers (float32, CPU, eos ignored).

    python tests/data/make_smollm2_many.py SmolLM2-135M-Instruct.Q4_1.gguf

Prompts hold no digits: transformers' own GGUF tokenizer splits them wrongly. A prompt whose run comes closer than
0.002 to a tie is left out, so that rounding cannot flip a token.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

TOPICS = (
    "the tides",
    "photosynthesis",
    "the Roman aqueducts",
    "how bread rises",
    "black holes",
    "the printing press",
    "coral reefs",
    "the game of chess",
    "volcanoes",
    "honey bees",
    "the piano",
    "sailing ships",
)
TASKS = (
    "Explain {} to a curious child.",
    "Write a short poem about {}.",
    "List three surprising facts about {} and say why each one matters.",
    "Write the opening paragraph of a detective story in which {} plays a part.",
    "Compare {} with something from everyday life, and be specific.",
    "Write a friendly email that invites a colleague to a talk on {}.",
)
NEW_TOKENS = 64
SMALLEST_GAP = 0.002


def main(gguf: Path) -> None:
    """Writes the file beside this script."""
    torch.set_num_threads(1)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    rows = []
    for number, content in enumerate(task.format(topic) for topic in TOPICS for task in TASKS):
        messages = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(
            **prompt,
            do_sample=False,
            repetition_penalty=1.0,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=-1,
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits).squeeze(1).topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        ids = out.sequences[0, prompt["input_ids"].shape[1] :].tolist()
        print(number, round(gap, 4), flush=True)  # noqa: T201
        if gap >= SMALLEST_GAP:
            rows.append({"content": content, "output_ids": ids, "smallest_gap": round(gap, 4)})
        if len(rows) == 64:
            break
    about = {
        "model": gguf.name,
        "library": f"transformers {transformers.__version__}",
        "torch": torch.__version__,
        "decoding": f"greedy, {NEW_TOKENS} new tokens, eos ignored, one prompt at a time, float32 on the CPU",
    }
    Path(__file__).with_name("smollm2_many.json").write_text(json.dumps({"about": about, "prompts": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
