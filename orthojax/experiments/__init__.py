"""The papers' tables and figures as data: which models are trained, what is measured, how it is shown."""
