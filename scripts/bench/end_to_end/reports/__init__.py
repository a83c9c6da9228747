"""The report of the training benchmark: tables, plots, and sections on costs and on scaling."""
