"""Tables, figures, pictures and the page that shows them, of numbers by variant and seed."""
