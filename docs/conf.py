"""Sphinx configuration: one site for the seven packages; every tutorial is executed at build time."""

from __future__ import annotations

import importlib

project = "Sextet"
author = "The Sextet developers"
copyright = "The Sextet developers"
html_title = "Sextet"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# Two attributes of one name are no ambiguity a reader meets: the page says which class it belongs to.
suppress_warnings = ["ref.python"]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]
html_theme = "furo"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 400
nb_merge_streams = True

# Names of other projects and type variables have no page here; the site builds without a network.
PACKAGES = ("core_kernels", "gnn_parallel", "gnn_comm", "gnn_eval", "recsys_embed", "autopar", "elastic_train")
nitpick_ignore_regex = [(r"py:.*", rf"(?!({'|'.join(PACKAGES)})\.).*")]


def exists(name: str) -> bool:
    """Whether a dotted name can be imported."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            found = getattr(found, part, None) or getattr(found, "__annotations__", {}).get(part)
            if found is None:
                return False
        return True
    return False


def link_public_name(app, env, node, contnode):
    """Link a name by its defining module to where the same object is public, e.g. graph.structure.Graph to graph.Graph.

    A name that exists but has no page is shown without a link; one that does not exist stays a warning.
    """
    if node.get("refdomain") != "py":
        return None
    package, _, rest = node["reftarget"].partition(".")
    if package not in PACKAGES:
        return None
    short = rest.rpartition(".")[2]
    domain = env.domains["py"]
    public = [name for name in domain.objects if name.startswith(f"{package}.") and name.endswith(f".{short}")]
    if not public:
        return contnode if exists(node["reftarget"]) else None
    target = min(public, key=len)
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode) or contnode


def setup(app):
    """Connect the handler above."""
    app.connect("missing-reference", link_public_name)
