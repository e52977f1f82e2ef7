"""`python -m moe_lab.evaluation.mirror NAME ... data_root=FOLDER [from=FOLDER|FILE]`."""

import sys
from functools import partial

from moe_lab.errors import end_with
from moe_lab.evaluation.mirror.make import main

end_with(partial(main, sys.argv[1:]))
