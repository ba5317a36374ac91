"""Settings of Sphinx for the documentation site, whose sources ci/docs/assemble.py writes."""

import mpicoll

for _name in mpicoll.__all__:
    # With the extension in C the blocking functions are objects of its own, which autodoc takes for data.
    _value = getattr(mpicoll, _name)
    setattr(mpicoll, _name, getattr(_value, "__wrapped__", _value))

project = "mpicoll"
author = "the maintainers of mpicoll"
version = release = mpicoll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
myst_heading_anchors = 4
# Headings of the included CHANGELOG repeat in each release.
suppress_warnings = ["myst.header"]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_custom_sections = [("Methods", "params_style")]

html_theme = "furo"
html_title = f"mpicoll {version.split('+')[0]}"
html_static_path: list[str] = []
