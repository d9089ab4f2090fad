"""What the page is made of keeps to its rules: no inline code, nothing from elsewhere, licences."""

import re
from pathlib import Path

import lighthouse

FOLDER = Path(lighthouse.__file__).parent / "dashboard"
OWN = sorted(FOLDER.glob("*.js"))


def test_html_has_no_inline_code_and_no_style():
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text)


def test_everything_comes_from_the_lighthouse_itself():
    text = (FOLDER / "index.html").read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    for link in links:
        assert link.startswith("/assets/")
        assert (FOLDER / link.removeprefix("/assets/")).is_file()
    for file in OWN:
        assert not re.search(r"https?://", file.read_text()), file.name


def test_each_module_is_loaded_ahead():
    text = (FOLDER / "index.html").read_text()
    ahead = set(re.findall(r'modulepreload" href="/assets/([^"]*)"', text))
    imported = {
        name for file in OWN for name in re.findall(r'from "\./([^"]*)"', file.read_text()) if name != "app.js"
    }
    assert ahead - {"vendor/hooks.js"} == imported - {"vendor/hooks.js"}


def test_no_code_is_made_from_text():
    for file in [*OWN, *FOLDER.glob("vendor/*.js")]:
        assert not re.search(r"\beval\(|new Function\b|innerHTML|document\.write\(", _code(file)), file.name


def _code(file: Path) -> str:
    """Preact names innerHTML for those who ask it to set that; our modules do not."""
    text = file.read_text()
    return re.sub(r"(dangerouslySetInner|\binner)HTML\b", "", text) if file.name == "preact.js" else text


def test_what_others_wrote_has_its_licence():
    table = (FOLDER / "vendor" / "README.md").read_text()
    for file in (FOLDER / "vendor").iterdir():
        assert f"`{file.name}`" in table or file.name == "README.md"
