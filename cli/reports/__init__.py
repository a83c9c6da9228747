"""Reports on datasets and on balancing: tables, plots, HTML pages."""
