"""From Attention to Activation (arXiv 2410.17174): its runs, tables, figures and appendices."""
