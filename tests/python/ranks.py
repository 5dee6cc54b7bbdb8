"""Jobs that run on all ranks of a pool of processes, on the CPU with gloo. A file that takes them imports the
fixture `pools` too, which ends the processes."""

import datetime
import multiprocessing
import os
import tempfile
import traceback
from itertools import accumulate
from multiprocessing.connection import wait

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

dist = pytest.importorskip("torch.distributed", reason="this torch is built without it")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no torch.distributed with gloo", allow_module_level=True)

TIMEOUT = 300


def _serve(rank, ranks, store, pipe):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", None, timeout, ranks, rank, dist.FileStore(store, ranks))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        torch.manual_seed(0)
        try:
            function(*arguments)
            pipe.send(None)
        except BaseException:  # pytest's own failures are no Exception
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Pool:
    def __init__(self, ranks):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gander", "torch._dynamo"])  # which all ranks import
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            store = os.path.join(self.folder.name, "store")
            process = context.Process(target=_serve, args=(rank, ranks, store, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function, arguments):
        for pipe in self.pipes:
            pipe.send((function, arguments))
        waiting, failures, timeout = [*self.pipes], [], TIMEOUT
        while waiting:
            ready = wait(waiting, timeout)
            if not ready:
                return failures or [f"no answer within {TIMEOUT} seconds"]
            for pipe in ready:
                waiting.remove(pipe)
                failures += filter(None, [pipe.recv()])
            if failures:
                timeout = 5  # the others may wait for the rank that has failed
        return failures

    def close(self):
        """No exit codes are checked: torch's threads for gloo can abort an interpreter that ends while they
        release a tensor (pytorch#179291)."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()
        self.folder.cleanup()


_pools: dict = {}


@pytest.fixture(scope="module", autouse=True)
def pools():
    yield
    while _pools:
        _pools.popitem()[1].close()


def on_all(ranks, function, *arguments):
    """Runs function(*arguments) on each rank. A pool in which a job has failed is not used again."""
    if ranks not in _pools:
        _pools[ranks] = Pool(ranks)
    failures = _pools[ranks].run(function, arguments)
    if failures:
        pool = _pools.pop(ranks)
        for process in pool.processes:
            process.kill()
        pytest.fail("\n".join(failures))


class Collectives:
    """Counts the all-gathers and the bytes that this rank sends, and all calls of other collectives."""

    def __enter__(self):
        self.sent, self.others = [], []
        self._gather = dist.all_gather_into_tensor

        def gather(output, given, *arguments, **options):
            self.sent.append(given.numel() * given.element_size())
            return self._gather(output, given, *arguments, **options)

        from torch.distributed.tensor.debug import CommDebugMode

        dist.all_gather_into_tensor = gather
        self._mode = CommDebugMode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)
        dist.all_gather_into_tensor = self._gather
        assert self._mode.get_total_counts() == len(self.sent), self._mode.get_comm_counts()


# ---- What jobs share ----


def bounds(sizes):
    """Where this rank's slice of so many elements begins and ends."""
    rank = dist.get_rank()
    end = [*accumulate(sizes)][rank]
    return end - sizes[rank], end


def mine(tensor, sizes):
    """This rank's slice of the last dimension."""
    first, end = bounds(sizes)
    return tensor[..., first:end]


def in_one_graph(function, backend, **options):
    """function, compiled, and the counter of the graphs that were made of it."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter
