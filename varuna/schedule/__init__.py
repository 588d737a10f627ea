"""Which action a stage runs next: actions, static orders, the validator, and the policies that decide."""
