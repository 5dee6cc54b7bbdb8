"""Other folders of tests, which a job runs on CUDA."""

import re
import sys

PYTEST = sys.executable, "-m", "pytest", "-q", "-rfs", "--show-capture=no", "-p", "no:cacheprovider"


def note_of(job, file):
    """Asserts that tests of a file passed. Returns how many, and which were skipped.

    pytest says where files are from the folder that it runs in. The note says where they are in a checkout.
    """
    assert job.returncode == 0 and " passed" in job.stdout, job.stdout[-6000:]
    *skipped, last = re.findall(r"^SKIPPED.*|^.* passed.*", job.stdout, re.MULTILINE)
    places = [re.sub(r"(?<= )\S*/(?=tests/)", "", line) for line in skipped]
    return "; ".join([f"{file} on cuda: {last.strip('= ')}", *places])
