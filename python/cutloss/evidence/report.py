"""The report: one HTML page with its figures in it, the same as Markdown and PDF, and a CSV and PNG of each table."""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from pathlib import Path
from typing import Any

from . import figures, markdown, records, tables, texts

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: right; } th { background: #f4f4f4; }
td.text, th.text { text-align: left; } img { max-width: 100%; } code { background: #f4f4f4; padding: 0 .2rem; }
.note { color: #555; } pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } th, code, pre { background: #262626; }
  th, td { border-color: #444; } .note { color: #aaa; } img { background: white; } }
"""


def add(commands: Any) -> None:
    command = commands.add_parser("report", help="a page from the records: HTML, Markdown, PDF; a CSV and PNG of each table")
    command.add_argument("--records", nargs="+", default=["evidence/records.jsonl"], metavar="FILE")
    command.add_argument("--to", default="docs/evidence", metavar="FOLDER", help="(default %(default)s)")
    command.add_argument("--no-pdf", action="store_true")
    command.add_argument("--json", action="store_true", help="print the tables as JSON instead")
    command.set_defaults(run=main)


def main(options: argparse.Namespace, console: Any) -> int:
    found: dict[str, dict[str, Any]] = {}
    for name in options.records:
        if not Path(name).exists():
            raise records.RecordsError(f"--records: {name}: no such file")
        found |= {one["key"]: one for one in records.read(Path(name))}
    if not found:
        raise records.RecordsError(f"--records: {', '.join(options.records)}: no record; `cutloss-evidence targets` makes some")
    made = tables.all_of(list(found.values()))
    if options.json:
        print(json.dumps([{n: getattr(t, n) for n in ("name", "title", "columns", "rows", "note", "command")} for t in made]))
        return 0
    files = write(list(found.values()), made, Path(options.to), pdf=not options.no_pdf)
    console.print(f"{len(made)} tables of {len(found)} records: {', '.join(files)}", highlight=False, markup=False, soft_wrap=True)
    return 0


def write(found: list[dict[str, Any]], made: list[tables.Table], folder: Path, pdf: bool = True) -> list[str]:
    """Writes the report's files; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {table.name: figure for table in made if (figure := figures.draw(table)) is not None}
    pictures = {name: _png(figure) for name, figure in drawn.items()}
    files = []
    for table in made:
        table.write_csv(folder / f"{table.name}.csv")
        files.append(f"{table.name}.csv")
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(picture)
        files.append(f"{name}.png")
    (folder / "report.html").write_text(page(found, made, pictures), encoding="utf-8")
    files.append("report.html")
    if pdf:
        write_pdf(folder / "report.pdf", found, made, drawn)
        files.append("report.pdf")
    (folder / "README.md").write_text(markdown.page(found, made, pictures), encoding="utf-8")
    _close(drawn)
    return [*files, "README.md"]


def _png(figure: Any) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=120)
    return held.getvalue()


def _close(drawn: dict[str, Any]) -> None:
    from matplotlib import pyplot

    for figure in drawn.values():
        pyplot.close(figure)


# ---- HTML --------------------------------------------------------------------------------------------------------------


def page(found: list[dict[str, Any]], made: list[tables.Table], pictures: dict[str, bytes]) -> str:
    parts = [f"<h1>{html.escape(texts.TITLE)}</h1>", *(f"<p>{_text(one)}</p>" for one in texts.summary(found, made))]
    parts += ["<h2>Method</h2>", *(f"<p>{_text(one)}</p>" for one in texts.METHOD), f"<p>{_text(texts.made_with(found))}</p>"]
    parts.append("<h2>Contents</h2><ul>" + "".join(
        f'<li><a href="#{t.name}">{html.escape(t.title)}</a></li>' for t in made) + "</ul>")  # fmt: skip
    for table in made:
        parts.append(f'<h2 id="{table.name}">{html.escape(table.title)}</h2>')
        parts += [f"<p>{_text(one)}</p>" for one in texts.about(table)]
        if table.name in pictures:
            data = base64.b64encode(pictures[table.name]).decode()
            parts.append(f'<img alt="{html.escape(table.title)}" src="data:image/png;base64,{data}">')
        parts.append(_html_table(table))
        parts.append(f'<p class="note">Again: <code>{html.escape(table.command)}</code></p>')
    parts += ["<h2>What is not shown</h2>", *(f"<p>{_text(one)}</p>" for one in texts.limits(found))]
    body = "\n".join(parts)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(texts.TITLE)}</title>\n'
            f"<style>\n{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n")  # fmt: skip


def _text(text: str) -> str:
    """Escaped, with `code`."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if k % 2 else part for k, part in enumerate(parts))


def _html_table(table: tables.Table) -> str:
    def cell(value: Any, tag: str = "td") -> str:
        kind = ' class="text"' if isinstance(value, str) else ""
        return f"<{tag}{kind}>{'–' if value is None else html.escape(str(value))}</{tag}>"

    common, columns, cells = table.brief()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = "\n".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in cells)
    before = f"<p>All of {html.escape(common)}:</p>\n" if common else ""
    return f"{before}<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"


# ---- PDF ---------------------------------------------------------------------------------------------------------------


def write_pdf(path: Path, found: list[dict[str, Any]], made: list[tables.Table], drawn: dict[str, Any]) -> None:
    """A landscape page of text, then figures and tables, as matplotlib draws them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(path, metadata={"Title": texts.TITLE}) as pdf:
        _pdf_text(pdf, texts.TITLE, [*texts.summary(found, made), "", *texts.METHOD, "", texts.made_with(found)])
        for table in made:
            about = texts.about(table)
            if about:
                _pdf_text(pdf, table.title, [*about, f"Again: {table.command}"])
            if table.name in drawn:
                pdf.savefig(drawn[table.name])
            _pdf_table(pdf, table)
        _pdf_text(pdf, "What is not shown", texts.limits(found))


_PAGE = (11.69, 8.27)
_ROWS = 34


def _pdf_text(pdf: Any, title: str, paragraphs: list[str]) -> None:
    import textwrap

    from matplotlib import pyplot

    lines = [line for one in paragraphs for line in (textwrap.wrap(one, 140) or [""]) + [""]]
    for start in range(0, max(1, len(lines)), 44):
        figure = pyplot.figure(figsize=_PAGE)
        figure.text(0.05, 0.94, title, fontsize=15, weight="bold", va="top")
        figure.text(0.05, 0.88, "\n".join(_plain(line) for line in lines[start : start + 44]), fontsize=9, va="top")
        pdf.savefig(figure)
        pyplot.close(figure)


def _plain(text: str) -> str:
    return text.replace("$", r"\$").replace("`", "")


def _pdf_table(pdf: Any, table: tables.Table) -> None:
    import textwrap

    from matplotlib import pyplot

    def short(value: Any) -> str:
        text = "–" if value is None else str(value)
        return _plain(text if len(text) <= 46 else text[:43] + "...")

    common, columns, rows = table.brief()
    heads = [_plain("\n".join(textwrap.wrap(column, 14))) for column in columns]
    for start in range(0, len(rows), _ROWS):
        figure, axes = pyplot.subplots(figsize=_PAGE)
        axes.axis("off")
        axes.set_title(_plain(": ".join(filter(None, (table.title, common)))), fontsize=12, loc="left")
        cells = [[short(cell) for cell in row] for row in rows[start : start + _ROWS]]
        drawn = axes.table(cells, colLabels=heads, loc="upper center", cellLoc="right")
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(6 if len(columns) > 10 else 7)
        drawn.auto_set_column_width(range(len(columns)))
        for column in range(len(columns)):
            drawn[0, column].set_height(drawn[0, column].get_height() * max(1 + text.count("\n") for text in heads))
        pdf.savefig(figure)
        pyplot.close(figure)
