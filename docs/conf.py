"""Sphinx: the documentation site. `make docs` builds it into docs/_build."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import generate  # noqa: E402

import ft_hsdp  # noqa: E402

generate.write(HERE / "_generated")

project = "ft_hsdp"
author = "The ft_hsdp developers"
project_copyright = "The ft_hsdp developers"
release = version = ft_hsdp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "examples", "grafana"]

myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Docstrings mark code with single backticks; they are no references.
default_role = "literal"

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_title = f"ft_hsdp {release}"
html_show_sphinx = False
