"""Load a study from a store as data frames."""

import pandas as pd

# Frames here have at most a few thousand rows, for which Python's strings are faster than
# pyarrow's.
pd.options.mode.string_storage = "python"
