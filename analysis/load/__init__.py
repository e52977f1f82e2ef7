"""Load a study from a store as data frames."""

import pandas as pd

# frames here have a few thousand rows at most; for these, Python's strings are faster than
# pyarrow's
pd.options.mode.string_storage = "python"
