"""Markdown pages of the repository: blocks of Python, links, headings."""

import re

from scripts import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "benchmarks/*.md", "docs/**/*.md", "news/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
)


def text_of(page):
    return (ROOT / page).read_text()


def blocks_of(page):
    """Python blocks, in order."""
    return BLOCK.findall(text_of(page))


def run_blocks(page, names, train=None, leave_out=()):
    """Run all blocks in one namespace, but those with a text of `leave_out`. A line "...  # train" calls `train`."""
    names["train"] = train
    for block in blocks_of(page):
        if not any(text in block for text in leave_out):
            exec(compile(block.replace("...  # train", "train()"), page, "exec"), names)


def links_of(page):
    """Targets of links outside of code."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", FENCED.sub("", text_of(page))))


def anchors_of(page):
    """Ends of addresses that lead to headings, and to names of the reference."""
    text = text_of(page)
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
