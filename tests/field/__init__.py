"""The field: models that nobody here chose, in tiny configurations that their libraries' own classes give."""
