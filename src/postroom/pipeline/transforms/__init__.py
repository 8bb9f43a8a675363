"""Pure functions from DataFrames to a DataFrame, one module for each layer of tables."""
