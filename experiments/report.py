"""Tables for the terminal, Markdown and self-contained HTML pages with figures inside."""

import base64
import html
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.3rem; margin-top: 3rem; border-top: 2px solid #e3e6ea; padding-top: 1rem }
h3 { font-size: 1rem; margin-bottom: .3rem } .wide { overflow-x: auto }
blockquote { margin: 0; padding-left: 1rem; border-left: 3px solid #8c6bb1; color: #444c56 }
img { max-width: 100%; height: auto } p { color: #444c56 }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #e3e6ea; white-space: nowrap }
"""

Rows = list[list[str]]


def show(console: Console, title: str, rows: Rows) -> None:
    """Print a table, header first."""
    printed = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows[0]:
        printed.add_column(name)
    for row in rows[1:]:
        printed.add_row(*row)
    console.print(printed)


def markdown(rows: Rows) -> str:
    """A table as Markdown, header first."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def heading(name: str, title: str, paper: str) -> str:
    """The opening of a study's section: its title, and what the paper says."""
    said = f"<blockquote>The paper: {html.escape(paper)}</blockquote>" if paper else ""
    return f"<h2 id='{html.escape(name)}'>{html.escape(title)}</h2>{said}"


def contents(titles: dict[str, str]) -> str:
    """Links to the sections, by name."""
    links = (
        f"<li><a href='#{html.escape(n)}'>{html.escape(t)}</a></li>" for n, t in titles.items()
    )
    return f"<ul>{''.join(links)}</ul>"


def text(words: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(words)}</p>"


def table(title: str, rows: Rows) -> str:
    """A table as HTML, header first."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[1:]
    )
    return (
        f"<h3>{html.escape(title)}</h3><div class='wide'><table><tr>{head}</tr>{body}</table></div>"
    )


def figure(title: str, path: Path, caption: str) -> str:
    """A PNG as HTML, with its bytes inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f"<h3>{html.escape(title)}</h3><img alt='{html.escape(title)}' "
        f"src='data:image/png;base64,{data}'><p>{html.escape(caption)}</p>"
    )


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A matplotlib figure with its axes, drawn without a screen."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    settings = {"squeeze": False, "layout": "constrained", **options}
    figure, axes = pyplot.subplots(rows, columns, figsize=size, **settings)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def page(path: Path, title: str, parts: list[str]) -> Path:
    """Write one self-contained HTML page."""
    path.write_text(
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{''.join(parts)}</html>"
    )
    return path
