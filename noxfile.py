"""Every command of the project; `nox -l` is the table of contents: try, test, check, measure, release.

Each session installs the packages it needs, editable and in one command, next to the CPU build of torch that
constraints/cpu.txt names. `nox -s demo` and `nox -s tests` are the two a newcomer needs.
"""

from __future__ import annotations

import json
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
TEST_TOOLS = (
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "jaxtyping>=0.2.30",
    "beartype>=0.18",
)
TEST_PEERS = ("torch_geometric>=2.6", "torchmetrics>=1.4")
EXTRAS = {CORE: "[data,partition,plot]"}
# Tests wait for ranks half of the time: two packages at once; conftest.py keeps each on one worker.
TWO_AT_ONCE = ("-n", "2", "--dist", "loadscope")
# A CUDA compiler without a toolkit; newer ones than 13.0 emit PTX that 13.0 drivers refuse.
NVRTC = ("cuda-bindings>=13.0,<13.1", "nvidia-cuda-nvrtc==13.0.*")
# What `bench` runs for a package, each a program that takes --json FILE; all of them together take a few minutes.
BENCHES = {
    CORE: (
        ["benchmarks/bench_start.py"],
        ["benchmarks/bench_ops.py", "run"],
        ["benchmarks/bench_layers.py"],
        ["benchmarks/bench_scale.py"],
    ),
    "gnn-parallel": (["gnn-parallel", "bench", "--dataset", "movielens", "--ranks", "2"],),
    "gnn-comm": (["benchmarks/planner_quality.py", "--scale", "14"],),
    "gnn-eval": (["benchmarks/speed.py"],),
    "recsys-embed": (["benchmarks/bench_one_rank.py"], ["benchmarks/bench_stats.py"]),
    "autopar": (
        ["autopar", "bench", "--model", "autopar.models:gpt", "--cluster", "a100-nvlink-8"],
        ["benchmarks/bench_exact.py", "--mesh", "8", "--budgets", "5"],
        ["benchmarks/bench_search.py"],
    ),
    "elastic": (
        ["elastic-train", "bench", "--megabytes", "6"],
        ["benchmarks/control_plane.py"],
        ["benchmarks/histories.py", "5"],
        ["benchmarks/campaign.py", "kill", "20"],
    ),
}
# A fixed time stamp makes wheels of the same sources equal byte for byte.
EPOCH = {"SOURCE_DATE_EPOCH": "1735689600"}
WHEELS = ROOT / ".sextet" / "wheels"

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


# -- try ---------------------------------------------------------------------------------------------------------------


@nox.session(tags=["quick"])
def demo(session: nox.Session) -> None:
    """Tour the packages on real data over two ranks, in three minutes; `-- gnn-eval` for one, `-- --epochs 20`."""
    install(session, *([package for package in LEAVES if package in session.posargs] or asked_leaves(session)))
    session.run("python", "examples/demo.py", *session.posargs)


def asked_leaves(session: nox.Session) -> tuple[str, ...]:
    """Return what the tour needs when no leaf is named: nothing beyond the core for the core, else all."""
    return () if CORE in session.posargs else LEAVES


@nox.session(tags=["nightly"])
def examples(session: nox.Session) -> None:
    """Run every example script, or those named: `-- four_together`."""
    install(session, *LEAVES, tools=TEST_PEERS)
    asked = session.posargs or [path.stem for path in sorted((ROOT / "examples").glob("*.py"))]
    for name in asked:
        if name not in ("chapter", "demo"):  # the one is imported by the others, the other has a session
            session.run("python", f"examples/{name}.py")


# -- test --------------------------------------------------------------------------------------------------------------


@nox.session(tags=["ci"])
def tests(session: nox.Session) -> None:
    """Run every test and docstring example of every package (without GPU and without the long ones)."""
    install(session, *LEAVES, tools=TEST_TOOLS + TEST_PEERS)
    pytest(session, "-q", *TWO_AT_ONCE, "-m", "not gpu and not slow", "--doctest-modules", "packages", "tests")


@nox.session
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Run one package's tests with only what it declares."""
    install(session, package, tools=TEST_TOOLS)
    pytest(session, "-q", "-m", "not gpu and not slow and not peer", f"packages/{package}")


@nox.session
@nox.parametrize("world_size", [1, 2, 4, 8])
def distributed(session: nox.Session, world_size: int) -> None:
    """Prove every package exact on one number of ranks."""
    install(session, *LEAVES, tools=TEST_TOOLS)
    session.env["SEXTET_WORLD_SIZES"] = str(world_size)
    pytest(session, "-q", "tests/test_world_sizes.py")


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
    if not shutil.which("nvcc"):
        session.install(*NVRTC)
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
    pytest(session, "-q", "-m", "slow and not gpu", "--timeout", "1800", "packages", "tests")


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
    pytest(session, "-q", *TWO_AT_ONCE, "-m", "not gpu and not slow and not peer", "packages")


# -- check -------------------------------------------------------------------------------------------------------------


@nox.session(tags=["ci", "quick"])
def lint(session: nox.Session) -> None:
    """Check style, imports between packages, public names, versions, changes and the text of pages."""
    prepare(session)
    session.install("ruff>=0.9")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_imports.py")
    session.run("python", "tools/check_versions.py")
    session.run("python", "tools/check_public_api.py")
    session.run("python", "tools/check_text.py")
    session.run("python", "tools/changelog.py", "--check")


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


# -- measure -----------------------------------------------------------------------------------------------------------


@nox.session
def bench(session: nox.Session) -> None:
    """Measure one package: `-- gnn-eval`; compare with an earlier run: `-- gnn-eval --against FILE --worse 0.2`."""
    package, *rest = session.posargs or [CORE]
    if package not in PACKAGES:
        session.error(f"package={package!r} is not valid: expected one of {', '.join(PACKAGES)}; correct the name")
    install(session, package, tools=TEST_PEERS)
    folder = ROOT / ".sextet" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for program, *arguments in BENCHES[package]:
        script = [f"packages/{package}/{program}"] if program.endswith(".py") else []
        part = folder / "part.json"
        session.run(*(["python", *script] if script else [program]), *arguments, "--json", str(part))
        found[Path(program).stem] = json.loads(part.read_text())
        part.unlink()
    result = folder / f"{package}.json"
    result.write_text(json.dumps(found, indent=1) + "\n")
    session.log(f"written to {result}; keep a copy to compare with later")
    if rest:
        compare_with(session, result, rest)


def compare_with(session: nox.Session, result: Path, arguments: list[str]) -> None:
    """Compare a result with the report named by ``--against FILE``; other arguments go to the comparison."""
    if "--against" not in arguments[:-1]:
        session.error(f"arguments={arguments} are not valid: expected --against FILE [--worse SHARE]; name a report")
    at = arguments.index("--against")
    before, others = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
    session.run("python", "tools/compare_reports.py", before, str(result), *others)


# -- release -----------------------------------------------------------------------------------------------------------


@nox.session
def changelog(session: nox.Session) -> None:
    """Show what a release of one package would say, `-- gnn-eval`; with `--write`, put it into its changelog."""
    prepare(session)
    session.install("towncrier>=24.8")
    session.run("python", "tools/changelog.py", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES)
def build(session: nox.Session, package: str) -> None:
    """Build one package's wheel and source archive into dist/, the same bytes every time."""
    prepare(session)
    session.install("hatchling>=1.25", "build")
    command = ("python", "-m", "build", "--no-isolation", "--outdir", "dist", f"packages/{package}")
    session.run(*command, env=EPOCH)


@nox.session(tags=["ci"])
def wheels(session: nox.Session) -> None:
    """Build every wheel twice and compare, check what is inside, install all alone and import them."""
    prepare(session)
    session.install("hatchling>=1.25")
    again = Path(session.create_tmp()).resolve() / "wheels"
    for target in (WHEELS, again):
        shutil.rmtree(target, ignore_errors=True)
        for package in PACKAGES:
            build_from_copy(session, package, target)
    session.run("python", "tools/check_wheels.py", str(WHEELS), str(again))
    session.install(*(str(path) for path in sorted(WHEELS.glob("*.whl"))), "-c", "constraints/cpu.txt")
    imports = ", ".join(IMPORT_NAME.values())
    session.run("python", "-P", "-c", f"import {imports}; print('imported', '{imports}')")


def build_from_copy(session: nox.Session, package: str, target: Path) -> None:
    """Build a wheel from a fresh copy of the sources, whose time stamps are new each time."""
    source = Path(session.create_tmp()).resolve() / "source" / package
    shutil.rmtree(source, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc", "tests", "benchmarks", "dist")
    shutil.copytree(ROOT / "packages" / package, source, ignore=ignored, copy_function=shutil.copyfile)
    with session.chdir(source):
        session.run("hatchling", "build", "-t", "wheel", "-d", str(target), env=EPOCH, silent=True)


@nox.session(reuse_venv=False, requires=["wheels"])
@nox.parametrize("package", PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Install one package's wheel in an empty environment: it brings only what it needs, and its program starts."""
    prepare(session)
    wanted = [DIST_NAME[part].replace("-", "_") for part in dict.fromkeys((CORE, package))]
    session.install(*(str(next(WHEELS.glob(f"{name}-*.whl"))) for name in wanted), "-c", "constraints/cpu.txt")
    session.run("python", "-P", "tools/check_wheels.py", "--installed", DIST_NAME[package])
    session.run(DIST_NAME[package], "--help", silent=True)


@nox.session(venv_backend="none")
def new_package(session: nox.Session) -> None:
    """Lay out a new package: `nox -s new_package -- graph-store "One sentence on it."`."""
    session.run("python3", "tools/new_package.py", *session.posargs)
