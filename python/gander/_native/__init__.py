"""libgander: library.py loads it, and turns its statuses into exceptions."""
