"""One HTML file about a run, and plots of the gap. No torch here."""
