"""Regular expressions in the compiler's dialect. Those of JSON Schemas match anywhere in a string. Knows no schema."""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise


class PatternError(Exception):
    """The pattern cannot be expressed."""


# In JSON these are written with a backslash, which the compiler does not know of: it would let them stand as they are.
# (Of classes it takes them out.)
_UNSAFE = {'"', '\\"', "\\\\", r"\n", r"\r", r"\t", r"\f", r"\v", r"\0", "\n", "\r", "\t"}
# As of ECMAScript: [^] is any character.
_CLASS = r"\[(?:\\.|[^\]\\])*\]"
# A piece of a pattern: a class, an escape, or any other character.
_PIECE = re.compile(_CLASS + r"|\\.|.", re.DOTALL)
_ANCHORS = {"^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z"}
# XGrammar 0.2.9 counts in 32 bits, and begins anew: to it a{4294967297} is a.
MAX_COUNT = (1 << 31) - 1
_COUNT = r"\{\s*(?:([0-9]+)\s*)?(?:,\s*(?:([0-9]+)\s*)?)?\}"
_IN_PATTERN = re.compile(rf"{_CLASS}|\\.|{_COUNT}", re.DOTALL)
_IN_GRAMMAR = re.compile(rf'"(?:\\.|[^"\\])*"|{_CLASS}|#[^\n]*|{_COUNT}', re.DOTALL)


def anchored(pattern: str) -> str:
    """^...$ around the pattern, and `.*` where it is open at an end.

    Raises:
        PatternError: an anchor within, a look-around, or a count above MAX_COUNT.
    """
    _check_counts(pattern, _IN_PATTERN)
    branches = list(_branches(pattern))
    if re.search(r"\(\?(?!:)", pattern):
        raise PatternError("groups that begin with (? are not served, but (?:")
    # Without the empty group XGrammar 0.2.9 takes the last a of a|a{1,2} as often as it likes.
    return _ascii("^(?:" + "|".join(_whole(branch) for branch in branches) + ")(?:)$")


def of_a_text(pattern: str) -> str:
    """The pattern of a whole text. To XGrammar 0.2.9 a line feed is a . too, and the last a of \\x61a a digit.

    Raises:
        PatternError: an anchor within, which XGrammar would leave out (and of \\A the backslash alone); a class that
            Python ends later than ECMAScript; or a count above MAX_COUNT.
    """
    _check_counts(pattern, _IN_PATTERN)
    pieces = _PIECE.findall(pattern)
    if not {"[]", "[^]"}.isdisjoint(pieces):
        raise PatternError(r"a ] that a class begins with is to be written \], and any character [\s\S]")
    for branch in _branches(pattern):
        _inner(branch)
    pattern = re.sub(r"(\\\\)|\\x([0-9A-Fa-f]{2})", lambda found: found[1] or f"\\u00{found[2]}", pattern)
    return "".join(r"[^\n]" if piece == "." else piece for piece in _PIECE.findall(pattern))


def checked_grammar(grammar: str) -> str:
    """The same grammar (EBNF). Raises PatternError: a count above MAX_COUNT."""
    _check_counts(grammar, _IN_GRAMMAR)
    return grammar


def _check_counts(text: str, within: re.Pattern[str]) -> None:
    if any(float(count) > MAX_COUNT for found in within.finditer(text) for count in found.groups() if count):
        raise PatternError(f"something is to be repeated more than {MAX_COUNT} times")


def _ascii(pattern: str) -> str:
    """The pattern with code points in the place of other characters: with these, XGrammar 0.2.9 lets quotes stand."""

    def point(found: re.Match[str]) -> str:
        number = ord(found[2] or "\0")
        return found[1] or (f"\\u{number:04x}" if number < 1 << 16 else f"\\u{{{number:x}}}")

    return re.sub(r"(\\[\0-~])|\\?([^\0-~])", point, pattern)


def _branches(pattern: str) -> Iterator[list[str]]:
    """The pieces of each alternative. Raises PatternError."""
    branch: list[str] = []
    depth = 0
    for last, piece in pairwise(["", *_PIECE.findall(pattern)]):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            yield branch
            branch = []
        else:
            # XGrammar 0.2.9 takes (ab*)? for (ab*|b*), but not (ab*){0,1}.
            branch.append("{0,1}" if (last, piece) == (")", "?") else piece)
    if depth:
        raise PatternError("its parentheses do not match")
    yield branch


def _inner(pieces: list[str]) -> tuple[bool, list[str], bool]:
    """An alternative without the anchors at its ends, and whether each was there. Raises PatternError: one within."""
    first = bool(pieces) and pieces[0] == "^"
    last = bool(pieces) and pieces[-1] == "$" and len(pieces) > first
    inner = pieces[first : len(pieces) - last]
    if not _ANCHORS.isdisjoint(inner):
        raise PatternError("of anchors only ^ and $ are served, at the ends of a pattern")
    return first, inner, last


def _whole(pieces: list[str]) -> str:
    first, inner, last = _inner(pieces)
    if any(piece in _UNSAFE for piece in inner):
        raise PatternError("quotes, backslashes and control characters are only served in classes such as [^,]")
    text = "".join(inner)
    if not first and not text.startswith(".*"):
        text = ".*" + text
    return text if last or text.endswith(".*") else text + ".*"


def bounded(pattern: str, low: int, high: int | None) -> str:
    """The same with a length of low to high characters; served for one repeated class, ^[a-z]+$.

    Raises:
        PatternError: any other pattern.
    """
    match = re.fullmatch(r"\^(\[(?:\\.|[^\]\\])+\]|\\[wd]|\.)([*+]|\{(\d+)(,)?(\d+)?\})\$", pattern, re.DOTALL)
    if match is None:
        raise PatternError("minLength and maxLength are only served beside a pattern like ^[a-z]+$")
    if match[2] in "*+":
        least, most = int(match[2] == "+"), None
    else:
        least = int(match[3])
        most = int(match[5]) if match[5] else None if match[4] else least
    low = max(low, least)
    tops = [one for one in (high, most) if one is not None]
    if tops and min(tops) < low:
        raise PatternError("no string matches it and has such a length")
    return anchored(f"^{match[1]}{{{low},{min(tops) if tops else ''}}}$")


def others(names: Iterable[str], prefixes: Iterable[str]) -> str:
    """A pattern that the names do not match which are given, or begin with a prefix; all others do.

    But for names that JSON writes with a backslash: these match no pattern.
    """
    plain = [(name, False) for name in names if re.fullmatch(r'[^"\\\x00-\x1f]*', name)]
    return _ascii(_others(plain + [(prefix, True) for prefix in prefixes]))


def _others(words: list[tuple[str, bool]]) -> str:
    """For the rests of the words behind a common beginning."""
    branches = [] if ("", False) in words else [""]
    firsts = dict.fromkeys(word[0] for word, _ in words if word)
    branches.append(f"[^{''.join(re.escape(first) for first in firsts)}].*" if firsts else "..*")
    for first in firsts:
        rest = [(word[1:], whole) for word, whole in words if word.startswith(first)]
        if ("", True) not in rest:
            branches.append(re.escape(first) + _others(rest))
    return f"(?:{'|'.join(branches)})"
