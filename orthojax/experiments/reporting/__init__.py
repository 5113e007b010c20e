"""How a result is shown: numbers as text, drawings, and the page in its three forms."""
