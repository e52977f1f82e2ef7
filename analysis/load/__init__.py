"""Load a study from a store as data frames."""

import pandas as pd

# for the few thousand rows at most of frames here, Python's strings are faster than pyarrow's
pd.options.mode.string_storage = "python"
