"""How Sphinx builds the site: `make docs`. A warning is an error there, and so is a reference that leads nowhere."""

import sys
from pathlib import Path

import gradwire

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "gradwire"
author = "The gradwire developers"
copyright = author
release = version = gradwire.__version__

extensions = ["site_pages", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"gradwire {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__, __new__, NOT_CONNECTED, OPTIONS"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes")]

# Every cross-reference to a name of gradwire must lead somewhere; names of other packages have no page here.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!gradwire\.).*")]
