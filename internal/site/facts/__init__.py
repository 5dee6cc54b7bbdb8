"""What pages may state: facts of the table of operators, of the library, and of the records of bench/results.

fill.py evaluates the marks of a page with the names of these modules. Each function returns Markdown.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("python", "bench", "tests/python")]

import tolerance  # noqa: E402, F401 - marks name its bounds
from gander import _table  # noqa: E402, F401 - and its lists

from .library import *  # noqa: E402, F403
from .measured import *  # noqa: E402, F403
from .operators import *  # noqa: E402, F403
from .pictures import pictures  # noqa: E402, F401
from .sources import *  # noqa: E402, F403
from .standing import *  # noqa: E402, F403
