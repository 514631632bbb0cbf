"""Makes docs/benchmarks.md out of docs/benchmarks.md.in and the result files: `python -m loadtest.docs`.

The page is a Jinja template. `{{ ladder("cpu-ladder.json") }}` and the like become a table of that result file,
followed by machine, commit and command as the file says them: no figure of a table is typed by hand. Knows no clock
and no network: the same files give the same page.
"""

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment, StrictUndefined, TemplateError

from loadtest import tables
from loadtest.records import Fields, LoadTestError
from loadtest.report import read_result

FOLDER = Path(__file__).parent.parent / "docs"
_File = str | Sequence[str]
"""The file of a result, or the load's name and the file; a pattern such as "h200/*-?.json" names several."""


class Page:
    """The functions of the template; each gives the text that takes its place.

    Args:
        folder: where the result files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def functions(self) -> dict[str, Callable[..., str]]:
        """By the names that the template uses: those below, and one for each kind of tables.ROWS."""
        own = (self.ladder, self.serve, self.compare, self.runs, self.table, self.figure)
        kinds = {kind: partial(self.table, columns=columns) for kind, columns in tables.ROWS.items()}
        return {**kinds, **{function.__name__: function for function in own}}

    def ladder(self, file: str) -> str:
        """A result of `fulcrum bench ladder`."""
        fields = self._read(file)
        return _with_origin(tables.ladder_table(fields), [fields])

    def serve(self, *files: _File) -> str:
        """Results of `fulcrum bench serve` or `sweep`, one a row."""
        results = self._runs(files)
        return _with_origin(tables.serve_table(results), results)

    def compare(self, reference: str, *files: _File) -> str:
        """Results beside a reference's rows of the same load; of several runs of a load the medians."""
        theirs, results = self._read(reference), self._runs(files)
        return _with_origin(tables.compare_table(theirs, results), [theirs, *results])

    def runs(self, columns: tables.Columns, *files: _File) -> str:
        """Any files, one a row: {heading: key of the field}; "load" is the name that is given here."""
        results = self._runs(files)
        return _with_origin(tables.rows_table(results, columns), results)

    def table(self, file: str, columns: tables.Columns, rows: str = "rows") -> str:
        """Any file with a list of rows: {heading: key of the field}."""
        fields = self._read(file)
        return _with_origin(tables.rows_table(_inner(fields, file, rows), columns), [fields])

    def figure(self, file: str, *keys: str | int) -> str:
        """One figure in the midst of a sentence; of several runs (a pattern) the median."""
        return tables.number(statistics.median(_inner(self._read(name), name, *keys) for name in self._matching(file)))

    def _runs(self, files: Sequence[_File]) -> list[Fields]:
        found = []
        for file in files:
            load, pattern = (None, file) if isinstance(file, str) else file
            runs = map(self._read, self._matching(pattern))
            found += [{**fields, "load": load or fields.get("load")} for fields in runs]
        return found

    def _matching(self, pattern: str) -> list[str]:
        names = sorted(str(path.relative_to(self._folder)) for path in self._folder.glob(pattern))
        if not names:
            raise LoadTestError(f"there is no {pattern} among the results")
        return names

    def _read(self, file: str) -> Fields:
        fields = read_result(self._folder / file)
        if missing := [key for key in ("machine", "command") if not fields.get(key)]:
            raise LoadTestError(f"{file} does not say its {missing[0]}")
        if not fields.get("commit") and not fields.get("source"):
            raise LoadTestError(f"{file} names neither a commit nor another source")
        return fields


def render(template: str, folder: Path) -> str:
    """The page that the template makes of the result files in `folder`.

    Raises: LoadTestError, naming the file or the line that is wrong.
    """
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    environment.globals.update(Page(folder).functions())
    try:
        return environment.from_string(template).render()
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise LoadTestError(f"template{f', line {line}' if line else ''}: {error.message}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LoadTestError(f"a result file or a placeholder lacks {error}") from error


def _with_origin(table: str, results: Sequence[Fields]) -> str:
    """The table, and where and how its figures were made; what several files have in common is said once."""
    commands: dict[str, list[str]] = {}
    for fields in results:
        commands.setdefault(_origin(fields), []).append(f"`{fields['command']}`")
    lines = [f"{origin} {', '.join(dict.fromkeys(typed))}" for origin, typed in commands.items()]
    return "\n\n".join([table, *lines])


def _origin(fields: Fields) -> str:
    machine = fields["machine"]
    memory = f"{machine['memory_gib']:g} GiB" if "memory_gib" in machine else ""
    cores = f"{machine['cores']} cores" if "cores" in machine else ""
    parts = [machine.get("cpu"), cores, memory, *machine.get("gpus", ())]
    text = ", ".join(part for part in parts if part)
    if versions := {name: version for name, version in (fields.get("versions") or {}).items() if version}:
        text += "; " + ", ".join(f"{name} {version}" for name, version in versions.items())
    if fields.get("commit"):
        text += f"; commit {fields['commit'][:9]}" + (" with changes" if fields["commit"].endswith("+") else "")
    if fields.get("settings"):
        text += f"; {fields['settings']}"
    source = f" Source: {fields['source']}" if fields.get("source") else ""
    day = re.sub(r"^(\d{4})(\d\d)(\d\d).*", r"\1-\2-\3", str(fields.get("date", "")))
    return f"Measured{f' {day}' if day else ''} on {text}.{source} Command:"


def _inner(fields: Any, file: str, *keys: str | int) -> Any:
    for key in keys:
        try:
            fields = fields[key]
        except (KeyError, IndexError, TypeError) as error:
            raise LoadTestError(f"{file} has no {key!r}") from error
    return fields


@click.command()
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=FOLDER, help="docs/")
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 when the page is not what would be written.")
def main(folder: Path, check: bool) -> None:
    """Write benchmarks.md out of benchmarks.md.in and results/."""
    page = folder / "benchmarks.md"
    try:
        text = render((folder / "benchmarks.md.in").read_text(encoding="utf-8"), folder / "results")
        if not check:
            page.write_text(text, encoding="utf-8")
            return
        current = page.exists() and page.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from error
    if not current:
        click.echo(f"{page.name} is not what its template and the result files make: python -m loadtest.docs", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
