"""The report of `rota demo`: one HTML page that needs nothing else, and the same facts as JSON."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.service.demo import Outcome

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd}
.ok{color:#0a7d33}.bad{color:#b3261e}img,svg{max-width:100%}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}td,th{border-color:#333}}"""
WIDTH, HEIGHT = 900.0, 120.0


def write(folder: Path, outcome: Outcome, job_output: Path) -> Path:
    """Write ``report.html``, ``report.json`` and the curve of the job into ``folder``; the path of the page."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"kind": "Demo", **asdict(outcome)}, indent=1) + "\n", "utf-8")
    curve = job_output / "curve.png"
    picture = ""
    if curve.is_file():
        data = curve.read_bytes()
        (folder / "curve.png").write_bytes(data)
        picture = f'<img alt="reward by commit" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    page = folder / "report.html"
    page.write_text(_page(outcome, picture), encoding="utf-8")
    return page


def _page(outcome: Outcome, picture: str) -> str:
    verdict = "ok" if not outcome.problems else "bad"
    words = "all promises kept" if not outcome.problems else "; ".join(outcome.problems)
    reward = "{reward_before:.3f} → {reward_after:.3f}".format(**outcome.figures) if outcome.figures else "–"
    kills = [(one.victim, one.at, one.pid, one.new_pid, f"{one.healed_s} s") for one in outcome.kills]
    healed = [
        (one["seen_at"], one["instance"], one["reason"], one["level"], len(one["scope"]), one["seconds"])
        for one in outcome.failures
    ]
    waits = [(one["job"], one["asks"], one["why"]) for one in outcome.waiting]
    return "\n".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Rota demo</title>',
            f"<style>{STYLE}</style><h1>Rota demo</h1>",
            f'<p class="{verdict}"><b>{html.escape(words)}</b></p>',
            f"<p>{html.escape(outcome.job)}: {outcome.state} in {outcome.seconds} s, commits 1..{len(outcome.commits)}"
            f", sampled reward {reward}</p>",
            picture,
            f"<h2>Commits and kills</h2>{_timeline(outcome)}",
            "<h2>Kills</h2>",
            _table(("killed", "at commit", "pid", "new pid", "commits again after"), kills),
            "<h2>Recoveries</h2>",
            _table(("seen", "cause", "reason", "level", "instances", "seconds"), healed),
            "<h2>Why others wait</h2>",
            _table(("job", "asks", "why"), waits),
            "</html>\n",
        )
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def _timeline(outcome: Outcome) -> str:
    """Commits over the seconds of the job as a line, each kill as a red mark."""
    points = [(_seconds(one["at"]), one["n"]) for one in outcome.events if one["kind"] == "Committed"]
    if len(points) < 2:
        return "<p>no commits</p>"
    start, end, top = points[0][0], points[-1][0], points[-1][1]

    def across(at: float) -> float:
        return (at - start) / (end - start or 1.0) * WIDTH

    line = " ".join(f"{across(at):.1f},{HEIGHT - n / top * HEIGHT:.1f}" for at, n in points)
    marks = "".join(
        f'<line x1="{across(one.wall_s):.1f}" x2="{across(one.wall_s):.1f}" y1="0" y2="{HEIGHT}" stroke="#b3261e"/>'
        f'<text x="{across(one.wall_s) + 4:.1f}" y="12" fill="#b3261e" font-size="12">{html.escape(one.victim)}</text>'
        for one in outcome.kills
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 4}" role="img" aria-label="commits over time">'
        f'<polyline points="{line}" fill="none" stroke="#08519c" stroke-width="2"/>{marks}</svg>'
    )
