"""Every JSON Schema of the corpora against the grammar that is compiled from it, without a model.

`python -m tests.service.schema_corpus > docs/results/structured-output.json`, with FULCRUM_DATA set, is the summary.
The judge of instances is the `jsonschema` library, not our own code.
"""

import importlib.metadata
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from engine.grammar import Vocabulary, tokenizer_info
from loadtest.environment import environment
from service.flat_schema import SchemaError
from service.grammar_worker import Constraint, compiled
from service.json_schema import core_schema

CORPORA = ("jsonschemabench.jsonl", "json_schema_suite.jsonl")
EOS = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (EOS,))


@dataclass
class Outcome:
    """What became of one schema.

    Attributes:
        refused: why it is not served, or "".
        accepted: valid instances that the grammar accepts to the end.
        rejected: invalid ones that it does not.
        narrowed: valid ones that it does not accept, for a documented reason.
        wrong: what should not be.
    """

    refused: str = ""
    accepted: int = 0
    rejected: int = 0
    narrowed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def corpus(folder: Path, name: str) -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
    """(id, schema, [(instance, whether it is valid by the corpus)])."""
    for line in (folder / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tests = row.get("tests") or [
            *({"data": data, "valid": True} for data in row["valid"]),
            *({"data": data, "valid": False} for data in row["invalid"]),
        ]
        yield row["id"], row["schema"], [(test["data"], test["valid"]) for test in tests]


def new_compiler() -> Any:
    """Over single bytes."""
    import xgrammar

    return xgrammar.GrammarCompiler(tokenizer_info(BYTES), max_threads=1, cache_enabled=False)


def follows(grammar: Any, text: str) -> bool:
    """Whether the grammar accepts the text, byte by byte, and may end there."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(EOS)


def check(compiler: Any, schema: Any, instances: list[tuple[Any, bool]]) -> Outcome:
    """Holds the grammar of a schema to its instances."""
    text = json.dumps(schema)
    try:
        core = json.loads(core_schema(text))
        grammar = compiled(compiler, Constraint("json_schema", text))
    except (SchemaError, RuntimeError) as error:
        return Outcome(refused=str(error).strip())
    outcome = Outcome()
    for value, valid in instances:
        written = json.dumps(ordered(value, core, core), separators=(",", ":"), ensure_ascii=False)
        if follows(grammar, written):
            if valid:
                outcome.accepted += 1
            elif is_valid(schema, value):
                outcome.narrowed.append(f"invalid by its format alone, which is an annotation: {written}")
            else:
                outcome.wrong.append(f"accepts {written}")
        elif not valid:
            outcome.rejected += 1
        elif not is_valid(core, value):
            outcome.narrowed.append(f"of another type than its keywords are for: {written}")
        elif '"format": ' in json.dumps(core):  # of those that hold a valid instance the corpora test nothing else
            outcome.narrowed.append(f"not of the format: {written}")
        elif "\\" in written:
            outcome.narrowed.append(f"an escape in a string of limited length or with a pattern: {written}")
        else:
            outcome.wrong.append(f"rejects {written}")
    return outcome


def some_text(grammar: Any, chance: random.Random, most: int = 400) -> str | None:
    """A text that the grammar lets through, drawn token by token; None if it did not end in time.

    Raises AssertionError at a dead end.
    """
    import xgrammar

    matcher, written = xgrammar.GrammarMatcher(grammar), bytearray()
    words = np.zeros((1, -(-len(BYTES.tokens) // 32)), np.int32)
    while len(written) < most:
        matcher.fill_next_token_bitmask(words)
        bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")[: len(BYTES.tokens)]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"a dead end after {written!r}"
        # Most draws lead to an end soon, and few into what is neither ASCII nor plain.
        if EOS in allowed and (len(allowed) == 1 or len(written) > most // 8 or chance.random() < 0.5):
            return written.decode(errors="replace")  # as the service does: XGrammar lets surrogates through
        bytes_ = [token for token in allowed if token != EOS]
        ends = [token for token in bytes_ if token in b'"]}']
        plain = [token for token in bytes_ if 32 <= token < 127 and token != ord("\\")]
        if ends and (len(written) > most // 10 or chance.random() < 0.3):
            token = chance.choice(ends)
        else:
            token = chance.choice(plain if plain and chance.random() < 0.97 else bytes_)
        matcher.accept_token(token)
        written.append(token)
    return None


def let_through(
    compiler: Any, rows: Iterable[tuple[str, Any, Any]], seed: int, times: int
) -> tuple[int, list[tuple[str, str]]]:
    """Texts that grammars let through: how many, and (id, text) of those that their schema is not content with."""
    chance, number, wrong = random.Random(seed), 0, []
    for key, schema, _ in rows:
        try:
            grammar = compiled(compiler, Constraint("json_schema", json.dumps(schema)))
        except (SchemaError, RuntimeError):
            continue
        texts = [text for text in (some_text(grammar, chance) for _ in range(times)) if text is not None]
        number += len(texts)
        wrong += [(key, text) for text in texts if not is_valid(schema, json.loads(text))]
    return number, wrong


def is_valid(schema: Any, value: Any) -> bool:
    """By the `jsonschema` library, to which formats are annotations."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


def ordered(value: Any, node: Any, root: Any) -> Any:
    """The instance as a grammar spells it: keys in the schema's order, whole numbers without a fraction."""
    while isinstance(node, dict) and "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    if not isinstance(node, dict):
        node = {}
    if "anyOf" in node:
        fitting = (one for one in node["anyOf"] if is_valid({**one, "$defs": root.get("$defs", {})}, value))
        return ordered(value, next(fitting, {}), root)
    if "enum" in node:
        return next((one for one in node["enum"] if is_valid({"const": one}, value)), value)
    if isinstance(value, dict):
        known, further = node.get("properties", {}), node.get("additionalProperties", {})
        patterns = [*node.get("patternProperties", {}).values(), further]
        names = [name for name in known if name in value] + [name for name in value if name not in known]
        return {name: ordered(value[name], known.get(name, patterns[0]), root) for name in names}
    if isinstance(value, list):
        prefix, items = node.get("prefixItems", []), node.get("items", {})
        return [ordered(part, prefix[n] if n < len(prefix) else items, root) for n, part in enumerate(value)]
    return int(value) if isinstance(value, float) and value == int(value) else value


def summary(folder: Path) -> dict[str, Any]:
    """What docs/results/structured-output.json holds."""
    compiler, result = new_compiler(), {}
    for name in CORPORA:
        outcomes = [check(compiler, schema, instances) for _, schema, instances in corpus(folder, name)]
        served = [one for one in outcomes if not one.refused]
        drawn, invalid = let_through(compiler, corpus(folder, name), seed=1, times=20)
        reasons = Counter(one.refused.partition(": ")[2] or one.refused for one in outcomes if one.refused)
        result[name] = {
            "schemas": len(outcomes),
            "served": len(served),
            "served_percent": round(100 * len(served) / len(outcomes), 1),
            "valid_accepted": sum(one.accepted for one in served),
            "invalid_rejected": sum(one.rejected for one in served),
            "documented_narrowings": dict(
                Counter(text.partition(": ")[0] for one in served for text in one.narrowed).most_common()
            ),
            "drawn_from_the_grammars": drawn,
            "drawn_but_invalid": len(invalid),
            "wrong": [text for one in served for text in one.wrong],
            "refused": dict(reasons.most_common()),
        }
    about = environment() | {"command": "python -m tests.service.schema_corpus"}
    about["versions"] |= {name: importlib.metadata.version(name) for name in ("xgrammar", "jsonschema")}
    return {**result, **about}


if __name__ == "__main__":
    json.dump(summary(Path(os.environ["FULCRUM_DATA"])), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
