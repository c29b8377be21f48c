"""The README and the documentation: links, sizes, the numbers in the README, the table of variables, and the site."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import onepass
import onepass.functional
import onepass.nn
from onepass.bench import record

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LONGEST = 25  # words in a sentence


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)


def sentences(text: str) -> list[str]:
    """The sentences of a page in Markdown. A heading, a cell of a table and the text of a picture are sentences, too."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", without_code(text))
    text = re.sub(r"^(#.*)$", r"\1\n", text, flags=re.MULTILINE)  # a heading ends a block
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)|\|", text)
    return [" ".join(found.split()) for block in blocks for found in re.split(r"(?<=[.!?])[\"*)]*\s", block) if found.strip(" -*\n")]


def slugs(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links of a page to files or headings that do not exist. Links to the web are not followed."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        known = link.startswith(("https://", "http://")) or target.exists()
        if not known or (anchor and target.suffix == ".md" and anchor not in slugs(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b\n[1](page.md) [2](#a-b) [3](no.md) [4](page.md#no) [5](#no)\n```\n[6](no.md)\n```\n")
    assert broken_links(page) == ["no.md", "page.md#no", "#no"]


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) < 120
    found = sentences(README.read_text())
    assert len(found) > 50
    assert [sentence for sentence in found if len(sentence.split()) > LONGEST] == []


def test_sentences():
    text = "# Title\nOne two. Three\nfour (five)! **Six.** Seven\n- [a b](c.md): d\n- e\n\n| f | g h |\n```\nno\n```\n"
    assert sentences(text) == ["# Title", "One two.", "Three four (five)!", "**Six.", "Seven", "- a b: d", "- e", "f", "g h"]


@pytest.mark.skipif(not (ROOT / "results/models-h200.jsonl").exists(), reason="no results")
def test_the_numbers_of_the_readme_are_measured():
    by_key = {(r["row"], r["provider"]): r for r in record.read(ROOT / "results/models-h200.jsonl")}
    before, after, compiled = (by_key["vae-decode", provider] for provider in ("before", "after", "compiled after"))
    median = {name: statistics.median(r["ratio"] for (_, p), r in by_key.items() if p == name) for name in ("after", "compiled after")}
    text = " ".join(README.read_text().split())
    for words in (
        f"decode images {after['ratio']:.1f}× faster",
        f"takes {after['ms']:.0f} ms instead of {before['ms']:.0f} ms",
        f"the VAE is {compiled['ratio']:.2f}× as fast",
        f"is {median['after']:.2f}×, and {median['compiled after']:.2f}× with",
    ):
        assert words in text


def test_all_environment_variables_are_in_the_table():
    sources = "\n".join(path.read_text() for path in Path(onepass.__file__).parent.rglob("*.py"))
    used = set(re.findall(r'"(ONEPASS_[A-Z_]+|TRITON_INTERPRET|XDG_CACHE_HOME|CC|CXX)"', sources))
    assert {"ONEPASS_CPU", "ONEPASS_CACHE", "CC"} <= used
    table = re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/gpus-and-cpus.md").read_text(), re.MULTILINE)
    assert used <= set(table)
    assert {name for name in table if name.startswith("ONEPASS_")} <= used  # no variable that nothing reads


class _Resources(HTMLParser):
    """Collects the ids of a page, and what a browser loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        address = values.get("src") or (values.get("href") if tag == "link" else None) or ""
        if address.startswith(("http:", "https:", "//")):
            self.foreign.append(address)


def read(page: Path) -> _Resources:
    resources = _Resources()
    resources.feed(page.read_text())
    return resources


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does: a warning is an error, and so is a broken link."""
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")):
        pytest.skip("mkdocs, its theme or mkdocstrings are not installed: pip install -e .[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_the_site_is_not_built_with_a_broken_link(tmp_path):
    for name in ("mkdocs.yml", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/norms.md").open("a") as page:
        page.write("\n[Nowhere](theory.md#nowhere)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "does not contain an anchor '#nowhere'" in done.stderr


def test_the_site_has_all_pages_and_loads_nothing_from_other_hosts(site):
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")} - {"404.html"}
    assert pages == {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert {address for page in pages for address in read(site / page).foreign} == set()


def test_the_reference_has_every_public_name(site):
    missing = []
    for module in (onepass, onepass.functional, onepass.nn):
        ids = read(site / "reference" / f"{module.__name__.removeprefix('onepass.')}.html").ids
        shown = {name.split(".")[-1] for name in ids if name.startswith("onepass.")}
        missing += [f"{module.__name__}.{name}" for name in module.__all__ if name not in shown]
    assert missing == ["onepass.__version__", "onepass.functional", "onepass.nn"]  # the last two have pages of their own
