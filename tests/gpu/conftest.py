"""Tests for a host with a GPU. They need only Python, torch, pytest and the built library.

Some tests run a separate program: a sanitizer, another kernel image, a first call in a new process. They
name it in a `job` mark. These programs start before the first test, a few at a time, and run in parallel with
the other tests.

Several processes may share the tests, with pytest-xdist: `-n auto --maxschedchunk 1`. Then a program starts
when a process comes to its test. Each process has another of the devices first.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = [str(ROOT / "python"), str(ROOT / "bench")]  # of gander and of gander_bench
sys.path[:0] = [*PACKAGES, str(ROOT / "tests" / "python")]  # the latter for tolerance.py
inherited = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [inherited])])
# A new cache for inductor, without graphs that another version of gander compiled.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="gander-inductor-"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX reserves most of the memory

import gander  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

JOBS_AT_ONCE = max(1, min(6, (os.cpu_count() or 2) // 2))
JOB_SECONDS = 1200  # racecheck takes 150 s by itself, and 580 s beside seven processes on an H100


def pytest_addoption(parser):
    parser.addoption(
        "--summary",
        metavar="FILE",
        help="write a summary of the tests and the device to this file, as JSON; the default is "
        "bench/results/gpu-test-<device>.json if all of tests/gpu runs, otherwise no file",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "core: shapes that are tested with every image of the library")
    config.addinivalue_line("markers", "job(*command, **environment): a program to run for the test")
    config.addinivalue_line("markers", "gib(count): the device memory that a test needs")
    config.stash[LAUNCHED] = set()
    if is_worker(config):
        rotate_devices(config.workerinput["devices"], config.workerinput["workerid"])
        # Or all processes together have many times as many threads as there are cores.
        threads = max(1, (os.cpu_count() or 1) // config.workerinput["workercount"])
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that it starts
        torch.set_num_threads(threads)
    else:
        if not torch.cuda.is_available() and not config.option.collectonly:
            raise pytest.UsageError("tests/gpu needs a GPU: there is no CUDA device, or torch cannot use it")
        config.stash[SUMMARY] = summary = Summary(config)
        config.pluginmanager.register(summary)


def is_worker(config):
    """True in a process that pytest-xdist has started. It reports to another one."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node):
    node.workerinput["devices"] = torch.cuda.device_count()


def rotate_devices(count, worker):
    """Lets CUDA, in this process and in the programs that it starts, count devices from another one on.
    Processes are named gw0, gw1, and so on."""
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(count)]
        first = int(worker.removeprefix("gw")) % len(devices)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers():
    """As many processes as there is memory for: 8 GiB of a device for each, 50 GiB for test_large.py."""
    gib = torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0
    workers = min((gib - 50) // 8 * torch.cuda.device_count(), os.cpu_count() or 1)
    return workers if workers > 1 else 0  # 0: pytest's own process runs all tests


def pytest_report_header(config):
    facts = gander.info()
    return f"gander {facts['version']} ({facts['commit']}), images: {', '.join(facts['architectures'])}"


# ---- The device ----


@pytest.fixture(autouse=True)
def on_the_device():
    torch.manual_seed(0)
    yield
    current = torch.cuda.current_device()
    torch.cuda.set_device(0)
    assert current == 0, f"the test left device {current} current"
    if torch.cuda.memory_reserved() > 4 << 30:  # leave memory for the programs of the jobs
        torch.cuda.empty_cache()


@pytest.fixture
def checked_transformers():
    """Skips a test of gander.hf where transformers is missing, or older than what gander.hf takes."""
    from gander.hf import _versions

    try:
        _versions.require()
    except ImportError as error:
        pytest.skip(str(error))


# ---- Programs that run in parallel to the tests ----


class Jobs:
    def __init__(self):
        self._pool = ThreadPoolExecutor(JOBS_AT_ONCE)
        self._started, self._processes = {}, []
        self._folder = tempfile.TemporaryDirectory(prefix="gander-jobs-")

    def start(self, item):
        mark = item.get_closest_marker("job")
        self._started[item.nodeid] = self._pool.submit(self._run, mark.args, mark.kwargs)

    def _run(self, command, environment):
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=self._folder.name,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        try:
            output, _ = process.communicate(timeout=JOB_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill(process)
            output, _ = process.communicate()
            output += f"\nstill running after {JOB_SECONDS} s"
        return subprocess.CompletedProcess(command, process.returncode, output)

    def result(self, item):
        if item.nodeid not in self._started:
            self.start(item)
        return self._started[item.nodeid].result()

    def wait(self):
        for job in self._started.values():
            job.result()

    @staticmethod
    def _kill(process):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def close(self):
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            self._kill(process)
        self._pool.shutdown()
        self._folder.cleanup()


JOBS = pytest.StashKey[Jobs]()


@pytest.hookimpl(tryfirst=True)  # before any item is deselected
def pytest_collection_modifyitems(config, items):
    config.stash[GRID_TESTS] = sum(item.path.name == GRID for item in items)
    # test_large.py comes last: it needs most of the device's memory, and so waits for the jobs. Where
    # processes share the tests, those with jobs come after the others: all processes take turns on the
    # device, and a sanitizer's turns are long. With several devices, the others do not wait for it, and all
    # would wait at the end for a sanitizer that began late (200 of 740 s on two H200s).
    shares, several = is_worker(config), torch.cuda.device_count() > 1

    def place(item):
        job = item.get_closest_marker("job")
        if job is None or not shares:
            return 0
        if several:
            return -1 if job.args[0] == "compute-sanitizer" else 0
        return 1

    items.sort(key=lambda item: (item.path.name == "test_large.py", place(item)))


def pytest_collection_finish(session):
    session.config.stash[JOBS] = jobs = Jobs()
    if session.config.option.collectonly or is_worker(session.config):
        return
    for item in session.items:
        mark = item.get_closest_marker("job")
        if mark is not None and shutil.which(str(mark.args[0])):
            jobs.start(item)


@pytest.fixture
def job(request):
    """The result of the test's program, with returncode and stdout. stdout includes stderr."""
    command = request.node.get_closest_marker("job").args
    if not shutil.which(str(command[0])):
        pytest.skip(f"{command[0]} is not on PATH")
    return request.config.stash[JOBS].result(request.node)


@pytest.fixture
def jobs_done(request):
    """Waits until no job of this process uses the device, nor another process that has this fixture."""
    request.config.stash[JOBS].wait()
    with open(Path(tempfile.gettempdir()) / f"gander-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- The kernels that ran ----

GRID = "test_grid.py"
SOURCES = ROOT / "kernels" / "cuda"
POLICY = ROOT / "internal" / "policy" / "policy.txt"
GRID_TESTS = pytest.StashKey[int]()
LAUNCHED = pytest.StashKey[set[str]]()


@pytest.fixture(scope="module")
def record_kernels(request):
    """Records the names of the kernels that run on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    names = {event.name() for event in profile.profiler.kineto_results.events()}
    request.config.stash[LAUNCHED].update(names)


def compiled_kernels():
    kernels = set()
    for source in SOURCES.glob("*_gen.cu"):
        kernels.update(re.findall(r"^KERNEL\((\w+), .*\)$", source.read_text(), re.MULTILINE))
    assert len(kernels) > 100, f"no kernels are listed in {SOURCES}"
    return kernels


def is_for_other_devices(kernel):
    """Whether the planner's policy has rows that take the kernel on other devices, and none for this one."""
    here = next((name for name in ("h100", "h200") if name in torch.cuda.get_device_name(0).lower()), None)
    devices, operators, for_others = [], [], False
    for line in POLICY.read_text().splitlines():
        if line.startswith("["):
            section, names, _, layouts = line.strip("[]").split(";")
            devices = [here] if section == "any" else section.split()
            operators = names.split() if {"any", "aligned"} & {*layouts.split()} else []
        elif line and line[0] != "#":
            tile, only = line.split()[5], re.search(r" only=(\S+)", line)
            if any(re.fullmatch(rf"{op}_[a-z]+_[a-z]+\d+_{tile}", kernel) for op in operators):
                if here in devices and (only is None or here in only[1].split(",")):
                    return False
                for_others = True
    return for_others and here is not None


def why_not_every_kernel(config, grid_tests, passed):
    """Why it can't be told whether every kernel has run, or None."""
    if any("::" in word for word in config.args) or not grid_tests or passed < grid_tests:
        return "not all of test_grid.py ran and passed"
    if os.environ.get("GANDER_FORCE_PTX"):
        return "some kernels are not used with GANDER_FORCE_PTX"
    if torch.cuda.get_device_capability()[0] < 9:
        return "kernels for clusters run on compute capability 9.0 and later only"
    if not any("softmax" in kernel for kernel in config.stash[LAUNCHED]):
        return "torch's profiler saw no kernels on this machine"
    return None


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    node.config.stash[LAUNCHED].update(output.get("launched", ()))
    node.config.stash[GRID_TESTS] = output.get("grid_tests", 0)


# ---- The summary ----


class Summary:
    def __init__(self, config):
        self.config = config
        self.start = time.time()
        self.outcomes, self.skipped, self.failed, self.seconds, self.notes = {}, {}, [], {}, []
        self.grid_passed, self.kernels = 0, {}

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0].rpartition("/")[2]
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        if report.skipped:
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            tests = self.skipped.setdefault(reason.removeprefix("Skipped: "), [])
            tests.append(report.nodeid.partition("::")[2])
        elif report.failed:
            self.failed.append(report.nodeid)
            # At once, because a run that is cut short has no summary.
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}")
        if report.when == "call":
            self.notes += [value for key, value in report.user_properties if key == "note"]
            self.grid_passed += file == GRID and report.passed

    def check_kernels(self, session):
        """Fails the session if a kernel of the library that is for this device never ran."""
        config = session.config
        reason = why_not_every_kernel(config, config.stash.get(GRID_TESTS, 0), self.grid_passed)
        if reason:
            self.kernels = {"not checked": reason}
            return
        compiled = compiled_kernels()
        never = sorted(k for k in compiled - config.stash[LAUNCHED] if not is_for_other_devices(k))
        self.kernels = {"compiled": len(compiled), "never launched": never}
        if never:
            self.failed.append(f"{len(never)} of {len(compiled)} kernels were never launched")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for what, value in self.kernels.items():
            terminalreporter.write_line(f"kernels, {what}: {value}")

    def write(self, path):
        facts, device = gander.info(), torch.cuda.get_device_properties(0)
        about_gander = ("version", "architectures", "go", "nvcc", "fast_path")
        text = json.dumps(
            {
                "device": device.name,
                "compute_capability": f"{device.major}.{device.minor}",
                "memory_bytes": device.total_memory,
                "driver": driver_version(),
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
                "commit": commit(facts),
                "gander": {key: facts[key] for key in about_gander},
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "counts": self.outcomes,
                "failed": self.failed,
                "kernels": self.kernels,
                "skipped": {reason: summarized(tests) for reason, tests in sorted(self.skipped.items())},
                "notes": self.notes,
                "seconds": {file: round(seconds, 1) for file, seconds in sorted(self.seconds.items())},
                "wall_seconds": round(time.time() - self.start, 1),
            },
            indent=2,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


SUMMARY = pytest.StashKey[Summary]()


def summarized(tests):
    return tests if len(tests) <= 10 else f"{len(tests)} tests, such as {tests[0]}"


def driver_version():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def commit(facts):
    if facts["commit"] != "unknown":
        return facts["commit"]
    try:
        query = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def pytest_sessionfinish(session):
    config = session.config
    if JOBS in config.stash:
        config.stash[JOBS].close()
    if is_worker(config):
        launched = sorted(config.stash[LAUNCHED])
        config.workeroutput.update(launched=launched, grid_tests=config.stash.get(GRID_TESTS, 0))
        return
    if config.option.collectonly:
        return
    summary, options = config.stash[SUMMARY], config.option
    summary.check_kernels(session)
    selected = options.keyword or options.markexpr
    path = options.summary
    if path is None and not selected and [Path(a).resolve() for a in config.args] == [HERE]:
        device = torch.cuda.get_device_name(0).lower().replace(" ", "-")
        path = ROOT / "bench" / "results" / f"gpu-test-{device}.json"
    if path:
        summary.write(Path(path))
