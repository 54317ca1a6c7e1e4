"""Numbers of a run as text: a headline, tables, and the output for a terminal."""

from collections.abc import Callable
from typing import Any

from torchtitan_diloco.base.formatting import brief, clock, markdown_table

TABLES = {"islands": "islands", "rounds of fragments": "fragments", "samples of slots": "slots"}
FORMS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "heard_seconds_ago": ("heard", "{:.0f} s ago".format),
    "loss": ("loss", "{:.4f}".format),
    "merged_seconds_ago": ("merged", "{:.1f} s ago".format),
    "open_seconds": ("open for", brief),
    "owner": ("owner", lambda owner: owner.partition("/")[0]),  # without the nonce of its start
    "part_in_rounds": ("in rounds", "{:.0%}".format),
    "round_trip_seconds": ("round trip", brief),
    "tokens_per_second": ("tokens/s", "{:,}".format),
    "upload_bytes_per_second": ("upload", lambda rate: f"{8e-6 * rate:.3g} Mbit/s"),
    "waited": ("waited", "{:.0%}".format),
}
"""Heading and format of the columns that are not shown unchanged."""
HIDDEN = {"for_seconds", "left_out_reason", "incarnation", "tokens", "leaving"}
"""Keys for programs, which users see elsewhere."""


def headline(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of the whole run by name."""
    merged = numbers["tokens_merged"]
    total = numbers["total_tokens"]
    last = numbers["last_merged"]
    lines = {}
    if total:
        lines["tokens merged"] = f"{merged:,} of {total:,} ({merged / total:.1%})"
    if rate := numbers["tokens_per_second"]:
        remaining = numbers["eta_seconds"]
        speed = f"{rate:,} tokens/s"
        lines["speed"] = speed if remaining is None else f"{speed}, ETA {clock(remaining)}"
    if last:
        version = f"version {last['version']} of fragment {last['fragment']}"
        lines["last merged"] = f"{version}, {clock(last['seconds_ago'])} ago"
    if numbers["loss"] is not None:
        place = f"at {numbers['loss_at_tokens']:,} tokens"
        lines["loss of the shared model"] = f"{numbers['loss']:.4f} {place}"
    if numbers["verdicts"]:
        lines["verdicts"] = ", ".join(numbers["verdicts"])
    if numbers["kept_samples"] is not None:
        lines["kept samples"] = f"{numbers['kept_samples']:.1%} of those merged, lost or read twice"
    return lines


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that have a value, in the order of the rows' keys, and the
    cells."""
    keys = [name for name in (rows[0] if rows else ()) if name not in HIDDEN]
    names = [name for name in keys if any(row[name] is not None for row in rows)]
    cells = [[_cell(name, row) for name in names] for row in rows]
    return [FORMS[name][0] if name in FORMS else name.replace("_", " ") for name in names], cells


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row.get(name)
    if name == "doing" and row["for_seconds"] is not None:
        return f"{value} for {clock(row['for_seconds'])}"
    if name == "left_out" and row["left_out_reason"] is not None:
        return f"{value:,}: {row['left_out_reason']}"
    match value:
        case None | []:
            return "-"
        case _ if name in FORMS:
            return FORMS[name][1](value)
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(value)
        case int():
            return f"{value:,}"
    return str(value)


def render(numbers: dict[str, Any], source: str) -> str:
    """Return the numbers as text for a terminal. `source`: what they are read from."""
    run = f"run {numbers['run']}" if numbers["run"] else "no run yet"
    lines = [f"{run}: {numbers['phase']}; {source}: {numbers['connection']}"]
    lines += [f"{name}: {text}" for name, text in headline(numbers).items()]
    for title, key in TABLES.items():
        names, cells = table(numbers[key])
        lines += ["", title, markdown_table(names, cells) if cells else "none"]
    return "\n".join(lines)
