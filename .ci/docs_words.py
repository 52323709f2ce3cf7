"""How long the pages are, and which sentences stand on three pages or more. Fails above a limit.

A limit goes down when the figure does. Raise one only with the reason next to it. Words are counted as by `wc -w`, with
the code of a page. A sentence is prose of six words or more: no heading, no row of a table, no code.

    python .ci/docs_words.py         # the figures, and the sentences
    python .ci/docs_words.py --pages # also the words of each page
    python .ci/docs_words.py --site  # the words of the reference, as built into site/
"""

from __future__ import annotations

import html
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "words of all pages": 55_108,  # with what replicas confirm, and what they do not
    "words for maintainers": 6_089,  # with sharded pub/sub, and the witness of a link
    "sentences on three pages or more": 0,
    "words of the reference": 28_263,
    "words of its longest page": 3_009,
}
NO_PROSE = re.compile(r"^---\n.*?^---\n|^ *(```+).*?^ *\1|<!--.*?-->|^ *[|#!?<].*?$", re.M | re.S)
SENTENCE = re.compile(r"[A-Z`*\[][^.!?:]*(?:[.!?:](?!\s|$)[^.!?:]*)*[.!?:](?=\s|$)")


def pages() -> dict[str, str]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "maintainers").glob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without what its links lead to and without emphasis."""
    text = re.sub(r"\[([^\]]+)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", NO_PROSE.sub("\n\n", text))
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", text, flags=re.M):
        for found in SENTENCE.findall(" ".join(paragraph.replace("*", "").split())):
            if len(found.split()) >= 6:
                yield found


def judge(figures: dict[str, int]) -> None:
    """Print the figures; exit with an error if one is above its limit."""
    above = 0
    for name, value in figures.items():
        above += value > LIMITS[name]
        print(f"{name}: {value:,} (at most {LIMITS[name]:,}){' ABOVE' if value > LIMITS[name] else ''}")
    if above:
        sys.exit(f"{above} above the limit: shorten a page, or state a fact on one page and link to it")


def rendered(page: Path) -> str:
    """Return the text of a page that was built, without what is around it."""
    article = re.sub(r"(?s).*<article[^>]*>(.*)</article>.*", r"\1", page.read_text("utf-8"))
    return html.unescape(re.sub(r"(?s)<(script|style|svg).*?</\1>|<[^>]+>", "", article))


def reference() -> None:
    words = {page.parent.name: len(rendered(page).split()) for page in (ROOT / "site/reference").rglob("index.html")}
    print("".join(f"{count:7,} {page}\n" for page, count in sorted(words.items(), key=lambda it: -it[1])), end="")
    judge({"words of the reference": sum(words.values()), "words of its longest page": max(words.values())})


def main(names: list[str]) -> None:
    """Count what is asked for."""
    if "--site" in names:
        return reference()
    texts = pages()
    places: dict[str, set[str]] = defaultdict(set)
    for page, text in texts.items():
        for sentence in sentences(text):
            places[sentence].add(page)
    repeated = {sentence: found for sentence, found in places.items() if len(found) >= 3}
    words = {page: len(text.split()) for page, text in texts.items()}
    if "--pages" in names:
        print("".join(f"{count:7,} {page}\n" for page, count in sorted(words.items(), key=lambda it: -it[1])), end="")
    print("".join(f"{len(found)} pages: {sentence}\n" for sentence, found in sorted(repeated.items())), end="")
    inside = sum(count for page, count in words.items() if page.startswith("maintainers/"))
    figures = {"words of all pages": sum(words.values()) - inside, "words for maintainers": inside}
    judge({**figures, "sentences on three pages or more": len(repeated)})


if __name__ == "__main__":
    main(sys.argv[1:])
