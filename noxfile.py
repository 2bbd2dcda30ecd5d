"""Every command of the project; `nox -l` is the table of contents.

Each session installs the packages it needs, editable and in one command, next to the CPU build of torch that
constraints/cpu.txt names. `nox -s demo` and `nox -s tests` are the two a newcomer needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CORE = "core-kernels"
LEAVES = ("gnn-parallel", "gnn-comm", "gnn-eval", "recsys-embed", "autopar", "elastic")
PACKAGES = (CORE, *LEAVES)
IMPORT_NAME = {p: p.replace("-", "_") for p in PACKAGES} | {"elastic": "elastic_train"}
DIST_NAME = {p: p for p in PACKAGES} | {"elastic": "elastic-train"}
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "jaxtyping>=0.2.30", "beartype>=0.18")
TEST_PEERS = ("torch_geometric>=2.6", "torchmetrics>=1.4")
EXTRAS = {CORE: "[data,partition,plot]"}

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_venv = "yes"


def pip_setting(name: str) -> str | None:
    """Read one setting of pip's, because uv does not read pip's configuration."""
    if value := os.environ.get(f"PIP_{name.replace('-', '_').upper()}"):
        return value
    listed = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    value = found.get(f"global.{name}", found.get(f"install.{name}"))
    return value.strip("'\"") if value else None


def prepare(session: nox.Session) -> None:
    """Let uv find the wheels that pip would find, and keep every rank to one thread."""
    bridges = {"UV_FIND_LINKS": "find-links", "UV_INDEX_URL": "index-url", "SSL_CERT_FILE": "cert"}
    for variable, setting in bridges.items():
        if variable not in os.environ and (value := pip_setting(setting)):
            session.env[variable] = value.replace(" ", "," if variable == "UV_FIND_LINKS" else " ")
    session.env.setdefault("OMP_NUM_THREADS", "1")


def install(session: nox.Session, *packages: str, tools: tuple[str, ...] = (), torch: str = "cpu") -> None:
    """Install packages with their sibling closure, editable, in one command, and prove that torch is a CPU build."""
    prepare(session)
    closure = dict.fromkeys((CORE, *packages))
    editables = [part for p in closure for part in ("-e", f"./packages/{p}{EXTRAS.get(p, '')}")]
    arguments = [*editables, *tools, "-c", f"constraints/{torch}.txt"]
    if session.venv_backend == "uv":
        refuse_cuda_download(session, arguments)
    session.install(*arguments)
    session.run(
        "python",
        "-c",
        "import torch; assert torch.version.cuda is None, f'expected a CPU build of torch, got {torch.__version__}'",
    )


def refuse_cuda_download(session: nox.Session, arguments: list[str]) -> None:
    """Stop before an installer fetches gigabytes of CUDA libraries that a CPU session never uses."""
    planned = subprocess.run(
        ["uv", "pip", "install", "--dry-run", "--python", session.virtualenv.location, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **{k: v for k, v in session.env.items() if v}},
        cwd=ROOT,
    )
    if planned.returncode:
        session.error(f"the packages cannot be resolved:\n{planned.stderr}")
    cuda = [line.strip(" +") for line in planned.stderr.splitlines() if line.startswith((" + nvidia-", " + cuda-"))]
    if cuda:
        session.error(
            f"torch would bring {len(cuda)} CUDA libraries ({cuda[0]}, ...), a CPU session needs none; "
            "set PIP_FIND_LINKS or UV_FIND_LINKS to a folder or page that has the CPU build of torch"
        )


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest with the session's own arguments first and the user's last."""
    session.run("python", "-m", "pytest", *arguments, *session.posargs)


@nox.session(tags=["quick"])
def demo(session: nox.Session) -> None:
    """Train a graph neural network on real data over two ranks, strategy chosen and explained by a plan."""
    install(session, "gnn-parallel")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(tags=["ci"])
def tests(session: nox.Session) -> None:
    """Run every test and docstring example of every package (without GPU and without the long ones)."""
    install(session, *LEAVES, tools=TEST_TOOLS + TEST_PEERS)
    pytest(session, "-q", "-m", "not gpu and not slow", "--doctest-modules", "packages", "tests")


@nox.session
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Run one package's tests with only what it declares."""
    install(session, package, tools=TEST_TOOLS)
    pytest(session, "-q", "-m", "not gpu and not slow and not peer", f"packages/{package}")


@nox.session
@nox.parametrize("world_size", [1, 2, 4, 8])
def distributed(session: nox.Session, world_size: int) -> None:
    """Run the tests that start ranks, at one world size."""
    install(session, *LEAVES, tools=TEST_TOOLS + TEST_PEERS)
    session.env["SEXTET_WORLD_SIZES"] = str(world_size)
    pytest(session, "-q", "-m", "distributed and not gpu", "packages")


@nox.session
def network(session: nox.Session) -> None:
    """Run the tests on shaped hosts: network namespaces joined by slow links (root only)."""
    install(session, *LEAVES, tools=TEST_TOOLS + TEST_PEERS)
    pytest(session, "-q", "-m", "network", "packages")


@nox.session
def emulate(session: nox.Session) -> None:
    """Run the CUDA C++ sources on the CPU, then under the address and undefined-behaviour sanitizers."""
    install(session, CORE, tools=TEST_TOOLS)
    pytest(session, "-q", "-m", "not gpu", "-k", "emulat or sanitiz", "packages/core-kernels/tests")


@nox.session
@nox.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def compile_cuda(session: nox.Session, arch: str) -> None:
    """Compile every CUDA kernel instance to machine code for one architecture; no device needed."""
    install(session, CORE)
    session.run("core-kernels", "compile", "--arch", arch, *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests marked gpu with the Python and torch that are already installed."""
    session.env["PYTHONPATH"] = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)
    pytest(session, "-q", "-m", "gpu", "packages")


@nox.session(tags=["nightly"])
def slow(session: nox.Session) -> None:
    """Run the long tests: whole grids and large graphs."""
    install(session, *LEAVES, tools=TEST_TOOLS + TEST_PEERS)
    pytest(session, "-q", "-m", "slow and not gpu", "--timeout", "1800", "packages")


@nox.session(tags=["nightly"])
def minimums(session: nox.Session) -> None:
    """Run the core's tests against the oldest versions that the packages declare."""
    install(session, CORE, tools=TEST_TOOLS, torch="lowest")
    pytest(session, "-q", "-m", "not gpu and not slow and not peer", "packages/core-kernels")


@nox.session(python=["3.11", "3.12", "3.13"], tags=["nightly"])
@nox.parametrize("torch", ["cpu", "lowest"])
def matrix(session: nox.Session, torch: str) -> None:
    """Run the tests on one Python and one torch."""
    install(session, *LEAVES, tools=TEST_TOOLS, torch=torch)
    pytest(session, "-q", "-m", "not gpu and not slow and not peer", "packages")


@nox.session(tags=["ci", "quick"])
def lint(session: nox.Session) -> None:
    """Check style, import rules between packages, versions and the text of the repository."""
    prepare(session)
    session.install("ruff>=0.9")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_imports.py")
    session.run("python", "tools/check_versions.py")


@nox.session(tags=["ci"])
def types(session: nox.Session) -> None:
    """Check the types of every package."""
    install(session, *LEAVES, tools=("pyright[nodejs]>=1.1.390", *TEST_PEERS))
    session.run("pyright", *session.posargs)


@nox.session(tags=["ci"])
def docs(session: nox.Session) -> None:
    """Build the documentation, tutorials executed, warnings as errors."""
    tools = ("sphinx>=9.0,<9.1", "furo", "myst-nb>=1.3", "sphinx-design", "sphinx-copybutton")
    install(session, *LEAVES, tools=tools + TEST_PEERS)
    session.run("python", "-m", "sphinx", "-W", "-n", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session(tags=["nightly"])
def examples(session: nox.Session) -> None:
    """Run every example script."""
    install(session, *LEAVES, tools=TEST_TOOLS + TEST_PEERS)
    for script in sorted((ROOT / "examples").glob("*.py")):
        session.run("python", str(script))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure one package against its named peers: `nox -s bench -- gnn-eval`."""
    package, *rest = session.posargs or [CORE]
    if package not in PACKAGES:
        session.error(f"package={package!r} is not valid: expected one of {', '.join(PACKAGES)}")
    install(session, package, tools=TEST_PEERS)
    for script in sorted((ROOT / "packages" / package / "benchmarks").glob("bench_*.py")):
        session.run("python", str(script), *rest)


@nox.session
@nox.parametrize("package", PACKAGES)
def build(session: nox.Session, package: str) -> None:
    """Build one package's wheel and source archive into dist/."""
    prepare(session)
    session.install("hatchling>=1.25", "build")
    session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", f"packages/{package}")


@nox.session(tags=["ci"])
def wheels(session: nox.Session) -> None:
    """Build every wheel, check what is inside, install them alone and import them."""
    prepare(session)
    target = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    session.install("hatchling>=1.25", "build")
    for package in PACKAGES:
        session.run(
            "python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), f"packages/{package}",
            silent=True,
        )  # fmt: skip
    session.run("python", "tools/check_wheels.py", str(target))
    session.install(*(str(path) for path in sorted(target.glob("*.whl"))), "-c", "constraints/cpu.txt")
    imports = ", ".join(IMPORT_NAME.values())
    session.run("python", "-P", "-c", f"import {imports}; print('imported', '{imports}')")


@nox.session(venv_backend="none")
def new_package(session: nox.Session) -> None:
    """Lay out a new package: `nox -s new_package -- graph-store "One sentence on it."`."""
    session.run("python3", "tools/new_package.py", *session.posargs)
