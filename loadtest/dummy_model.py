"""Writes a model folder without weights, for `--load-format dummy`: the shape of a Qwen2.5 model and its tokenizer.

    python -m loadtest.dummy_model 7B FOLDER --tokenizer tokenizer.json --tokenizer-config tokenizer_config.json

Both tokenizer files may be xz-compressed. A Qwen3 tokenizer serves too: it is Qwen2.5's and four tokens more, which are
left out.
"""

import json
import lzma
from pathlib import Path

import click

# Shapes: the models' config.json on the Hugging Face hub (Qwen/Qwen2.5-0.5B, -1.5B, -7B).
_COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "torch_dtype": "bfloat16",
}
_SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "tiny": (16, 16, 8, 1, 1, 151936, True),  # none of Qwen's: for measuring what surrounds a model
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
_FIRST_QWEN3_TOKEN = 151665
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("size", type=click.Choice(list(_SHAPES)))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tokenizer", required=True, type=_FILE)
@click.option("--tokenizer-config", required=True, type=_FILE)
def main(size: str, folder: Path, tokenizer: Path, tokenizer_config: Path) -> None:
    """Writes a folder with Qwen2.5's shape and tokenizer, and no weights."""
    config = _COMMON | dict(zip(_FIELDS, _SHAPES[size], strict=True))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        content = json.loads(_read(tokenizer))
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < _FIRST_QWEN3_TOKEN]
        (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_bytes(_read(tokenizer_config))
    except OSError as error:
        raise click.ClickException(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{tokenizer} is no tokenizer.json: {error!r}") from error


def _read(path: Path) -> bytes:
    try:
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise click.ClickException(f"{path} cannot be decompressed: {error}") from error


if __name__ == "__main__":
    main()
