"""Every link in a README of the repository leads to a file that is there, and to a heading that the file has."""

import re
from pathlib import Path

import pytest

import mppo

pytestmark = pytest.mark.unit

ROOT = Path(mppo.__file__).parent.parent
FOLDERS = ("configs", "launch", "mppo", "tests")
READMES = [ROOT / "README.md", *(readme for folder in FOLDERS for readme in sorted((ROOT / folder).rglob("*.md")))]
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)


def links(readme: Path) -> list[str]:
    """Targets of links and pictures that are not addresses of the web; what stands in code is none."""
    text = re.sub(r"`[^`\n]*`", "code", FENCE.sub("", readme.read_text()))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(readme: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", readme.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing(readme: Path) -> list[str]:
    found = []
    for link in links(readme):
        path, _, anchor = link.partition("#")
        target = readme.parent / path if path else readme
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.relative_to(ROOT)))
def test_every_link_leads_somewhere(readme):
    assert missing(readme) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# One heading\n```\n# none\n```\n")
    readme = tmp_path / "README.md"
    readme.write_text("[a](there.md#one-heading) [b](gone.md) [`c`](there.md#none) `[d](code.md)` [e](https://x.org/y)")
    assert missing(readme) == ["gone.md", "there.md#none"]


def test_every_room_has_a_readme():
    rooms = [folder for folder in (ROOT / "mppo").iterdir() if (folder / "__init__.py").is_file()]
    assert len(rooms) > 8
    assert [room.name for room in rooms if not (room / "README.md").is_file()] == []
