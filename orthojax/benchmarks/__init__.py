"""What softmax-1 and OrthoAdam cost: ratios to what they replace, measured in turn within one process.

A suite (`suite.py` says what that is) yields rows; `catalog.py` names the suites.
"""
