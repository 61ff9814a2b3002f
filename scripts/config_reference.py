"""Writes the config reference of the documentation: one row per key, made from the models."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from tieroff.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs/config.md"
MARKER = "<!-- made by scripts/config_reference.py -->\n"


def config_reference() -> str:
    """Returns a heading and a table per table of the config."""
    tables: dict[str, type[BaseModel]] = {}
    top = {}
    for name, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            tables[name] = info.annotation
        else:
            top[name] = info
    parts = [_table("Top level", "", Config, list(top))]
    parts += [_table(f"[{name}]", model.__doc__ or "", model, list(model.model_fields)) for name, model in tables.items()]
    return "\n\n".join(parts) + "\n"


def _table(title: str, about: str, model: type[BaseModel], keys: list[str]) -> str:
    defaults = model().model_dump(mode="json")
    lines = [f"## `{title}`" if title.startswith("[") else f"## {title}", ""]
    if about:
        lines += [about.strip(), ""]
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        info = model.model_fields[key]
        extra = info.json_schema_extra
        assert isinstance(extra, dict)
        default = "left out" if defaults[key] is None else f"`{json.dumps(defaults[key])}`"
        lines.append(f"| `{key}` | {extra['expected']} | {default} | {info.description} |")
    return "\n".join(lines)


def main() -> None:
    """Replaces what follows the marker in the page."""
    before = PAGE.read_text(encoding="utf-8").split(MARKER)[0]
    PAGE.write_text(f"{before}{MARKER}\n{config_reference()}", encoding="utf-8")


if __name__ == "__main__":
    main()
