"""What every test runs under: strict numerics, checked shapes, two CPU devices, no network.

Set before jax starts, and before rooflax is imported: the hook checks the shapes that functions
declare, in these packages and in tests only.
"""

import gc
import importlib.metadata
import os
import tempfile
from pathlib import Path

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""Tests compile much and run little; an XLA_FLAGS that is set, if only to nothing, wins."""

if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it, and abort
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"

CACHE = Path(tempfile.gettempdir()) / f"rooflax-tests-{os.getuid()}"
os.environ.setdefault("ROOFLAX_CACHE_DIR", str(CACHE))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's and BLAS's: these wait by spinning

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import shapes  # noqa: E402

shapes.install(["rooflax.ops", "rooflax.nn", "rooflax.models"])

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from rooflax.engine.compilation import REQUEST, enable_persistent_cache  # noqa: E402
from tests import goldens  # noqa: E402

enable_persistent_cache()

NEWER_JAX = jax.__version_info__ >= (0, 11)


TESTS = Path(__file__).parent

AREAS = ("cli", "loading", "models", "ops", "server", "train")

pytest_plugins = [f"tests.support.{area}.fixtures" for area in AREAS]


def pytest_addoption(parser):
    parser.addoption(
        "--every-case",
        action="store_true",
        help="also the nightly cases of parametrized tests, and on newer JAX what is oldest_jax",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not has_mark(item, "first"))
    if config.getoption("every_case"):
        return
    left_out = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Tracing makes many objects: collecting them looks at nothing that lives to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def is_left_out(item) -> bool:
    if has_mark(item, "nightly"):
        return True
    of_oldest = has_mark(item, "oldest_jax") or is_in(item, "unit")
    return NEWER_JAX and of_oldest and not has_mark(item, "every_jax")


def is_in(item, tier) -> bool:
    return TESTS / tier in item.path.parents


def has_mark(item, name):
    return item.get_closest_marker(name) is not None


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny checkpoint of Qwen 2 whose layers see a window or all; nobody writes into it."""
    root, name = tmp_path_factory.mktemp("qwen2_window"), "qwen2_window"
    return goldens.write_checkpoint(root / "m", name, goldens.committed(name))


@pytest.fixture(autouse=True)
def _unit_tests_compile_nothing(request):
    """So that the tier stays quick: a test that compiles belongs to the engine tier."""
    before = _num_compiled
    yield
    assert not is_in(request.node, "unit") or _num_compiled == before


_num_compiled = 0


def _count(event, *_, **__):
    global _num_compiled
    _num_compiled += event == REQUEST


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs_of_many_modules():
    """Compiled programs take memory, and map it; until then a module uses those of others."""
    yield
    if _num_maps() > MANY_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _forget_programs_before_maps_run_out(request):
    """Some modules compile more in one process than it may map; then XLA ends it."""
    yield
    every = request.config.getoption("every_case") or is_in(request.node, "nightly")
    if every and _num_maps() > MOST_MAPS:
        jax.clear_caches()


MANY_MAPS = 8_000
"""About 30 modules, and 2 GiB of a worker."""

MOST_MAPS = 30_000
"""Of the 65,530 that Linux gives a process by default."""


def _num_maps() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
