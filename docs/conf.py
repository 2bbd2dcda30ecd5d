"""Sphinx configuration: one site for the seven packages; every tutorial is executed at build time."""

from __future__ import annotations

project = "Sextet"
author = "The Sextet developers"
copyright = "The Sextet developers"
html_title = "Sextet"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]
templates_path = ["_templates"]
html_theme = "furo"

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

# Names of other projects and type variables have no page here; the site builds without a network.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!(core_kernels|gnn_parallel|gnn_comm|gnn_eval|recsys_embed|autopar|elastic_train)\.).*")
]
