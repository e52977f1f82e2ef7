"""A study in a store as data frames."""

import pandas as pd

# frames here have at most some thousand rows, which strings of Python serve faster than pyarrow's
pd.options.mode.string_storage = "python"
